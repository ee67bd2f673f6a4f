"""Says why a layout does not fit, and the nearest one that does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from math import inf

from service.planning.search import Search, runs
from service.planning.shapes import Layout

GIB = 2**30

# Fields of a layout that are said when two differ; the others follow from these.
SAID = ("recompute", "zero", "micro_batch", "tensor", "pipeline", "virtual_stages", "data")


@dataclass(frozen=True)
class Refusal:
    """A layout that does not fit: which stage needs how much, and the fastest change found that makes it fit."""

    layout: Layout
    stage: int
    needed_bytes: float
    limit_bytes: float
    remedy: Layout | None
    remedy_bytes: float | None

    @property
    def reason(self) -> str:
        """A sentence such as: stage 0 needs 91 GiB of 71 GiB usable: recompute full brings it to 63 GiB."""
        said = f"stage {self.stage} needs {self.needed_bytes / GIB:.0f} GiB of {self.limit_bytes / GIB:.0f} GiB usable"
        if self.remedy is None or self.remedy_bytes is None:
            return f"{said}, and nothing fits at this number of workers"
        return f"{said}: {difference(self.layout, self.remedy)} brings it to {self.remedy_bytes / GIB:.0f} GiB"


def difference(layout: Layout, other: Layout) -> str:
    """What to change in a layout to get another, such as: recompute full, zero 3."""
    changed = {field.name for field in fields(Layout) if getattr(layout, field.name) != getattr(other, field.name)}
    return ", ".join(f"{name} {getattr(other, name)}" for name in SAID if name in changed)


def refuse(search: Search, layout: Layout) -> Refusal | None:
    """Why a layout does not fit; None when it does.

    The remedy is the fastest single change that helps at the same number of workers; failing that, the fastest layout
    with the same degrees; failing that, the fastest there is.
    """
    ranks = search.memory.of_ranks(layout)
    stage = max(ranks, key=lambda rank: ranks[rank].needed)
    if ranks[stage].needed <= search.limit:
        return None
    remedy = _remedy(search, layout)
    after = search.memory.peak(remedy).needed if remedy else None
    return Refusal(layout, stage, ranks[stage].needed, search.limit, remedy, after)


def refused(search: Search, workers: int, limit: int = 5) -> list[Refusal]:
    """Near misses: of each pair of degrees the smallest layout that would beat the best if it fitted, fastest first."""
    best = search.best(workers)
    fastest = best.step.seconds if best else inf
    misses: dict[tuple[int, int], tuple[float, float, Layout]] = {}
    for layout in search.every(workers):
        needed = search.memory.peak(layout).needed
        degrees = layout.tensor, layout.pipeline
        if needed > search.limit and (degrees not in misses or needed < misses[degrees][0]):
            seconds = search.time.step(layout).seconds
            if seconds < fastest:
                misses[degrees] = needed, seconds, layout
    nearest = sorted(misses.values(), key=lambda miss: miss[1])[:limit]
    return [refusal for _, _, layout in nearest if (refusal := refuse(search, layout)) is not None]


def _remedy(search: Search, layout: Layout) -> Layout | None:
    fitting = [other for other in _single_changes(search, layout) if search.fits(other)]
    if fitting:
        return min(fitting, key=lambda other: search.time.step(other).seconds)
    degrees = layout.tensor, layout.pipeline
    if degrees in search.replica_degrees and layout.context == 1:
        _, same_degrees = search.family(degrees, layout.data)
        if same_degrees is not None:
            return same_degrees
    best = search.best(layout.world_size)
    return best.layout if best else None


def _single_changes(search: Search, layout: Layout) -> Iterator[Layout]:
    """Layouts one step away that need less memory, at the same number of workers."""
    batch, space = search.work.global_batch, search.space
    order = ("none", "selective", "full")
    for mode in space.recompute:
        useful = mode != "selective" or search.time.runtime.attention == "unfused"
        if order.index(mode) > order.index(layout.recompute) and useful:
            yield replace(layout, recompute=mode)
    if layout.data > 1:
        for zero in space.zero:
            if zero > layout.zero:
                yield replace(layout, zero=zero)
    smaller = [size for size in range(1, layout.micro_batch) if batch % size == 0]
    if smaller:
        yield replace(layout, micro_batch=smaller[-1])
    for tensor, pipeline in search.replica_degrees:
        more = tensor >= layout.tensor and pipeline >= layout.pipeline
        one = (tensor > layout.tensor) != (pipeline > layout.pipeline)
        data, rest = divmod(layout.world_size, tensor * pipeline * layout.context)
        if more and one and data and not rest:
            other = replace(
                layout,
                tensor=tensor,
                pipeline=pipeline,
                data=data,
                schedule="1f1b",
                virtual_stages=1,
                stage_layers=None,
                sequence_parallel=space.sequence_parallel and tensor > 1,
            )
            if runs(other, batch):
                yield other
