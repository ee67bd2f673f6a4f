"""How much arithmetic a token costs, and which share of the machine's peak a rate of tokens is."""

from __future__ import annotations

from rubato.arithmetic import Decoder, training_flops_per_token
from rubato.spec import JobSpec


def flops_per_token(spec: JobSpec) -> int:
    """Floating-point operations to train on one token, with attention as a full square: what MFU is defined by."""
    return training_flops_per_token(Decoder.of(spec.model, spec.data.vocab_size), spec.data.sequence_length)


def model_flops_utilization(tokens_per_s: float, spec: JobSpec, workers: int, peak: float) -> float:
    """MFU: the share of the workers' peak that a rate of tokens needs.

    Args:
        tokens_per_s: of the whole job.
        spec: what is trained.
        workers: how many there are.
        peak: FLOP/s of one worker, from ``peak_flops``.
    """
    return tokens_per_s * flops_per_token(spec) / (workers * peak)
