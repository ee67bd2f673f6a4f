"""Compiled layers: the same curve, kept for the next start, and a clear word where a machine cannot compile."""

from __future__ import annotations

import os
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.config
from torch.distributed._tools.mem_tracker import MemTracker

from rubato.layout import Layout
from rubato.problems import RubatoError
from rubato.spec import JobSpec
from tests.engine.forked import in_one_process, run_ranks
from tests.engine.jobs import tiny_spec, train_at, write_corpus
from workers.engine import compiled
from workers.engine.compiled import Compilation, CompileCost
from workers.engine.device import Device
from workers.engine.mesh import ReplicaMesh
from workers.engine.parallel.compose import ModelShare

ALONE = Layout(1, 1, 1)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def spec_at(layout: Layout, corpus: Path, **sections: Any) -> JobSpec:
    shape = {"tensor": layout.tensor, "pipeline": layout.pipeline, "micro_batch": 2}
    sections = {"parallelism": {**shape, **sections.pop("parallelism", {})}, "workers": layout.world_size, **sections}
    return tiny_spec(corpus, **{**sections, "train": {"compile": True, **sections.get("train", {})}})


def curve(metrics: list[dict[str, Any]]) -> torch.Tensor:
    """Loss, gradient norm and validation loss (NaN where there was no validation) of each step."""
    names = ("loss", "grad_norm", "validation_loss")
    rows = [[torch.nan if metric[name] is None else metric[name] for name in names] for metric in metrics]
    return torch.tensor(rows, dtype=torch.float64)


