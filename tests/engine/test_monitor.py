"""What is told of a run while it trains: numbers of all workers, text of the model, recorded steps."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rubato.layout import Layout
from rubato.resources import Metric
from rubato.spec import JobSpec
from tests.engine.forked import in_one_process, run_ranks
from tests.engine.jobs import tiny_spec, train_at, write_corpus
from workers.engine import train as loop
from workers.engine.device import Device
from workers.engine.mesh import ReplicaMesh
from workers.engine.parallel.compose import ModelShare
from workers.engine.parallel.generate import Generator
from workers.engine.watch import flops_per_token

LAYOUTS = [Layout(2, 1, 1), Layout(1, 2, 2)]
SAMPLES = {"every": 2, "prompts": ["line 1", "the square of"], "tokens": 4}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def spec_of(corpus: Path, layout: Layout, steps: int = 2, **sections: Any) -> JobSpec:
    shape = {"tensor": layout.tensor, "pipeline": layout.pipeline}
    return tiny_spec(corpus, train={"steps": steps}, parallelism=shape, workers=layout.world_size, **sections)


Told = tuple[list[dict[str, Any]], list[dict[str, Any]]]


def told_at(layout: Layout, corpus: Path, folder: Path, rank: int = 0, store: Any = None, **sections: Any) -> Told:
    events: list[dict[str, Any]] = []
    spec = spec_of(corpus, layout, **sections)
    return train_at(layout, spec, folder / str(layout), rank, store, str(layout), events=events), events


@pytest.fixture(scope="module")
def everywhere(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Told]:
    """What is told at each layout, with one process among them."""
    folder = tmp_path_factory.mktemp("runs")
    monitor = {"every": 2, "samples": SAMPLES}
    found = {}
    for size in (1, 2, 4):
        layouts = [each for each in [Layout(1, 1, 1), *LAYOUTS] if each.world_size == size]

        def work(rank: int, store: Any, layouts: list[Layout] = layouts) -> dict[str, Told]:
            return {str(each): told_at(each, corpus, folder, rank, store, monitor=monitor) for each in layouts}

        by_rank = run_ranks(size, work)
        found |= by_rank[0]
        assert not any(metrics or events for told in by_rank[1:] for metrics, events in told.values())
    return found


@pytest.mark.parametrize("layout", [Layout(1, 1, 1), *LAYOUTS], ids=str)
def test_a_metric_has_what_the_api_tells(layout: Layout, corpus: Path, everywhere: dict[str, Told]) -> None:
    metrics, _ = everywhere[str(layout)]
    told = [Metric.model_validate({**metric, "at": "2026-01-01T00:00:00Z"}) for metric in metrics]
    assert [metric.step for metric in told] == [1, 2]
    cost = flops_per_token(spec_of(corpus, layout))
    for metric in told:
        assert metric.flops_per_s == pytest.approx(metric.tokens_per_s * cost)
        assert 0 < (metric.data_s or 0) < metric.step_s
        assert 2**20 < (metric.memory_bytes or 0) <= (metric.memory_peak_bytes or 0)
        assert (metric.workers is None) == (metric.gradient_norms is None) == bool(metric.step % 2)
    spread = told[1].workers or {}
    assert set(spread) == {"step_s", "data_s", "memory_bytes", "memory_peak_bytes"}
    assert all(each.min <= each.max for each in spread.values())
    assert spread["step_s"].min <= told[1].step_s <= spread["step_s"].max
    assert (spread["memory_bytes"].min < spread["memory_bytes"].max) == (layout.world_size > 1)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_norms_of_groups_are_those_of_one_process(layout: Layout, everywhere: dict[str, Told]) -> None:
    found, reference = (everywhere[str(each)][0][1]["gradient_norms"] for each in (layout, Layout(1, 1, 1)))
    assert list(reference) == ["embedding", "layer 0", "layer 1", "layer 2", "layer 3", "head"]
    assert found == pytest.approx(reference, rel=1e-9)
    whole = everywhere[str(layout)][0][1]["grad_norm"]
    assert sum(norm**2 for norm in found.values()) ** 0.5 == pytest.approx(whole, rel=1e-9)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_model_says_the_same_at_every_layout(layout: Layout, everywhere: dict[str, Told]) -> None:
    found, reference = (
        [(event["data"]["step"], event["data"]["prompt"], event["data"]["text"]) for event in events
         if event["kind"] == "sample"]
        for _, events in (everywhere[str(layout)], everywhere[str(Layout(1, 1, 1))])
    )  # fmt: skip
    assert [sample[:2] for sample in reference] == [(2, prompt) for prompt in SAMPLES["prompts"]]
    assert found == reference
    assert all(sample[2] for sample in reference)


@pytest.mark.long
def test_shards_say_and_show_the_same(corpus: Path, everywhere: dict[str, Told], tmp_path: Path) -> None:
    """Where the replicas share parameters out among them, all of them compute what one tells."""

    def work(rank: int, store: Any) -> Told:
        more: dict[str, Any] = {"monitor": {"every": 2, "samples": SAMPLES}, "memory": {"zero": 3}}
        return told_at(Layout(2, 1, 1), corpus, tmp_path, rank, store, **more)

    metrics, events = run_ranks(2, work)[0]
    reference_metrics, reference_events = everywhere[str(Layout(1, 1, 1))]
    assert metrics[1]["gradient_norms"] == pytest.approx(reference_metrics[1]["gradient_norms"], rel=1e-9)
    texts, expected = (
        [event["data"]["text"] for event in told if event["kind"] == "sample"] for told in (events, reference_events)
    )
    assert texts == expected


def test_greedy_text_is_that_of_the_plain_model_and_draws_are_repeatable(corpus: Path) -> None:
    def work() -> tuple[list[list[int]], list[list[int]], list[list[list[int]]]]:
        torch.set_default_dtype(torch.float64)
        spec = spec_of(corpus, Layout(1, 1, 1))
        mesh = ReplicaMesh.of_world(Layout(1, 1, 1), 0, Device.of_rank(0, gpu=False))
        share = ModelShare(spec, mesh)
        share.initialise(share.parameters)
        generator = Generator(spec, mesh, share)
        prompts = [[5, 6, 7], [200], list(range(40, 80))]
        greedy = generator.continue_all(share.runner(2), 2, prompts, 6, vocabulary=256, temperature=0.0, seed=0)
        drawn = [
            generator.continue_all(share.runner(2), 2, prompts, 6, vocabulary=90, temperature=5.0, seed=seed)
            for seed in (1, 1, 2)
        ]

        expected = []
        for prompt in prompts:
            tokens = prompt[-10:]
            for _ in range(6):
                with torch.no_grad():
                    behind = [17] * (16 - len(tokens))  # what stands there is of no matter
                    logits: Tensor = share.parts[0](torch.tensor([tokens + behind]))
                tokens = [*tokens, int(logits[0, len(tokens) - 1].argmax())]
            expected.append(tokens[-6:])
        return greedy, expected, drawn

    greedy, expected, (first, again, other) = in_one_process(work)
    assert greedy == expected
    assert first == again != other
    assert [len(each) for each in first] == [6, 6, 6]
    assert max(map(max, first)) < 90


def test_steps_are_recorded_as_the_spec_says_and_on_demand(corpus: Path, tmp_path: Path) -> None:
    layout = Layout(2, 1, 1)

    def work(rank: int, store: Any) -> list[dict[str, Any]]:
        if rank == 1:
            step = loop.Worker.step

            def asked(worker: loop.Worker, session: Any) -> bool:
                if worker.state.done == 4:
                    worker.membership.request_profile(50)  # more than are left
                return step(worker, session)

            loop.Worker.step = asked  # type: ignore[method-assign]
        profile = {"steps": [2, 3], "ranks": [0]}
        return told_at(layout, corpus, tmp_path, rank, store, steps=6, profile=profile)[1]

    first, second = run_ranks(2, work)
    (mine,) = [event["data"] for event in first if event["kind"] == "profile.saved"]
    (other,) = [event["data"] for event in second if event["kind"] == "profile.saved"]
    assert (mine["steps"], mine["rank"]) == ([2, 3], 0)
    assert (other["steps"], other["rank"]) == ([6, 6], 1)
    run = tmp_path / str(layout)
    assert mine["files"] == [
        f"profile/steps-2-3/rank-0.{kind}" for kind in ("trace.json.gz", "operations.txt", "memory.txt")
    ]
    names = {
        event.get("name") for event in json.loads(gzip.decompress((run / mine["files"][0]).read_bytes()))["traceEvents"]
    }
    assert "aten::mm" in names or "aten::addmm" in names
    assert "Self CPU" in (run / mine["files"][1]).read_text()
    assert "Mem" in (run / mine["files"][2]).read_text()
    assert len(mine["operations"]) == 10
    assert mine["operations"][0]["seconds"] >= mine["operations"][1]["seconds"] > 0
