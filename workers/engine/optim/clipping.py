"""Clipping by the norm of a gradient that lies in pieces on many ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

EPSILON = 1e-6


def squared_norm(gradients: Sequence[Tensor], counted: Sequence[bool]) -> float:
    """This rank's part of the squared gradient norm of a model copy: summed over the copy's ranks it is the whole.

    Args:
        gradients: of the local shards.
        counted: false where another rank of the copy holds the same gradient and counts it.
    """
    norms = torch._foreach_norm([gradient for gradient, count in zip(gradients, counted, strict=True) if count])
    return float(torch.stack(norms).double().square().sum()) if norms else 0.0


def clip_factor(norm: float, largest: float | None) -> float:
    """What gradients of this norm are multiplied by so that their norm is at most ``largest`` (None: no limit)."""
    return 1.0 if largest is None else min(1.0, largest / (norm + EPSILON))
