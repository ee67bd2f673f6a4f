"""The Llama family: a decoder written for one device, and the plan that splits it over a tensor axis.

RMSNorm before each block, rotary positions, grouped-query attention, SwiGLU (Touvron et al. 2023,
https://arxiv.org/abs/2302.13971; https://arxiv.org/abs/2307.09288), rotary angles stretched for long sequences
(Grattafiori et al. 2024, https://arxiv.org/abs/2407.21783).

Dims in names: B sequences, S positions, D hidden, H heads, E dims a head, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)
from torch.nn import functional

from rubato.spec import JobSpec, RopeScalingSpec
from workers.engine.parallel.tensor import RepeatedHeads

INITIAL_STD = 0.02


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes of the whole model, whatever part of it a rank holds."""

    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    ffn_size: int
    vocab_size: int
    sequence_length: int
    rope_theta: float
    rope_scaling: RopeScalingSpec | None
    norm_eps: float
    tie_embeddings: bool

    @classmethod
    def from_spec(cls, spec: JobSpec) -> Self:
        """The model that a job trains."""
        named = [field.name for field in fields(cls) if field.name in type(spec.model).model_fields]
        sizes = {name: getattr(spec.model, name) for name in named}
        return cls(**sizes, vocab_size=spec.data.vocab_size, sequence_length=spec.data.sequence_length)


def frequencies(head_size: int, theta: float, scaling: RopeScalingSpec | None, device: torch.device) -> Tensor:
    """Angle a position of each pair of dims, (head_size / 2), fp32 or wider."""
    dtype = torch.promote_types(torch.get_default_dtype(), torch.float32)
    frequency = 1 / theta ** (torch.arange(0, head_size, 2, device=device, dtype=dtype) / head_size)
    if scaling is None:
        return frequency
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    turns = frequency * scaling.original_length / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return frequency * (kept + (1 - kept) / scaling.factor)


