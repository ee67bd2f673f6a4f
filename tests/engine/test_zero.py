"""ZeRO: whoever holds which rows, the curve is that of one process, and rows lost with a replica are not made up."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from rubato.layout import Layout, sharding_degree
from rubato.spec import JobSpec
from tests.engine.forked import in_one_process, run_ranks, wait
from tests.engine.jobs import tiny_spec, train_at, write_corpus
from tests.engine.test_elastic import STEPS, Job
from workers.engine.data import Sampler
from workers.engine.device import GlooGroup
from workers.engine.parallel.rows import Split


class Case(NamedTuple):
    """A layout, its memory section, and what else differs from the reference."""

    layout: Layout
    memory: dict[str, Any]
    sections: dict[str, Any] = {}  # noqa: RUF012 (a tuple shares nothing it could change)

    def __str__(self) -> str:
        return "-".join(map(str, [*self.layout.__dict__.values(), *self.memory.values(), *self.sections.values()]))


# The one key head has six rows: of four ranks one has none, and two ranks of a tensor axis have the same.
ODD = {"hidden_size": 12, "heads": 2, "kv_heads": 1, "ffn_size": 20, "tie_embeddings": True}
CASES = {
    3: [Case(Layout(3, 1, 1), {"zero": zero}) for zero in (1, 2, 3)],  # of 8 samples one has 2, the others 3
    4: [
        Case(Layout(2, 2, 1), {"zero": 1}, {"parallelism": {"schedule": "zbv"}}),
        Case(Layout(2, 2, 1), {"zero": 2}),  # the tied embedding is on two stages
        Case(Layout(2, 2, 1), {"zero": 3}, {"parallelism": {"schedule": "interleaved"}}),
        Case(Layout(2, 1, 2), {"zero": 3}),
        Case(Layout(4, 1, 1), {"zero": 2, "shard_over": 2}),
    ],
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def curve(
    case: Case, corpus: Path, folder: Path, rank: int = 0, store: Any = None, dtype: torch.dtype = torch.float64
) -> list[list[float]]:
    """Loss, gradient norm and validation loss of each step that was trained."""
    layout, sections = case.layout, case.sections
    spec = tiny_spec(
        corpus,
        **{
            "model": ODD,
            "data": {"validation": {"every": 1}},
            **sections,
            "memory": case.memory,
            "parallelism": {"tensor": layout.tensor, "pipeline": layout.pipeline, **sections.get("parallelism", {})},
            "workers": layout.world_size,
        },
    )
    metrics = train_at(layout, spec, folder, rank, store, f"{case}-{folder.name}", dtype=dtype)
    return [[metric[what] for what in ("loss", "grad_norm", "validation_loss")] for metric in metrics]


def same(found: list[list[float]], expected: list[list[float]], tolerance: float = 1e-9) -> bool:
    return torch.allclose(torch.tensor(found), torch.tensor(expected), rtol=tolerance, atol=0)


@pytest.fixture(scope="module")
def reference(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[float]]:
    folder = tmp_path_factory.mktemp("reference")
    return in_one_process(lambda: curve(Case(Layout(1, 1, 1), {}), corpus, folder))


@pytest.mark.parametrize("size", CASES)
def test_the_curve_of_one_process(size: int, corpus: Path, reference: list[list[float]], tmp_path: Path) -> None:
    by_rank = run_ranks(
        size, lambda rank, store: [curve(case, corpus, tmp_path / str(case), rank, store) for case in CASES[size]]
    )
    assert len(reference) == 3
    for case, found in zip(CASES[size], by_rank[0], strict=True):
        assert same(found, reference), str(case)


def test_a_checkpoint_of_any_stage_loads_at_any_other(corpus: Path, tmp_path: Path) -> None:
    ways = [
        Case(Layout(3, 1, 1), {"zero": 3}),
        Case(Layout(2, 1, 2), {"zero": 1}),
        Case(Layout(1, 1, 1), {}),
    ]

    def sections(steps: int) -> dict[str, Any]:
        return {"train": {"steps": steps}, "optimizer": {"schedule": {"name": "constant", "warmup": 0}}}

    whole = Case(Layout(1, 1, 1), {}, sections(len(ways)))
    expected = in_one_process(lambda: curve(whole, corpus, tmp_path / "whole"))
    found: list[list[float]] = []
    for steps, way in enumerate(ways, 1):
        case = way._replace(sections=sections(steps))
        size = case.layout.world_size
        found += run_ranks(size, lambda rank, store, case=case: curve(case, corpus, tmp_path / "moved", rank, store))[0]
    assert len(expected) == len(ways)
    assert same(found, expected)


@pytest.mark.parametrize(("precision", "zero"), [("bf16_pure", 3), ("fp16", 2)])
def test_masters_and_the_loss_scale_are_those_of_zero_0(
    precision: str, zero: int, corpus: Path, tmp_path: Path
) -> None:
    steps = 8
    sections = {"train": {"precision": precision, "steps": steps, "loss_scale": {"start": 2**24}}}

    def both(rank: int, store: Any) -> list[list[list[float]]]:
        cases = [Case(Layout(2, 1, 1), {"zero": stage}, sections) for stage in (0, zero)]
        return [curve(each, corpus, tmp_path / str(each), rank, store, torch.float32) for each in cases]

    plain, sharded = run_ranks(2, both)[0]
    assert (0 < len(plain) < steps) == (precision == "fp16"), "some steps overflow, and then no more"
    # Sums of 16-bit products differ in their last bits, and a row of updates carries that on.
    assert same(sharded, plain, 1e-3)


def test_rows_are_split_so_that_every_row_is_somewhere_once() -> None:
    for degree in range(1, 7):
        for rows in range(9):
            held = [Split(degree, index).of(rows) for index in range(degree)]
            assert [row for part in held for row in range(rows)[part]] == list(range(rows))


@pytest.mark.parametrize(
    ("data", "shard_over", "degree"), [(8, None, 8), (8, 4, 4), (6, 4, 6), (9, 2, 3), (5, 4, 5), (2, 4, 2), (1, 1, 1)]
)
def test_a_copy_is_never_on_fewer_replicas_than_were_asked_for(data: int, shard_over: int | None, degree: int) -> None:
    assert sharding_degree(data, shard_over) == degree


def elastic_spec(corpus: Path) -> JobSpec:
    return tiny_spec(
        corpus,
        memory={"zero": 3},
        parallelism={"pipeline": 2, "micro_batch": 2},
        train={"steps": STEPS, "global_batch": 12},
        checkpoint={"every": 4, "keep_last": 2},
        workers={"min": 2, "max": 6},
    )


@pytest.fixture
def job(corpus: Path, tmp_path: Path) -> Iterator[Job]:
    job = Job(elastic_spec(corpus), tmp_path)
    yield job
    job.close()


def assert_same_curve(job: Job, corpus: Path, folder: Path) -> None:
    spec = tiny_spec(corpus, train={"steps": STEPS, "global_batch": 12})
    reference = in_one_process(lambda: train_at(Layout(1, 1, 1), spec, folder))
    assert {metric["step"] for metric in job.metrics} == set(range(1, STEPS + 1))
    for metric in job.metrics:
        for name in ("loss", "grad_norm", "lr", "tokens"):
            assert metric[name] == pytest.approx(reference[metric["step"] - 1][name], rel=1e-9), (metric["step"], name)


def test_growing_and_shrinking_lose_no_step_and_a_lost_shard_goes_back(job: Job, corpus: Path, tmp_path: Path) -> None:
    job.want("a")
    job.start("a")
    job.reach(2)
    job.want("a", "b")
    job.start("b")
    job.let_in(2)
    grown = job.step
    job.reach(grown + 1)
    assert not rolled_back(job)
    job.gates.open_next()
    job.reach(grown + 2)
    job.kill_one("b", 1)
    job.start("b")
    job.gates.open_next()
    job.until(lambda: len(rolled_back(job)) == 1)
    back = rolled_back(job)[0]
    assert grown + 2 <= back["from"] <= grown + 3  # no further than the next gate
    assert back["to"] == max(grown, back["from"] // 4 * 4)
    job.reach(back["from"] + 1)
    job.want("b")
    job.finish()
    wait(job.replicas["b"], lambda: all(rank.ended for rank in job.replicas["b"]), 90)
    assert len(rolled_back(job)) == 1
    assert_same_curve(job, corpus, tmp_path / "one")


@pytest.mark.long
@pytest.mark.parametrize("call", ["begin_all_gather", "begin_reduce_scatter", "finish"])
def test_a_pass_that_loses_the_axis_in_its_midst_ends_and_is_done_again(
    call: str, corpus: Path, tmp_path: Path
) -> None:
    """One worker of b fails after the checkpoint of step 4, in a pass that its mate of the pipeline needs it to end."""
    step, failed = [0], threading.Event()

    def sabotage(replica: str, rank: int) -> None:
        if (replica, rank) != ("b", 1):
            return
        batch, original = Sampler.batch, getattr(GlooGroup, call)

        def counting(self: Sampler, number: int, samples: range) -> tuple[Tensor, Tensor]:
            step[0] = number  # a step ahead at most
            return batch(self, number, samples)

        def failing(self: GlooGroup, *arguments: Any) -> Any:
            if step[0] == 7 and not failed.is_set():
                failed.set()
                raise RuntimeError("the test says that this failed")
            return original(self, *arguments)

        Sampler.batch = counting  # type: ignore[method-assign]
        setattr(GlooGroup, call, failing)

    job = Job(elastic_spec(corpus), tmp_path, sabotage)
    try:
        job.want("a", "b")
        job.start("a")
        job.start("b")
        job.finish()
        assert [each["replicas"] for each in job.all("formed")] == [["a", "b"], ["a", "b"]]
        assert [back["to"] for back in rolled_back(job)] == [4]
        assert_same_curve(job, corpus, tmp_path / "one")
    finally:
        job.close()


def rolled_back(job: Job) -> list[dict[str, Any]]:
    events = [each["record"] for each in job.all("event")]
    return [event["data"] for event in events if event["kind"] == "training.rolled_back"]
