"""Pipeline schedules: the rules of each, which rank holds which stage, and which layers a stage is given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ScheduleName = Literal["gpipe", "1f1b", "interleaved", "interleaved_zero_bubble", "zbv", "dualpipev"]


@dataclass(frozen=True)
class PipelineSchedule:
    """What a schedule asks of a layout.

    Attributes:
        stages: stages a rank that it is written for, fewest and most; None: any number from the fewest on.
        v_shaped: whether a rank holds its stages on the way there and on the way back (rank 0 the first and the last),
            else every rank's stages come in turn.
        splits_backward: whether gradients of the input and of the weights are computed apart.
        rounds: whether micro-batches go in rounds of at least one a rank, all of one size.
        fewest: micro-batches a step for each rank of the pipeline; 0: a single one will do.
    """

    stages: tuple[int, int | None]
    v_shaped: bool = False
    splits_backward: bool = False
    rounds: bool = False
    fewest: int = 0


SCHEDULES: dict[str, PipelineSchedule] = {
    "gpipe": PipelineSchedule((1, 1)),  # Huang et al. 2019, https://arxiv.org/abs/1811.06965
    "1f1b": PipelineSchedule((1, 1), fewest=1),  # Narayanan et al. 2019, https://arxiv.org/abs/1806.03377
    "interleaved": PipelineSchedule((2, None), rounds=True),  # Narayanan et al. 2021, https://arxiv.org/abs/2104.04473
    # Qi et al. 2024, https://arxiv.org/abs/2401.10241: ZB-1P over several stages a rank, and ZB-V (section 6).
    "interleaved_zero_bubble": PipelineSchedule((2, None), splits_backward=True, rounds=True),
    "zbv": PipelineSchedule((2, 2), v_shaped=True, splits_backward=True),
    # DeepSeek-AI 2024, https://arxiv.org/abs/2412.19437, folded in two: https://github.com/deepseek-ai/DualPipe
    "dualpipev": PipelineSchedule((2, 2), v_shaped=True, splits_backward=True, fewest=2),
}
"""By the name a spec calls them; as torch.distributed.pipelining runs them."""


def stages_of(schedule: str, pipeline: int, virtual_stages: int, rank: int) -> list[int]:
    """The stages that a rank of the pipeline holds, ascending."""
    if SCHEDULES[schedule].v_shaped:
        return [rank, 2 * pipeline - 1 - rank]
    return list(range(rank, pipeline * virtual_stages, pipeline))


def balanced(layers: int, stages: int, first: float, last: float) -> list[int]:
    """Layers of each stage, so that the dearest stage is as cheap as it can be; every stage has one at least.

    Args:
        layers: of the model, all of one cost.
        stages: how many, at most ``layers``.
        first: what the first stage does beside its layers (the embedding), in layers.
        last: what the last stage does beside its layers (the output head), in layers.
    """
    counts = [1] * stages
    extra = [0.0] * stages
    extra[0] += first
    extra[-1] += last
    for _ in range(layers - stages):
        cheapest = min(range(stages), key=lambda stage: counts[stage] + extra[stage])
        counts[cheapest] += 1
    return counts