def traced(layout: Layout, spec: JobSpec, folder: Path, rank: int = 0, store: Any = None) -> tuple[torch.Tensor, int]:
    """The curve, and how many programs were made: layers are traced and differentiated, but run in plain PyTorch."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.compile = partial(COMPILE, backend="aot_eager")
    try:
        return curve(train_at(layout, spec, folder, rank, store, folder.name)), CompileCost.so_far().graphs
    finally:
        torch.compile = COMPILE


COMPILE = torch.compile
TRACED: dict[str, tuple[Layout, dict[str, Any]]] = {
    "plain": (ALONE, {}),
    "gpt2": (ALONE, {"model": {"family": "gpt2", "positions": 32}}),
    "full": (ALONE, {"memory": {"recompute": "full"}}),
    "selective": (ALONE, {"memory": {"recompute": {"mode": "selective", "every": 2}}}),
    "placed": (ALONE, {"parallelism": {"device_map": "balanced"}, "workers": {"min": 1, "max": 1, "cpus": 2}}),
    "tensor": (Layout(1, 1, 2), {"memory": {"loss_chunks": 2}}),
    "tensor, selective": (Layout(1, 1, 2), {"memory": {"recompute": "selective"}}),
    "pipeline, full": (Layout(1, 2, 1), {"memory": {"recompute": "full"}}),
    "interleaved": (Layout(1, 2, 1), {"parallelism": {"schedule": "interleaved"}}),
}


def test_traced_layers_have_the_curve_of_plain_ones(corpus: Path, tmp_path: Path) -> None:
    validated = {"data": {"validation": {"every": 2}}}

    def reference(name: str) -> torch.Tensor:
        sections = {"train": {"compile": False}, "model": TRACED[name][1].get("model", {}), **validated}
        return curve(train_at(ALONE, spec_at(ALONE, corpus, **sections), tmp_path / f"{name}, plain"))

    def ranks(rank: int, store: Any, size: int) -> dict[str, tuple[torch.Tensor, int]]:
        return {
            name: traced(layout, spec_at(layout, corpus, **sections, **validated), tmp_path / name, rank, store)
            for name, (layout, sections) in TRACED.items()
            if layout.world_size == size
        }

    llama, gpt2 = in_one_process(lambda: (reference("plain"), reference("gpt2")))
    alone, two = run_ranks(1, partial(ranks, size=1))[0], run_ranks(2, partial(ranks, size=2))[0]
    for name, (found, graphs) in {**alone, **two}.items():
        expected = gpt2 if name == "gpt2" else llama
        assert torch.allclose(found, expected, rtol=1e-9, atol=0, equal_nan=True), name
        assert graphs >= 2, name
    # With gradients and without: one program for all layers, one for those that are recomputed, one for the loss.
    assert alone["plain"][1] == 4
    assert alone["selective"][1] == 6


def test_a_machine_without_a_compiler_trains_on_and_says_so(corpus: Path, tmp_path: Path) -> None:
    def work() -> tuple[torch.Tensor, list[dict[str, Any]], str]:
        torch._inductor.config.cpp.cxx = (str(tmp_path / "no-compiler"),)
        events: list[dict[str, Any]] = []
        metrics = train_at(ALONE, spec_at(ALONE, corpus), tmp_path / "compiled", events=events)
        budget = spec_at(ALONE, corpus, memory={"recompute": {"budget": 0.5}})
        with pytest.raises(RubatoError) as refused:
            Compilation.of(budget, ReplicaMesh.of_world(ALONE, 0, Device.of_rank(0, gpu=False)))
        return curve(metrics)[:, :2], events, str(refused.value)

    plain = in_one_process(lambda: curve(train_at(ALONE, spec_at(ALONE, corpus, train={"compile": False}), tmp_path)))
    found, events, refusal = in_one_process(work)
    assert torch.equal(found, plain[:, :2])
    (told,) = [event for event in events if event["kind"].startswith("compile")]
    assert told["kind"] == "compile.unavailable"
    assert "no C++ compiler" in told["message"]
    assert "memory.recompute.budget is kept by compiled layers, and there is no C++ compiler" in refusal


def test_auto_compiles_long_runs_of_what_can_be_compiled(corpus: Path) -> None:
    def decision(steps: int, **sections: Any) -> bool:
        train = {"compile": "auto", "steps": steps, "precision": sections.pop("precision", "fp32")}
        spec = spec_at(ALONE, corpus, train=train, **sections)
        return spec.compiles(pays=compiled.flops_a_worker(spec) >= compiled.PAYS_FROM["cpu"])

    # 8 sequences of 16 tokens, 6 FLOPs for each of some 14,000 weights: 10^7 FLOPs a step.
    assert not decision(1_000_000)
    assert decision(10_000_000)
    schedule = {"schedule": "zbv", "pipeline": 2, "micro_batch": 1}
    spec = tiny_spec(corpus, train={"steps": 10_000_000}, parallelism=schedule, workers=2)
    assert not spec.compiles(pays=True)


@pytest.mark.long
def test_a_second_start_finds_what_the_first_has_compiled(corpus: Path, tmp_path: Path) -> None:
    """The real compiler; one program for all layers and one for the loss."""
    run = tmp_path / "run"

    def start() -> tuple[torch.Tensor, dict[str, Any], CompileCost]:
        shutil.rmtree(run / "checkpoints", ignore_errors=True)
        events: list[dict[str, Any]] = []
        metrics = train_at(ALONE, spec_at(ALONE, corpus), run, dtype=torch.float32, events=events)
        told = next(event for event in events if event["kind"] == "compiled")
        return curve(metrics), told["data"], CompileCost.so_far()

    def eager() -> torch.Tensor:
        spec = spec_at(ALONE, corpus, train={"compile": False})
        return curve(train_at(ALONE, spec, tmp_path / "eager", dtype=torch.float32))

    expected = in_one_process(eager)
    (first, told, cold), (second, _, warm) = in_one_process(start), in_one_process(start)
    assert torch.allclose(first[:, :2], expected[:, :2], rtol=1e-4, atol=0)
    assert torch.equal(second[:, :2], first[:, :2])
    assert (cold.graphs, cold.from_cache) == (2, 0)
    assert (warm.graphs, warm.from_cache) == (2, 2)
    assert (told["graphs"], told["from_cache"]) == (2, 0)
    assert [folder.name for folder in (run / "compiled").iterdir()] == [compiled.machine()]


@pytest.mark.long
def test_a_budget_bounds_what_is_kept(corpus: Path, tmp_path: Path) -> None:
    def kept(budget: float) -> int:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(tmp_path / "cache")
        model = {"hidden_size": 64, "layers": 4, "heads": 4, "ffn_size": 192}
        memory = {"recompute": {"budget": budget}}
        spec = spec_at(ALONE, corpus, model=model, memory=memory, data={"sequence_length": 128})
        share = ModelShare(spec, ReplicaMesh.of_world(ALONE, 0, Device.of_rank(0, gpu=False)))
        share.initialise(share.parameters)
        part, tokens_BS = share.parts[0], torch.zeros(2, 128, dtype=torch.int64)
        part(tokens_BS).sum().backward()
        tracker = MemTracker()
        tracker.track_external(part)
        with tracker:
            part(tokens_BS).sum()
            snapshot = next(iter(tracker.get_tracker_snapshot("current").values()))
        return next(size for kind, size in snapshot.items() if "ACT" in str(kind))

    all_of_it, half, least = (in_one_process(lambda budget=budget: kept(budget)) for budget in (1.0, 0.5, 0.0))
    assert least < 0.3 * all_of_it
    assert half < 0.75 * all_of_it
    assert least < half
