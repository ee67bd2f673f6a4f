"""A job gets one replica that serves all its sizes, and what cannot fit is refused with the nearest that can."""

from __future__ import annotations

from typing import Any

import pytest

from rubato.problems import RubatoError, SpecError
from rubato.resources import NodeView
from rubato.spec import JobSpec, WorkersSpec, as_given, is_planned, parse_spec
from service.planning.accelerators import catalogue
from service.planning.constants import fitted
from service.planning.fleet import Measured, live_fleet, named_fleet, unseen_fleet
from service.planning.from_spec import layout_of
from service.planning.job_plan import JobPlanner, resolve, spread

GIB = 2**30


def spec_of(preset: str = "8b", workers: Any = 64, length: int = 4096, batch: int = 1024, **changes: Any) -> JobSpec:
    return parse_spec(
        {
            "name": "planned",
            "model": {"preset": preset},
            "data": {"train": {"builtin": "python-stdlib"}, "sequence_length": length},
            "train": {"steps": 100, "global_batch": batch, "precision": "bf16"},
            "workers": workers,
            **changes,
        }
    )


def planner(spec: JobSpec, cluster: str) -> JobPlanner:
    return JobPlanner(spec, named_fleet(cluster, spec.workers))


def node(**changes: Any) -> NodeView:
    usual = {"id": "n", "ip": "10.0.0.1", "alive": True, "cpus": 4, "gpus": 0, "cpus_free": 4, "gpus_free": 0}
    return NodeView(**{**usual, **changes})


def test_the_chosen_replica_fits_and_runs_from_the_smallest_size_to_the_largest() -> None:
    spec = spec_of("8b", {"min": 64, "max": 256, "gpus": 1})
    found = planner(spec, "h100:256")
    replica = found.choose()
    resolved = resolve(spec, found.fleet)
    assert resolved.sizes[0] == 64
    assert resolved.sizes[-1] == 256
    assert resolved.parallelism.replica_size == replica.replica_size
    assert not is_planned(resolved)
    for size in (64, 256):
        at = found.at(size, replica)
        assert at.choice is not None
        assert at.refusal is None
        best = found.best(size)
        assert best is not None
        assert at.choice.tokens_per_s >= 0.7 * best.tokens_per_s


def test_at_one_size_the_replica_is_that_of_the_fastest_layout() -> None:
    found = planner(spec_of("8b", {"min": 64, "max": 64, "gpus": 1}), "h100:64")
    best = found.best(64)
    assert best is not None
    at = found.at(64, found.choose())
    assert at.choice is not None
    assert at.choice.layout == best.layout


def test_what_the_spec_says_of_recomputation_is_kept() -> None:
    workers = {"min": 64, "max": 64, "gpus": 1}
    fleet = named_fleet("h100:64", WorkersSpec(**workers))
    assert resolve(spec_of("8b", workers), fleet).memory.recompute.mode == "none"
    for mode in ("none", "selective", "full"):
        assert resolve(spec_of("8b", workers, memory={"recompute": mode}), fleet).memory.recompute.mode == mode


@pytest.mark.parametrize("zero", [0, 2, 3])
def test_what_the_spec_says_of_zero_is_kept(zero: int) -> None:
    spec = spec_of(memory={"zero": zero}, workers={"min": 16, "max": 64, "gpus": 1})
    resolved = resolve(spec, named_fleet("h100:64", spec.workers))
    assert resolved.memory.zero == zero
    layout = layout_of(resolved, 64)
    assert layout is not None
    assert layout.zero == zero


def test_a_spec_survives_being_sent_with_what_it_leaves_open() -> None:
    left_out = spec_of()
    assert "parallelism" not in as_given(left_out)
    assert "recompute" not in as_given(left_out)["memory"]
    assert is_planned(parse_spec(as_given(left_out)))
    given = spec_of(parallelism={"tensor": 2})
    assert parse_spec(as_given(given)) == given
    assert not is_planned(parse_spec(as_given(given)))


