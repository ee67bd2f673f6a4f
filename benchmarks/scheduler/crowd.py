"""How long one decision takes about a thousand jobs on ten thousand GPUs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable
from random import Random

from service.queue.policy import decide
from service.queue.rooms import Cluster, Need, Room
from service.queue.terms import Job, Project, Rules

JOBS = 1000
GPUS = 10_000
_NEED = Need(cpus=4.0, gpus=1.0)
_TIMES = 5


def crowd(running: int, filled: float, seed: int = 0) -> tuple[list[Job], Cluster]:
    """So many running jobs that hold a share of all GPUs, and the rest of a thousand waiting; nodes of eight GPUs."""
    random = Random(seed)
    shares = [random.paretovariate(1.2) for _ in range(running)]
    jobs, used = [], 0
    for number in range(JOBS):
        runs = number < running
        size = max(1, int(filled * GPUS * shares[number] / sum(shares))) if runs else 0
        used += size
        low = max(1, (size or random.choice((4, 8, 16, 64))) // 4)
        jobs.append(
            Job(
                id=f"job-{number}",
                number=number,
                need=_NEED,
                sizes=range(low, 16 * low + 1),
                wanted=low,
                project=f"project-{number % 7}",
                priority=random.choice((0, 0, 0, 1)),
                workers=size,
                seen=size,
                since=-random.random() * 1e4,
                changed_at=-1e4,
                work=random.paretovariate(1.1) * 1e4 if runs else None,
            )
        )
    whole, rest = divmod(GPUS - used, 8)
    free = {Room(96.0, 8.0): whole, Room(96.0, float(rest)): 1 if rest else 0}
    return jobs, Cluster({Room(96.0, 8.0): GPUS // 8}, free)


def decision_ms() -> dict[str, float]:
    """Milliseconds of a decision in several situations: the median of some calls each."""
    situations = {
        "full, all run": (JOBS, 1.0),
        "full, 300 wait": (700, 0.97),
        "half empty, all run": (JOBS, 0.5),
        "nearly empty, 900 wait": (100, 0.05),
    }
    return {name: _milliseconds(*crowd(*situation)) for name, situation in situations.items()}


def _milliseconds(jobs: Iterable[Job], cluster: Cluster) -> float:
    jobs = list(jobs)
    projects = {f"project-{index}": Project(usage=float(index)) for index in range(7)}
    took = []
    for _ in range(_TIMES):
        began = time.perf_counter()
        decide(jobs, cluster, 0.0, Rules(pause=True), projects)
        took.append(time.perf_counter() - began)
    return round(1e3 * statistics.median(took), 1)
