"""Clipping by the norm of a gradient that lies in pieces on many ranks."""

from __future__ import annotations

EPSILON = 1e-6


def clip_factor(norm: float, largest: float | None) -> float:
    """What gradients of this norm are multiplied by so that their norm is at most ``largest`` (None: no limit)."""
    return 1.0 if largest is None else min(1.0, largest / (norm + EPSILON))
