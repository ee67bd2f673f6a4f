"""Whose process is whose, and that all of a stack ends and nothing else does. Without Ray."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from rubato.stack import processes
from rubato.stack.processes import MARK_VARIABLE, end_family, family, identify, living
from rubato.stack.record import ProcessIdentity

Start = Callable[..., "subprocess.Popen[str]"]

READY = "print('ready', flush=True); "
WAIT = READY + "import time; time.sleep(600)"
DEAF = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + WAIT
CHILD = "import subprocess, sys; child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']); "
PARENT = CHILD + "print(child.pid, flush=True); child.wait()"


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a Python process that has said it is there, and ends it after the test."""
    started = []

    def run(code: str, mark: Path | None = None, *arguments: str) -> subprocess.Popen[str]:
        environment = dict(os.environ) | ({MARK_VARIABLE: str(mark)} if mark else {})
        process = subprocess.Popen(
            [sys.executable, "-c", code, *arguments], env=environment, stdout=subprocess.PIPE, text=True
        )
        started.append(process)
        return process

    yield run
    for process in started:
        if process.poll() is None:
            for child in psutil.Process(process.pid).children():
                child.kill()
            process.kill()
        process.wait()
        process.stdout.close()


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout
    return process.stdout.readline().strip()


def runs(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_a_process_is_recognised_until_it_ends(start: Start) -> None:
    process = start(WAIT)
    identity = identify(process.pid)
    assert living(identity) == psutil.Process(process.pid)
    process.kill()
    psutil.Process(process.pid).wait()
    assert living(identity) is None
    assert living(None) is None


def test_a_zombie_is_dead(start: Start) -> None:
    process = start("pass")
    identity = identify(process.pid)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert psutil.Process(process.pid).status() == psutil.STATUS_ZOMBIE
    assert living(identity) is None


def test_a_later_process_with_the_same_pid_is_another(start: Start) -> None:
    process = start(WAIT)
    earlier = ProcessIdentity(pid=process.pid, created=identify(process.pid).created - 60)
    assert living(earlier) is None
    assert family([earlier], Path("/nowhere/rb-x")) == set()


def test_the_family_is_roots_descendants_and_whoever_carries_the_mark(start: Start, tmp_path: Path) -> None:
    mark = tmp_path / "rb-1"
    parent, by_environment = start(PARENT), start(WAIT, mark)
    by_argument, stranger = start(WAIT, None, f"--temp-dir={mark}"), start(WAIT, tmp_path / "rb-12")
    child = int(said(parent))
    for process in (by_environment, by_argument, stranger):
        said(process)
    expected = {parent.pid, child, by_environment.pid, by_argument.pid}
    assert {process.pid for process in family([identify(parent.pid)], mark)} == expected


def test_the_end_of_a_stack_is_the_end_of_its_orphans_too(start: Start, tmp_path: Path) -> None:
    mark = tmp_path / "rb-1"
    parent, deaf, stranger = start(PARENT, mark), start(DEAF, mark), start(WAIT)
    child = int(said(parent))
    said(deaf)
    said(stranger)
    identity = identify(parent.pid)
    parent.kill()  # the child is an orphan now, known by its mark alone
    parent.wait()
    assert end_family([identity], mark, patience_s=0.2) == 2
    assert not runs(child)
    assert not runs(deaf.pid)
    assert stranger.poll() is None
    assert end_family([identity], mark, patience_s=0.2) == 0


def test_a_root_is_asked_before_it_is_killed(start: Start, tmp_path: Path) -> None:
    note = tmp_path / "note"
    last_words = f"import pathlib, signal, sys; end = lambda *_: (pathlib.Path({str(note)!r}).touch(), sys.exit()); "
    polite = start(last_words + "signal.signal(signal.SIGTERM, end); " + WAIT)
    said(polite)
    assert end_family([identify(polite.pid)], tmp_path / "rb-1", patience_s=10) == 1
    assert note.exists()


def test_a_process_that_cannot_be_ended_is_named(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    process = start(DEAF)
    said(process)
    monkeypatch.setattr(psutil.Process, "kill", lambda self: None)
    monkeypatch.setattr(processes, "_KILLING_ROUNDS", 1)
    monkeypatch.setattr(psutil, "wait_procs", lambda waiting, timeout: ([], waiting))
    with pytest.raises(processes.RubatoError, match=f"{process.pid}") as caught:
        end_family([identify(process.pid)], tmp_path / "rb-1", patience_s=0)
    assert caught.value.code == "stack_not_ended"
