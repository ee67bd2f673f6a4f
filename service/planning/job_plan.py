"""Plans one job: the replica that serves all its sizes best, what each size comes to, and what cannot fit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import inf, log

from rubato.problems import FieldProblem, SpecError
from rubato.spec import JobSpec
from service.planning.constants import Constants
from service.planning.elastic import SLACK
from service.planning.fleet import Fleet
from service.planning.from_spec import layout_of, runtime_of, space_of, with_layout, work_of
from service.planning.refusals import GIB, Refusal, difference, refuse, refused
from service.planning.search import Choice, Search, runs
from service.planning.shapes import Accelerator, Layout

# A size that a replica cannot use at all counts as if it ran there at so small a share of the best speed.
UNUSED_SIZE = 0.25

# Sizes a replica is judged at; between two neighbours of more than these nothing new happens.
MOST_SIZES = 16


@dataclass(frozen=True)
class SizePlan:
    """What a number of workers comes to at one replica.

    ``choice``: None where the replica cannot be run at this size. ``refusal``: why it does not fit, if it does not.
    """

    workers: int
    choice: Choice | None
    refusal: Refusal | None
    limit: float
    """Bytes of a worker that may be used."""


class JobPlanner:
    """Plans a job on a fleet. What it has found out about a size it remembers."""

    def __init__(self, spec: JobSpec, fleet: Fleet) -> None:
        self.spec, self.fleet = spec, fleet
        self.work, self.runtime, self.space = work_of(spec), runtime_of(spec), space_of(spec)
        self._searches: dict[tuple[Accelerator, Constants], Search] = {}

    def search(self, workers: int) -> Search:
        """Layouts as so many workers see their cluster."""
        cluster, constants = self.fleet.cluster(workers), self.fleet.constants_for(workers)
        key = cluster.accelerator, constants
        if key not in self._searches:
            self._searches[key] = Search(self.work, cluster, self.runtime, constants, self.space)
        return self._searches[key]

    def choose(self) -> Layout:
        """The replica, as a layout without a data axis, that is nearest to the best at all sizes of the job together.

        It is one for all sizes, since a job does not change tensor and pipeline degrees while it runs. It fits and runs
        at the smallest size it can be laid out at, and so at all.

        Raises:
            SpecError: nothing fits; with the nearest that does.
        """
        low, high = self.spec.workers.min, self.spec.workers.max
        best: dict[int, float] = {}
        candidates: dict[Layout, None] = {}
        for size in spread(range(low, high + 1)):
            found = self.search(size).within(size, SLACK)
            if found:
                best[size] = min(seconds for seconds, _ in found.values())
            candidates.update((layout.with_data(1, layout.zero), None) for _, layout in found.values())
        least, chosen = inf, None
        for replica in candidates:
            cost = self._cost(replica, best)
            if cost < least:
                least, chosen = cost, replica
        if chosen is None:
            raise SpecError([self._nothing_fits(best)])
        return chosen

    def _cost(self, replica: Layout, best: dict[int, float]) -> float:
        """Summed logarithms of how much slower a replica is than the best of each size; infinite where it cannot be."""
        usable = self._data_degrees(replica)
        smallest = next(usable, None)
        if smallest is None or not self._fits(replica, smallest):
            return inf
        cost = 0.0
        for size, fastest in best.items():
            data = next(self._data_degrees(replica, size), None)
            if data is None:
                cost -= log(UNUSED_SIZE)
                continue
            layout = at_data(replica, data)
            cost += log(self.search(layout.world_size).time.step(layout).seconds / fastest)
        return cost

    def _data_degrees(self, replica: Layout, most: int | None = None) -> Iterator[int]:
        """Data degrees the job can have with a replica: ascending, or with ``most`` workers descending from there."""
        size, batch = replica.replica_size, self.work.global_batch
        first = -(-self.spec.workers.min // size)
        last = min((self.spec.workers.max if most is None else most) // size, batch // replica.micro_batch)
        degrees: Iterable[int] = range(first, last + 1) if most is None else range(last, first - 1, -1)
        return (data for data in degrees if data and runs(at_data(replica, data), batch))

    def _fits(self, replica: Layout, data: int) -> bool:
        layout = at_data(replica, data)
        return self.search(layout.world_size).fits(layout)

    def at(self, workers: int, replica: Layout) -> SizePlan:
        """What a size comes to at a replica, whether it fits or not."""
        search = self.search(workers)
        data, rest = divmod(workers, replica.replica_size)
        layout = at_data(replica, data) if data else replica
        if rest or not data or not runs(layout, self.work.global_batch):
            return SizePlan(workers, None, None, search.limit)
        return SizePlan(workers, search.judge(layout), refuse(search, layout), search.limit)

    def misses(self, workers: int, limit: int = 3) -> list[Refusal]:
        """Layouts that would be faster at a size if they fitted."""
        return refused(self.search(workers), workers, limit)

    def best(self, workers: int) -> Choice | None:
        """The fastest at a size, whatever other sizes use."""
        return self.search(workers).best(workers)

    def check(self) -> None:
        """Refuses a spec whose own layout cannot fit, at the smallest size it runs at.

        Without the margin that a planned layout keeps: whoever gives a layout may know better by that much.

        Raises:
            SpecError: with the nearest that fits.
        """
        for size in self.spec.sizes[:1]:
            layout = layout_of(self.spec, size)
            search = self.search(size)
            if layout is None or search.memory.peak(layout).needed <= search.cluster.accelerator.memory_bytes:
                return
            refusal = refuse(search, layout)
            if refusal is not None:
                raise SpecError([self._too_large(refusal, size)])

    def _too_large(self, refusal: Refusal, size: int) -> FieldProblem:
        cause = f"at {size} workers {_needs(refusal)}"
        if refusal.remedy is not None and refusal.remedy_bytes is not None:
            change = difference(refusal.layout, refusal.remedy)
            fix = f"use {change}, which needs {_gib(refusal.remedy_bytes)} (or leave parallelism out)"
        else:
            fix = self._elsewhere(size)
        return FieldProblem("parallelism", cause, fix)

    def _nothing_fits(self, best: dict[int, float]) -> FieldProblem:
        low, high = self.spec.workers.min, self.spec.workers.max
        if best:
            fix = f"use workers.min {min(best)}"
            return FieldProblem("workers.min", f"no layout fits at {low} workers", fix)
        cause = f"no layout fits at {low} workers" if low == high else f"no layout fits at {low} to {high} workers"
        search = self.search(high)
        smallest = min(search.every(high), key=lambda layout: search.memory.peak(layout).needed, default=None)
        near = refuse(search, smallest) if smallest is not None else None
        if near is not None:
            shape = near.layout
            said = f"tensor {shape.tensor}, pipeline {shape.pipeline}, recompute {shape.recompute}"
            cause += f": even with {said} {_needs(near)}"
        return FieldProblem("workers", cause, self._elsewhere(high))

    def _elsewhere(self, workers: int) -> str:
        """The nearest larger size at which something fits, in words."""
        size = workers
        while size < self.work.global_batch * self.work.model.layers * self.fleet.node_size:
            size *= 2
            if self.search(size).best(size) is not None:
                return f"use {size} workers"
        return "use a smaller model, a shorter sequence, or accelerators with more memory"


def at_data(replica: Layout, data: int) -> Layout:
    """So many of a replica; ZeRO has nothing to split over a single one."""
    return replica.with_data(data, replica.zero if data > 1 else 0)


def spread(sizes: range, most: int = MOST_SIZES) -> list[int]:
    """Up to ``most`` of the sizes, the first and the last among them, about evenly in their logarithm."""
    if len(sizes) <= most:
        return list(sizes)
    low, high = sizes[0], sizes[-1]
    return sorted({round(low * (high / low) ** (number / (most - 1))) for number in range(most)})


def resolve(spec: JobSpec, fleet: Fleet) -> JobSpec:
    """A spec that leaves its layout open, with the one that is chosen for it on a fleet.

    Raises:
        SpecError: nothing fits; with the nearest that does.
    """
    return with_layout(spec, JobPlanner(spec, fleet).choose())


def _needs(refusal: Refusal) -> str:
    stage = f"stage {refusal.stage}" if refusal.layout.pipeline > 1 else "a worker"
    return f"{stage} needs {_gib(refusal.needed_bytes)} of {_gib(refusal.limit_bytes)} usable"


def _gib(amount: float) -> str:
    return f"{amount / GIB:.3g} GiB"
