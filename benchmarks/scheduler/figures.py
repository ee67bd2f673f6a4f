"""What is measured of a simulated trace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from benchmarks.scheduler.simulation import Outcome, SimulatedJob

HOUR = 3600.0


@dataclass(frozen=True)
class Figures:
    """Hours from submission to end, the share of GPUs in use while jobs arrive, resizes a job, and who starved."""

    mean_h: float
    median_h: float
    p99_h: float
    longest_wait_h: float
    utilisation: float
    resizes_a_job: float
    starved: int
    decision_ms: float

    def rounded(self) -> dict[str, Any]:
        """As a record, with the digits that mean something."""
        return {name: round(value, 3) for name, value in asdict(self).items()}


def figures(outcome: Outcome, gpus: int, overdue: float) -> Figures:
    """The figures of a trace that ran to its end."""
    unfinished = [job.waits.id for job in outcome.jobs if job.finished is None]
    if unfinished:
        raise RuntimeError(f"{len(unfinished)} jobs never ended, such as {unfinished[0]}")
    took = np.array([(job.finished or 0.0) - job.traced.submitted for job in outcome.jobs])
    waited = max((job.started or 0.0) - job.traced.submitted for job in outcome.jobs)
    return Figures(
        mean_h=float(took.mean()) / HOUR,
        median_h=float(np.median(took)) / HOUR,
        p99_h=float(np.percentile(took, 99)) / HOUR,
        longest_wait_h=waited / HOUR,
        utilisation=outcome.used / (gpus * outcome.until),
        resizes_a_job=sum(job.resizes for job in outcome.jobs) / len(outcome.jobs),
        starved=starved(outcome.jobs, overdue),
        decision_ms=1e3 * float(np.mean(outcome.decision_s)),
    )


def starved(jobs: Sequence[SimulatedJob], overdue: float) -> int:
    """Jobs that had waited for ``overdue`` seconds and then saw one start that was submitted after them."""
    found = 0
    by_start = sorted((job.started or 0.0, job.traced.number) for job in jobs)
    for job in jobs:
        patience_ends, started = job.traced.submitted + overdue, job.started or 0.0
        if started > patience_ends:
            found += any(patience_ends < at < started and number > job.traced.number for at, number in by_start)
    return found
