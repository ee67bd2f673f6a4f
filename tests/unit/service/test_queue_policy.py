"""Who may start, who gives way, who is given more, and what all of them are told."""

from __future__ import annotations

from typing import Any

from service.queue.policy import decide
from service.queue.rooms import Cluster, Need, Node, Room
from service.queue.terms import Action, Decision, Job, Project, Quota, Rules

CPU = Need(cpus=1, gpus=0)
FIXED = Rules(elastic=False)
STRICT = Rules(elastic=False, backfill=False)
SHARING = Rules()
PAUSING = Rules(pause=True)


def nodes(*cpus: float | tuple[float, float], gpus: float = 0) -> Cluster:
    """Nodes with so many CPUs, or with so many of which so many are free."""
    both = [each if isinstance(each, tuple) else (each, each) for each in cpus]
    return Cluster.of(Node(Room(total, gpus), Room(free, gpus)) for total, free in both)


def job(name: str, wanted: int, number: int = 1, **more: Any) -> Job:
    fields: dict[str, Any] = {"need": CPU, "sizes": [4, 8, 12, 16], **more}
    return Job(id=name, number=number, wanted=wanted, **fields)


def running(name: str, workers: int, number: int = 1, **more: Any) -> Job:
    return job(name, workers, number, **{"workers": workers, "seen": workers, **more})


def outcome(decisions: list[Decision]) -> dict[str, int | str]:
    return {
        each.job: each.code
        if each.action is Action.WAIT
        else each.workers
        if each.action is not Action.PAUSE
        else "paused"
        for each in decisions
    }


def decided(jobs: list[Job], cluster: Cluster, rules: Rules = FIXED, now: float = 0.0, **projects: Project) -> Any:
    return outcome(decide(jobs, cluster, now, rules, projects))


# Who starts.


def test_first_come_first_served_within_a_priority() -> None:
    waiting = [job("late", 4, 3), job("first", 4, 1), job("urgent", 4, 9, priority=5), job("second", 4, 2)]
    decisions = decide(waiting, nodes(12), 0.0, FIXED)
    assert [decision.job for decision in decisions] == ["urgent", "first", "second", "late"]
    assert outcome(decisions) == {"urgent": 4, "first": 4, "second": 4, "late": "waiting_for_room"}
    assert decisions[-1].message == "waits for 4 workers of 1 CPU each; there is room for 0 now"


def test_nobody_overtakes_without_backfill() -> None:
    decisions = decide([job("large", 8, 1), job("small", 4, 2)], nodes((8, 4)), 0.0, STRICT)
    assert outcome(decisions) == {"large": "waiting_for_room", "small": "waiting_behind"}
    assert "large" in decisions[1].message


def test_the_first_in_line_lets_others_pass_for_some_time() -> None:
    waiting = [job("large", 8, 1), job("small", 4, 2)]
    assert decided(waiting, nodes((8, 4)), now=599.0) == {"large": "waiting_for_room", "small": 4}
    assert decided(waiting, nodes((8, 4)), now=600.0) == {"large": "waiting_for_room", "small": "waiting_behind"}


def test_who_is_over_in_time_may_pass_longer() -> None:
    ends_at_1000 = running("busy", 4, 1, work=400.0 * 4**0.9)
    large, cluster = job("large", 8, 2), nodes((8, 4))
    in_time = job("short", 4, 3, work=300.0 * 4**0.9)
    too_long = job("long", 4, 4, work=500.0 * 4**0.9)
    found = decided([ends_at_1000, large, too_long, in_time], cluster, now=600.0)
    assert found == {"large": "waiting_for_room", "long": "waiting_behind", "short": 4}
    half_a_day_later = decided([ends_at_1000, large, in_time], cluster, now=43_200.0)
    assert half_a_day_later["short"] == "waiting_behind", "who predicted wrongly for so long is not believed any more"


