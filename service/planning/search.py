"""Finds the fastest layout that fits, for any number of workers, by bounding what need not be looked at."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf

from rubato.arithmetic import training_flops_per_token
from rubato.layout import distinct_stages, runs_in_schedule
from service.planning.candidates import Space, pipeline_degrees, replicas, tensor_degrees
from service.planning.constants import Constants, fitted
from service.planning.engine_memory import memory_model
from service.planning.memory import Memory
from service.planning.shapes import Cluster, Layout, Runtime, Work
from service.planning.throughput import StepTime, TimeModel

# Share of a device's memory to leave free: nine predictions of ten come that close to what was measured.
MARGIN = 0.10

# Nine of ten published speeds lie this close to what is predicted for trainers that the constants never saw.
SPEED_SPREAD = 0.11


@dataclass(frozen=True)
class Choice:
    """A layout for so many workers, and what is predicted for it; some workers may be left idle."""

    workers: int
    layout: Layout
    step: StepTime
    memory: Memory
    tokens_per_s: float
    mfu: float

    @property
    def idle(self) -> int:
        """Workers that do not make a whole replica."""
        return self.workers - self.layout.world_size

    @property
    def replica(self) -> tuple[int, int]:
        """Tensor and pipeline degrees: two layouts that share them differ in their number of replicas alone."""
        return self.layout.tensor, self.layout.pipeline

    @property
    def tokens_per_s_range(self) -> tuple[float, float]:
        """Where nine of ten measurements should lie."""
        return self.tokens_per_s * (1 - SPEED_SPREAD), self.tokens_per_s * (1 + SPEED_SPREAD)


@dataclass
class _Replica:
    """One replica's layout, the micro-batches of all replicas, and what a step of m of them takes at least.

    That is m x ``slowest`` + ``bubble`` seconds.
    """

    layout: Layout
    micro_batches: int
    slowest: float
    bubble: float
    fits_from: dict[int, float]
    """By ZeRO stage: the smallest data degree that fits, once it was needed."""


class Search:
    """Layouts of one piece of work on one kind of cluster, at any number of workers."""

    def __init__(
        self,
        work: Work,
        cluster: Cluster,
        runtime: Runtime | None = None,
        constants: Constants | None = None,
        space: Space | None = None,
        margin: float = MARGIN,
    ) -> None:
        self.work, self.cluster = work, cluster
        self.space = space or Space()
        runtime, constants = runtime or Runtime(), constants or fitted()
        self.time = TimeModel(work, cluster, runtime, constants)
        self.memory = memory_model(work, cluster.accelerator, runtime, constants)
        self.limit = cluster.accelerator.memory_bytes * (1 - margin)
        self._flops = work.tokens * training_flops_per_token(work.model, work.sequence)
        self._replicas = {
            (tensor, pipeline): self._bounded(tensor, pipeline)
            for tensor in tensor_degrees(work, self.space, cluster.node_size)
            for pipeline in pipeline_degrees(work, self.space)
        }
        self._least = {
            degrees: min((replica.slowest / replica.layout.micro_batch for replica in known), default=inf)
            for degrees, known in self._replicas.items()
        }
        self._found: dict[tuple[int, int, int], tuple[float, Layout | None]] = {}
        self._no_faster: dict[tuple[int, int, int], float] = {}

    @property
    def replica_degrees(self) -> list[tuple[int, int]]:
        """The (tensor, pipeline) degrees considered."""
        return list(self._replicas)

    def _bounded(self, tensor: int, pipeline: int) -> list[_Replica]:
        unfused = self.time.runtime.attention == "unfused"
        found = []
        for layout in replicas(self.work, self.space, tensor, pipeline, unfused):
            slowest, bubble = self.time.bound(layout)
            found.append(_Replica(layout, self.work.global_batch // layout.micro_batch, slowest, bubble, {}))
        return found

    def best(self, workers: int) -> Choice | None:
        """The fastest layout that fits on so many workers; None when nothing does."""
        fastest, chosen = inf, None
        for least, degrees, data in self._families(workers):
            if least >= fastest:
                break
            seconds, layout = self.family(degrees, data, fastest)
            if layout is not None and seconds < fastest:
                fastest, chosen = seconds, layout
        return self.judge(chosen, workers) if chosen else None

    def within(self, workers: int, slack: float) -> dict[tuple[int, int], tuple[float, Layout]]:
        """By (tensor, pipeline): seconds and layout of the fastest that fits, where within ``slack`` of the best."""
        found: dict[tuple[int, int], tuple[float, Layout]] = {}
        fastest = inf
        for least, degrees, data in self._families(workers):
            if least >= fastest * (1 + slack):
                break
            seconds, layout = self.family(degrees, data, fastest * (1 + slack))
            if layout is not None:
                found[degrees] = seconds, layout
                fastest = min(fastest, seconds)
        return {degrees: entry for degrees, entry in found.items() if entry[0] <= fastest * (1 + slack)}

    def _families(self, workers: int) -> list[tuple[float, tuple[int, int], int]]:
        """(Seconds at least, degrees, data degree) of every replica shape, most promising first."""
        families = []
        for degrees, least in self._least.items():
            data = workers // (degrees[0] * degrees[1])
            if data:
                families.append((least * self.work.global_batch / data, degrees, data))
        families.sort()
        return families

    def family(self, degrees: tuple[int, int], data: int, below: float = inf) -> tuple[float, Layout | None]:
        """Seconds and layout of the fastest that fits with these degrees; no layout when none does below ``below``."""
        key = (*degrees, data)
        if key in self._found:
            return self._found[key]
        if self._no_faster.get(key, 0.0) >= below:
            return inf, None
        bounds = []
        for number, replica in enumerate(self._replicas[degrees]):
            micro_batches = -(-replica.micro_batches // data)
            bounds.append((micro_batches * replica.slowest + replica.bubble, number, replica))
        bounds.sort()
        fastest, chosen = inf, None
        for bound, _, replica in bounds:
            if bound >= fastest:
                break
            if bound >= below:
                if chosen is None:
                    self._no_faster[key] = below
                    return inf, None
                break
            for layout in self._fitting(replica, data):
                seconds = self.time.step(layout).seconds
                if seconds < fastest:
                    fastest, chosen = seconds, layout
        self._found[key] = fastest, chosen
        return fastest, chosen

    def _fitting(self, replica: _Replica, data: int) -> Iterator[Layout]:
        """The replica's layout at every ZeRO stage that fits and that its schedule can run."""
        if not _runs(replica.layout, replica.micro_batches, data):
            return
        for zero in self.space.zero if data > 1 else (0,):
            if zero not in replica.fits_from:
                replica.fits_from[zero] = self._smallest_that_fits(replica, zero)
            if data >= replica.fits_from[zero]:
                yield replica.layout.with_data(data, zero)

    def _smallest_that_fits(self, replica: _Replica, zero: int) -> float:
        """The data degree from which a replica fits; memory never grows with it, so bisection finds it."""
        fails, enough = 0, replica.micro_batches
        if not self.fits(replica.layout.with_data(enough, zero)):
            return inf
        while enough - fails > 1:
            middle = (fails + enough) // 2
            if self.fits(replica.layout.with_data(middle, zero)):
                enough = middle
            else:
                fails = middle
        return enough

    def judge(self, layout: Layout, workers: int | None = None) -> Choice:
        """What is predicted for a layout, whether it fits or not."""
        step = self.time.step(layout)
        peak = self.cluster.accelerator.peak_flops * layout.world_size
        return Choice(
            workers=layout.world_size if workers is None else workers,
            layout=layout,
            step=step,
            memory=self.memory.peak(layout),
            tokens_per_s=self.work.tokens / step.seconds,
            mfu=self._flops / step.seconds / peak,
        )

    def fits(self, layout: Layout) -> bool:
        """Whether every stage does; the first that does not is the end of it."""
        stages = distinct_stages(layout.pipeline)
        return all(self.memory.of_rank(layout, stage).needed <= self.limit for stage in stages)

    def every(self, workers: int) -> Iterator[Layout]:
        """Every layout considered for so many workers, whether it fits or not."""
        for degrees, known in self._replicas.items():
            data = workers // (degrees[0] * degrees[1])
            if not data:
                continue
            for replica in known:
                if _runs(replica.layout, replica.micro_batches, data):
                    for zero in self.space.zero if data > 1 else (0,):
                        yield replica.layout.with_data(data, zero)

    def pareto(self, workers: int) -> list[Choice]:
        """Layouts than which none that fits is both faster and smaller, fastest first."""
        choices = sorted(
            (self.judge(layout, workers) for layout in self.every(workers)),
            key=lambda choice: (choice.step.seconds, choice.memory.needed),
        )
        front: list[Choice] = []
        for choice in choices:
            needed = choice.memory.needed
            if needed <= self.limit and (not front or needed < front[-1].memory.needed):
                front.append(choice)
        return front


def runs(layout: Layout, global_batch: int) -> bool:
    """Whether every replica has micro-batches, and as many as its schedule can run."""
    return _runs(layout, global_batch // layout.micro_batch, layout.data)


def _runs(replica: Layout, micro_batches: int, data: int) -> bool:
    fewest, rest = divmod(micro_batches, data)
    return runs_in_schedule(replica, fewest) and (not rest or runs_in_schedule(replica, fewest + 1))
