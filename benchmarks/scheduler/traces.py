"""Traces of jobs: read from a file, or made with arrivals, sizes and lengths as clusters see them."""

from __future__ import annotations

import csv
import gzip
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from random import Random

DAY = 86_400.0

COLUMNS = ("timestamp", "duration", "num_gpus", "cluster")

# Shares of job sizes in GPUs: most are small, most GPU time goes to the large (as in Philly, Jeon et al., ATC'19, and
# Helios, Hu et al., SC'21).
_SIZES = {1: 0.42, 2: 0.13, 4: 0.14, 8: 0.19, 16: 0.07, 32: 0.03, 64: 0.015, 128: 0.005}
_MEDIAN = 45 * 60.0
_SIGMA = 1.7  # of the logarithm of a length: a job in a hundred takes more than a day
_LONGEST = 20 * DAY
_SPANS_TRIED = 12
_PROJECTS = (0.4, 0.25, 0.15, 0.1, 0.06, 0.04)


@dataclass(frozen=True)
class TracedJob:
    """A job as it was submitted: ``seconds`` is how long it runs with ``gpus`` GPUs."""

    number: int
    submitted: float
    seconds: float
    gpus: int
    project: str

    @property
    def work(self) -> float:
        """GPU seconds at the size it was submitted with."""
        return self.seconds * self.gpus


def read_trace(path: Path) -> list[TracedJob]:
    """The jobs of a CSV, plain or gzipped, by time of submission; times are seconds since the first.

    Raises:
        ValueError: a column is missing or a value is none, with the line.
    """
    with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
        reader = csv.DictReader(file)
        missing = [name for name in COLUMNS if name not in (reader.fieldnames or ())]
        if missing:
            raise ValueError(f"{path} has no column {', '.join(missing)}; it needs {', '.join(COLUMNS)}")
        found = []
        for row in reader:
            try:
                at = datetime.fromisoformat(row["timestamp"]).timestamp()
                seconds, gpus = float(row["duration"]), int(row["num_gpus"])
            except (TypeError, ValueError) as error:
                raise ValueError(f"{path}, line {reader.line_num}: {error}") from error
            if seconds > 0 and gpus > 0:
                found.append((at, seconds, gpus, row["cluster"]))
    found.sort(key=lambda job: job[0])
    return [
        TracedJob(number, at - found[0][0], seconds, gpus, project)
        for number, (at, seconds, gpus, project) in enumerate(found)
    ]


def window(jobs: Sequence[TracedJob], first: int, count: int) -> list[TracedJob]:
    """A stretch of a trace, with its own beginning of time."""
    chosen = jobs[first : first + count]
    return [replace(job, submitted=job.submitted - chosen[0].submitted) for job in chosen]


def offered(jobs: Sequence[TracedJob], crowded: bool = False) -> float:
    """All GPU time of the jobs, over the time in which they arrive: GPUs.

    Args:
        crowded: count only the GPU time that they would use while they arrive, if none had to wait. Of jobs that last
            for longer than a short stretch of a trace most is used after it, so that this is less, and fewer GPUs offer
            the same load.
    """
    end = jobs[-1].submitted
    return sum(job.gpus * (min(job.seconds, end - job.submitted) if crowded else job.seconds) for job in jobs) / end


def generated(count: int, gpus: int, load: float, seed: int, crowded: bool = False) -> list[TracedJob]:
    """Jobs whose arrivals rise and fall with the day and rest at weekends, with heavy-tailed sizes and lengths.

    They are spread over as much time as makes them offer ``gpus`` GPUs the load.
    """
    random = Random(seed)
    sizes = random.choices(list(_SIZES), list(_SIZES.values()), k=count)
    lengths = [min(_LONGEST, max(30.0, random.lognormvariate(math.log(_MEDIAN), _SIGMA))) for _ in range(count)]
    names = [f"project-{index}" for index in range(len(_PROJECTS))]
    projects = random.choices(names, _PROJECTS, k=count)
    span = sum(size * length for size, length in zip(sizes, lengths, strict=True)) / (gpus * load)
    found: dict[float, list[TracedJob]] = {}  # by how far they are off
    for _ in range(_SPANS_TRIED):
        at = _arrivals(count, span, Random(seed))
        jobs = [TracedJob(index, at[index], lengths[index], sizes[index], projects[index]) for index in range(count)]
        excess = offered(jobs, crowded) / (gpus * load)
        found[abs(excess - 1.0)] = jobs
        span *= math.sqrt(excess)  # what a shorter time leaves to do after its end is not offered within it
    return found[min(found)]


def _arrivals(count: int, span: float, random: Random) -> list[float]:
    """Moments from 0 to ``span``, by thinning: as likely as people are at work."""
    found: list[float] = []
    while len(found) < count:
        at = random.uniform(0.0, span)
        weekday = int(at // DAY) % 7 < 5
        likely = (1.0 if weekday else 0.45) * (0.55 + 0.45 * math.sin(2 * math.pi * (at / DAY - 0.25)))
        if random.random() < likely:
            found.append(at)
    found.sort()
    return [(at - found[0]) * span / max(found[-1] - found[0], 1.0) for at in found]