def rotations(length: int, frequency_E: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary angles, each (length, head_size / 2)."""
    positions = torch.arange(length, device=frequency_E.device, dtype=frequency_E.dtype)
    angles = torch.outer(positions, frequency_E)
    return angles.cos(), angles.sin()


def rotate(heads_BSHE: Tensor, cos_SE: Tensor, sin_SE: Tensor) -> Tensor:
    """Turns each pair of dims (first half, second half) by its position's angle, in the precision of the angles."""
    first, second = heads_BSHE.to(cos_SE.dtype).chunk(2, dim=-1)
    cos, sin = cos_SE[:, None], sin_SE[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(heads_BSHE.dtype)


def within_documents(documents_BS: Tensor) -> Tensor:
    """Who may look at whom, (B, 1, S, S): back, and within one document, by the number of each position's."""
    length = documents_BS.shape[1]
    same_BSS = documents_BS[:, :, None] == documents_BS[:, None, :]
    return (same_BSS & torch.ones(length, length, dtype=torch.bool, device=documents_BS.device).tril())[:, None]


def attention_mask(mask_B1SS: Tensor | None) -> dict[str, Tensor]:
    """A mask as an argument by name, which plans for a tensor axis pass on as it is; none where there is no mask."""
    return {} if mask_B1SS is None else {"mask_B1SS": mask_B1SS}


class Attention(nn.Module):
    """Causal self-attention. Counts heads from the width of its weights, so it runs on a share of them too."""

    def __init__(self, config: LlamaConfig, qkv_bias: bool = False) -> None:
        super().__init__()
        self.head_size = config.head_size
        self.wq = nn.Linear(config.hidden_size, config.heads * self.head_size, bias=qkv_bias)
        self.wk = nn.Linear(config.hidden_size, config.kv_heads * self.head_size, bias=qkv_bias)
        self.wv = nn.Linear(config.hidden_size, config.kv_heads * self.head_size, bias=qkv_bias)
        self.wo = nn.Linear(config.heads * self.head_size, config.hidden_size, bias=False)

    def forward(self, hidden_BSD: Tensor, cos_SE: Tensor, sin_SE: Tensor, mask_B1SS: Tensor | None = None) -> Tensor:
        query, key, value = self.project(hidden_BSD)
        query, key = rotate(query, cos_SE, sin_SE), rotate(key, cos_SE, sin_SE)
        mixed_BHSE = functional.scaled_dot_product_attention(
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            attn_mask=mask_B1SS,
            is_causal=mask_B1SS is None,
            enable_gqa=query.shape[2] != key.shape[2],
        )
        return self.wo(mixed_BHSE.transpose(1, 2).flatten(2))

    def project(self, hidden_BSD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, each (B, S, H, E), not yet turned."""
        query, key, value = (
            weights(hidden_BSD).unflatten(-1, (-1, self.head_size)) for weights in (self.wq, self.wk, self.wv)
        )
        return query, key, value


class FeedForward(nn.Module):
    """SwiGLU: w2(silu(w1 x) * w3 x)."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.hidden_size, config.ffn_size, bias=False)
        self.w2 = nn.Linear(config.ffn_size, config.hidden_size, bias=False)
        self.w3 = nn.Linear(config.hidden_size, config.ffn_size, bias=False)

    def forward(self, hidden_BSD: Tensor) -> Tensor:
        return self.w2(functional.silu(self.w1(hidden_BSD)) * self.w3(hidden_BSD))


class Block(nn.Module):
    """Attention and feed-forward, each added to the residual stream."""

    def __init__(self, config: LlamaConfig, attention: Attention) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.attention = attention
        self.ffn_norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.feed_forward = FeedForward(config)

    def forward(self, hidden_BSD: Tensor, cos_SE: Tensor, sin_SE: Tensor, mask_B1SS: Tensor | None = None) -> Tensor:
        hidden_BSD = hidden_BSD + self.attention(
            self.attention_norm(hidden_BSD), cos_SE, sin_SE, **attention_mask(mask_B1SS)
        )
        return hidden_BSD + self.feed_forward(self.ffn_norm(hidden_BSD))


class Llama(nn.Module):
    """A stretch of the decoder: all of it, or one pipeline stage.

    The first part takes token ids (B, S) and embeds them, the others take hidden states (B, S, D); the last part
    returns logits (B, S, V), the others hidden states. With numbers of documents (B, S) attention stays within them.
    Layers are keyed by their number in the whole model, so a parameter has one name in every layout.

    Attributes:
        headless: leaves the logits of the last part to whoever calls `head` on what `forward` returns.
    """

    attention: ClassVar[Callable[[Any], Attention]] = Attention

    def __init__(
        self, config: LlamaConfig, layers: range | None = None, *, first: bool = True, last: bool = True
    ) -> None:
        super().__init__()
        self.config = config
        self.headless = False
        held = range(config.layers) if layers is None else layers
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.hidden_size) if first else None
        self.layers = nn.ModuleDict({str(number): Block(config, type(self).attention(config)) for number in held})
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps) if last else None
        self.output = nn.Linear(config.hidden_size, config.vocab_size, bias=False) if last else None
        self.tie_weights()

    def tie_weights(self) -> None:
        """Makes the output share the embedding's weight, where the config says so. Needed again after `to_empty`."""
        if self.config.tie_embeddings and self.tok_embeddings is not None and self.output is not None:
            self.output.weight = self.tok_embeddings.weight

    def forward(self, tokens_BS_or_hidden_BSD: Tensor, documents_BS: Tensor | None = None) -> Tensor:
        hidden_BSD = tokens_BS_or_hidden_BSD
        if self.tok_embeddings is not None:
            hidden_BSD = self.tok_embeddings(hidden_BSD)
        config = self.config
        frequency_E = frequencies(config.head_size, config.rope_theta, config.rope_scaling, hidden_BSD.device)
        cos_SE, sin_SE = rotations(config.sequence_length, frequency_E)
        masked = attention_mask(None if documents_BS is None else within_documents(documents_BS))
        for layer in self.layers.values():
            hidden_BSD = layer(hidden_BSD, cos_SE, sin_SE, **masked)
        return hidden_BSD if self.output is None or self.headless else self.head(hidden_BSD)

    def head(self, hidden_BSD: Tensor) -> Tensor:
        """Logits of some positions."""
        assert self.norm is not None
        assert self.output is not None
        return self.output(self.norm(hidden_BSD))


def initial_value(name: str, shape: torch.Size, config: LlamaConfig, generator: torch.Generator) -> Tensor:
    """The first value of a parameter, by its global name and global shape, on the CPU.

    Norms are ones, biases zeros. Weights are normal with a deviation of 0.02, and the two that write to the residual
    stream are scaled down by sqrt(2 x layers), so its variance at the output does not grow with depth (GPT-2).
    """
    value = torch.empty(shape)
    if name.endswith(".bias"):
        return nn.init.zeros_(value)
    if value.ndim == 1:
        return nn.init.ones_(value)
    into_residual = name.endswith(("attention.wo.weight", "feed_forward.w2.weight"))
    std = INITIAL_STD / math.sqrt(2 * config.layers) if into_residual else INITIAL_STD
    return nn.init.normal_(value, std=std, generator=generator)


def tensor_plan(part: Llama, degree: int) -> dict[str, ParallelStyle]:
    """How the modules of a part are split over a tensor axis of ``degree`` ranks, by module name.

    Heads, feed-forward width and vocabulary are sharded, but key/value heads fewer than the ranks are repeated; between
    blocks the residual stream is sharded along the sequence (Korthikanti et al. 2022, https://arxiv.org/abs/2205.05198).
    Stages pass their sequence shards on, and the logits stay sharded over the vocabulary: parts take and return plain
    local tensors.
    """
    sequence, whole = Shard(1), Replicate()
    repeated = degree > part.config.kv_heads
    plan: dict[str, ParallelStyle] = {}
    if part.tok_embeddings is not None:
        plan["tok_embeddings"] = RowwiseParallel(input_layouts=whole, output_layouts=sequence)
    if part.output is not None:
        plan["norm"] = SequenceParallel()
        plan["output"] = ColwiseParallel(input_layouts=sequence, output_layouts=Shard(-1))
    for number in part.layers:
        block = f"layers.{number}."
        plan |= {
            block + "attention_norm": SequenceParallel(),
            block + "attention": PrepareModuleInput(
                input_layouts=(sequence, None, None), desired_input_layouts=(whole, None, None)
            ),
            block + "attention.wq": ColwiseParallel(),
            block + "attention.wk": RepeatedHeads(part.config.kv_heads) if repeated else ColwiseParallel(),
            block + "attention.wv": RepeatedHeads(part.config.kv_heads) if repeated else ColwiseParallel(),
            block + "attention.wo": RowwiseParallel(output_layouts=sequence),
            block + "ffn_norm": SequenceParallel(),
            block + "feed_forward": PrepareModuleInput(input_layouts=(sequence,), desired_input_layouts=(whole,)),
            block + "feed_forward.w1": ColwiseParallel(),
            block + "feed_forward.w3": ColwiseParallel(),
            block + "feed_forward.w2": RowwiseParallel(output_layouts=sequence),
        }
    return plan
