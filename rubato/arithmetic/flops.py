"""Floating-point operations of training: 6 a weight and token, and attention by the length of the sequence.

A multiply-add is two operations; the backward pass does twice the work of the forward pass. Attention costs
``12 x layers x hidden x sequence`` a token, with ``hidden`` the width of all heads (Chowdhery et al. 2022, appendix B,
https://arxiv.org/abs/2204.02311; Korthikanti et al. 2022, appendix A, https://arxiv.org/abs/2205.05198). ``causal``
halves it: that is what a kernel computes which skips the scores that a causal mask hides (FlashAttention), while the
full square is what published MFU figures count. Formulas with ``sequence^2 x tokens`` count the attention of a whole
sequence for each of its tokens, and are too large by the length of the sequence.
"""

from __future__ import annotations

from rubato.arithmetic.decoder import Decoder
from rubato.arithmetic.memory import Recompute


def training_flops(
    parameters: float,
    tokens: float,
    *,
    layers: int = 0,
    hidden: int = 0,
    sequence: int = 0,
    causal: bool = False,
) -> float:
    """Forward and backward operations of a whole run of a model known by its size alone.

    Args:
        parameters: that multiply a token.
        tokens: trained on.
        layers, hidden, sequence: for attention; without them it is left out, as in Kaplan et al. 2020
            (https://arxiv.org/abs/2001.08361).
        causal: whether the half of the scores that the mask hides is skipped.
    """
    attention = (6.0 if causal else 12.0) * layers * hidden * sequence
    return (6.0 * parameters + attention) * tokens


def forward_flops_per_token(decoder: Decoder, sequence: int, *, causal: bool = False) -> int:
    """Operations of the matrix products of one token's forward pass.

    Exact where the papers round: only matrices count (norms, biases and the lookup of embeddings are no products), the
    head does.
    """
    weights = decoder.layers * decoder.layer_weights + decoder.embedding_parameters
    return 2 * weights + decoder.layers * _attention_forward(decoder, sequence, causal)


def training_flops_per_token(decoder: Decoder, sequence: int, *, causal: bool = False) -> int:
    """Operations to train on one token, forward and backward; recomputation is not the model's work and not counted."""
    return 3 * forward_flops_per_token(decoder, sequence, causal=causal)


def recomputed_flops_per_token(decoder: Decoder, sequence: int, recompute: Recompute, *, causal: bool = False) -> int:
    """Operations that recomputation adds to a token: all layers once more, or their attention cores (``selective``).

    A layer's last product is done again with it; software that stops at the last tensor that backward needs saves it.
    """
    if recompute == "none":
        return 0
    attention = _attention_forward(decoder, sequence, causal)
    return decoder.layers * (attention if recompute == "selective" else 2 * decoder.layer_weights + attention)


def _attention_forward(decoder: Decoder, sequence: int, causal: bool) -> int:
    """A layer's scores, and the sum of values they weigh: 2 x 2 x width x sequence."""
    return (2 if causal else 4) * decoder.query_hidden * sequence
