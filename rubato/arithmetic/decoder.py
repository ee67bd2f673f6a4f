"""Sizes of a dense decoder, and how many parameters it has where."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:  # the spec's own checks work with what is here
    from rubato.spec import ModelSpec

Biases = Literal["none", "qkv", "all"]


@dataclass(frozen=True)
class Decoder:
    """Sizes of a dense decoder, by which everything else is worked out.

    ``gated``: a SwiGLU MLP of three matrices. ``tied``: one embedding in and out. ``head_dim``: dims a head, where they
    are not hidden / heads. ``positions``: learned ones. ``biases``: of queries, keys and values, or of the norms and of
    all linear layers but the head. ``qk_norm``: queries and keys are normalised head by head.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    gated: bool = True
    tied: bool = False
    head_dim: int | None = None
    positions: int = 0
    biases: Biases = "none"
    qk_norm: bool = False

    @classmethod
    def of(cls, model: ModelSpec, vocab_size: int) -> Decoder:
        """The model of a spec with the vocabulary of its tokenizer."""
        gpt2 = model.family == "gpt2"
        return cls(
            layers=model.layers,
            hidden=model.hidden_size,
            heads=model.heads,
            kv_heads=model.kv_heads,
            ffn=model.ffn_size,
            vocab=vocab_size,
            gated=not gpt2,
            tied=model.tie_embeddings,
            head_dim=model.head_size if model.head_size * model.heads != model.hidden_size else None,
            positions=model.positions or 0,
            biases="all" if gpt2 else "qkv" if model.qkv_bias else "none",
            qk_norm=model.qk_norm,
        )

    @property
    def head_size(self) -> int:
        """Dims a head."""
        return self.head_dim or self.hidden // self.heads

    @property
    def query_hidden(self) -> int:
        """Width of the queries of all heads, and of what attention gives back."""
        return self.heads * self.head_size

    @property
    def kv_hidden(self) -> int:
        """Width of the keys (and of the values)."""
        return self.kv_heads * self.head_size

    @property
    def mlp_matrices(self) -> int:
        return 3 if self.gated else 2

    @cached_property
    def layer_weights(self) -> int:
        """Elements of the matrices of one layer, each of which multiplies every token."""
        attention = 2 * self.hidden * (self.query_hidden + self.kv_hidden)
        return attention + self.mlp_matrices * self.hidden * self.ffn

    @cached_property
    def layer_parameters(self) -> int:
        """Parameters of one layer: matrices, biases and norms."""
        norms = 2 * self.hidden * self._norm_vectors + (2 * self.head_size if self.qk_norm else 0)
        biases = 0
        if self.biases != "none":
            biases += self.query_hidden + 2 * self.kv_hidden
        if self.biases == "all":
            biases += self.hidden + (self.mlp_matrices - 1) * self.ffn + self.hidden
        return self.layer_weights + norms + biases

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the embedding of tokens, and of the head."""
        return self.vocab * self.hidden

    @property
    def position_parameters(self) -> int:
        """Parameters of the positions, which stand beside the first embedding."""
        return self.positions * self.hidden

    @property
    def norm_parameters(self) -> int:
        """Parameters of the norm before the head."""
        return self.hidden * self._norm_vectors

    @property
    def parameters(self) -> int:
        """All parameters; a tied embedding counts once."""
        embeddings = (1 if self.tied else 2) * self.embedding_parameters + self.position_parameters
        return self.layers * self.layer_parameters + embeddings + self.norm_parameters

    @property
    def _norm_vectors(self) -> int:
        return 2 if self.biases == "all" else 1
