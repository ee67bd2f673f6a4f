"""up, down and status of the stack under one home folder."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path

import httpx
from pydantic import ValidationError

from rubato.problems import RubatoError
from rubato.resources import Cluster
from rubato.stack import parts, ports, processes
from rubato.stack.parts import Child
from rubato.stack.record import (
    PartView,
    StackRecord,
    StackView,
    prepare_home,
    read_record,
    remove_record,
    sole_control,
    write_record,
)

DEFAULT_PORT = 8700
READY_WITHIN_S = 120.0
CONTROL_PLANE_PATIENCE_S = 10.0
RAY_PATIENCE_S = 8.0

Tell = Callable[[str], None]


def up(home: Path, *, cpus: int | None, port: int | None, tell: Tell) -> StackView:
    """Starts what is not running of the stack under ``home`` and returns once it is ready.

    A stack whose control plane has died gets a new one, and its jobs go on. If anything fails or the caller is
    interrupted, what was started here is ended before the error leaves.

    Args:
        cpus: logical CPUs of the Ray head; None: those of the machine.
        port: where the control plane listens; None: 8700, 0: any free port.
        tell: is told, in sentences, what is being done.

    Raises:
        RubatoError: ``stack_busy``, ``stack_differs``, ``port_in_use``, ``bad_home``, ``ray_did_not_start``,
            ``control_plane_did_not_start`` or ``stack_not_ready``.
    """
    prepare_home(home)
    with sole_control(home), ExitStack() as undo:
        record = read_record(home)
        if record and record.state == "up" and processes.living(record.ray):
            _require_same(record, cpus, port)
            if processes.living(record.control_plane):
                tell("already up")
            else:
                tell("the control plane is gone, starting it again on the same Ray")
                ports.require_free(record.ports["api"])
                record = _start_control_plane(home, record, undo)
        else:
            if record:
                tell("ending what is left of an earlier stack")
                _end(home, record)
            record = _start(home, cpus or os.cpu_count() or 1, DEFAULT_PORT if port is None else port, undo, tell)
        undo.pop_all()
    return status(home)


def down(home: Path, *, tell: Tell) -> StackView:
    """Ends the stack under ``home``: the control plane, then Ray with all that runs on it. Does nothing without one.

    Returns once no process and no port of it is left; jobs stay in the record.

    Raises:
        RubatoError: ``stack_busy``, ``stack_not_ended``, ``stack_record_unreadable``.
    """
    if home.is_dir():
        with sole_control(home):
            record = read_record(home)
            if record:
                _end(home, record)
            else:
                tell(f"no stack is up under {home}")
    return status(home)


def status(home: Path) -> StackView:
    """The stack under ``home`` as it is now, by its processes."""
    record = read_record(home)
    ray = processes.living(record.ray) if record else None
    control_plane = processes.living(record.control_plane) if record else None
    if record is None or not (ray or control_plane):
        state = "down"
    elif not (ray and control_plane):
        state = "partly up" if record.state == "up" else "starting"
    else:
        state = record.state
    return StackView.model_validate(
        {
            "state": state,
            "home": home,
            "cpus": record.cpus if record else None,
            "started_at": record.started_at if record else None,
            "urls": record.urls if record else {},
            "ray": _part(ray.pid if ray else None, parts.ray_log(home)),
            "control_plane": _part(control_plane.pid if control_plane else None, parts.control_plane_log(home)),
        }
    )


def _part(pid: int | None, log: Path) -> PartView:
    return PartView(state="running" if pid else "not running", pid=pid, log=log)


def _require_same(record: StackRecord, cpus: int | None, port: int | None) -> None:
    differences = []
    if cpus not in (None, record.cpus):
        differences.append(f"{record.cpus} CPUs, not {cpus}")
    if port not in (None, 0, record.ports["api"]):
        differences.append(f"port {record.ports['api']}, not {port}")
    if differences:
        raise RubatoError(
            f"a stack is up already, with {' and '.join(differences)}",
            fix="use it as it is, or end it first with `rubato down`",
            code="stack_differs",
            status=409,
        )


def _start(home: Path, cpus: int, port: int, undo: ExitStack, tell: Tell) -> StackRecord:
    api_port = port or ports.free_ports(1)[0]
    ports.require_free(api_port)
    chosen = parts.choose_ray_ports()
    temp_dir = _make_temp_dir()
    record = StackRecord(
        state="starting",
        cpus=cpus,
        started_at=datetime.now(UTC),
        temp_dir=temp_dir,
        ports={"api": api_port, **chosen},
        urls={
            "api": f"http://{ports.HOST}:{api_port}",
            "dashboard": f"http://{ports.HOST}:{chosen['dashboard']}",
        },
    )
    undo.callback(lambda: _end(home, record))
    write_record(home, record)
    tell(f"starting Ray with {cpus} CPUs and the control plane")
    ray = parts.start_ray(home, record)
    record = record.model_copy(update={"ray": ray.identity})
    write_record(home, record)
    return _start_control_plane(home, record, undo, ray)


def _make_temp_dir() -> Path:
    made = Path(tempfile.mkdtemp(prefix="rb-"))
    if len(os.fsencode(made)) > parts.LONGEST_TEMP_DIR:
        made.rmdir()
        raise RubatoError(
            f"the temporary folder {made.parent} is too long a path: Ray's sockets in it would pass the system's limit",
            fix="set TMPDIR to a short path such as /tmp",
            code="temp_dir_too_long",
        )
    return made


def _start_control_plane(home: Path, record: StackRecord, undo: ExitStack, ray: Child | None = None) -> StackRecord:
    child = parts.start_control_plane(home, record)
    identity = child.identity
    undo.callback(lambda: _end_control_plane(record.model_copy(update={"control_plane": identity})))
    record = record.model_copy(update={"control_plane": identity})
    write_record(home, record)
    _wait_until_ready(record.urls["api"], [child, *([ray] if ray else [])])
    record = record.model_copy(update={"state": "up"})
    write_record(home, record)
    return record


def _wait_until_ready(url: str, children: list[Child]) -> None:
    """Returns once the control plane is ready and sees CPUs: until then no job could begin."""
    deadline = time.monotonic() + READY_WITHIN_S
    answer = "nothing answers"
    with httpx.Client(base_url=url, timeout=5.0, trust_env=False) as http:
        while time.monotonic() < deadline:
            for child in children:
                child.require_alive()
            try:
                response = http.get("/readyz")
                if response.is_success:
                    response = http.get("/v1/cluster")
                    if response.is_success and Cluster.model_validate_json(response.content).cpus > 0:
                        return
                answer = response.text
            except httpx.TransportError as error:
                answer = str(error)
            except ValidationError:
                answer = f"no control plane of this version: {answer}"
            time.sleep(0.1)
    logs = " and ".join(str(child.log) for child in children)
    raise RubatoError(
        f"the stack was not ready within {READY_WITHIN_S:.0f} s; its last answer: {answer}",
        fix=f"read {logs}; on a busy machine, try again when there is less load",
        code="stack_not_ready",
        status=503,
    )


def _end_control_plane(record: StackRecord) -> None:
    control_plane = processes.living(record.control_plane)
    if control_plane:
        processes.end(control_plane, CONTROL_PLANE_PATIENCE_S)


def _end(home: Path, record: StackRecord) -> None:
    """Ends all of a stack and forgets it. The control plane goes first, so that it does not see its jobs die."""
    _end_control_plane(record)
    ended = processes.end_family([record.control_plane, record.ray], record.temp_dir, RAY_PATIENCE_S)
    # A port of a stack that was dead already may be someone else's by now.
    taken = [f"{port} ({name})" for name, port in record.ports.items() if ended and not ports.is_free(port)]
    if taken:
        raise RubatoError(
            f"ports of the ended stack are still in use: {', '.join(taken)}",
            fix="see who has them with `ss -ltnp`; if that is none of Rubato's, delete stack.json",
            code="stack_not_ended",
            status=500,
        )
    shutil.rmtree(record.temp_dir, ignore_errors=True)
    remove_record(home)
