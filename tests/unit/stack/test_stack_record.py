"""stack.json, its lock, its home, ports, and what up, down and status make of them. Without Ray."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from rubato.problems import RubatoError
from rubato.stack import local, parts, ports
from rubato.stack.processes import identify
from rubato.stack.record import (
    ProcessIdentity,
    StackRecord,
    prepare_home,
    read_record,
    sole_control,
    write_record,
)

DEAD = ProcessIdentity(pid=os.getpid(), created=1.0)


def record(tmp_path: Path, **changes: object) -> StackRecord:
    fields = {
        "state": "up",
        "cpus": 8,
        "started_at": datetime.now(UTC),
        "temp_dir": tmp_path / "rb-1",
        "ray": DEAD,
        "control_plane": DEAD,
        "ports": {"api": 1, **dict.fromkeys(parts.RAY_PORTS, 1)},
        "urls": {"api": "http://127.0.0.1:1", "dashboard": "http://127.0.0.1:2"},
    }
    return StackRecord.model_validate({**fields, **changes})


@pytest.fixture
def home(tmp_path: Path) -> Path:
    prepare_home(tmp_path / "home")
    return tmp_path / "home"


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_a_record_survives_being_written(home: Path, tmp_path: Path) -> None:
    assert read_record(home) is None
    write_record(home, record(tmp_path))
    assert read_record(home) == record(tmp_path, started_at=read_record(home).started_at)  # type: ignore[union-attr]
    assert [path.name for path in home.glob("stack*")] == ["stack.json"]


def test_a_record_that_is_none_is_said_not_ignored(home: Path) -> None:
    (home / "stack.json").write_text("{")
    with pytest.raises(RubatoError, match=r"stack\.json cannot be read") as caught:
        local.status(home)
    assert caught.value.code == "stack_record_unreadable"


def test_a_home_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RubatoError) as caught:
        prepare_home(tmp_path / "file" / "home")
    assert caught.value.code == "bad_home"
    assert "--home" in caught.value.fix


def test_only_one_may_start_or_end_a_stack(home: Path) -> None:
    with sole_control(home):
        for command in (lambda: local.up(home, cpus=1, port=0, tell=print), lambda: local.down(home, tell=print)):
            with pytest.raises(RubatoError, match=f"process {os.getpid()} is starting or ending") as caught:
                command()
            assert caught.value.code == "stack_busy"
    with sole_control(home):
        pass


def test_status_by_processes(home: Path, tmp_path: Path) -> None:
    assert local.status(home).state == "down"
    me = identify(os.getpid())
    for ray, control_plane, state in ((DEAD, DEAD, "down"), (me, DEAD, "partly up"), (me, me, "up")):
        write_record(home, record(tmp_path, ray=ray, control_plane=control_plane))
        view = local.status(home)
        assert (view.state, view.ray.pid) == (state, me.pid if ray is me else None)


def test_down_without_a_stack_says_so(home: Path, tmp_path: Path) -> None:
    told: list[str] = []
    assert local.down(home, tell=told.append).state == "down"
    assert told == [f"no stack is up under {home}"]
    assert local.down(tmp_path / "nothing", tell=told.append).state == "down"
    assert not (tmp_path / "nothing").exists()


def test_down_forgets_a_stack_that_is_dead(home: Path, tmp_path: Path) -> None:
    (tmp_path / "rb-1").mkdir()
    write_record(home, record(tmp_path))
    assert local.down(home, tell=print).state == "down"
    assert read_record(home) is None
    assert not (tmp_path / "rb-1").exists()


def test_up_when_up_says_so_and_changes_nothing(home: Path, tmp_path: Path) -> None:
    me = identify(os.getpid())
    write_record(home, record(tmp_path, ray=me, control_plane=me))
    before, told = read_record(home), list[str]()
    assert local.up(home, cpus=8, port=1, tell=told.append).state == "up"
    assert local.up(home, cpus=None, port=None, tell=told.append).state == "up"
    assert told == ["already up", "already up"]
    with pytest.raises(RubatoError, match="8 CPUs, not 4 and port 1, not 2") as caught:
        local.up(home, cpus=4, port=2, tell=told.append)
    assert caught.value.code == "stack_differs"
    assert read_record(home) == before


def test_a_port_in_use_is_refused_before_anything_starts(home: Path, taken: int) -> None:
    with pytest.raises(RubatoError, match=rf"port {taken} is in use by process {os.getpid()} ") as caught:
        local.up(home, cpus=1, port=taken, tell=print)
    assert caught.value.code == "port_in_use"
    assert "--port" in caught.value.fix
    assert read_record(home) is None


def test_free_ports_are_free_and_different(taken: int) -> None:
    assert not ports.is_free(taken)
    found = ports.free_ports(20)
    assert len(set(found)) == 20
    assert all(ports.is_free(port) for port in found)


@pytest.mark.parametrize("ends", ["ray", "control plane"])
def test_a_part_that_does_not_start_leaves_nothing_behind(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    """Both parts are stand-ins here: one dies at once with a message, the other would live for ever."""

    def stand_in(dies: bool) -> list[str]:
        code = "import sys; sys.exit('no such thing: rubato test')" if dies else "import time; time.sleep(600)"
        return [sys.executable, "-c", code]

    real = parts._start

    def start(name: str, command: list[str], *rest: object) -> parts.Child:
        return real(name, stand_in((name == "Ray") is (ends == "ray")), *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(parts, "_start", start)
    monkeypatch.setenv("TMPDIR", "/tmp")
    marks = []
    choose = local._make_temp_dir
    monkeypatch.setattr(local, "_make_temp_dir", lambda: marks.append(choose()) or marks[0])
    with pytest.raises(RubatoError, match="no such thing: rubato test") as caught:
        local.up(home, cpus=1, port=0, tell=print)
    assert caught.value.code == ("ray_did_not_start" if ends == "ray" else "control_plane_did_not_start")
    assert read_record(home) is None
    assert not marks[0].exists()
    assert local.processes.family([], marks[0]) == set()


def test_a_temporary_folder_that_is_too_long_for_sockets_is_refused(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("x" * 50)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    with pytest.raises(RubatoError, match="too long a path") as caught:
        local.up(home, cpus=1, port=0, tell=print)
    assert caught.value.code == "temp_dir_too_long"
    assert list(long.iterdir()) == []
    assert read_record(home) is None
