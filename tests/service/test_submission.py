"""A submission that is cut off leaves nothing behind, and takes nothing of anybody else."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from service.jobs import run_directory
from tests.service.world import SPEC, Host, World

pytestmark = pytest.mark.parametrize("host", ["sqlite"], indirect=True)


class KilledError(BaseException):
    """Stands for the moment in which the process is no more."""


def age(run_dir: Path, seconds: float = 3600) -> None:
    mark = run_dir / ".submitting"
    then = mark.stat().st_mtime - seconds
    os.utime(mark, (then, then))


async def cut_off(world: World, monkeypatch: pytest.MonkeyPatch, at: str) -> Path:
    """Submits, and dies before the job is stored, or after it and before its run directory is kept."""

    def dies(*_: object, **__: object) -> None:
        raise KilledError

    before = set(world.plane.settings.runs.glob("*"))
    monkeypatch.setattr(run_directory, "remove", lambda path: None)
    if at == "before":
        monkeypatch.setattr(type(world.plane.jobs), "_insert", dies)
    else:
        monkeypatch.setattr(run_directory, "keep", dies)
    with pytest.raises(KilledError):
        await world.http.post("/v1/jobs", json=SPEC)
    monkeypatch.undo()
    (made,) = set(world.plane.settings.runs.glob("*")) - before
    return made


async def test_a_run_directory_without_a_job_is_taken_back(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    async with host.world() as world:
        left = await cut_off(world, monkeypatch, "before")
        kept = Path((await world.submit())["run_dir"])
        assert [path.name for path in kept.iterdir()] == ["spec.json"]
    async with host.world() as world:
        await world.plane.jobs.sweep()
        assert left.exists(), "another control plane may be storing it"
        age(left)
        async with world.plane.supervising():
            await asyncio.sleep(0)
        assert not left.exists()
        assert kept.exists()


async def test_a_job_that_was_stored_keeps_its_run_directory(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    async with host.world() as world:
        run_dir = await cut_off(world, monkeypatch, "after")
        age(run_dir)
        await world.plane.jobs.sweep()
        assert [path.name for path in run_dir.iterdir()] == ["spec.json"]
        assert (await world.job(run_dir.name))["state"] == "QUEUED"


async def test_run_directories_of_another_database_are_let_alone(
    host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with host.world() as world:
        run_dir = await cut_off(world, monkeypatch, "before")
        age(run_dir)
    async with Host(f"sqlite:///{tmp_path}/other.db", tmp_path).world() as other:
        await other.plane.jobs.sweep()
        assert run_dir.exists()
