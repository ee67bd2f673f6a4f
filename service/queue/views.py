"""What is free, seen in several ways, since each is late or blind in its own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from service.queue.rooms import Cluster, Need, Room, Rooms
from service.queue.terms import Job


class Views:
    """What is free, less what was kept for somebody.

    ``shown``: what Ray shows, which lags some seconds behind and does not know of workers to come. ``counted``: our own
    count, which does not know of anybody else on the cluster. What starts must fit in both. ``future``: our own count
    when all running jobs have the size that is wanted of them. ``empty``: all there is.
    """

    def __init__(self, cluster: Cluster, running: Iterable[Job]) -> None:
        self._cluster = cluster
        self._wanted: dict[Need, int] = {}
        held: dict[Need, int] = {}
        coming: dict[Need, int] = {}
        for job in running:
            held[job.need] = held.get(job.need, 0) + job.held
            self._wanted[job.need] = self._wanted.get(job.need, 0) + job.workers
            coming[job.need] = coming.get(job.need, 0) + max(0, job.workers - job.seen)
        self.empty = Rooms(cluster.total)
        self._shown = _without(cluster.free, coming)
        self._counted = _without(cluster.total, held)
        self._future: Rooms | None = None
        self._pending: tuple[Need, int] | None = None

    def free(self, need: Need) -> int:
        """How many workers of a kind could start now."""
        pending = self._pending[1] if self._pending is not None and self._pending[0] == need else self._settle()
        views = (self._shown, self._counted, self._future_rooms())
        return min(view.holds(need) for view in views) - pending

    def future(self, need: Need) -> int:
        """How many workers of a kind could start when all running jobs have the size that is wanted of them."""
        self._settle()
        return self._future_rooms().holds(need)

    def foreign(self, need: Need) -> int:
        """For how many workers of a kind there is room by our count, but not by what Ray shows."""
        self._settle()
        return max(0, self._counted.holds(need) - self._shown.holds(need))

    def keep(self, need: Need, workers: int) -> None:
        """Takes what there is of some workers' room in every view, so that nobody else is given it."""
        # A run of calls for one kind is kept in one go: a worker takes one place of its own kind, wherever it is put.
        if self._pending is None or self._pending[0] != need:
            self._settle()
            self._pending = (need, 0)
        self._pending = (need, self._pending[1] + workers)

    def resized(self, need: Need, by: int) -> None:
        """The size that is wanted of a running job was changed by so many workers."""
        self._settle()
        self._wanted[need] += by
        self._future = None

    def _settle(self) -> int:
        if self._pending is not None:
            need, workers = self._pending
            self._pending = None
            self._future_rooms().take(need, workers)
            self._wanted[need] = self._wanted.get(need, 0) + workers
            self._shown.take(need, workers)
            self._counted.take(need, workers)
        return 0

    def _future_rooms(self) -> Rooms:
        if self._future is None:
            self._future = _without(self._cluster.total, self._wanted)
        return self._future


def _without(nodes: Mapping[Room, int], taken: Mapping[Need, int]) -> Rooms:
    rooms = Rooms(nodes)
    for need in sorted(taken, key=lambda need: (-need.gpus, -need.cpus)):  # the large ones find room first
        rooms.take(need, taken[need])
    return rooms
