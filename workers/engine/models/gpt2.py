"""The GPT-2 family: a decoder written for one device, and the plan that splits it over a tensor axis.

Learned positions, LayerNorm before each block, biases everywhere but in the head, GELU in its tanh form, a head tied to
the embedding (Radford et al. 2019; https://github.com/openai/gpt-2/blob/master/src/model.py). GPT-3's dense sizes too.

Dims in names: B sequences, S positions, D hidden, H heads, E dims a head, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

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

from rubato.spec import JobSpec
from workers.engine.models import llama

POSITIONS_STD = 0.01


@dataclass(frozen=True)
class GPT2Config:
    """Sizes of the whole model, whatever part of it a rank holds."""

    hidden_size: int
    layers: int
    heads: int
    ffn_size: int
    vocab_size: int
    positions: int
    norm_eps: float
    tie_embeddings: bool

    @classmethod
    def from_spec(cls, spec: JobSpec) -> Self:
        """The model that a job trains."""
        model = spec.model
        assert model.positions is not None  # the spec has them for this family
        return cls(
            hidden_size=model.hidden_size,
            layers=model.layers,
            heads=model.heads,
            ffn_size=model.ffn_size,
            vocab_size=spec.data.vocab_size,
            positions=model.positions,
            norm_eps=model.norm_eps,
            tie_embeddings=model.tie_embeddings,
        )


class Attention(nn.Module):
    """Causal self-attention. Counts heads from the width of its weights, so it runs on a share of them too."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.head_size = config.hidden_size // config.heads
        self.wq = nn.Linear(config.hidden_size, config.hidden_size)
        self.wk = nn.Linear(config.hidden_size, config.hidden_size)
        self.wv = nn.Linear(config.hidden_size, config.hidden_size)
        self.wo = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, hidden_BSD: Tensor, mask_B1SS: Tensor | None = None) -> Tensor:
        query_BHSE, key_BHSE, value_BHSE = (
            weights(hidden_BSD).unflatten(-1, (-1, self.head_size)).transpose(1, 2)
            for weights in (self.wq, self.wk, self.wv)
        )
        mixed_BHSE = functional.scaled_dot_product_attention(
            query_BHSE, key_BHSE, value_BHSE, attn_mask=mask_B1SS, is_causal=mask_B1SS is None
        )
        return self.wo(mixed_BHSE.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """w2(gelu(w1 x)), the GELU in its tanh form (Hendrycks & Gimpel, https://arxiv.org/abs/1606.08415)."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.hidden_size, config.ffn_size)
        self.w2 = nn.Linear(config.ffn_size, config.hidden_size)

    def forward(self, hidden_BSD: Tensor) -> Tensor:
        return self.w2(functional.gelu(self.w1(hidden_BSD), approximate="tanh"))


class Block(nn.Module):
    """Attention and feed-forward, each added to the residual stream."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.hidden_size, eps=config.norm_eps)
        self.attention = Attention(config)
        self.ffn_norm = nn.LayerNorm(config.hidden_size, eps=config.norm_eps)
        self.feed_forward = FeedForward(config)

    def forward(self, hidden_BSD: Tensor, mask_B1SS: Tensor | None = None) -> Tensor:
        masked = llama.attention_mask(mask_B1SS)
        hidden_BSD = hidden_BSD + self.attention(self.attention_norm(hidden_BSD), **masked)
        return hidden_BSD + self.feed_forward(self.ffn_norm(hidden_BSD))


class GPT2(nn.Module):
    """A stretch of the decoder: all of it, or one pipeline stage.

    The first part takes token ids (B, S) and embeds them with their positions, the others take hidden states
    (B, S, D); the last part returns logits (B, S, V), the others hidden states. Layers are keyed by their number in the
    whole model, so a parameter has one name in every layout.

    Attributes:
        headless: leaves the logits of the last part to whoever calls `head` on what `forward` returns.
    """

    def __init__(
        self, config: GPT2Config, layers: range | None = None, *, first: bool = True, last: bool = True
    ) -> None:
        super().__init__()
        self.config = config
        self.headless = False
        held = range(config.layers) if layers is None else layers
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.hidden_size) if first else None
        self.positions = nn.Embedding(config.positions, config.hidden_size) if first else None
        self.layers = nn.ModuleDict({str(number): Block(config) for number in held})
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.norm_eps) if last else None
        self.output = nn.Linear(config.hidden_size, config.vocab_size, bias=False) if last else None
        self.tie_weights()

    def tie_weights(self) -> None:
        """Makes the output share the embedding's weight, where the config says so. Needed again after `to_empty`."""
        if self.config.tie_embeddings and self.tok_embeddings is not None and self.output is not None:
            self.output.weight = self.tok_embeddings.weight

    def forward(self, tokens_BS_or_hidden_BSD: Tensor, documents_BS: Tensor | None = None) -> Tensor:
        hidden_BSD = tokens_BS_or_hidden_BSD
        masked = llama.attention_mask(None if documents_BS is None else llama.within_documents(documents_BS))
        if self.tok_embeddings is not None and self.positions is not None:
            places_1S = torch.arange(hidden_BSD.shape[1], device=hidden_BSD.device)[None]
            hidden_BSD = self.tok_embeddings(hidden_BSD) + self.positions(places_1S)
        for layer in self.layers.values():
            hidden_BSD = layer(hidden_BSD, **masked)
        return hidden_BSD if self.output is None or self.headless else self.head(hidden_BSD)

    def head(self, hidden_BSD: Tensor) -> Tensor:
        """Logits of some positions."""
        assert self.norm is not None
        assert self.output is not None
        return self.output(self.norm(hidden_BSD))


