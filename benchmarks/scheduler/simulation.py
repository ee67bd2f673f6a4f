"""A simulated cluster that does what the policy decides, event by event."""

from __future__ import annotations

import heapq
import itertools
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from benchmarks.scheduler.traces import TracedJob
from service.queue.order import decayed
from service.queue.policy import decide
from service.queue.rooms import Cluster, Need, Room
from service.queue.terms import Action, Decision, Job, Project, Rules

EXPONENT = 0.9  # a job's speed grows as size ** EXPONENT
RESIZE_S = 30.0  # a resize takes so much training time; what a shrink frees is free after it
GPUS_A_NODE = 8
MEASURED_AFTER = 60.0  # seconds of training after which the time left of a job is known from its speed
NEED = Need(cpus=1.0, gpus=1.0)


class Knowledge(StrEnum):
    """What the policy is told of the work a job has left.

    MEASURED: nothing before it has trained for a minute, then what declared steps and measured speed come to.
    DECLARED: the same from its submission on, as if it had been predicted without error. NOTHING: never anything.
    """

    MEASURED = "measured"
    DECLARED = "declared"
    NOTHING = "nothing"


@dataclass(frozen=True)
class Setup:
    """A policy as it is compared: its rules, whether jobs may be resized, and what it knows."""

    name: str
    rules: Rules
    elastic: bool
    knowledge: Knowledge
    half_life: float = 7 * 86_400.0


@dataclass
class SimulatedJob:
    """A job on the simulated cluster. ``left`` is in seconds of one worker."""

    traced: TracedJob
    sizes: Sequence[int]
    left: float
    waits: Job
    size: int = 0
    seen: int = 0
    done: float = 0.0
    trained_s: float = 0.0
    updated: float = 0.0
    pauses_until: float = 0.0
    changed_at: float = 0.0
    started: float | None = None
    finished: float | None = None
    resizes: int = 0
    version: int = 0


@dataclass
class Outcome:
    """What became of a trace."""

    jobs: list[SimulatedJob]
    used: float = 0.0
    until: float = 0.0
    decisions: int = 0
    decision_s: list[float] = field(default_factory=list)


