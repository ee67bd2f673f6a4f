"""Writes that survive a crash of the machine: whole, or not there."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def write_durably(path: Path, text: str) -> None:
    """Replaces a file in one go; a reader sees the old text or the new one."""
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
            os.fchmod(file.fileno(), 0o644)  # mkstemp's own would shut out readers that run as another user
        Path(name).rename(path)
    except OSError:
        Path(name).unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def append_whole(handle: int, data: bytes) -> None:
    """Adds to the end of a file that is open for appending; what fails halfway, as on a full disk, is taken back.

    Raises:
        OSError: it could not be written.
    """
    size = os.fstat(handle).st_size
    rest = memoryview(data)
    try:
        while rest:
            rest = rest[os.write(handle, rest) :]
    except OSError:
        os.ftruncate(handle, size)
        raise


def sync_folder(folder: Path) -> None:
    """Makes names that were created, renamed or removed in a folder permanent."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