def initial_value(name: str, shape: torch.Size, config: GPT2Config, generator: torch.Generator) -> Tensor:
    """The first value of a parameter, by its global name and global shape, on the CPU.

    As Llama's, which has taken it from here; positions begin half as large as tokens.
    """
    if name == "positions.weight":
        return nn.init.normal_(torch.empty(shape), std=POSITIONS_STD, generator=generator)
    return llama.initial_value(name, shape, config, generator)


def tensor_plan(part: GPT2, degree: int) -> dict[str, ParallelStyle]:
    """How the modules of a part are split over the tensor axis, by module name, whatever its degree.

    Heads, feed-forward width, vocabulary and positions are sharded; between blocks the residual stream is sharded along
    the sequence (Korthikanti et al. 2022, https://arxiv.org/abs/2205.05198). Stages pass their sequence shards on, and
    the logits stay sharded over the vocabulary: parts take and return plain local tensors.
    """
    sequence, whole = Shard(1), Replicate()
    plan: dict[str, ParallelStyle] = {}
    if part.tok_embeddings is not None:
        plan["tok_embeddings"] = RowwiseParallel(input_layouts=whole, output_layouts=sequence)
        plan["positions"] = RowwiseParallel(input_layouts=whole, output_layouts=sequence)
    if part.output is not None:
        plan["norm"] = SequenceParallel()
        plan["output"] = ColwiseParallel(input_layouts=sequence, output_layouts=Shard(-1))
    for number in part.layers:
        block = f"layers.{number}."
        plan |= {
            block + "attention_norm": SequenceParallel(),
            block + "attention": PrepareModuleInput(input_layouts=(sequence,), desired_input_layouts=(whole,)),
            block + "attention.wq": ColwiseParallel(),
            block + "attention.wk": ColwiseParallel(),
            block + "attention.wv": ColwiseParallel(),
            block + "attention.wo": RowwiseParallel(output_layouts=sequence),
            block + "ffn_norm": SequenceParallel(),
            block + "feed_forward": PrepareModuleInput(input_layouts=(sequence,), desired_input_layouts=(whole,)),
            block + "feed_forward.w1": ColwiseParallel(),
            block + "feed_forward.w2": RowwiseParallel(output_layouts=sequence),
        }
    return plan
