"""A file of records, a JSON object a line: one attempt at a time appends, and reads what is to be told."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from rubato.durable import append_whole

log = logging.getLogger(__name__)

BLOCK = 1 << 20
KEPT = 10_000
"""Records that wait in memory while the file cannot be written."""
LOCK_S = 5.0


class Line(NamedTuple):
    """A line that is not acknowledged. ``record`` None: it cannot be read."""

    seq: int
    end: int
    record: dict[str, Any] | None


class RecordFile:
    """Appends and numbers records. A line's number is its sequence number, from 1.

    What cannot be written waits in memory, up to ``KEPT`` records, and is written in order once it can be; it has no
    number until then. Nothing but opening raises.

    Args:
        path: the file; made by the first record.
        fence: whether this attempt may still write. Asked under a lock on the file, which a newer attempt takes too
            before it counts the lines: so an older one that was held up adds none afterwards.

    Attributes:
        lost: records that were dropped, since too many waited.

    Raises:
        OSError: the file is there but cannot be read.
    """

    def __init__(self, path: Path, fence: Callable[[], bool] = lambda: True) -> None:
        self.path = path
        self._fence = fence
        self._waiting: deque[bytes] = deque()
        self._trouble: str | None = None
        self._torn = False
        self.lost = 0
        self.fenced = False
        self._count, self._size = self._open()
        self._acknowledged = 0
        self._offset = 0  # where the first line that is not acknowledged begins
        self._batch: deque[Line] = deque()

    def append(self, record: Mapping[str, Any]) -> None:
        """Adds a record, now or as soon as it can be written."""
        self._waiting.append((json.dumps(record, separators=(",", ":"), default=str) + "\n").encode())
        self.write()
        while len(self._waiting) > KEPT:
            self._waiting.popleft()
            self.lost += 1

    def write(self) -> bool:
        """Writes what waits; whether nothing waits any more. A fenced attempt has nothing more to write."""
        if not self._waiting:
            return True
        try:
            handle = os.open(self.path, os.O_RDWR | os.O_APPEND | (0 if self._size else os.O_CREAT), 0o644)
            try:
                with _locked(handle):
                    self._write(handle)
            finally:
                os.close(handle)
        except (OSError, ValueError) as error:  # a ValueError: the epoch cannot be read
            self._say(f"cannot be written, so it is kept in memory: {error}")
        else:
            self._say(None)
        return not self._waiting

    @property
    def all_told(self) -> bool:
        """Whether everything is written and acknowledged."""
        return not self._waiting and self._acknowledged >= self._count

    def pending(self, most: int) -> list[Line]:
        """The oldest lines that are written and not acknowledged; fewer while the file cannot be read."""
        missing = min(most, self._count - self._acknowledged) - len(self._batch)
        if missing > 0:
            try:
                self._read(missing)
            except OSError as error:
                self._say(f"cannot be read: {error}")
        return [line for line, _ in zip(self._batch, range(most), strict=False)]

    def acknowledged(self, seq: int) -> None:
        """The control plane has stored the lines up to ``seq``."""
        while self._batch and self._batch[0].seq <= seq:
            line = self._batch.popleft()
            self._acknowledged, self._offset = line.seq, line.end
        ahead = min(seq, self._count) - self._acknowledged
        if ahead > 0:
            try:
                self._offset = self._skip(ahead)
                self._acknowledged += ahead
            except OSError as error:
                self._say(f"cannot be read: {error}")

    def backwards(self) -> Iterator[bytes]:
        """The lines from the last to the first. Raises OSError."""
        if not self._size:
            return
        with self.path.open("rb") as file:
            end, rest = self._size, b""
            while end:
                begin = max(0, end - BLOCK)
                file.seek(begin)
                first, *lines = (file.read(end - begin) + rest).split(b"\n")
                yield from reversed([line for line in lines if line])
                end, rest = begin, first
            if rest:
                yield rest

    def _open(self) -> tuple[int, int]:
        """Lines and bytes of the file. A last line that was cut off when its writer died is removed."""
        try:
            handle = os.open(self.path, os.O_RDWR)
        except FileNotFoundError:
            return 0, 0
        with os.fdopen(handle, "r+b") as file:
            try:
                with _locked(handle, LOCK_S):
                    return self._count_lines(file)
            except BlockingIOError:
                log.warning("%s is held by another process for more than %g s", self.path, LOCK_S)
                return self._count_lines(file)

    def _count_lines(self, file: Any) -> tuple[int, int]:
        count = whole = read = 0
        while block := file.read(BLOCK):
            count += block.count(b"\n")
            whole = read + block.rfind(b"\n") + 1 if b"\n" in block else whole
            read += len(block)
        if whole < read and self._fence():
            file.truncate(whole)
        return count, whole

    def _write(self, handle: int) -> None:
        if not self._fence():
            self.fenced = True
            self._waiting.clear()
            return
        size = os.fstat(handle).st_size
        if size < self._size:
            raise OSError(f"it has {size} bytes, of {self._size} that were written")
        if size > self._size:
            self._take_in(handle)
        while self._waiting:
            self._torn = True
            append_whole(handle, self._waiting[0])
            self._torn = False
            self._count += 1
            self._size += len(self._waiting.popleft())

    def _take_in(self, handle: int) -> None:
        """Removes what is left of a line that this process could not write; lines of another one count."""
        if self._torn:
            os.ftruncate(handle, self._size)
        else:
            with open(handle, "r+b", closefd=False) as file:
                self._count, self._size = self._count_lines(file)

    def _read(self, count: int) -> None:
        begin = self._batch[-1].end if self._batch else self._offset
        seq = self._batch[-1].seq if self._batch else self._acknowledged
        with self.path.open("rb") as file:
            file.seek(begin)
            for _ in range(count):
                text = file.readline()
                if not text.endswith(b"\n"):
                    raise OSError(f"it ends after line {seq}, and {self._count} were written")
                seq, begin = seq + 1, begin + len(text)
                self._batch.append(Line(seq, begin, _parsed(text, self.path, seq)))

    def _skip(self, lines: int) -> int:
        """Where the line after the next ``lines`` lines begins."""
        place = self._offset
        with self.path.open("rb") as file:
            file.seek(place)
            while lines:
                block = file.read(BLOCK)
                if not block:
                    raise OSError(f"it ends {lines} lines too early")
                found = block.count(b"\n")
                if found < lines:
                    lines -= found
                    place += len(block)
                    continue
                inside = -1
                for _ in range(lines):
                    inside = block.index(b"\n", inside + 1)
                return place + inside + 1
        return place

    def _say(self, trouble: str | None) -> None:
        if trouble != self._trouble:
            log.log(logging.ERROR if trouble else logging.INFO, "%s %s", self.path, trouble or "can be used again")
        self._trouble = trouble


@contextmanager
def _locked(handle: int, patience_s: float = 0.0) -> Iterator[None]:
    """Raises BlockingIOError when another process holds the lock all the time. Storage without locks goes without."""
    until = time.monotonic() + patience_s
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() >= until:
                raise
            time.sleep(0.05)
        except OSError as error:
            log.debug("no lock: %s", error)
            break
    yield  # closing the file lets go of the lock


def _parsed(text: bytes, path: Path, seq: int) -> dict[str, Any] | None:
    try:
        record = json.loads(text)
        if not isinstance(record, dict):
            raise TypeError("it is no JSON object")
    except (ValueError, TypeError, RecursionError) as error:
        log.warning("line %d of %s cannot be read: %s", seq, path, error)
        return None
    return record
