"""What is to be done now about all jobs: a function of jobs, cluster and time, without input, output or memory.

1. Jobs that wait are asked in turn (``order.py``). One starts when all workers of its smallest size have room: in each
   view of the cluster (``views.py``), and in the quota of its project.
2. When there is no room, running jobs that share are shrunk toward their smallest size, those first that miss it least
   (``sharing.py``). When that is not enough, and only then, jobs of a lower priority are paused.
3. When nothing makes room, the job is the first in line. Others may pass it while it has waited for less than
   ``Rules.patience``, and later if they are predicted to be over before it could start.
4. What is free and nobody waits for is given to those that gain most by it, if the gain is worth the resize.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from service.queue.order import in_turn
from service.queue.rooms import Cluster, Need
from service.queue.sharing import Lenders, grow, largest, seconds_saved
from service.queue.terms import NO_PROJECTS, Action, Decision, Held, Job, Project, Projects, Quota, Rules, wait
from service.queue.views import Views

_NOBODY = Project()


def decide(
    jobs: Iterable[Job], cluster: Cluster, now: float, rules: Rules, projects: Projects = NO_PROJECTS
) -> list[Decision]:
    """A decision for each job that waits, and for each running one whose size is to change."""
    return _Round(list(jobs), cluster, now, rules, projects).decide()


class _Round:
    """The state of one call."""

    def __init__(self, jobs: Sequence[Job], cluster: Cluster, now: float, rules: Rules, projects: Projects) -> None:
        self._now = now
        self._rules = rules
        self._projects = projects
        self._waiting = [job for job in jobs if not job.held]
        self._running = [job for job in jobs if job.held]
        self._sizes = {job.id: job.workers for job in self._running}
        self._views = Views(cluster, self._running)
        self._starts: dict[str, tuple[Job, int]] = {}
        self._changes: dict[str, Decision] = {}
        self._first: Job | None = None  # in line: no room can be made for it
        self._first_starts = float("inf")  # when the first in line could start, as predicted
        self._short_of_room = False
        self._lenders: dict[Need, Lenders] = {}
        self._making_room: set[str] = set()  # projects whose jobs are shrunk to stay within the quota
        self._held: dict[str, Held] = {}
        for job in self._running:
            self._holds(job.project).add(job.need, job.held, 1)

    def decide(self) -> list[Decision]:
        turn = in_turn(self._waiting, self._projects, self._held, self._now, self._rules)
        decisions = [self._ask(job) for job in turn]
        if self._rules.elastic and not self._short_of_room:
            self._share()
        decisions = [_started(*self._starts[each.job]) if each.action is Action.START else each for each in decisions]
        return [*self._changes.values(), *decisions]

    # A job that waits.

    def _ask(self, job: Job) -> Decision:
        views, least = self._views, self._least(job)
        most = views.empty.holds(job.need)
        if most < least:
            return _never(job, least, most)
        if (refused := self._over_quota(job, least)) is not None:
            return refused
        if self._first is not None and not self._may_pass(self._first, job, least):
            needed = self._least(self._first)
            return wait(job.id, "waiting_behind", f"waits behind {self._first.id}, which waits for {needed} workers")
        free = views.free(job.need)
        if free >= least:
            return self._start(job, self._first_size(job, free))
        self._short_of_room = True
        message = f"waits for {least} workers of {job.need} each; there is room for {free} now"
        if self._first is None:
            others = views.foreign(job.need)
            believed = others if self._now - job.since >= self._rules.lag else 0
            missing = least + believed - views.future(job.need)
            if missing > 0:
                self._make_room(job, missing)
            if views.future(job.need) - others >= least:
                views.keep(job.need, least)
                return wait(job.id, "room_is_made", f"{message}, and others are making room for it")
            self._first = job
            if not self._has_patience(job):
                self._first_starts = self._predicted_start(job, least - free)
        return wait(job.id, "waiting_for_room", message)

    def _least(self, job: Job) -> int:
        if job.recovering:
            return job.sizes[0] if job.takes_less else job.wanted
        return job.sizes[0] if self._rules.elastic else job.wanted

    def _first_size(self, job: Job, free: int) -> int:
        """As small as it can be: what is free beyond that is shared among all, see ``_share``."""
        if job.recovering and job.takes_less:
            allowed = self._holds(job.project).room(self._quota(job), job.need)
            return largest(job, min(free, job.wanted, free if allowed is None else allowed))
        return self._least(job)

    def _has_patience(self, first: Job) -> bool:
        return self._rules.backfill and self._now - first.since < self._rules.patience

    def _may_pass(self, first: Job, job: Job, least: int) -> bool:
        if self._has_patience(first):
            return True
        if not self._rules.backfill or job.work is None or self._now - first.since >= self._rules.overdue:
            return False  # predictions may be wrong again and again, so they serve for some time only
        return self._now + float(job.work / least**job.exponent) <= self._first_starts

    def _predicted_start(self, job: Job, places: int) -> float:
        """When enough of the running jobs are over, if their work is known."""
        ends = []
        for other in self._running:
            per_place = other.need.in_place_of(job.need)
            size = self._sizes[other.id]
            if other.work is not None and per_place is not None and size:
                ends.append((self._now + other.work / size**other.exponent, size // per_place))
        for end, given in sorted(ends):
            places -= given
            if places <= 0:
                return float(end)
        return self._now

    def _start(self, job: Job, workers: int) -> Decision:
        self._views.keep(job.need, workers)
        held = self._holds(job.project)
        held.add(job.need, workers, 1)
        held.granted += workers * (job.need.gpus or job.need.cpus)
        self._starts[job.id] = (job, workers)
        return _started(job, workers)

    # Quotas.

    def _holds(self, project: str) -> Held:
        return self._held.setdefault(project, Held())

    def _quota(self, job: Job) -> Quota:
        return self._projects.get(job.project, _NOBODY).quota

    def _over_quota(self, job: Job, least: int) -> Decision | None:
        quota = self._quota(job)
        held = self._holds(job.project)
        if quota.running_jobs is not None and held.jobs >= quota.running_jobs:
            message = f"project {job.project} may run {quota.running_jobs} jobs at a time, and runs {held.jobs}"
            return wait(job.id, "over_quota", message)
        allowed = held.room(quota, job.need)
        if allowed is None or allowed >= least:
            return None
        message = f"needs {least} workers of {job.need} each, and the quota of project {job.project} leaves "
        message += f"room for {max(0, allowed)}"
        if self._rules.elastic and job.project not in self._making_room:
            self._making_room.add(job.project)
            own = [each for each in self._running if each.project == job.project]
            missing = least - allowed - sum(max(0, each.seen - self._sizes[each.id]) for each in own)
            lenders = Lenders(self._shrinkable(own), job.need, self._rules)
            self._shrink(lenders, missing, f"to let {job.id} into the quota of {job.project}")
            self._lenders.clear()
        return wait(job.id, "over_quota", message)

    # Room that others give up.

    def _make_room(self, job: Job, places: int) -> None:
        lenders = self._lenders.get(job.need)
        if lenders is None:  # one at a time: shrinking for one kind changes what there is for another
            lenders = Lenders(self._shrinkable(self._running), job.need, self._rules)
            self._lenders = {job.need: lenders}
        if lenders.able < places:
            places -= self._pause_for(job, places, lenders.able)
            lenders = Lenders(self._shrinkable(self._running), job.need, self._rules)
            self._lenders = {job.need: lenders}
        if 0 < places <= lenders.able:
            self._shrink(lenders, places, f"to make room for {job.id}")

    def _pause_for(self, job: Job, places: int, able: int) -> int:
        """Pauses jobs of a lower priority, the lowest and latest first, if that makes room at all.

        Args:
            places: how many are needed.
            able: how many shrinking alone could give.

        Returns:
            How many places become free by it.
        """
        if not self._rules.pause:
            return 0
        victims, given = [], 0
        for other in sorted(self._running, key=lambda each: (each.priority, -each.since, -each.number)):
            per_place, size = other.need.in_place_of(job.need), self._sizes[other.id]
            if given + able >= places or other.priority >= job.priority:
                break
            if per_place is not None and size:
                victims.append(other)
                given += size // per_place
                able -= (size - other.sizes[0]) // per_place if self._may_shrink(other) else 0
        if given + able < places:
            return 0
        for other in victims:
            message = f"paused for {job.id}, whose priority is {job.priority} and not {other.priority}; "
            message += "shrinking others was not enough"
            self._change(other, Action.PAUSE, 0, "preempted", message)
        return given

    def _may_shrink(self, job: Job) -> bool:
        return self._rules.elastic and job.settled and self._sizes[job.id] > job.sizes[0]

    def _shrinkable(self, jobs: Iterable[Job]) -> list[tuple[Job, int]]:
        return [(job, self._sizes[job.id]) for job in jobs if self._may_shrink(job)]

    def _shrink(self, lenders: Lenders, places: int, why: str) -> None:
        for job, size in lenders.release(places):
            self._change(job, Action.RESIZE, size, "shrunk", f"{job.workers} -> {size} workers {why}")

    def _change(self, job: Job, action: Action, size: int, code: str, message: str) -> None:
        self._changes[job.id] = Decision(job.id, action, size, code, message)
        self._views.resized(job.need, size - self._sizes[job.id])
        self._sizes[job.id] = size

    # Room that nobody waits for.

    def _share(self) -> None:
        rules = self._rules
        sharing = [job for job in self._running if self._may_grow(job)]
        sharing += [job for job, _ in self._starts.values() if not job.recovering]
        sizes = {**self._sizes, **{job_id: size for job_id, (_, size) in self._starts.items()}}
        kept = {need: int(rules.headroom * self._views.empty.holds(need)) for need in {job.need for job in sharing}}

        def room(job: Job, more: int) -> bool:
            held = self._holds(job.project)
            allowed = held.room(self._quota(job), job.need)
            spared = 0 if job.id in self._starts else kept[job.need]  # it is for jobs that come, and this one has
            if self._views.free(job.need) - more < spared or (allowed is not None and allowed < more):
                return False
            self._views.keep(job.need, more)
            held.add(job.need, more)
            return True

        grown = grow(sharing, lambda job: sizes[job.id], room, rules)
        for job in sharing:
            size = grown.get(job.id)
            if size is None:
                continue
            if job.id in self._starts:
                self._starts[job.id] = (job, size)
            elif (saved := seconds_saved(job, job.workers, size, rules)) >= rules.worth * rules.resize_cost:
                message = f"{job.workers} -> {size} workers: they are free, and it is thought to be over {saved:.0f} s "
                message += "sooner with them"
                self._changes[job.id] = Decision(job.id, Action.RESIZE, size, "grown", message)

    def _may_grow(self, job: Job) -> bool:
        size, rules = self._sizes[job.id], self._rules
        if not job.settled or job.id in self._changes or job.seen != size or self._now - job.changed_at < rules.settle:
            return False
        return seconds_saved(job, size, max(size, job.sizes[-1]), rules) >= rules.worth * rules.resize_cost


def _started(job: Job, workers: int) -> Decision:
    return Decision(job.id, Action.START, workers, "admitted", f"starts with {workers} workers")


def _never(job: Job, least: int, most: int) -> Decision:
    message = f"needs {least} workers of {job.need} each, and the whole cluster has room for {most}"
    smaller = largest(job, most)
    message += f"; scale it to {smaller}, or add nodes" if smaller else "; it waits for nodes to be added"
    return wait(job.id, "larger_than_cluster", message)