def test_a_job_larger_than_the_cluster_holds_up_nobody() -> None:
    decisions = decide([job("huge", 16, 1), job("small", 4, 2)], nodes(8), 0.0, STRICT)
    assert outcome(decisions) == {"huge": "larger_than_cluster", "small": 4}
    assert decisions[0].message == (
        "needs 16 workers of 1 CPU each, and the whole cluster has room for 8; scale it to 8, or add nodes"
    )
    (alone,) = decide([job("huge", 16, sizes=[16])], nodes(8), 0.0, FIXED)
    assert alone.message.endswith("it waits for nodes to be added")


def test_all_workers_or_none() -> None:
    assert decided([job("a", 4)], nodes(3)) == {"a": "larger_than_cluster"}
    assert decided([job("a", 4)], nodes((8, 3))) == {"a": "waiting_for_room"}
    assert decided([job("a", 4)], nodes(2, 2)) == {"a": 4}


def test_a_worker_is_never_cut_in_two() -> None:
    wide = Need(cpus=3, gpus=0)
    assert decided([job("a", 4, need=wide)], nodes(4, 4, 4, 4)) == {"a": 4}
    assert decided([job("a", 4, need=wide)], nodes(8, 8)) == {"a": 4}
    assert decided([job("a", 4, need=wide)], nodes(5, 7)) == {"a": "larger_than_cluster"}


def test_gpus_are_counted_where_they_are() -> None:
    need = Need(cpus=1, gpus=1)
    apart = Cluster.of([Node(Room(64, 0), Room(64, 0)), Node(Room(8, 3), Room(8, 3))])
    assert decided([job("a", 4, need=need)], apart) == {"a": "larger_than_cluster"}
    (decision,) = decide([job("a", 4, need=need)], nodes(8, gpus=3), 0.0, FIXED)
    assert "1 CPU and 1 GPU" in decision.message
    assert decided([job("a", 4, need=need)], nodes(8, gpus=4)) == {"a": 4}


def test_fractions_of_a_cpu_add_up() -> None:
    assert decided([job("a", 8, need=Need(cpus=0.1, gpus=0))], nodes(0.8)) == {"a": 8}


def test_workers_that_are_to_come_have_their_places() -> None:
    # Ray shows everything free: the workers of the running job have not begun.
    assert decided([job("a", 4, 2), running("b", 8, seen=0)], nodes(8)) == {"a": "waiting_for_room"}
    # All of them train, and what Ray shows is from before: our own count says that nothing is left.
    assert decided([job("a", 4, 2), running("b", 8)], nodes(8)) == {"a": "waiting_for_room"}
    # A job that shrinks holds its places until it has let them go.
    assert decided([job("a", 4, 2), running("b", 4, seen=8)], nodes(8)) == {"a": "room_is_made"}


def test_others_on_the_cluster_have_their_places() -> None:
    assert decided([job("a", 4)], nodes((8, 3))) == {"a": "waiting_for_room"}


def test_a_job_that_recovers_goes_first_and_may_come_back_smaller() -> None:
    def back(**more: Any) -> Job:
        return job("back", 8, 9, recovering=True, **more)

    new = job("new", 4, 1, priority=100)
    assert decided([new, back()], nodes((8, 4)), STRICT) == {"back": "waiting_for_room", "new": "waiting_behind"}
    found = decided([new, back(takes_less=True)], nodes((8, 4)), STRICT)
    assert found == {"back": 4, "new": "waiting_for_room"}
    assert decided([back(takes_less=True)], nodes(8)) == {"back": 8}
    assert decided([back(takes_less=True)], nodes(6)) == {"back": 4}
    assert decided([back(takes_less=True)], nodes(3)) == {"back": "larger_than_cluster"}


def test_an_empty_cluster() -> None:
    assert decided([job("a", 4)], nodes()) == {"a": "larger_than_cluster"}
    assert decide([], nodes(8), 0.0, SHARING) == []


# Quotas and shares.


