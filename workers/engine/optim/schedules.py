"""The learning rate as a function of the step."""

from __future__ import annotations

import math

from rubato.spec import OptimizerSpec


def learning_rate(spec: OptimizerSpec, step: int, steps: int) -> float:
    """The learning rate of an update.

    Linear warm-up to ``lr`` over the first ``warmup`` updates, then constant, or down to ``floor`` x lr at the last
    one: along a cosine (https://arxiv.org/abs/1608.03983), along a line, or along a line over the last ``decay`` share
    of all steps (warm-up, stable, decay: https://arxiv.org/abs/2404.06395).

    Args:
        spec: the optimizer section of a spec.
        step: updates done before this one, 0 <= step < steps.
        steps: updates of the whole run.
    """
    schedule = spec.schedule
    if step < schedule.warmup:
        return spec.lr * (step + 1) / schedule.warmup
    if schedule.name == "constant":
        return spec.lr
    begin = max(schedule.warmup, round(steps * (1 - schedule.decay))) if schedule.name == "wsd" else schedule.warmup
    if step < begin:
        return spec.lr
    # 0 at the last update before the way down, 1 at the last update of all.
    progress = (
        (step - begin + 1) / (steps - begin) if schedule.name == "wsd" else (step - begin) / max(1, steps - 1 - begin)
    )
    share = (1 + math.cos(math.pi * progress)) / 2 if schedule.name == "cosine" else 1 - progress
    return spec.lr * (schedule.floor + (1 - schedule.floor) * share)
