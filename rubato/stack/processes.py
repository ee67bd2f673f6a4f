"""Whose process is whose: identities that survive the reuse of a pid, the family of a stack, and its end."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path

import psutil

from rubato.problems import RubatoError
from rubato.stack.record import ProcessIdentity

MARK_VARIABLE = "RUBATO_STACK"

# Start times are whole clock ticks after a boot time that the clock's corrections move a little.
_SAME_START_S = 1.0

# More than one, since a process that is dying may have started another a moment ago.
_KILLING_ROUNDS = 5


def identify(pid: int) -> ProcessIdentity:
    """The identity of a process that is alive now."""
    return ProcessIdentity(pid=pid, created=psutil.Process(pid).create_time())


def living(identity: ProcessIdentity | None) -> psutil.Process | None:
    """The process, if it is still that one and still runs. A zombie is dead: only its parent has yet to notice."""
    if identity is None:
        return None
    try:
        process = psutil.Process(identity.pid)
        same = abs(process.create_time() - identity.created) < _SAME_START_S
        return process if same and process.status() != psutil.STATUS_ZOMBIE else None
    except psutil.NoSuchProcess:
        return None


def family(roots: Iterable[ProcessIdentity | None], mark: Path) -> set[psutil.Process]:
    """Every living process of a stack: the roots, their descendants, and whoever carries the stack's mark.

    The mark is found in the environment or in the command line, so orphans are found too.
    """
    found = {process for process in map(living, roots) if process}
    for root in tuple(found):
        with contextlib.suppress(psutil.NoSuchProcess):
            found.update(root.children(recursive=True))
    found.update(process for process in psutil.process_iter() if _carries(process, str(mark)))
    return {process for process in found if _runs(process)}


def _carries(process: psutil.Process, mark: str) -> bool:
    if process.pid == psutil.Process().pid:
        return False
    try:
        if any(mark == part or f"{mark}/" in part or part.endswith(f"={mark}") for part in process.cmdline()):
            return True
        return process.environ().get(MARK_VARIABLE) == mark
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False  # gone, or another user's: a stack's processes are its owner's


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def end(process: psutil.Process, patience_s: float) -> None:
    """Asks one process to end, and makes it end when it has not within ``patience_s``."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process.terminate()
        try:
            process.wait(patience_s)
        except psutil.TimeoutExpired:
            process.kill()


def end_family(roots: Iterable[ProcessIdentity | None], mark: Path, patience_s: float) -> int:
    """Ends a whole stack: its roots are asked, what has not ended within ``patience_s`` is killed.

    Returns:
        The number of processes that were ended.

    Raises:
        RubatoError: ``stack_not_ended``, naming the processes that survived even that.
    """
    roots = tuple(roots)
    members = family(roots, mark)  # before anything dies: afterwards nobody knows whose child an orphan was
    ended = len(members)
    asked = [root for root in map(living, roots) if root]
    for root in asked:
        with contextlib.suppress(psutil.NoSuchProcess):
            root.terminate()
    psutil.wait_procs(list(members), timeout=patience_s if asked else 0)  # orphans have nobody to end them in order
    rounds = 0
    while members := {process for process in members if _runs(process)} | family(roots, mark):
        if rounds == _KILLING_ROUNDS:
            raise _immortal(members)
        rounds += 1
        for process in members:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(list(members), timeout=2.0)
    return ended


def _immortal(members: Iterable[psutil.Process]) -> RubatoError:
    pids = ", ".join(str(process.pid) for process in members)
    return RubatoError(
        f"processes {pids} of the stack do not end, not even when killed",
        fix="they wait for a device or a file system; free that, or restart the machine, then `rubato down` again",
        code="stack_not_ended",
        status=500,
    )
