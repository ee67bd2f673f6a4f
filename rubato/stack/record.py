"""stack.json: what a stack consists of, so that whoever comes later can see it and end exactly that."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from rubato.home import record_path
from rubato.problems import RubatoError


class ProcessIdentity(BaseModel):
    """A process that cannot be taken for a later one with the same number."""

    model_config = ConfigDict(frozen=True)

    pid: int
    created: float
    """Seconds since the epoch at which it started."""


class StackRecord(BaseModel):
    """Everything needed to find, reach and end a stack."""

    model_config = ConfigDict(frozen=True)

    state: Literal["starting", "up"]
    cpus: int
    started_at: datetime
    temp_dir: Path
    """Ray's session lives here, and every process of the stack carries this path: it is the stack's mark."""
    ray: ProcessIdentity | None = None
    control_plane: ProcessIdentity | None = None
    ports: dict[str, int]
    urls: dict[Literal["api", "dashboard"], str]


class PartView(BaseModel):
    """One half of a stack as it is now."""

    model_config = ConfigDict(frozen=True)

    state: Literal["running", "not running"]
    pid: int | None
    log: Path


class StackView(BaseModel):
    """A stack as it is now."""

    model_config = ConfigDict(frozen=True)

    state: Literal["up", "starting", "partly up", "down"]
    home: Path
    cpus: int | None
    started_at: datetime | None
    urls: dict[Literal["api", "dashboard"], str]
    ray: PartView
    control_plane: PartView


def read_record(home: Path) -> StackRecord | None:
    """The record of the stack under ``home``, or None when there is none. Raises RubatoError when it is unreadable."""
    path = record_path(home)
    try:
        return StackRecord.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValidationError) as error:
        raise RubatoError(
            f"{path} cannot be read: {error}",
            fix="end the stack's processes by hand if any still run, then delete the file",
            code="stack_record_unreadable",
            status=500,
        ) from error


def write_record(home: Path, record: StackRecord) -> None:
    """Replaces the record in one step, so that no reader ever sees half of it."""
    path = record_path(home)
    draft = path.with_suffix(".tmp")
    draft.write_text(record.model_dump_json(indent=2) + "\n", encoding="utf-8")
    draft.replace(path)


def remove_record(home: Path) -> None:
    record_path(home).unlink(missing_ok=True)


def prepare_home(home: Path) -> None:
    """Makes the folder of the stack. Raises RubatoError when that cannot be."""
    try:
        (home / "logs").mkdir(parents=True, exist_ok=True)
        (home / "runs").mkdir(exist_ok=True)
        writable = os.access(home, os.W_OK | os.X_OK)
    except OSError as error:
        raise _bad_home(home, str(error.strerror)) from error
    if not writable:
        raise _bad_home(home, "it is not writable")


def _bad_home(home: Path, cause: str) -> RubatoError:
    return RubatoError(
        f"{home} cannot hold a stack: {cause}",
        fix="give another folder with --home or RUBATO_HOME",
        code="bad_home",
    )


@contextmanager
def sole_control(home: Path) -> Iterator[None]:
    """Nobody else may start or end the stack under ``home`` meanwhile. The lock ends with the process at the latest.

    Raises:
        RubatoError: ``stack_busy``, somebody else is at it.
    """
    with (home / "stack.lock").open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            lock.seek(0)
            holder = lock.read().strip() or "unknown"
            raise RubatoError(
                f"process {holder} is starting or ending the stack under {home} just now",
                fix="wait until it is done, then look at `rubato status`",
                code="stack_busy",
                status=409,
            ) from error
        lock.truncate(0)
        lock.write(f"{os.getpid()}\n")
        lock.flush()
        yield