class Simulation:
    """One policy on one trace."""

    def __init__(self, trace: Sequence[TracedJob], gpus: int, setup: Setup, every: float = 10.0) -> None:
        self._setup = setup
        self._gpus = gpus
        self._every = every
        self._nodes = _nodes(gpus)
        self._now = 0.0
        self._used = 0
        self._events: list[tuple[float, int, str, SimulatedJob | None, int]] = []
        self._order = itertools.count()
        self._waiting: dict[str, SimulatedJob] = {}
        self._running: dict[str, SimulatedJob] = {}
        self._usage: dict[str, float] = {}
        self._decided_at = -math.inf
        self._planned = math.inf
        self._jobs = [self._simulated(job) for job in trace]
        self._by_id = {job.waits.id: job for job in self._jobs}
        self._last_arrival = trace[-1].submitted
        self._outcome = Outcome(self._jobs, until=self._last_arrival)

    def _simulated(self, traced: TracedJob) -> SimulatedJob:
        most = min(4 * traced.gpus, self._gpus)
        sizes = range(max(1, math.ceil(traced.gpus / 4)), most + 1) if self._setup.elastic else (traced.gpus,)
        left = traced.seconds * traced.gpus**EXPONENT
        waits = Job(
            id=f"job-{traced.number}",
            number=traced.number,
            need=NEED,
            sizes=sizes,
            wanted=traced.gpus,
            project=traced.project,
            since=traced.submitted,
            work=left if self._setup.knowledge is Knowledge.DECLARED else None,
            exponent=EXPONENT,
        )
        return SimulatedJob(traced, sizes, left, waits)

    def run(self) -> Outcome:
        """Until the last job is over."""
        for job in self._jobs:
            self._at(job.traced.submitted, "submitted", job)
        while self._events:
            moment, _, kind, job, version = heapq.heappop(self._events)
            self._pass_to(moment)
            due = True
            if kind == "decide":
                if moment == self._planned:
                    self._decide()
                continue
            if job is not None and kind == "submitted":
                self._waiting[job.waits.id] = job
            elif job is not None and version != job.version:
                continue
            elif job is not None and kind == "over":
                self._end(job)
            elif job is not None:  # a resize is done
                self._used += job.size - job.seen
                job.seen = job.size
                due = bool(self._waiting) or self._used < self._gpus
            if due:
                self._decide_soon()
        return self._outcome

    def _at(self, moment: float, kind: str, job: SimulatedJob | None = None) -> None:
        version = 0 if job is None else job.version
        heapq.heappush(self._events, (moment, next(self._order), kind, job, version))

    def _pass_to(self, moment: float) -> None:
        within = min(moment, self._last_arrival) - min(self._now, self._last_arrival)
        self._outcome.used += self._used * within
        self._now = moment

    def _end(self, job: SimulatedJob) -> None:
        self._train(job)
        job.left, job.finished = 0.0, self._now
        self._used -= job.seen
        del self._running[job.waits.id]

    def _train(self, job: SimulatedJob) -> None:
        """Brings what a job has done up to date."""
        seconds = max(0.0, self._now - max(job.updated, job.pauses_until))
        done = seconds * job.size**EXPONENT
        job.left = max(0.0, job.left - done)
        job.done += done
        job.trained_s += seconds
        job.updated = self._now

    # Decisions.

    def _decide_soon(self) -> None:
        """Decides now, or when ``every`` seconds have passed since the last time, as the service does it in rounds."""
        if self._now - self._decided_at >= self._every:
            self._decide()
        else:
            self._plan(self._decided_at + self._every)

    def _plan(self, moment: float) -> None:
        if self._now < self._planned <= moment:
            return
        self._planned = moment
        self._at(moment, "decide")

    def _decide(self) -> None:
        if not self._waiting and not (self._setup.elastic and self._used < self._gpus):
            return
        self._account()
        jobs = [*(self._running_job(job) for job in self._running.values())]
        jobs += [job.waits for job in self._waiting.values()]
        cluster = Cluster(self._nodes, _nodes(self._gpus - self._used))
        projects = {name: Project(usage) for name, usage in self._usage.items()}
        began = time.perf_counter()
        decisions = decide(jobs, cluster, self._now, self._setup.rules, projects)
        self._outcome.decision_s.append(time.perf_counter() - began)
        for decision in decisions:
            self._apply(decision)
        if self._used > self._gpus:
            raise RuntimeError(f"{self._used} of {self._gpus} GPUs are taken at {self._now:.0f} s")
        self._planned = math.inf
        self._plan_ahead()

    def _plan_ahead(self) -> None:
        """The next moment at which time alone changes what is decided."""
        rules, moments = self._setup.rules, []
        if self._setup.elastic and self._used < self._gpus:
            moments += [job.changed_at + rules.settle for job in self._running.values() if job.size < job.sizes[-1]]
        moments += [job.traced.submitted + rules.patience for job in self._waiting.values()]
        ahead = [moment for moment in moments if moment > self._now]
        if ahead:
            self._plan(max(min(ahead), self._now + self._every))

    def _account(self) -> None:
        seconds = self._now - self._decided_at if self._decided_at >= 0 else 0.0
        self._decided_at = self._now
        held: dict[str, float] = dict.fromkeys(self._usage, 0.0)
        for job in self._running.values():
            project = job.traced.project
            held[project] = held.get(project, 0.0) + job.seen
        for project, gpus in held.items():
            self._usage[project] = decayed(self._usage.get(project, 0.0), gpus, seconds, self._setup.half_life)

    def _running_job(self, job: SimulatedJob) -> Job:
        self._train(job)
        known = self._setup.knowledge
        told = known is Knowledge.DECLARED or (known is Knowledge.MEASURED and job.trained_s >= MEASURED_AFTER)
        return Job(
            id=job.waits.id,
            number=job.traced.number,
            need=NEED,
            sizes=job.sizes,
            wanted=job.waits.wanted,
            project=job.traced.project,
            workers=job.size,
            seen=job.seen,
            since=job.started or 0.0,
            changed_at=job.changed_at,
            settled=job.pauses_until <= self._now,
            work=job.left if told else None,
            done=job.done,
            exponent=EXPONENT,
        )

    def _apply(self, decision: Decision) -> None:
        job = self._by_id[decision.job]
        if decision.action is Action.START:
            del self._waiting[decision.job]
            self._running[decision.job] = job
            job.started = job.updated = job.changed_at = self._now
            job.size = job.seen = decision.workers
            self._used += job.size
        elif decision.action is Action.RESIZE:
            job.resizes += 1
            job.pauses_until = self._now + RESIZE_S
            job.changed_at = self._now
            self._used += max(0, decision.workers - job.seen)
            job.size, job.seen = decision.workers, max(job.seen, decision.workers)
        else:
            return
        job.version += 1
        if job.pauses_until > self._now:
            self._at(job.pauses_until, "resized", job)
        self._at(max(self._now, job.pauses_until) + job.left / job.size**EXPONENT, "over", job)


def _nodes(gpus: int) -> dict[Room, int]:
    """Nodes of eight GPUs that have so many between them; workers of one GPU each fit wherever one is free."""
    whole, rest = divmod(gpus, GPUS_A_NODE)
    nodes = {Room(64.0, float(GPUS_A_NODE)): whole} if whole else {}
    if rest:
        nodes[Room(64.0, float(rest))] = 1
    return nodes
