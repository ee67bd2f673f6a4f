"""What holds of the queue's decisions whatever the jobs and the cluster are."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from rubato.layout import Layout, possible_sizes
from rubato.spec.sections import ParallelismSpec
from service.queue.order import decayed
from service.queue.policy import decide
from service.queue.rooms import Cluster, Need, Node, Room, Rooms
from service.queue.terms import Action, Decision, Job, Project, Quota, Rules

CPU, GPU, WIDE = Need(1, 0), Need(1, 1), Need(2, 2)
PROJECTS = ("p", "q")
SHAPES = [possible_sizes(ParallelismSpec(tensor=t, pipeline=p), 16, 1, 16) for t, p in ((1, 1), (2, 1), (2, 2))]

optional_limit = st.none() | st.integers(0, 12)
quotas = st.builds(Quota, workers=optional_limit, gpus=optional_limit, running_jobs=st.none() | st.integers(0, 4))
projects = st.fixed_dictionaries({name: st.builds(Project, st.floats(0, 50), quota=quotas) for name in PROJECTS})
rules = st.builds(Rules, elastic=st.booleans(), fair=st.booleans(), backfill=st.booleans(), pause=st.booleans())
clusters = st.lists(st.tuples(st.integers(0, 8), st.integers(0, 4)), max_size=4)


@st.composite
def jobs(draw: st.DrawFn) -> list[Job]:
    found = []
    for number in range(draw(st.integers(0, 8))):
        sizes = draw(st.sampled_from(SHAPES))
        size = draw(st.sampled_from([0, 0, *sizes[:6]]))
        found.append(
            Job(
                id=f"j{number}",
                number=number,
                need=draw(st.sampled_from([CPU, GPU, WIDE])),
                sizes=sizes,
                wanted=size or draw(st.sampled_from(sizes)),
                project=draw(st.sampled_from(PROJECTS)),
                priority=draw(st.integers(-1, 1)),
                workers=size,
                seen=size and draw(st.sampled_from([size, 0])),
                since=draw(st.floats(0, 1000)),
                settled=draw(st.booleans()),
                recovering=not size and draw(st.booleans()),
                takes_less=draw(st.booleans()),
                work=draw(st.none() | st.floats(1, 1e6)),
            )
        )
    return found


def cluster_for(found: list[Job], nodes: list[tuple[int, int]]) -> Cluster:
    """Nodes that hold what runs or is to come, and some more; Ray shows as free what nobody holds yet."""

    def room(job: Job, workers: int) -> Room:
        return Room(workers * job.need.cpus, workers * job.need.gpus)

    own = [Node(room(job, job.held), room(job, max(0, job.workers - job.seen))) for job in found if job.held]
    return Cluster.of([*own, *(Node(Room(*each), Room(*each)) for each in nodes)])


def after(found: list[Job], decisions: list[Decision]) -> dict[str, int]:
    sizes = {job.id: job.workers for job in found}
    for each in decisions:
        if each.action is not Action.WAIT:
            sizes[each.job] = each.workers
    return sizes


@given(jobs(), clusters, rules, projects)
@settings(max_examples=150)
def test_decisions_keep_to_sizes_room_and_quotas(
    found: list[Job], nodes: list[tuple[int, int]], chosen: Rules, known: dict[str, Project]
) -> None:
    cluster = cluster_for(found, nodes)
    decisions = decide(found, cluster, 1000.0, chosen, known)
    assert decisions == decide(found, cluster, 1000.0, chosen, known), "the same question has the same answer"
    assert sorted(decisions, key=lambda each: each.job) == sorted(
        decide(found[::-1], cluster, 1000.0, chosen, known), key=lambda each: each.job
    ), "whatever the order it is put in"
    by_id = {job.id: job for job in found}
    assert len({each.job for each in decisions}) == len(decisions), "one decision a job"
    assert {job.id for job in found if not job.held} <= {each.job for each in decisions}, "nobody is left without one"
    assert all(each.message for each in decisions)
    sizes = after(found, decisions)
    for each in decisions:
        job = by_id[each.job]
        if each.action is Action.START:
            assert not job.held
            assert each.workers in job.sizes
        elif each.action is Action.RESIZE:
            assert each.workers in job.sizes
            assert each.workers != job.workers
            assert job.settled
            assert chosen.elastic
        elif each.action is Action.PAUSE:
            assert chosen.pause
            assert any(other.priority > job.priority for other in found if not other.held)
    more = {job.id: sizes[job.id] - job.held for job in found if sizes[job.id] > job.held}
    for need in {job.need for job in found if job.id in more}:
        of_one_kind = sum(more[job.id] for job in found if job.id in more and job.need == need)
        assert of_one_kind <= Rooms(cluster.free).holds(need), "no more than there is, node by node"
    for index in (0, 1):
        taken = sum((more.get(job.id, 0) + max(0, job.workers - job.seen)) * job.need[index] for job in found)
        free = sum(room[index] * count for room, count in cluster.free.items())
        assert taken <= free + 1e-6, "all kinds together, with what was decided before"
    for name, project in known.items():
        quota, own = project.quota, [job for job in found if job.project == name]
        held = {job.id: max(job.held, sizes[job.id]) for job in own}
        if any(job.id in more for job in own):
            assert quota.workers is None or sum(held.values()) <= quota.workers
        if any(job.id in more and job.need.gpus for job in own):
            assert quota.gpus is None or sum(held[job.id] * job.need.gpus for job in own) <= quota.gpus
        if any(job.id in more and not job.held for job in own):
            assert quota.running_jobs is None or sum(map(bool, held.values())) <= quota.running_jobs


class Machine:
    """Does what is decided, at once, on nodes that all jobs fit on."""

    def __init__(self, found: list[Job], cpus: int, chosen: Rules) -> None:
        self.jobs = {job.id: job for job in found}
        self.cpus, self.rules, self.now = cpus, chosen, 0.0
        self.resizes: Counter[str] = Counter()

    def round(self, seconds: float) -> list[Decision]:
        held = sum(job.held for job in self.jobs.values())
        assert held <= self.cpus
        cluster = Cluster.of([Node(Room(self.cpus, 0), Room(self.cpus - held, 0))])
        decisions = decide(self.jobs.values(), cluster, self.now, self.rules)
        for each in decisions:
            job = self.jobs[each.job]
            if each.action is Action.WAIT:
                continue
            self.resizes[each.job] += each.action is Action.RESIZE
            since = job.since if job.held else self.now
            self.jobs[each.job] = replace(
                job, workers=each.workers, seen=each.workers, changed_at=self.now, since=since
            )
        self.now += seconds
        return decisions

    def end(self, name: str) -> None:
        del self.jobs[name]


waiting_jobs = st.lists(st.tuples(st.sampled_from(SHAPES), st.floats(1e3, 1e6)), min_size=1, max_size=8)


@given(waiting_jobs, st.integers(16, 40), st.booleans())
@settings(max_examples=60)
def test_where_nothing_happens_nothing_is_changed(
    given_jobs: list[tuple[list[int], float]], cpus: int, blind: bool
) -> None:
    """No flapping: once jobs have started and grown, sizes stay until somebody comes or goes."""
    found = [
        Job(f"j{number}", number, CPU, sizes, sizes[0], work=None if blind else work)
        for number, (sizes, work) in enumerate(given_jobs)
    ]
    machine = Machine(found, cpus, Rules())
    for _ in range(12):
        machine.round(61.0)
    before = Counter(machine.resizes)
    for _ in range(10):
        decisions = machine.round(61.0)
        assert all(each.action is Action.WAIT for each in decisions)
    assert machine.resizes == before
    assert max(before.values(), default=0) <= 4


@given(st.integers(2, 15), st.integers(0, 3))
@settings(max_examples=20)
def test_the_first_in_line_never_starves(size: int, seed: int) -> None:
    """A stream of small jobs that never ends does not keep a large one waiting: the cluster drains for it."""
    large = Job("large", 0, CPU, [size], size, since=0.0)
    chosen = Rules(elastic=bool(seed % 2), fair=seed < 2)
    machine = Machine([Job("first", -1, CPU, [1], 1), large], 16, chosen)
    ends: dict[str, int] = {}
    for turn in range(200):
        for _ in range(3):
            name = f"small-{len(ends)}"
            ends[name] = turn + 40 + len(ends) % 7
            machine.jobs[name] = Job(name, len(ends), CPU, [1, 2], 1, since=machine.now)
        machine.round(30.0)
        for name in [name for name, end in ends.items() if end <= turn and name in machine.jobs]:
            machine.end(name)
        if machine.jobs["large"].held:
            break
    assert machine.jobs["large"].held == size
    assert machine.now <= 600.0 + 50 * 30.0, "patience, and then until those are over that it let pass"


@given(st.lists(st.tuples(st.integers(0, 8), st.integers(0, 4)), max_size=5), st.sampled_from([CPU, GPU, WIDE]))
def test_rooms_count_as_if_nodes_were_filled_one_by_one(nodes: list[tuple[int, int]], need: Need) -> None:
    cluster = Cluster.of([Node(Room(*each), Room(*each)) for each in nodes])
    rooms = Rooms(cluster.total)
    one_by_one = sum(Room(*each).holds(need) for each in nodes)
    assert rooms.holds(need) == one_by_one
    for left in range(one_by_one, 0, -1):
        assert rooms.holds(need) == left
        assert rooms.take(need, 1) == 1
    assert rooms.take(need, 1) == 0


def test_usage_decays_to_what_is_held() -> None:
    assert decayed(8.0, 0.0, 3600.0, 3600.0) == 4.0
    assert decayed(8.0, 8.0, 1e4, 3600.0) == 8.0
    once = decayed(0.0, 4.0, 7200.0, 3600.0)
    assert once == decayed(decayed(0.0, 4.0, 3600.0, 3600.0), 4.0, 3600.0, 3600.0) == 3.0


def test_sizes_here_are_those_of_layouts() -> None:
    assert SHAPES[2] == [4, 8, 12, 16]
    assert all(Layout(size // 4, 2, 2).world_size == size for size in SHAPES[2])
