"""What Hugging Face calls the parameters of each family, and how it lays them out."""

from __future__ import annotations

import re
from dataclasses import dataclass

from torch import Tensor

_LAYER = re.compile(r"layers\.(\d+)\.(.+)\.(weight|bias)")

_ROTARY = {
    "tok_embeddings.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_ROTARY_LAYER = {
    "attention_norm": "input_layernorm",
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
}
_GPT2 = {
    "tok_embeddings.weight": "transformer.wte.weight",
    "positions.weight": "transformer.wpe.weight",
    "norm.weight": "transformer.ln_f.weight",
    "norm.bias": "transformer.ln_f.bias",
    "output.weight": "lm_head.weight",
}
# Name, which third of it, and whether its weight is (in, out): GPT-2's linear layers are convolutions of width 1.
_GPT2_LAYER = {
    "attention_norm": ("ln_1", None, False),
    "attention.wq": ("attn.c_attn", 0, True),
    "attention.wk": ("attn.c_attn", 1, True),
    "attention.wv": ("attn.c_attn", 2, True),
    "attention.wo": ("attn.c_proj", None, True),
    "ffn_norm": ("ln_2", None, False),
    "feed_forward.w1": ("mlp.c_fc", None, True),
    "feed_forward.w2": ("mlp.c_proj", None, True),
}


@dataclass(frozen=True)
class Origin:
    """The tensor of a Hugging Face folder that a parameter is, or is a part of.

    Attributes:
        name: what it is called there.
        transposed: whether it is (in, out) there, as linear layers are (out, in) here.
        third: which third of its outputs the parameter is; None: it is all of it.
    """

    name: str
    transposed: bool = False
    third: int | None = None

    def block(self, shape: tuple[int, ...], offsets: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[slice, ...]:
        """Where a block of the parameter, of that shape as a whole, lies in the tensor."""
        first = [*offsets]
        if self.third is not None:
            first[0] += self.third * shape[0]
        found = [slice(start, start + size) for start, size in zip(first, sizes, strict=True)]
        return tuple(reversed(found)) if self.transposed else tuple(found)

    def whole_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the tensor, by that of the parameter."""
        found = [*shape]
        if self.third is not None:
            found[0] *= 3
        return tuple(reversed(found)) if self.transposed else tuple(found)

    def turned(self, tensor: Tensor) -> Tensor:
        """A block of the tensor as one of the parameter, or the other way."""
        return tensor.t() if self.transposed else tensor


def origin(family: str, name: str) -> Origin:
    """Where a parameter of a family comes from, by its global name."""
    whole = _GPT2 if family == "gpt2" else _ROTARY
    if name in whole:
        return Origin(whole[name])
    found = _LAYER.fullmatch(name)
    if found is None:
        raise KeyError(f"{name} is no parameter of {family}")
    layer, module, kind = found.groups()
    if family != "gpt2":
        return Origin(f"model.layers.{layer}.{_ROTARY_LAYER[module]}.{kind}")
    theirs, third, transposed = _GPT2_LAYER[module]
    return Origin(f"transformer.h.{layer}.{theirs}.{kind}", transposed and kind == "weight", third)
