"""What users see of a run directory: logs and checkpoints. The files are the record; nothing is copied."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

from rubato.checkpoints import survey
from rubato.resources import Checkpoint, LayoutView, LogSource, Page
from service.database.engine import Database
from service.jobs import logs
from service.jobs.service import JobService
from service.jobs.view import members

_MOST = 16 * 1024 * 1024


@dataclass(frozen=True)
class LogText:
    """A piece of a log, and the offset in bytes where it ends."""

    content: bytes
    end: int


class JobFiles:
    """Logs and checkpoints of jobs. Files are read in threads."""

    def __init__(self, database: Database, jobs: JobService) -> None:
        self._database = database
        self._jobs = jobs

    async def log_sources(self, name_or_id: str) -> Page[LogSource]:
        """The logs a job has."""
        found = await asyncio.to_thread(logs.sources, await self._run_dir(name_or_id))
        return Page[LogSource](items=found, next=None)

    async def log_path(self, name_or_id: str, source: str | None, rank: int | None, attempt: int | None) -> Path:
        """The file of a log, named by source or by rank; the driver's when neither is. Raises RubatoError (404)."""
        async with self._database.reading() as session:
            job = await self._jobs.resolve(session, name_or_id)
        if source is None and rank is not None:
            layout = None if job.layout is None else LayoutView.model_validate(job.layout)
            source = logs.source_of_rank(members(job), layout, rank)
        return await asyncio.to_thread(logs.path_of, Path(job.run_dir), source or "driver", attempt)

    async def tail(self, path: Path, lines: int) -> LogText:
        """The last lines of a log, at most 16 MiB."""
        return LogText(*await asyncio.to_thread(logs.read_tail, path, lines, _MOST))

    async def text_from(self, path: Path, offset: int) -> LogText:
        """What follows an offset, at most 16 MiB."""
        return LogText(*await asyncio.to_thread(logs.read_from, path, offset, _MOST))

    async def checkpoints(self, name_or_id: str) -> Page[Checkpoint]:
        """The checkpoints of a job, newest first. ``verified`` is false for one whose files are not as they were."""
        folder = await self._run_dir(name_or_id) / "checkpoints"
        return Page[Checkpoint](items=await asyncio.to_thread(_checkpoints, folder), next=None)

    async def _run_dir(self, name_or_id: str) -> Path:
        async with self._database.reading() as session:
            return Path((await self._jobs.resolve(session, name_or_id)).run_dir)


def _checkpoints(folder: Path) -> list[Checkpoint]:
    found = [found.stored.view() for found in survey(folder) if found.stored is not None]
    return found[::-1]
