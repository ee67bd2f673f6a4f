"""The benchmark on published runs: how it reads them, that its fit finds constants, and how good the planner is."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.fitting import START, TIME_CONSTANTS, fit
from benchmarks.published_runs import read_runs
from benchmarks.scoring import Quantity, figures, peak_gib, ranking, tokens_per_gpu
from rubato.arithmetic import BF16, FP16, SHARDED
from service.planning.constants import fitted

ROOT = Path(__file__).parents[3]
CLOSE = [*ROOT.parent.glob("*/data/published_runs.csv"), *ROOT.glob("data/published_runs.csv")]
PUBLISHED = Path(os.environ.get("RUBATO_PUBLISHED_RUNS") or (CLOSE[0] if CLOSE else "published_runs.csv"))
needs_runs = pytest.mark.skipif(not PUBLISHED.is_file(), reason="set RUBATO_PUBLISHED_RUNS to the CSV file")

ROW = {
    "source": "a paper",
    "model": "GPT-8B",
    "layers": "36",
    "hidden": "4096",
    "heads": "32",
    "kv_heads": "32",
    "ffn_hidden": "16384",
    "vocab": "51200",
    "vocab_known": "True",
    "seq_len": "2048",
    "gpu": "a100-80gb",
    "num_gpus": "32",
    "tp": "4",
    "pp": "2",
    "dp": "4",
    "cp": "1",
    "zero_stage": "1",
    "micro_batch": "2",
    "global_batch": "256",
    "precision": "bf16",
    "recompute": "full",
    "sequence_parallel": "False",
    "schedule": "1f1b",
    "virtual_stages": "1",
    "compiled": "False",
    "tokens_per_s_per_gpu": "",
    "throughput_basis": "published",
    "mfu_pct": "",
    "peak_mem_gib": "",
    "note": "",
    "suspect": "False",
    "software": "Megatron-LM",
    "attention": "unfused",
    "launch_blocking": "False",
}


def write(path: Path, *rows: dict[str, str]) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(ROW))
        writer.writeheader()
        writer.writerows({**ROW, **row} for row in rows)
    return path


def test_rows_become_models_layouts_and_runtimes(tmp_path: Path) -> None:
    file = write(
        tmp_path / "runs.csv",
        {"precision": "fp16", "layers": "34", "pp": "12", "virtual_stages": "1"},
        {"software": "llm-foundry", "attention": "flash", "zero_stage": "3", "recompute": "none", "pp": "1"},
        {"source": "bigscience-workshop/bigscience", "note": "section: contenders 02-21", "launch_blocking": "True"},
        {"source": "bigscience-workshop/bigscience", "note": "section: variations 02-25", "layers": "78", "pp": "12"},
        {"model": "Llama-like 3.57B", "software": "nanotron", "layers": "28", "hidden": "3072", "ffn_hidden": "8192"}
        | {"vocab": "131072", "attention": "flash", "gpu": "h100-80gb"},
    )
    runs, kept_out = read_runs(file)
    assert kept_out == {}
    first, foundry, faulty, healthy, nanotron = runs
    assert first.runtime.precision == FP16
    assert first.layout.stage_layers == (2, *[3] * 10, 2)  # embedding and head count as layers
    assert first.work.model.tied
    assert first.runtime.overlapped_tensor
    assert not first.runtime.early_stop
    assert foundry.runtime.attention == "flash1"
    assert foundry.runtime.precision == SHARDED
    assert foundry.runtime.early_stop
    assert (faulty.faulty, healthy.faulty) == (True, False)
    assert faulty.runtime.launch_blocking
    assert faulty.runtime.precision == BF16
    assert faulty.cluster.network_bytes == 6.25e9
    assert healthy.layout.stage_layers == (*[7] * 11, 1)
    assert nanotron.work.model.gated
    assert nanotron.work.model.tied  # 3.57 billion with one embedding, 3.97 with two
    assert nanotron.layout.sequence_parallel
    assert nanotron.runtime.attention == "flash2"


def test_rows_that_are_not_modelled_are_counted_by_reason(tmp_path: Path) -> None:
    file = write(
        tmp_path / "runs.csv", {"gpu": "abacus"}, {"precision": "fp8"}, {"recompute": "sometimes"}, {"dp": ""}, {}
    )
    runs, kept_out = read_runs(file)
    assert len(runs) == 1
    assert kept_out == {
        "GPU not in the catalogue: abacus": 1,
        "precision not modelled: fp8": 1,
        "recomputation not modelled: sometimes": 1,
        "not given: dp": 1,
    }


VARIED = [
    {"tp": tp, "pp": pp, "dp": str(32 // int(tp) // int(pp)), "micro_batch": mb, "recompute": mode, "seq_len": seq}
    | {"attention": attention, "zero_stage": zero}
    for tp, pp in (("1", "1"), ("4", "2"), ("8", "1"))
    for mb in ("1", "8")
    for mode, attention, zero in (("full", "unfused", "1"), ("none", "flash", "3"))
    for seq in ("1024", "8192")
]


def test_the_fit_finds_the_constants_that_made_the_measurements(tmp_path: Path) -> None:
    runs, _ = read_runs(write(tmp_path / "runs.csv", *VARIED))
    truth = replace(START, matmul_share=0.8, attention_share=0.7, link_share=0.6)
    measured = {run.line: tokens_per_gpu(run, truth) for run in runs}
    found = fit(
        TIME_CONSTANTS,
        lambda constants: np.array([np.log(tokens_per_gpu(run, constants) / measured[run.line]) for run in runs]),
    )
    before = figures(tokens_per_gpu(run, START) / measured[run.line] - 1 for run in runs)
    after = figures(tokens_per_gpu(run, found) / measured[run.line] - 1 for run in runs)
    assert before["median"] > 5
    assert after["median"] < 1
    assert found.matmul_share == pytest.approx(0.8, rel=0.05)
    assert (found.activation_factor, found.reserved_share) == (START.activation_factor, START.reserved_share)


def test_rows_that_are_left_out_do_not_shape_their_own_prediction(tmp_path: Path) -> None:
    ours = [{"tokens_per_s_per_gpu": "1000", "source": "ours"} | row for row in VARIED]
    theirs = [{"tokens_per_s_per_gpu": "3000", "source": "theirs"} | row for row in VARIED]
    errors = []
    for claimed in ("3000", "30"):
        changed = [row | {"tokens_per_s_per_gpu": claimed} for row in theirs]
        runs, _ = read_runs(write(tmp_path / "runs.csv", *ours, *changed))
        speed = Quantity.speed(runs)
        left_out = speed.left_out(lambda run: run.source)
        lines = [run.line for run in runs if run.source == "theirs"]
        errors.append([speed.measured[line] * (1 + left_out[line]) for line in lines])
    assert errors[0] == pytest.approx(errors[1])


def test_ranking_counts_pairs_that_differ_and_the_layout_it_would_choose(tmp_path: Path) -> None:
    rows = [
        {"micro_batch": mb, "tokens_per_s_per_gpu": speed} for mb, speed in (("1", "100"), ("2", "120"), ("4", "121"))
    ]
    runs, _ = read_runs(write(tmp_path / "runs.csv", *rows))
    measured = {run.line: run.measured_tokens or 0.0 for run in runs}
    right = ranking(runs, {2: 10.0, 3: 30.0, 4: 20.0}, measured)
    assert right == {"pairs": 2, "right": 1.0, "groups": 1, "chosen_within_5_percent": 1.0}
    wrong = ranking(runs, {2: 30.0, 3: 10.0, 4: 20.0}, measured)
    assert wrong == {"pairs": 2, "right": 0.0, "groups": 1, "chosen_within_5_percent": 0.0}


def test_the_command_prints_figures_and_ends_with_json(tmp_path: Path) -> None:
    file = write(
        tmp_path / "runs.csv",
        {"tokens_per_s_per_gpu": "2000", "peak_mem_gib": "30"},
        {"tokens_per_s_per_gpu": "1900", "micro_batch": "1"},
        {"tokens_per_s_per_gpu": "9", "suspect": "True"},
    )
    command = [sys.executable, "-m", "benchmarks.planner", "--runs", str(file), "--shipped"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["runs"] == 3
    assert result["tokens/s/GPU"]["shipped constants"]["all"]["n"] == 2
    assert result["peak memory"]["shipped constants"]["gpu"]["a100-80gb"]["n"] == 1
    assert list(result["tokens/s/GPU"]["apart: the source contradicts itself"]) == ["line 4, GPT-8B on a100-80gb"]
    assert result["constants"] == {name: value for name, value in vars(fitted()).items() if value}


@needs_runs
def test_the_planner_is_as_good_as_it_says_on_published_runs() -> None:
    runs, kept_out = read_runs(PUBLISHED)
    assert kept_out == {}
    speed, memory = Quantity.speed(runs), Quantity.memory(runs)
    crossed = speed.cross_validated(seed=0)
    assert_within(figures(crossed.values()), median=5, p90=12)
    assert_within(figures(speed.left_out(lambda run: run.source).values()), median=6, p90=16)
    assert_within(figures(memory.cross_validated(seed=0).values()), median=6, p90=15)
    predicted = {line: speed.measured[line] * (1 + error) for line, error in crossed.items()}
    ranked = ranking(speed.runs, predicted, speed.measured)
    assert ranked["right"] >= 0.75
    assert ranked["chosen_within_5_percent"] >= 0.8


@needs_runs
def test_the_shipped_constants_are_those_that_the_published_runs_give() -> None:
    runs, _ = read_runs(PUBLISHED)
    for quantity in (Quantity.speed(runs), Quantity.memory(runs)):
        found = quantity.fit(quantity.runs)
        for name in quantity.names:
            assert getattr(fitted(), name) == pytest.approx(getattr(found, name), rel=0.01), name


@needs_runs
def test_memory_of_the_most_loaded_rank_is_not_far_off_anywhere() -> None:
    runs, _ = read_runs(PUBLISHED)
    for run in Quantity.memory(runs).runs:
        assert peak_gib(run, fitted()) == pytest.approx(run.measured_gib, rel=0.25), run.line


def assert_within(found: dict[str, float], median: float, p90: float) -> None:
    assert found["median"] <= median, found
    assert found["p90"] <= p90, found
