"""The Qwen family: Llama with biases on queries, keys and values (Qwen2, Qwen2.5), or with both normalised (Qwen3).

Yang et al. 2024 (https://arxiv.org/abs/2407.10671) and 2025 (https://arxiv.org/abs/2505.09388). Qwen3 also chooses
the size of a head freely, so that all heads together may be wider or narrower than the residual stream.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn
from torch.distributed.tensor.parallel import ParallelStyle, SequenceParallel

from workers.engine.models import llama


@dataclass(frozen=True)
class QwenConfig(llama.LlamaConfig):
    """Sizes of the whole model, and which of its versions it is."""

    qkv_bias: bool
    qk_norm: bool


class QwenAttention(llama.Attention):
    """Attention whose queries and keys may be normalised over the dims of each head before they are turned."""

    def __init__(self, config: QwenConfig) -> None:
        super().__init__(config, qkv_bias=config.qkv_bias)
        self.q_norm = nn.RMSNorm(config.head_size, eps=config.norm_eps) if config.qk_norm else None
        self.k_norm = nn.RMSNorm(config.head_size, eps=config.norm_eps) if config.qk_norm else None

    def project(self, hidden_BSD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = super().project(hidden_BSD)
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        return query, key, value


class Qwen(llama.Llama):
    """A stretch of the decoder: all of it, or one pipeline stage."""

    config: QwenConfig
    attention = QwenAttention


def tensor_plan(part: Qwen, degree: int) -> dict[str, ParallelStyle]:
    """How the modules of a part are split over a tensor axis of ``degree`` ranks: as Llama's, norms by heads."""
    plan = llama.tensor_plan(part, degree)
    if part.config.qk_norm:
        for number in part.layers:
            attention = f"layers.{number}.attention."
            # Its "sequence" is the heads, dim 2: each rank normalises those it has with weights that all share.
            plan[attention + "q_norm"] = SequenceParallel(sequence_dim=2, use_local_output=True)
            plan[attention + "k_norm"] = SequenceParallel(sequence_dim=2, use_local_output=True)
    return plan
