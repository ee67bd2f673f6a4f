"""Bytes of a parameter in each of its roles, by how software mixes number formats."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Precision:
    """Bytes a parameter takes in each of its roles, and bytes of an activation.

    ``parameter``: the resident copy; ``gradient``: as accumulated; ``computed_gradient``: kept beside it as backward
    computed it; ``optimizer``: two moments, and a master copy where ``parameter`` is 16-bit; ``wire``: a gradient on
    its way; ``activation``: 2, or 4 without mixed precision.
    """

    parameter: int
    gradient: int
    optimizer: int
    wire: int
    activation: int = 2
    computed_gradient: int = 0


FP16 = Precision(parameter=2, gradient=2, optimizer=12, wire=2)
"""Megatron and DeepSpeed in fp16 (arXiv:1910.02054, section 3.1)."""
BF16 = Precision(parameter=2, gradient=4, optimizer=12, wire=4, computed_gradient=2)
"""Megatron and DeepSpeed in bf16: as fp16, but gradients accumulate and reduce in 32 bits."""
SHARDED = Precision(parameter=4, gradient=4, optimizer=8, wire=2)
"""FSDP with a bf16 policy: 32-bit shards are the master copy, gathered and reduced in 16 bits."""
AUTOCAST = Precision(parameter=4, gradient=4, optimizer=8, wire=4)
"""32-bit parameters, gradients and reductions, 16-bit products."""
FP32 = Precision(parameter=4, gradient=4, optimizer=8, wire=4, activation=4)
