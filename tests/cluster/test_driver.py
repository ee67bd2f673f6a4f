"""The driver on a real Ray cluster: one job that grows, loses workers, shrinks, loses everybody, and finishes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from control_plane import TOKEN, ControlPlane

from rubato.spec import parse_spec
from workers.engine.run import RunDirectory

if TYPE_CHECKING:
    from conftest import RayHead

PATIENCE_S = 300.0
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

STEPS = 150
SPEC: dict[str, Any] = {
    "name": "elastic",
    "model": {"family": "llama", "preset": "tiny"},
    "data": {"train": {"builtin": "python-stdlib"}, "sequence_length": 64},
    "train": {"steps": STEPS, "global_batch": 8},
    "optimizer": {"lr": 1e-3},  # at 3e-3 mere rounding grows to 1e-2 over so many steps
    "parallelism": {"tensor": 2, "pipeline": 2, "micro_batch": 2},
    "workers": {"min": 4, "max": 8},
    "checkpoint": {"every": 20, "keep_last": 2},
}


def prepare(root: Path, **changes: Any) -> RunDirectory:
    run = RunDirectory.create(root)
    run.adopt(parse_spec(SPEC | changes))
    return run


@contextmanager
def driving(
    head: RayHead, run: RunDirectory, *, url: str | None, workers: int = 4
) -> Iterator[subprocess.Popen[bytes]]:
    """A driver as the Jobs API would start it."""
    command = [sys.executable, "-m", "workers.driver", "--run-dir", str(run.root)]
    command += ["--attempt", f"a-{run.root.name}", "--epoch", "1", "--workers", str(workers)]
    command += ["--control", url] if url else []
    environment = os.environ | {
        "RAY_ADDRESS": head.address,
        "RUBATO_ATTEMPT_TOKEN": TOKEN,
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # keeps the loopback address
    }
    driver = subprocess.Popen(command, env=environment, start_new_session=True)
    try:
        yield driver
    finally:
        if driver.poll() is None:
            driver.kill()
        driver.wait()


def pids(control: ControlPlane, replica: str) -> list[int]:
    assert control.request
    members = [member for member in control.request.members if member.replica == replica and member.state != "lost"]
    return [member.pid for member in members if member.pid]


def undisturbed_losses(run: RunDirectory) -> list[float]:
    """The curve of the same spec on one process, without any of this."""
    alone = run.root.parent / "alone"
    single = {"parallelism": {"micro_batch": 2}, "workers": {"min": 1, "max": 1}}
    spec = run.root.parent / "alone.json"
    spec.write_text(json.dumps(SPEC | single))
    command = [sys.executable, "-m", "workers.engine", str(spec), "--run-dir", str(alone)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return [json.loads(line)["loss"] for line in (alone / "metrics.jsonl").read_text().splitlines()]


def test_a_job_grows_loses_workers_shrinks_loses_all_and_ends_on_its_curve(ray_head: RayHead, tmp_path: Path) -> None:
    run = prepare(tmp_path / "run")
    control = ControlPlane(workers=4)
    with driving(ray_head, run, url=control.url) as driver:
        control.wait("the first steps", lambda: control.step >= 3)
        first = set(pids(control, "replica-0"))

        control.scale(8, "op-grow")
        control.wait("two replicas train", lambda: control.of_kind("scale.done"))
        assert set(pids(control, "replica-0")) == first, "survivors keep their processes"
        assert control.request
        assert control.request.layout
        assert control.request.layout.data == 2

        # Nobody but the control plane notices that it is away.
        control.go_away()
        os.kill(pids(control, "replica-1")[2], signal.SIGKILL)
        control.come_back()
        control.wait("the others train on", lambda: control.of_kind("generation.formed")[-1].data["data"] == 1)
        control.wait("the replica is back", lambda: control.of_kind("generation.formed")[-1].data["data"] == 2)
        assert set(pids(control, "replica-0")) == first

        control.scale(4, "op-shrink")
        control.wait("one replica trains", lambda: len(control.of_kind("scale.done")) == 2)
        assert set(pids(control, "replica-0")) == first
        control.wait("the other is gone", lambda: control.of_kind("replica.released"))

        for pid in pids(control, "replica-0"):
            os.kill(pid, signal.SIGKILL)
        control.wait("all is loaded again", lambda: control.of_kind("checkpoint.restored"))
        control.wait("the end", lambda: control.states[-1] == "SUCCEEDED")
        assert driver.wait(PATIENCE_S) == 0

    assert control.request.restarts.hardware == 2
    assert control.states[0] == "STARTING"
    assert {"RUNNING", "RESIZING", "RECOVERING"} <= set(control.states)
    formed = [(event.data["data"], event.data["workers"]) for event in control.of_kind("generation.formed")]
    assert formed == [(1, 4), (2, 8), (1, 4), (2, 8), (1, 4), (1, 4)]
    generations = [event.data["generation"] for event in control.of_kind("generation.formed")]
    assert generations == sorted(set(generations))
    phases = [event.phase for event in control.events if event.operation == "op-grow"]
    assert phases == ["accepted", "starting", "regrouping", "done"]
    assert len(control.of_kind("worker.lost")) == 2

    # What was told is what is written, and nothing is missing or there twice beyond what was trained anew.
    written = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    assert [metric.step for metric in control.metrics] == [record["step"] for record in written]
    assert len(control.events) == len(run.events.read_text().splitlines())
    losses = {metric.step: metric.loss for metric in control.metrics}
    assert sorted(losses) == list(range(1, STEPS + 1))
    repeated = len(control.metrics) - STEPS
    restored = control.of_kind("checkpoint.restored")[0].data["step"]
    assert restored % 20 == 0
    assert restored > 0
    assert 0 <= repeated <= 20, "only steps since the last checkpoint are done again"
    assert {metric.data for metric in control.metrics} == {1, 2}

    expected = undisturbed_losses(run)
    assert max(abs(losses[step] - loss) for step, loss in enumerate(expected, 1)) < 1e-3
    assert losses[STEPS] < 0.8 * losses[1]


def test_a_corpus_that_is_empty_fails_the_attempt_at_once(ray_head: RayHead, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").touch()
    data = {"train": {"path": str(tmp_path / "empty.txt")}, "sequence_length": 64}
    run = prepare(tmp_path / "run", data=data)
    control = ControlPlane(workers=4)
    with driving(ray_head, run, url=control.url) as driver:
        assert driver.wait(PATIENCE_S) == 1
    assert control.request
    assert control.request.state == "FAILED"
    assert control.request.reason_code == "user_error"
    assert "data.train.path" in control.request.reason_message
    assert len(control.of_kind("replica.starting")) == 1
    assert not control.of_kind("replica.restarting")
    assert control.events[-1].kind == "attempt.failed"


def test_what_cannot_be_placed_waits_without_disturbing_and_a_drain_saves(ray_head: RayHead, tmp_path: Path) -> None:
    run = prepare(tmp_path / "run", workers={"min": 4, "max": 12}, train={"steps": 4000, "global_batch": 12})
    control = ControlPlane(workers=4)
    with driving(ray_head, run, url=control.url) as driver:
        control.wait("the first steps", lambda: control.step >= 2)
        control.scale(12, "op-too-much")
        control.wait("somebody waits for room", lambda: control.of_kind("replica.waiting"))
        waiting = control.of_kind("replica.waiting")[-1]
        assert "CPU" in waiting.data["cause"]
        before = control.step
        control.wait("training goes on", lambda: control.step >= before + 3)
        control.scale(4, "op-back")
        control.wait("the wish is taken back", lambda: control.of_kind("scale.done"))
        assert [event.operation for event in control.events if event.done] == ["op-too-much", "op-back"]
        control.cancel("drain", "op-cancel")
        assert driver.wait(PATIENCE_S) == 0
    assert control.states[-1] == "CANCELLED"
    saved = control.of_kind("checkpoint.saved")[-1]
    assert saved.data["step"] == control.step
    phases = [event.phase for event in control.events if event.operation == "op-cancel"]
    assert phases == ["accepted", "saving", "done"]
    ray_head.wait_until_idle()
