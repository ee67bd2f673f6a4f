"""Who is asked first: priority, then the project that had least of late, then first come first served."""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterable, Iterator

from service.queue.terms import Held, Job, Project, Projects, Rules

_NOBODY = Project()


def decayed(usage: float, held: float, seconds: float, half_life: float) -> float:
    """Usage as a moving average of what was held, in the same unit: what was held long ago counts for less.

    Args:
        usage: the average so far.
        held: what was held during these seconds.
        half_life: seconds after which something counts for half.
    """
    kept = math.pow(0.5, max(seconds, 0.0) / half_life)
    return usage * kept + held * (1.0 - kept)


def in_turn(
    waiting: Iterable[Job], projects: Projects, held: dict[str, Held], now: float, rules: Rules
) -> Iterator[Job]:
    """Jobs that wait, each once. What a project is granted while this goes on moves its next job back.

    Jobs that lost their workers come first, then higher priorities. Within a priority a job that is overdue is not
    overtaken by any that came after it.
    """
    classes: dict[tuple[bool, int, bool], list[Job]] = {}
    for job in waiting:
        overdue = rules.fair and now - job.since >= rules.overdue
        classes.setdefault((not job.recovering, -job.priority, not overdue), []).append(job)
    for key in sorted(classes):
        members = sorted(classes[key], key=lambda job: job.number)
        if not rules.fair or not key[2]:
            yield from members
        else:
            yield from _fairly(members, projects, held)


def _fairly(jobs: Iterable[Job], projects: Projects, held: dict[str, Held]) -> Iterator[Job]:
    queues: dict[str, deque[Job]] = {}
    for job in jobs:
        queues.setdefault(job.project, deque()).append(job)

    def share(name: str) -> float:
        project = projects.get(name, _NOBODY)
        granted = held[name].granted if name in held else 0.0
        return (project.usage + granted) / project.weight

    heap = [(share(name), queue[0].number, name) for name, queue in queues.items()]
    heapq.heapify(heap)
    while heap:
        _, _, name = heapq.heappop(heap)
        yield queues[name].popleft()
        if queues[name]:
            heapq.heappush(heap, (share(name), queues[name][0].number, name))
