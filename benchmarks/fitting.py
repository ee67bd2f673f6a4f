"""Fits the planner's constants to measurements: robust damped least squares in the logarithms."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from service.planning.constants import Constants

Floats = NDArray[np.float64]

# What documents say without any of the runs, and halves where they say nothing. Fitted constants do not stray far from
# here, and one that the runs at hand tell nothing about stays.
START = Constants(
    matmul_share=0.9,
    memory_bandwidth_share=0.85,  # STREAM-like kernels
    attention_share=0.6,  # FlashAttention 2 on A100, arXiv:2307.08691, figure 5
    layer_gap_s=0.5e-3,  # a hundred kernels, 5 us apart
    blocking_gap_s=1e-3,  # a hundred kernels, 10 us of launch and synchronisation each
    link_share=0.78,  # nccl-tests on A100: 235 of 300 GB/s
    hop_latency_s=5e-6,
    exposed_share=0.5,
    activation_factor=1.0,  # what arXiv:2205.05198 counts
    reserved_share=0.15,
)
TIME_CONSTANTS = (
    "matmul_share",
    "memory_bandwidth_share",
    "attention_share",
    "layer_gap_s",
    "blocking_gap_s",
    "link_share",
    "hop_latency_s",
    "exposed_share",
)
MEMORY_CONSTANTS = ("activation_factor", "reserved_share")

TYPICAL_ERROR = 0.04  # of a prediction, where the loss turns from squares to absolute values
TYPICAL_DISTANCE = 0.13  # of a constant from its start: what the documents leave open
PRIOR = 0.5 / TYPICAL_DISTANCE**2
STEP = 1e-3
MOST_ITERATIONS = 15


def fit(names: Sequence[str], residuals: Callable[[Constants], Floats], start: Constants = START) -> Constants:
    """The constants that make ``residuals`` small; those not named stay as they start.

    Args:
        names: the constants to fit.
        residuals: log(predicted / measured) of every measurement under given constants.
        start: where to begin, and what to fall back to.
    """
    origin = np.array([math.log(getattr(start, name)) for name in names])

    def at(point: Floats) -> Constants:
        return replace(start, **{name: math.exp(value) for name, value in zip(names, point, strict=True)})

    def cost(errors: Floats, point: Floats) -> float:
        robust = np.sqrt(1 + (errors / TYPICAL_ERROR) ** 2) - 1
        return float(robust.sum() + PRIOR * ((point - origin) ** 2).sum())

    point = origin.copy()
    errors = residuals(at(point))
    best, damping = cost(errors, point), 1e-2
    for _ in range(MOST_ITERATIONS):
        steps = STEP * np.eye(len(point))
        slopes = np.stack([(residuals(at(point + step)) - errors) / STEP for step in steps], axis=1)
        weights = 1 / (TYPICAL_ERROR**2 * np.sqrt(1 + (errors / TYPICAL_ERROR) ** 2))
        curvature = slopes.T @ (slopes * weights[:, None]) + PRIOR * np.eye(len(point))
        gradient = slopes.T @ (weights * errors) + PRIOR * (point - origin)
        before = best
        for _ in range(8):
            move = np.clip(-np.linalg.solve(curvature + damping * np.diag(np.diag(curvature)), gradient), -0.5, 0.5)
            new_errors = residuals(at(point + move))
            new_cost = cost(new_errors, point + move)
            if new_cost < best:
                point, errors, best, damping = point + move, new_errors, new_cost, damping / 4
                break
            damping *= 4
        if before - best < 1e-4 * before:
            break
    return at(point)
