"""Who may start now, and why the others wait: first come first served within a priority, all workers or none."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

_TOLERANCE = 1e-6  # Ray counts resources in steps of 1e-4, and sums of them as floats


@dataclass(frozen=True)
class Room:
    """What a node has, or has free."""

    cpus: float
    gpus: float

    def holds(self, need: Need) -> int:
        """How many workers of one kind fit."""
        counts = [
            int((has + _TOLERANCE) // each) for has, each in ((self.cpus, need.cpus), (self.gpus, need.gpus)) if each
        ]
        return max(0, min(counts, default=0))

    def less(self, need: Need, workers: int) -> Room:
        """What is left when some workers are there."""
        return Room(self.cpus - workers * need.cpus, self.gpus - workers * need.gpus)


@dataclass(frozen=True)
class Need:
    """What one worker takes, all of it on one node."""

    cpus: float
    gpus: float

    def __str__(self) -> str:
        gpus = f" and {self.gpus:g} GPU" if self.gpus else ""
        return f"{self.cpus:g} CPU{gpus}"


@dataclass(frozen=True)
class Node:
    """A living node: all it has, and what Ray showed as free."""

    total: Room
    free: Room


@dataclass(frozen=True)
class Running:
    """A job that has workers, or is about to: as many as are wanted, and as many as are seen to train."""

    need: Need
    wanted: int
    seen: int


@dataclass(frozen=True)
class Candidate:
    """A job without an attempt.

    Attributes:
        workers: the size it wants to start at.
        sizes: all it could run at, ascending.
        recovering: it ran already and goes before those that wait for the first time.
        shrinks: when ``workers`` do not fit it takes the most that do, rather than wait.
    """

    job: str
    number: int
    priority: int
    need: Need
    workers: int
    sizes: Sequence[int]
    recovering: bool = False
    shrinks: bool = False


@dataclass(frozen=True)
class Decision:
    """``workers``: the job starts at this size. None: it waits, and ``code`` and ``message`` say why."""

    job: str
    workers: int | None
    code: str
    message: str


def decide(candidates: Iterable[Candidate], nodes: Sequence[Node], running: Iterable[Running]) -> list[Decision]:
    """A decision for each candidate, in the order of the queue.

    Nobody overtakes a job that waits for room, or a large one would wait for ever; only a job that the whole cluster
    could not hold is passed by.
    """
    running = list(running)
    empty = [node.total for node in nodes]
    # Two views of what is free, each late or blind in its own way: what Ray shows lags some seconds behind and does
    # not know of workers to come; our own count does not know of anybody else on the cluster. A job must fit in both.
    shown = [node.free for node in nodes]
    counted = list(empty)
    for job in running:
        _place(shown, job.need, max(0, job.wanted - job.seen))
        _place(counted, job.need, max(job.wanted, job.seen))
    decisions: list[Decision] = []
    blocked_by: Candidate | None = None
    for candidate in sorted(candidates, key=lambda job: (not job.recovering, -job.priority, job.number)):
        most = _fits(empty, candidate.need)
        if most < _least(candidate):
            decisions.append(_never(candidate, most))
            continue
        if blocked_by is not None:
            message = f"waits behind {blocked_by.job}, which waits for {blocked_by.workers} workers"
            decisions.append(Decision(candidate.job, None, "waiting_behind", message))
            continue
        now = min(_fits(shown, candidate.need), _fits(counted, candidate.need))
        workers = candidate.workers
        if candidate.shrinks:
            workers = max((size for size in candidate.sizes if size <= min(now, workers)), default=workers)
        if workers > now:
            blocked_by = candidate
            decisions.append(_later(candidate, now))
            continue
        _place(shown, candidate.need, workers)
        _place(counted, candidate.need, workers)
        decisions.append(Decision(candidate.job, workers, "admitted", f"starts with {workers} workers"))
    return decisions


def _least(candidate: Candidate) -> int:
    return candidate.sizes[0] if candidate.recovering else candidate.workers


def _fits(rooms: Iterable[Room], need: Need) -> int:
    return sum(room.holds(need) for room in rooms)


def _place(rooms: list[Room], need: Need, workers: int) -> None:
    """Takes room for as many workers as fit, the fullest nodes first, as Ray packs them."""
    order = sorted(range(len(rooms)), key=lambda index: (rooms[index].holds(need), index))
    for index in order:
        here = min(workers, rooms[index].holds(need))
        rooms[index] = rooms[index].less(need, here)
        workers -= here


def _never(candidate: Candidate, most: int) -> Decision:
    least = _least(candidate)
    message = f"needs {least} workers of {candidate.need} each, and the whole cluster has room for {most}"
    smaller = [size for size in candidate.sizes if size <= most]
    message += f"; scale it to {smaller[-1]}, or add nodes" if smaller else "; it waits for nodes to be added"
    return Decision(candidate.job, None, "larger_than_cluster", message)


def _later(candidate: Candidate, now: int) -> Decision:
    message = f"waits for {candidate.workers} workers of {candidate.need} each; there is room for {now} now"
    return Decision(candidate.job, None, "waiting_for_room", message)


def impatient(candidate: Candidate) -> Candidate:
    """The same job when it would rather run smaller than wait."""
    return replace(candidate, shrinks=True)