def test_a_quota_holds_up_its_project_alone() -> None:
    waiting = [job("a", 4, 1, project="p"), job("b", 4, 2, project="p"), job("c", 4, 3, project="q")]
    for quota in (Quota(workers=4), Quota(running_jobs=1)):
        assert decided(waiting, nodes(16), p=Project(quota=quota)) == {"a": 4, "b": "over_quota", "c": 4}
    need = Need(1, 1)
    on_gpus = [job("a", 4, 1, project="p", need=need), job("b", 4, 2, project="p", need=need)]
    assert decided(on_gpus, nodes(16, gpus=16), p=Project(quota=Quota(gpus=7))) == {"a": 4, "b": "over_quota"}


def test_what_a_project_has_grown_into_makes_way_for_its_next_job() -> None:
    grown, new = running("grown", 12, 1, project="p"), job("new", 4, 2, project="p")
    decisions = decide([grown, new], nodes((32, 20)), 0.0, SHARING, {"p": Project(quota=Quota(workers=12))})
    assert outcome(decisions) == {"grown": 8, "new": "over_quota"}
    assert decisions[0].message == "12 -> 8 workers to let new into the quota of p"


def test_whoever_had_less_of_late_goes_first() -> None:
    waiting = [job("greedy", 4, 1, project="p"), job("modest", 4, 2, project="q")]
    assert decided(waiting, nodes(4), p=Project(usage=10.0), q=Project(usage=9.0))["modest"] == 4
    assert decided(waiting, nodes(4), p=Project(usage=10.0, weight=2.0), q=Project(usage=9.0))["greedy"] == 4
    assert decided(waiting, nodes(4), Rules(elastic=False, fair=False), p=Project(usage=10.0))["greedy"] == 4
    urgent = [job("greedy", 4, 1, project="p", priority=1), waiting[1]]
    assert decided(urgent, nodes(4), p=Project(usage=10.0))["greedy"] == 4, "a priority counts for more than a share"


def test_what_is_granted_now_counts_at_once() -> None:
    waiting = [job(f"p{number}", 4, number, project="p") for number in range(4)]
    waiting += [job(f"q{number}", 4, 10 + number, project="q") for number in range(4)]
    started = [name for name, size in decided(waiting, nodes(16)).items() if size == 4]
    assert sorted(started) == ["p0", "p1", "q0", "q1"]


def test_whoever_is_overdue_goes_first_whatever_its_share() -> None:
    waiting = [job("old", 4, 1, project="p"), job("new", 4, 2, project="q", since=40_000.0)]
    greedy = Project(usage=1000.0)
    assert decided(waiting, nodes(4), now=43_199.0, p=greedy)["new"] == 4
    assert decided(waiting, nodes(4), now=43_200.0, p=greedy)["old"] == 4


# Elastic sharing.


def test_what_nobody_waits_for_is_given_to_those_that_run() -> None:
    assert decided([job("new", 4)], nodes(16), SHARING) == {"new": 16}
    assert decided([running("a", 4, work=1e4)], nodes((16, 12)), SHARING) == {"a": 16}
    assert decided([running("a", 4, work=1e4)], nodes((16, 12)), FIXED) == {}
    assert decided([running("a", 4, work=1e4)], nodes((11, 7)), SHARING) == {"a": 8}, "possible sizes alone"


def test_room_goes_to_whom_it_brings_most() -> None:
    nearly_over, just_begun = running("short", 4, 1, work=1e4), running("long", 4, 2, work=1e6)
    decisions = decide([nearly_over, just_begun], nodes((16, 8)), 0.0, SHARING)
    assert outcome(decisions) == {"short": 12}
    assert decisions[0].message.startswith("4 -> 12 workers: they are free, and it is thought to be over")
    alike = [running("a", 4, 1, work=1e5), running("b", 4, 2, work=1e5)]
    assert decided(alike, nodes((16, 8)), SHARING) == {"a": 8, "b": 8}
    badly_scaling = running("bad", 4, 1, work=1e5, exponent=0.3)
    assert decided([badly_scaling, alike[1]], nodes((12, 4)), SHARING) == {"b": 8}


