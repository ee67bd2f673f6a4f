"""``python -m workers.engine``: one line of JSON on stdout, clear refusals, and runs that go on where they stopped."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rubato.checkpoints import list_checkpoints
from rubato.spec import load_spec
from workers.engine.__main__ import main
from workers.engine.run import RunDirectory

TINY = Path(__file__).parents[3] / "examples" / "tiny.yaml"
SMALL = ["train.steps=6", "train.global_batch=4", "data.sequence_length=32", "data.validation.every=0"]
CONSTANT = ["optimizer.schedule.name=constant", "optimizer.schedule.warmup=0"]  # so that more steps are the same run


def run_engine(*arguments: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "workers.engine", *map(str, arguments)],
        cwd=cwd, capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip


def test_it_trains_and_says_the_result_in_one_line(tmp_path: Path) -> None:
    done = run_engine(TINY, "--set", *SMALL, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 1
    result = json.loads(done.stdout)
    assert result["steps"] == 6
    assert result["tokens"] == 6 * 4 * 32
    assert 3.0 < result["loss"] < 6.0
    assert result["tokens_per_s"] > 0
    assert result["layout"]["data"] == result["layout"]["tensor"] == result["layout"]["pipeline"] == 1
    run = Path(result["run_dir"])
    assert run.parent == tmp_path / "runs"
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [metric["step"] for metric in metrics] == [1, 2, 3, 4, 5, 6]
    assert metrics[-1]["loss"] == result["loss"]
    events = [json.loads(line)["kind"] for line in (run / "events.jsonl").read_text().splitlines()]
    assert "checkpoint.saved" in events


@pytest.fixture(autouse=True)
def _log_of_its_own() -> Iterator[None]:
    """The command sends the log of its process to its stderr, which ends with the test."""
    root, package = logging.getLogger(), logging.getLogger("workers")
    handlers, levels = root.handlers[:], (root.level, package.level)
    yield
    root.handlers[:] = handlers
    root.setLevel(levels[0])
    package.setLevel(levels[1])


def engine(capfd: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str, str]:
    """The command without the start of a process."""
    status = main([str(argument) for argument in arguments])
    return status, *capfd.readouterr()


def test_a_run_goes_on_where_it_stopped(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def train(name: str, steps: int) -> dict[str, object]:
        status, out, error = engine(
            capfd, TINY, "--set", *SMALL, *CONSTANT, f"train.steps={steps}", "--run-dir", tmp_path / name
        )
        assert status == 0, error
        return json.loads(out)

    train("parts", 3)
    parts, whole = train("parts", 6), train("whole", 6)
    assert parts["loss"] == whole["loss"]
    assert parts["tokens"] == whole["tokens"]
    assert [stored.step for stored in list_checkpoints(tmp_path / "parts" / "checkpoints")] == [3, 6]
    again = train("parts", 6)  # nothing is left to do
    assert (again["loss"], again["steps"]) == (whole["loss"], 6)


def refused(capfd: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    status, out, error = engine(capfd, *arguments)
    assert status == 2
    assert out == ""
    assert "Traceback" not in error
    return error


def test_the_directory_of_another_run_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = RunDirectory.create(tmp_path)
    run.adopt(load_spec(TINY, SMALL))
    error = refused(capfd, TINY, "--set", *SMALL, "train.seed=5", "--run-dir", tmp_path)
    assert "train.seed is 0 there, 5 here" in error
    assert "fix: " in error
    assert run.read_spec().train.seed == 0


def test_every_field_at_fault_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    error = refused(capfd, TINY, "--set", "model.preset=tyni", "train.stps=3", "--run-dir", tmp_path / "run")
    assert "model.preset: no preset is called 'tyni'; did you mean 'tiny'?" in error
    assert "train.stps: unknown field; did you mean 'steps'?" in error
    assert not (tmp_path / "run").exists()


def test_a_missing_spec_a_missing_corpus_and_a_bad_directory_are_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert "cannot be read" in refused(capfd, tmp_path / "gone.yaml")
    corpus = f"data.train={{path: {tmp_path}/gone.txt}}"
    error = refused(capfd, TINY, "--set", corpus, "--run-dir", tmp_path / "run")
    assert f"data.train.path: {tmp_path}/gone.txt does not exist" in error
    (tmp_path / "file").touch()
    assert "cannot be written" in refused(capfd, TINY, "--run-dir", tmp_path / "file" / "run")


def test_an_impossible_number_of_workers_is_refused_with_the_nearest_possible(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = refused(capfd, TINY, "--set", "parallelism.tensor=2", "--run-dir", tmp_path / "run")
    assert "1 worker was started" in one
    assert "start 2 with torchrun" in one
    monkeypatch.setitem(os.environ, "TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setitem(os.environ, "WORLD_SIZE", "5")
    five = refused(capfd, TINY, "--set", "parallelism.tensor=2", "workers.max=8", "--run-dir", tmp_path / "run")
    assert "5 workers were started" in five
    assert "start 4 or 6 with torchrun" in five
    assert not (tmp_path / "run").exists()


def test_torchrun_ends_where_one_process_ends(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    status, out, error = engine(capfd, TINY, "--set", *SMALL, "--run-dir", tmp_path / "one")
    assert status == 0, error
    four = subprocess.run(
        [
            sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "4", "-m", "workers.engine", str(TINY),
            "--set", *SMALL, "parallelism.tensor=2", "parallelism.pipeline=2",
        ],
        cwd=tmp_path, capture_output=True, text=True, check=False, timeout=240,
    )  # fmt: skip
    assert four.returncode == 0, four.stderr
    result = json.loads(four.stdout)  # of four ranks, one speaks
    assert abs(result["loss"] - json.loads(out)["loss"]) < 1e-4
    assert (result["layout"]["tensor"], result["layout"]["pipeline"]) == (2, 2)
    assert Path(result["run_dir"]).parent == tmp_path / "runs"
    # And one process goes on with what four have saved.
    status, out, error = engine(capfd, TINY, "--set", *SMALL, "--run-dir", result["run_dir"])
    assert status == 0, error
    assert json.loads(out)["loss"] == result["loss"]
