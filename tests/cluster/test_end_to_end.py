"""A job from submit to cancel through the command line: scaled, robbed of a worker, and left without control plane."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest
from stacks import Stack, stack

from rubato.client import Client
from rubato.problems import RubatoError
from rubato.resources import Job
from rubato.stack.ports import is_free
from rubato.stack.processes import family

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

PATIENCE_S = 150.0

SPEC: dict[str, Any] = {
    "name": "end-to-end",
    "model": {"preset": "tiny"},
    "data": {"train": {"builtin": "python-stdlib"}, "sequence_length": 64},
    "train": {"steps": 1_000_000, "global_batch": 8},
    "parallelism": {"tensor": 2, "pipeline": 2},
    "workers": {"min": 4, "max": 8},
    "checkpoint": {"every": 100_000},
}


@pytest.fixture
def up(tmp_path: Path) -> Iterator[Stack]:
    with stack(tmp_path / "home", cpus=8) as made:
        yield made


def test_scaled_robbed_and_left_alone(up: Stack, tmp_path: Path) -> None:
    file = tmp_path / "spec.json"
    file.write_text(json.dumps(SPEC))
    submitted = up.done("submit", "-f", file, "--idempotency-key", "once")
    job_id = submitted["id"]
    assert up.done("submit", "-f", file, "--idempotency-key", "once")["id"] == job_id
    with up.client() as client:
        _trains(client, job_id, workers=4)
        _an_impossible_size_is_refused_with_the_nearest(up)
        _scales(up, client, job_id, 8)
        _robbed_while_nobody_commands(up, client, job_id)
        _scales(up, client, job_id, 4)
        _is_cancelled_with_a_checkpoint(up, client, job_id)
        _goes_down_with_a_job_on_it(up, client, up.done("submit", "-f", file)["id"])


def _trains(client: Client, job_id: str, workers: int) -> Job:
    return _until(client, job_id, lambda job: job.workers.observed == workers and job.progress.step >= 3)


def _until(client: Client, job_id: str, seen: Callable[[Job], Any]) -> Job:
    """The job once it is as wanted. Fails with what its driver said when it is not in time."""
    deadline = time.monotonic() + PATIENCE_S
    job = client.job(job_id)
    while not seen(job):
        assert not job.state.terminal, f"{job.reason}\n{client.logs(job_id)[-3000:]}"
        if time.monotonic() > deadline:
            pytest.fail(f"not as wanted within {PATIENCE_S:g} s: {job}\n{client.logs(job_id)[-3000:]}")
        time.sleep(0.2)
        job = client.job(job_id)
    return job


def _an_impossible_size_is_refused_with_the_nearest(up: Stack) -> None:
    refused = up.run("scale", "end-to-end", 5)
    assert (refused.code, refused.problem["code"]) == (2, "impossible_size")
    assert "4 or 8" in refused.problem["errors"][0]["fix"]


def _scales(up: Stack, client: Client, job_id: str, workers: int) -> None:
    operation = up.done("scale", "end-to-end", workers, "--wait")
    assert operation["state"] == "DONE", operation
    names = [phase["name"] for phase in operation["phases"]]
    assert names[0] == "accepted"
    assert "regrouping" in names
    job = _until(client, job_id, lambda job: job.workers.observed == workers and job.state == "RUNNING")
    assert job.layout
    assert (job.layout.data, job.layout.pipeline, job.layout.tensor) == (workers // 4, 2, 2)
    shown = up.done("show", "end-to-end")
    assert shown["workers"]["desired"] == workers
    assert sorted(member["rank"] for member in shown["workers"]["members"]) == list(range(workers))


def _robbed_while_nobody_commands(up: Stack, client: Client, job_id: str) -> None:
    before, events = client.job(job_id), list(client.events(job_id))
    victim = next(member for member in before.workers.members if member.rank == 0)
    assert victim.pid
    _kill_the_control_plane(up)
    with pytest.raises(RubatoError, match="cannot reach"):
        client.job(job_id)
    os.kill(victim.pid, signal.SIGKILL)
    _trains_on_by_itself(Path(before.run_dir))
    up.done("up")

    def back(job: Job) -> bool:
        formed = [event.data["workers"] for event in client.events(job_id) if event.kind == "generation.formed"]
        return formed == [4, 8, 4, 8] and job.state == "RUNNING" and job.workers.observed == 8

    job = _until(client, job_id, back)
    assert (job.attempts, job.layout, job.restarts.hardware) == (before.attempts, before.layout, 1)
    whole = list(client.events(job_id))
    assert whole[: len(events)] == events
    lost = [event for event in whole if event.kind == "worker.lost"]
    assert [event.data["pid"] for event in lost] == [victim.pid]
    steps = [metric.step for metric in client.metrics(job_id)]
    assert steps == list(range(1, len(steps) + 1))
    assert len(steps) > before.progress.step


def _kill_the_control_plane(up: Stack) -> None:
    identity = up.record.control_plane
    assert identity
    control_plane = psutil.Process(identity.pid)
    control_plane.kill()
    psutil.wait_procs([control_plane], timeout=10)


def _trains_on_by_itself(run_dir: Path) -> None:
    """Waits until the record says that the others formed a generation without the lost one, and made steps in it."""

    def records(name: str) -> list[dict[str, Any]]:
        # The last line may be half written.
        return [json.loads(line) for line in (run_dir / name).read_text().split("\n")[:-1]]

    def alone() -> bool:
        formed = [event["data"] for event in records("events.jsonl") if event["kind"] == "generation.formed"]
        shrunk = [new["generation"] for old, new in pairwise(formed) if (old["workers"], new["workers"]) == (8, 4)]
        return sum(metric["generation"] in shrunk for metric in records("metrics.jsonl")) >= 3

    deadline = time.monotonic() + PATIENCE_S
    while not alone():
        assert time.monotonic() < deadline, "training did not go on without the control plane"
        time.sleep(0.2)


def _is_cancelled_with_a_checkpoint(up: Stack, client: Client, job_id: str) -> None:
    operation = up.done("cancel", "end-to-end", "--wait")
    assert operation["state"] == "DONE", operation
    job = client.wait(job_id)
    assert job.state == "CANCELLED"
    (checkpoint,) = up.done("checkpoints", "end-to-end")["items"]
    assert checkpoint["verified"]
    assert checkpoint["step"] == job.progress.step
    followed = up.run("metrics", "end-to-end", "-f")
    steps = [json.loads(line)["step"] for line in followed.out.splitlines()]
    assert steps == list(range(1, job.progress.step + 1))
    kinds = [json.loads(line)["kind"] for line in up.run("events", "end-to-end", "-f").out.splitlines()]
    assert kinds[0] == "job.queued"
    assert kinds.count("attempt.started") == 1


def _goes_down_with_a_job_on_it(up: Stack, client: Client, job_id: str) -> None:
    job = _until(client, job_id, lambda job: any(member.pid for member in job.workers.members))
    record, started = up.record, up.processes()
    workers = {member.pid for member in job.workers.members if member.pid}
    assert workers <= {process.pid for process in started}
    assert up.done("down")["state"] == "down"
    assert [process for process in started if process.is_running() and process.status() != "zombie"] == []
    assert family([record.ray, record.control_plane], record.temp_dir) == set()
    assert [port for port in record.ports.values() if not is_free(port)] == []
