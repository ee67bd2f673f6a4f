"""What the policy of the queue is told and what it answers, as plain values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from service.queue.rooms import Need


@dataclass(frozen=True)
class Job:
    """A job that waits for workers, or has some. Times are in seconds, of any one clock.

    Attributes:
        number: grows from job to job in the order they were submitted.
        sizes: what it may run at, ascending; one alone for a job that nobody but its user resizes.
        wanted: the size it starts at where nobody shares, and the largest a job comes back with after a loss.
        workers: those it has or is being given; 0: it waits.
        seen: those that really hold room; more than ``workers`` while it shrinks.
        since: when it began to wait, or to run.
        changed_at: when its size last changed.
        settled: neither starting nor in the middle of a resize.
        recovering: it lost its workers, and goes before those that wait for the first time.
        takes_less: when ``wanted`` workers do not fit it takes the most that do, rather than wait.
        work: seconds of one worker that are left, as predicted; None: nobody knows.
        done: seconds of one worker that it has trained for.
        exponent: its speed grows as size ** exponent.
    """

    id: str
    number: int
    need: Need
    sizes: Sequence[int]
    wanted: int
    project: str = "default"
    priority: int = 0
    workers: int = 0
    seen: int = 0
    since: float = 0.0
    changed_at: float = float("-inf")
    settled: bool = True
    recovering: bool = False
    takes_less: bool = False
    work: float | None = None
    done: float = 0.0
    exponent: float = 0.9

    @property
    def held(self) -> int:
        """Workers that hold room or are about to."""
        return max(self.workers, self.seen)


@dataclass(frozen=True)
class Quota:
    """The most a project may have at one time; None: no limit."""

    workers: int | None = None
    gpus: float | None = None
    running_jobs: int | None = None


@dataclass(frozen=True)
class Project:
    """What the queue knows of a project: ``usage`` is what it has had lately, of whatever is scarce."""

    usage: float = 0.0
    weight: float = 1.0
    quota: Quota = Quota()


@dataclass(frozen=True)
class Rules:
    """How the queue decides. Times are in seconds.

    Attributes:
        elastic: running jobs are given free room, and shrunk to let others in.
        fair: projects that had less lately go first; else it is first come first served within a priority.
        backfill: jobs that fit may start while one that does not waits, until that one has waited ``patience``.
        pause: a job may be paused for one of a higher priority, when shrinking is not enough.
        patience: how long the first in line lets others go before it.
        overdue: a job that has waited so long goes before all others of its priority, whatever their share.
        lag: how long after the end of a job Ray may still show its room as taken; for that nobody is shrunk.
        settle: how long after a change of its size a job is not given more.
        resize_cost: training time that a resize takes from a job.
        worth: a growth must save at least so many times what it costs.
        headroom: share of the cluster, in whole workers, that is kept free for jobs to come rather than given to those
            that run.
        unknown_work: what is taken for the work that is left of a job of which nothing is known, in seconds of one
            worker.
    """

    elastic: bool = True
    fair: bool = True
    backfill: bool = True
    pause: bool = False
    patience: float = 600.0
    overdue: float = 12 * 3600.0
    lag: float = 20.0
    settle: float = 60.0
    resize_cost: float = 30.0
    worth: float = 8.0
    headroom: float = 0.02
    unknown_work: float = 600.0


class Action(StrEnum):
    START = "start"
    RESIZE = "resize"
    PAUSE = "pause"
    WAIT = "wait"


@dataclass(frozen=True)
class Decision:
    """What is to be done about a job, and why, in words for its user.

    ``workers`` is the size it is to have; for WAIT and PAUSE 0.
    """

    job: str
    action: Action
    workers: int
    code: str
    message: str


def wait(job: str, code: str, message: str) -> Decision:
    """The decision that a job waits."""
    return Decision(job, Action.WAIT, 0, code, message)


Projects = Mapping[str, Project]
NO_PROJECTS: Projects = {}


@dataclass
class Held:
    """What the jobs of a project hold, counted against its quota while decisions are made."""

    workers: int = 0
    gpus: float = 0.0
    jobs: int = 0
    scarce: float = 0.0  # GPUs, or CPUs of workers that have none
    granted: float = 0.0

    def add(self, need: Need, workers: int, jobs: int = 0) -> None:
        """Some workers more, or fewer when negative."""
        self.workers += workers
        self.gpus += workers * need.gpus
        self.scarce += workers * (need.gpus or need.cpus)
        self.jobs += jobs

    def room(self, quota: Quota, need: Need) -> int | None:
        """How many more workers of a kind the quota allows; None: any number, negative: it has too many already."""
        limits = [] if quota.workers is None else [quota.workers - self.workers]
        if quota.gpus is not None and need.gpus:
            limits.append(int((quota.gpus - self.gpus + 1e-6) // need.gpus))
        return min(limits, default=None)
