"""What users see of a run directory: logs and checkpoints. The files are the record; nothing is copied."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

from rubato.checkpoints import survey
from rubato.resources import Checkpoint, LayoutView, LogSource, Page, StoredFileView
from service.cursors import number
from service.database.engine import Database
from service.jobs import artifacts, logs
from service.jobs.service import JobService
from service.jobs.view import members

_MOST = 16 * 1024 * 1024


@dataclass(frozen=True)
class LogPlace:
    """A place in a log: which attempt's, whose, and after how many bytes. Its text is the id of an event."""

    attempt: int
    source: str
    offset: int

    def __str__(self) -> str:
        return f"{self.attempt}:{self.source}:{self.offset}"

    @classmethod
    def read(cls, text: str | None) -> LogPlace | None:
        """The place an id names; None for what is none."""
        parts = (text or "").split(":")
        if len(parts) != 3:
            return None
        attempt, offset = number(parts[0]), number(parts[2])
        return None if attempt is None or offset is None else cls(attempt, parts[1], offset)


@dataclass(frozen=True)
class LogText:
    """A piece of a log, and the offset in bytes where it ends."""

    content: bytes
    end: int


@dataclass(frozen=True)
class Log:
    """The log of one source of a job, of the newest attempt that has it, or of the one that was asked for."""

    job_id: str
    run_dir: Path
    source: str
    attempt: int
    pinned: bool

    def path(self, attempt: int) -> Path:
        """The file of an attempt."""
        return logs.path_of(self.run_dir, self.source, attempt)

    def holds(self, place: LogPlace) -> bool:
        """Whether a place is in this log, or in that of an attempt before."""
        return place.source == self.source and (
            place.attempt == self.attempt or (not self.pinned and place.attempt < self.attempt)
        )


class JobFiles:
    """Logs and checkpoints of jobs. Files are read in threads."""

    def __init__(self, database: Database, jobs: JobService) -> None:
        self._database = database
        self._jobs = jobs

    async def log_sources(self, name_or_id: str) -> Page[LogSource]:
        """The logs a job has."""
        found = await asyncio.to_thread(logs.sources, await self._run_dir(name_or_id))
        return Page[LogSource](items=found, next=None)

    async def log(self, name_or_id: str, source: str | None, rank: int | None, attempt: int | None) -> Log:
        """A log, named by source or by rank; the driver's when neither is. Raises RubatoError (404)."""
        async with self._database.reading() as session:
            job = await self._jobs.resolve(session, name_or_id)
        if source is None and rank is not None:
            layout = None if job.layout is None else LayoutView.model_validate(job.layout)
            source = logs.source_of_rank(members(job), layout, rank)
        run_dir, name = Path(job.run_dir), source or "driver"
        newest = await asyncio.to_thread(logs.attempt_of, run_dir, name, attempt)
        return Log(job.id, run_dir, name, newest, pinned=attempt is not None)

    async def tail(self, log: Log, lines: int) -> LogText:
        """The last lines of a log, at most 16 MiB."""
        return LogText(*await asyncio.to_thread(logs.read_tail, log.path(log.attempt), lines, _MOST))

    async def text_from(self, log: Log, offset: int) -> LogText:
        """What follows an offset, at most 16 MiB."""
        return LogText(*await asyncio.to_thread(logs.read_from, log.path(log.attempt), offset, _MOST))

    async def lines_from(self, log: Log, place: LogPlace, over: bool) -> list[tuple[LogPlace, str]]:
        """The whole lines after a place, each with the place it ends at: of its attempt, or when that one is followed
        by another and nothing is left of it, of the next that has this log.

        Args:
            over: nobody writes any more, so the last line needs no end.
        """
        return await asyncio.to_thread(_lines_from, log, place, over)

    async def checkpoints(self, name_or_id: str) -> Page[Checkpoint]:
        """The checkpoints of a job, newest first. ``verified`` is false for one whose files are not as they were."""
        folder = await self._run_dir(name_or_id) / "checkpoints"
        return Page[Checkpoint](items=await asyncio.to_thread(_checkpoints, folder), next=None)

    async def stored(self, name_or_id: str) -> Page[StoredFileView]:
        """The files that a run has made for people to look at."""
        found = await asyncio.to_thread(artifacts.listed, await self._run_dir(name_or_id))
        return Page[StoredFileView](items=found, next=None)

    async def stored_path(self, name_or_id: str, path: str) -> Path:
        """Where one of them is. Raises RubatoError (404)."""
        return await asyncio.to_thread(artifacts.path_of, await self._run_dir(name_or_id), path)

    async def _run_dir(self, name_or_id: str) -> Path:
        async with self._database.reading() as session:
            return Path((await self._jobs.resolve(session, name_or_id)).run_dir)


def _lines_from(log: Log, place: LogPlace, over: bool) -> list[tuple[LogPlace, str]]:
    known = [] if log.pinned else logs.attempts_of(log.run_dir, log.source)
    attempts = sorted({place.attempt, *(attempt for attempt in known if attempt > place.attempt)})
    for attempt in attempts:
        offset = place.offset if attempt == place.attempt else 0
        text, _ = logs.read_from(log.path(attempt), offset, _MOST)
        # A line that is still being written waits for its end, unless nobody will write it any more, or it has none.
        ended, final = text[: text.rfind(b"\n") + 1], over or attempt != attempts[-1]
        whole = text if (final and len(text) < _MOST) or (len(text) == _MOST and not ended) else ended
        found = []
        for line in whole.splitlines(keepends=True):
            offset += len(line)
            found.append((LogPlace(attempt, log.source, offset), line.rstrip(b"\r\n").decode(errors="replace")))
        if found:
            return found
    return []


def _checkpoints(folder: Path) -> list[Checkpoint]:
    found = [found.stored.view() for found in survey(folder) if found.stored is not None]
    return found[::-1]
