"""What becomes of training when a save fails, and what is told when a job stops before its last step."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from rubato.layout import Layout
from rubato.problems import RubatoError
from rubato.spec import JobSpec
from tests.engine.forked import TIMEOUT, RankError, in_one_process, run_ranks, start_group
from tests.engine.jobs import tiny_spec, write_corpus
from workers.engine.checkpoint import CheckpointStore
from workers.engine.device import Device
from workers.engine.membership import Generation, Standing, StaticMembership
from workers.engine.mesh import ReplicaMesh
from workers.engine.run import RunDirectory
from workers.engine.train import train

Told = list[tuple[str, dict[str, Any]]]


def spec_in(folder: Path, tensor: int = 1) -> JobSpec:
    shape = {"pipeline": 1, "tensor": tensor, "micro_batch": 4}
    sections: dict[str, Any] = {"train": {"steps": 6, "global_batch": 8}, "checkpoint": {"every": 2}}
    return tiny_spec(write_corpus(folder), parallelism=shape, workers={"min": tensor, "max": tensor}, **sections)


def fill_the_disk(at: set[int]) -> None:
    """In this process, saves of these steps meet a full disk."""
    publish = CheckpointStore._publish

    def full(self: CheckpointStore, building: Path, final: Path, manifest: Any) -> Any:
        if manifest.step in at:
            raise OSError(errno.ENOSPC, "No space left on device")
        return publish(self, building, final, manifest)

    CheckpointStore._publish = full  # type: ignore[method-assign]


def two_ranks(folder: Path, full_at: set[int]) -> list[tuple[str, Told]]:
    """How training ended on each of the ranks of a replica, of which the first meets a full disk; what it told."""
    spec, run = spec_in(folder, tensor=2), RunDirectory.create(folder / "run")

    def work(rank: int, store: dist.Store) -> tuple[str, Told]:
        start_group(store, "world", rank, 2)
        if rank == 0:
            fill_the_disk(full_at)
        told: Told = []
        membership = StaticMembership(on_report=lambda kind, record: told.append((kind, record)))
        mesh = ReplicaMesh.of_world(Layout(1, 1, 2), rank, Device.of_rank(0, gpu=False), TIMEOUT)
        try:
            result = train(spec, membership=membership, mesh=mesh, run=run, warm_up_steps=0)
            return f"step {result.step}", told
        except RubatoError as error:
            return f"{error.code} {error.status}", told

    return run_ranks(2, work)


def events(told: Told, part: str) -> list[tuple[str, int]]:
    named = [(record["kind"], record["data"]["step"]) for kind, record in told if kind == "event"]
    return [(kind, step) for kind, step in named if part in kind]


def test_a_save_that_fails_is_told_and_the_next_one_tries_again(tmp_path: Path) -> None:
    (end, told), (other_end, other_told) = two_ranks(tmp_path, {2})
    assert end == other_end == "step 6"
    assert events(told, "checkpoint") == [("checkpoint.failed", 2), ("checkpoint.saved", 4), ("checkpoint.saved", 6)]
    cause = next(record["data"]["cause"] for _, record in told if record.get("kind") == "checkpoint.failed")
    assert "No space left on device" in cause
    assert events(other_told, "checkpoint") == []
    assert [record["step"] for kind, record in told if kind == "metric"] == [1, 2, 3, 4, 5, 6]


def test_the_last_save_must_not_fail(tmp_path: Path) -> None:
    (end, told), (other_end, _) = two_ranks(tmp_path, {6})
    assert end == other_end == "checkpoint_unsaved 500"
    assert events(told, "checkpoint") == [("checkpoint.saved", 2), ("checkpoint.saved", 4)]


class Drained(StaticMembership):
    """Asks for a boundary at once, and has the state saved instead of forming another generation."""

    def join(self, standing: Standing) -> Generation | None:
        return None if self._joined else super().join(standing)

    def boundary_requested(self) -> bool:
        return True

    def save_requested(self) -> bool:
        return True


def drained(folder: Path, before: Callable[[], None] = lambda: None) -> Told:
    spec, run = spec_in(folder), RunDirectory.create(folder / "run")
    told: Told = []

    def work() -> Told:
        before()
        membership = Drained(on_report=lambda kind, record: told.append((kind, record)))
        mesh = ReplicaMesh.of_world(Layout(1, 1, 1), 0, Device.of_rank(0, gpu=False), TIMEOUT)
        train(spec, membership=membership, mesh=mesh, run=run, warm_up_steps=0)
        return told

    return in_one_process(work)


def test_the_step_that_led_to_the_checkpoint_of_a_stop_is_told(tmp_path: Path) -> None:
    told = drained(tmp_path)
    assert events(told, "checkpoint") == [("checkpoint.saved", 1)]
    assert [record["step"] for kind, record in told if kind == "metric"] == [1]


def test_the_save_of_a_stop_must_not_fail(tmp_path: Path) -> None:
    with pytest.raises(RankError, match="could not be saved"):
        drained(tmp_path, lambda: fill_the_disk({1}))


def test_a_worker_that_saves_or_validates_says_so_and_says_when_it_is_over(tmp_path: Path) -> None:
    doing = [record["doing"] for kind, record in drained(tmp_path) if kind == "busy"]
    assert doing == ["state", None, "checkpoint", None]
