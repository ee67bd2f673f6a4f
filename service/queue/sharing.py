"""Which running job gains most from a worker more, and which misses one least."""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator

from service.queue.rooms import Need
from service.queue.terms import Job, Rules


def work_left(job: Job, rules: Rules) -> float:
    """Seconds of one worker that a job is thought to have before it.

    Where nobody knows, it is taken to have as much before it as behind it: what is true on average of times as unequal
    as those of training runs (with P(longer than t) ~ 1/t, the expected rest grows in proportion to what is done).
    """
    if job.work is not None:
        return max(job.work, 1.0)
    return max(job.done, rules.unknown_work)


def seconds_saved(job: Job, old: int, new: int, rules: Rules) -> float:
    """How much sooner a job would be over at another size, were both kept to the end; negative: later."""
    work = work_left(job, rules)
    return float(work / old**job.exponent - work / new**job.exponent)


def grow(
    jobs: Iterable[Job], start: Callable[[Job], int], room: Callable[[Job, int], bool], rules: Rules
) -> dict[str, int]:
    """Gives room away, a step at a time, to whoever gains most by it.

    The gain is that of throughput for each worker, relative to the work that is left, so that what is about to be over
    is over soon and leaves its room to all others. A step is at least an eighth of a job's size, if that is possible.

    Args:
        start: the size a job has so far.
        room: takes room for some workers more of a job and says True, or says False.

    Returns:
        New sizes of the jobs that got more, by id.
    """
    found: dict[str, int] = {}
    heap = []
    for job in jobs:
        size = start(job)
        if job.sizes[-1] > size:
            following = _step(job, size)
            heap.append((-_gain(job, size, following, rules), job.number, size, following, job))
    heapq.heapify(heap)
    while heap:
        _, number, size, following, job = heap[0]
        if not room(job, following - size):
            heapq.heappop(heap)
            continue
        found[job.id] = size = following
        if job.sizes[-1] == size:
            heapq.heappop(heap)
            continue
        following = _step(job, size)
        heapq.heapreplace(heap, (-_gain(job, size, following, rules), number, size, following, job))
    return found


def _step(job: Job, size: int) -> int:
    least = bisect_right(job.sizes, size)
    ample = bisect_right(job.sizes, size + max(size // 8, 1)) - 1
    return job.sizes[max(least, ample)]


class Lenders:
    """Jobs that can be shrunk for others of one kind, those first that miss it least."""

    def __init__(self, jobs: Iterable[tuple[Job, int]], need: Need, rules: Rules) -> None:
        """``jobs``: what may be shrunk, and the size it has."""
        self._rules = rules
        self._heap: list[tuple[float, int, int, int, Job]] = []
        self.able = 0  # places that all of them together can give
        for job, size in jobs:
            per_place = job.need.in_place_of(need)
            if per_place is not None and size - job.sizes[0] >= per_place:
                self._heap.append((_gain(job, job.sizes[0], size, rules), -job.number, size, per_place, job))
                self.able += (size - job.sizes[0]) // per_place
        heapq.heapify(self._heap)

    def release(self, wanted: int) -> Iterator[tuple[Job, int]]:
        """Jobs and their new sizes, until so many places are free, or nobody is left who could give any."""
        while self._heap and wanted > 0:
            _, number, size, per_place, job = heapq.heappop(self._heap)
            target = largest(job, size - wanted * per_place) or job.sizes[0]
            wanted -= (size - target) // per_place
            self.able -= (size - job.sizes[0]) // per_place
            if target - job.sizes[0] >= per_place:
                self.able += (target - job.sizes[0]) // per_place
                gain = _gain(job, job.sizes[0], target, self._rules)
                heapq.heappush(self._heap, (gain, number, target, per_place, job))
            yield job, target


def _gain(job: Job, small: int, large: int, rules: Rules) -> float:
    faster = large**job.exponent - small**job.exponent
    return float(faster / (large - small) / work_left(job, rules))


def largest(job: Job, most: int) -> int:
    """The largest possible size up to ``most``; 0: there is none."""
    index = bisect_right(job.sizes, most)
    return job.sizes[index - 1] if index else 0
