"""up, status and down with a real Ray: what is said, what runs, and that nothing is left."""

from __future__ import annotations

import signal
from pathlib import Path

import psutil
import pytest
from stacks import Stack

from rubato.stack.ports import is_free
from rubato.stack.processes import family

pytestmark = pytest.mark.cluster


def test_a_stack_from_up_to_down(tmp_path: Path) -> None:
    stack = Stack(tmp_path / "home")
    try:
        view = stack.done("up", "--cpus", 3, "--port", 0)
        assert (view["state"], view["cpus"]) == ("up", 3)
        _status_tells_what_runs(stack)
        _a_second_up_says_so(stack)
        _the_port_is_refused_to_another(stack, tmp_path / "other")
        _a_dead_control_plane_is_started_again_on_the_same_ray(stack)
        _everything_listens_on_this_machine_only(stack)
    finally:
        record = stack.record
        started = stack.processes()
        ended = stack.run("down")
    assert ended.code == 0, ended.err
    assert ended.document["state"] == "down"
    assert len(started) >= 5
    assert family([record.ray, record.control_plane], record.temp_dir) == set()
    assert not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in started)
    assert [port for port in record.ports.values() if not is_free(port)] == []
    assert not record.temp_dir.exists()
    assert not (stack.home / "stack.json").exists()
    assert stack.run("status").code == 3
    assert stack.run("list").code == 3


def _status_tells_what_runs(stack: Stack) -> None:
    status = stack.done("status")
    assert status["ray"]["state"] == status["control_plane"]["state"] == "running"
    assert (status["cluster"]["state"], status["cluster"]["cpus"]) == ("reachable", 3)
    assert stack.done("list") == {"items": [], "next": None}


def _a_second_up_says_so(stack: Stack) -> None:
    before = stack.record
    again = stack.run("up", "--cpus", 3)
    assert again.code == 0
    assert "already up" in again.err
    other = stack.run("up", "--cpus", 4)
    assert (other.code, other.problem["code"]) == (2, "stack_differs")
    assert stack.record == before


def _the_port_is_refused_to_another(stack: Stack, home: Path) -> None:
    other = Stack(home)
    refused = other.run("up", "--port", stack.record.ports["api"])
    assert (refused.code, refused.problem["code"]) == (2, "port_in_use")
    assert not (home / "stack.json").exists()


def _a_dead_control_plane_is_started_again_on_the_same_ray(stack: Stack) -> None:
    before = stack.record
    assert before.control_plane
    assert before.ray
    psutil.Process(before.control_plane.pid).send_signal(signal.SIGKILL)
    psutil.wait_procs([psutil.Process(before.control_plane.pid)], timeout=10)
    partly = stack.run("status")
    assert (partly.code, partly.document["state"]) == (3, "partly up")
    view = stack.done("up")
    assert view["ray"]["pid"] == before.ray.pid
    assert view["control_plane"]["pid"] != before.control_plane.pid
    assert view["urls"]["api"] == before.urls["api"]


def _everything_listens_on_this_machine_only(stack: Stack) -> None:
    listening = [
        connection.laddr[0]
        for process in stack.processes()
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert listening
    assert {address.removeprefix("::ffff:") for address in listening} == {"127.0.0.1"}


def test_a_ray_that_does_not_start_is_said_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stack = Stack(tmp_path / "home")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    broken = tmp_path / "ray"
    broken.mkdir()
    (broken / "__init__.py").write_text("raise ImportError('this Ray is broken on purpose')")
    failed = stack.run("up", "--cpus", 1, "--port", 0)
    assert (failed.code, failed.problem["code"]) == (3, "ray_did_not_start")
    assert "this Ray is broken on purpose" in failed.problem["detail"]
    assert str(stack.home / "logs" / "ray.log") in failed.problem["fix"]
    assert stack.run("status").document["state"] == "down"
    assert not (stack.home / "stack.json").exists()