def test_a_resize_that_saves_nothing_is_not_made() -> None:
    assert decided([running("a", 4, work=500.0)], nodes((16, 12)), SHARING) == {}


def test_a_size_is_left_alone_for_some_time() -> None:
    young = running("a", 4, work=1e5, changed_at=100.0)
    assert decided([young], nodes((16, 12)), SHARING, now=159.0) == {}
    assert decided([young], nodes((16, 12)), SHARING, now=160.0) == {"a": 16}
    assert decided([running("a", 4, work=1e5, settled=False)], nodes((16, 12)), SHARING) == {}


def test_a_quota_ends_growth() -> None:
    own = Project(quota=Quota(workers=9))
    assert decided([running("a", 4, work=1e5, project="p")], nodes((16, 12)), SHARING, p=own) == {"a": 8}


def test_room_is_made_by_shrinking_whom_it_costs_least() -> None:
    jobs = [running("short", 8, 1, work=1e4), running("long", 8, 2, work=1e6), job("new", 4, 3)]
    decisions = decide(jobs, nodes((16, 0)), 0.0, SHARING)
    assert outcome(decisions) == {"long": 4, "new": "room_is_made"}
    assert decisions[0].message == "8 -> 4 workers to make room for new"
    half_way = [jobs[0], running("long", 4, 2, seen=8, settled=False), jobs[2]]
    assert decided(half_way, nodes((16, 0)), SHARING) == {"new": "room_is_made"}, "asked for once"
    done = [jobs[0], running("long", 4, 2, work=1e6), jobs[2]]
    assert decided(done, nodes((16, 4)), SHARING) == {"new": 4}


def test_nobody_is_shrunk_in_vain() -> None:
    jobs = [running("a", 8, 1), running("b", 8, 2, sizes=[8]), job("new", 8, 3, sizes=[8, 16])]
    assert decided(jobs, nodes((16, 0)), SHARING) == {"new": "waiting_for_room"}


def test_what_is_kept_for_the_first_in_line_is_not_given_away() -> None:
    jobs = [running("a", 4, 1, work=1e5, sizes=[4, 6]), running("b", 4, 2, sizes=[4]), job("new", 8, 3, sizes=[8])]
    assert decided(jobs, nodes((12, 4)), SHARING, now=1e4) == {"new": "waiting_for_room"}


def test_only_a_higher_priority_pauses_and_only_when_shrinking_is_not_enough() -> None:
    low, lower = running("low", 8, 1, priority=-1), running("lower", 8, 2, priority=-2)
    small = job("new", 8, 3, sizes=[8, 16])
    assert decided([low, lower, small], nodes((16, 0)), PAUSING) == {"low": 4, "lower": 4, "new": "room_is_made"}
    large = job("new", 12, 3, sizes=[12])
    decisions = decide([low, lower, large], nodes((16, 0)), 0.0, PAUSING)
    assert outcome(decisions) == {"lower": "paused", "low": 4, "new": "room_is_made"}
    assert "priority is 0 and not -2" in next(each.message for each in decisions if each.job == "lower")
    assert decided([low, lower, large], nodes((16, 0)), SHARING) == {"new": "waiting_for_room"}
    equal = [running("a", 8, 1), running("b", 8, 2), large]
    assert decided(equal, nodes((16, 0)), PAUSING) == {"new": "waiting_for_room"}


def test_a_user_who_chose_a_size_has_it() -> None:
    pinned = running("mine", 8, 1, sizes=[8], work=1e6)
    assert decided([pinned, job("new", 4, 2)], nodes((12, 4)), SHARING) == {"new": 4}
    assert decided([pinned, job("new", 4, 2)], nodes((8, 0)), SHARING) == {"new": "waiting_for_room"}