def test_a_model_that_fits_nowhere_in_the_range_is_refused_with_the_nearest_size_that_holds_it() -> None:
    found = planner(spec_of("405b", {"min": 8, "max": 16, "gpus": 1}), "h100:16")
    with pytest.raises(SpecError) as refused:
        found.choose()
    (problem,) = refused.value.problems
    assert problem.field == "workers"
    size = int(problem.fix.split()[1])
    assert found.best(size) is not None
    assert found.best(size // 2) is None


def test_a_range_that_begins_too_small_begins_where_the_model_fits() -> None:
    spec = spec_of("70b", {"min": 8, "max": 128, "gpus": 1})
    found = planner(spec, "h100:128")
    assert found.best(8) is None
    first = resolve(spec, found.fleet).sizes[0]
    assert 8 < first < 128
    assert found.at(first, found.choose()).refusal is None


def test_a_given_layout_that_cannot_fit_is_refused_with_a_change_that_makes_it_fit() -> None:
    found = planner(spec_of("70b", {"min": 64, "max": 64, "gpus": 1}, parallelism={"tensor": 8}), "h100:64")
    with pytest.raises(SpecError) as refused:
        found.check()
    (problem,) = refused.value.problems
    assert problem.field == "parallelism"
    assert "at 64 workers a worker needs" in problem.cause
    assert "recompute full" in problem.fix
    assert "which needs" in problem.fix
    planner(spec_of("8b", {"min": 32, "max": 32, "gpus": 1}, parallelism={"tensor": 8}), "h100:32").check()


def test_workers_on_cpus_share_the_memory_and_the_cores_of_their_node() -> None:
    measured = {"cpu-core": Measured(catalogue()["cpu-core"], fitted(), cores=2)}
    fleet = live_fleet([node(cpus=8, memory_bytes=8 * GIB)], WorkersSpec(min=1, max=8), measured)
    assert fleet is not None
    assert (fleet.workers, fleet.node_size) == (8, 8)
    core = catalogue()["cpu-core"]
    for workers, cores in ((1, 1.0), (2, 1.0), (4, 0.5), (8, 0.25)):
        one = fleet.cluster(workers).accelerator
        assert one.memory_bytes == 8 * GIB / workers
        assert one.matmul_flops == pytest.approx(core.matmul_flops * cores)
        assert fleet.constants_for(workers).layer_gap_s == pytest.approx(fitted().layer_gap_s / cores)
    with pytest.raises(SpecError, match="workers"):
        JobPlanner(spec_of("8b", {"min": 1, "max": 8}, batch=8), fleet).choose()


def test_the_live_cluster_is_recognised_by_what_ray_calls_its_gpus() -> None:
    gpus = WorkersSpec(min=1, max=8, gpus=1)
    for called, known in (
        ("H100", "h100-80gb"),
        ("A100", "a100-40gb"),
        ("A100-80G", "a100-80gb"),
        ("L40S", "l40s-48gb"),
    ):
        fleet = live_fleet([node(gpus=4, accelerator=called)] * 2, gpus)
        assert fleet is not None
        assert (fleet.accelerator.name, fleet.workers, fleet.node_size) == (known, 8, 4)
    mixed = live_fleet([node(gpus=8, accelerator="H100"), node(gpus=8, accelerator="A100-80G")], gpus)
    assert mixed is not None
    assert mixed.accelerator.matmul_flops == catalogue()["a100-80gb"].matmul_flops
    with pytest.raises(RubatoError, match="T4"):
        live_fleet([node(gpus=4, accelerator="T4")], gpus)
    assert live_fleet([node()], gpus) is None
    assert unseen_fleet(gpus) is None
    assert unseen_fleet(WorkersSpec(min=1, max=4)) is not None


@pytest.mark.parametrize("text", ["h100", "h100:", "h100:0", "h100:many", "x900:8", "a100:8"])
def test_a_cluster_that_is_not_written_right_is_refused(text: str) -> None:
    with pytest.raises(RubatoError) as refused:
        named_fleet(text, WorkersSpec(min=1, max=1))
    assert refused.value.problems[0].field == "cluster"


def test_sizes_are_spread_over_their_range_with_both_ends() -> None:
    assert spread(range(3, 8)) == [3, 4, 5, 6, 7]
    found = spread(range(64, 1025), 5)
    assert found == [64, 128, 256, 512, 1024]


def test_the_spec_s_own_layout_counts_with_its_stages_and_its_recomputation() -> None:
    spec = spec_of("8b", 8, parallelism={"tensor": 2, "pipeline": 2, "stages": [20, 12]}, memory={"recompute": "full"})
    layout = layout_of(spec, 8)
    assert layout is not None
    assert layout.stage_layers == (20, 12)
    assert layout.recompute == "full"
    assert layout.sequence_parallel
