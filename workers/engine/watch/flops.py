"""How much arithmetic a token costs, and which share of the machine's peak a rate of tokens is."""

from __future__ import annotations

from rubato.spec import JobSpec, ModelSpec


def flops_per_token(spec: JobSpec) -> int:
    """Floating-point operations to train on one token, forward and backward.

    Counted as in PaLM (Chowdhery et al., 2022, appendix B): 6 for each parameter that multiplies a token, and 12 x
    layers x heads x head size x sequence length for attention, whose scores are taken as a full square. Exact where
    the paper rounds: only matrices count (norms, biases and the lookup of embeddings are not matrix products), the
    output head does. Recomputed activations are not counted: that is what makes it *model* FLOPs.
    """
    return 3 * forward_flops_per_token(spec.model, spec.data.vocab_size, spec.data.sequence_length)


def forward_flops_per_token(model: ModelSpec, vocab_size: int, sequence_length: int) -> int:
    """Floating-point operations of the matrix products of one token's forward pass; 2 for a multiply-add."""
    hidden = model.hidden_size
    keys = hidden // model.heads * model.kv_heads
    projections = 2 * hidden * hidden + 2 * hidden * keys  # queries and output; keys and values
    feed_forward = 3 * hidden * model.ffn_size  # gate, up and down
    attention = 2 * sequence_length * hidden  # scores, and the sum of values they weigh
    return 2 * (model.layers * (projections + feed_forward + attention) + hidden * vocab_size)


def model_flops_utilization(tokens_per_s: float, spec: JobSpec, workers: int, peak: float) -> float:
    """MFU: the share of the workers' peak that a rate of tokens needs.

    Args:
        tokens_per_s: of the whole job.
        spec: what is trained.
        workers: how many there are.
        peak: FLOP/s of one worker, from ``peak_flops``.
    """
    return tokens_per_s * flops_per_token(spec) / (workers * peak)
