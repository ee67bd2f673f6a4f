"""A run directory keeps one run: another is refused with the reason, and so is a place that cannot be written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rubato.problems import RubatoError, SpecError
from workers.engine.run import RunDirectory


def test_a_spec_comes_back_as_it_was(tmp_path: Path, make_spec) -> None:
    spec = make_spec(train={"seed": 7})
    RunDirectory.create(tmp_path / "new" / "run").adopt(spec)
    assert RunDirectory(tmp_path / "new" / "run").read_spec() == spec


def test_a_relative_path_stays_where_it_was_meant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = RunDirectory.create("runs/one")
    monkeypatch.chdir("/")
    assert run.checkpoints == tmp_path / "runs" / "one" / "checkpoints"
    assert run.checkpoints.is_dir()


def test_another_layout_goes_on_with_a_run(tmp_path: Path, make_spec) -> None:
    run = RunDirectory.create(tmp_path)
    run.adopt(make_spec())
    other = make_spec(parallelism={"tensor": 2, "pipeline": 2}, workers={"min": 4}, checkpoint={"every": 3})
    run.adopt(other)
    assert run.read_spec() == other


def test_another_run_is_refused_with_what_differs(tmp_path: Path, make_spec) -> None:
    run = RunDirectory.create(tmp_path)
    run.adopt(make_spec())
    with pytest.raises(RubatoError) as caught:
        run.adopt(make_spec(train={"seed": 1}, optimizer={"lr": 0.5}))
    assert caught.value.code == "run_directory_taken"
    assert [problem.field for problem in caught.value.problems] == ["optimizer.lr", "train.seed"]
    assert f"{tmp_path} holds another run: optimizer.lr is 0.0003 there, 0.5 here; train.seed is 0" in str(caught.value)
    assert run.read_spec() == make_spec()


def test_a_place_that_cannot_be_written_is_named_with_the_cause(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RubatoError, match=r"run directory .*/file/run cannot be written \(.*Not a directory") as caught:
        RunDirectory.create(tmp_path / "file" / "run")
    assert caught.value.problems[0].field == "run_dir"
    with pytest.raises(RubatoError, match="cannot be written"):
        RunDirectory.create("/proc/run")


@pytest.mark.parametrize("content", [None, "{", "[]"])
def test_a_directory_without_a_readable_spec_says_so(tmp_path: Path, content: str | None) -> None:
    run = RunDirectory.create(tmp_path)
    if content is not None:
        run.spec.write_text(content)
    with pytest.raises((RubatoError, SpecError)):
        run.read_spec()


def test_only_the_newest_epoch_may_write(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path)
    assert run.holds(0)
    assert run.claim(1)
    assert run.claim(2)
    assert not run.claim(1)
    assert not run.holds(1)
    assert run.holds(2)
    assert run.newest_epoch() == 2


def test_records_are_lines(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path)
    run.append(run.metrics, {"step": 1, "loss": 2.5})
    run.append(run.metrics, {"step": 2, "loss": 2.25})
    assert [json.loads(line) for line in run.metrics.read_text().splitlines()] == [
        {"step": 1, "loss": 2.5},
        {"step": 2, "loss": 2.25},
    ]
