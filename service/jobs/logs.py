"""The logs of a job: files of its run directory, one a process and attempt."""

from __future__ import annotations

import os
import re
from datetime import UTC, datetime
from pathlib import Path

from rubato.layout import Coordinates, Layout
from rubato.problems import RubatoError
from rubato.resources import LayoutView, LogSource, WorkerView

_ATTEMPT = re.compile(r"attempt-(\d+)")
_BLOCK = 64 * 1024


def sources(run_dir: Path) -> list[LogSource]:
    """All logs there are, the newest attempt first and the driver's first of each."""
    found = []
    for path in (run_dir / "logs").glob("attempt-*/*.log"):
        attempt = _ATTEMPT.fullmatch(path.parent.name)
        if attempt:
            stat = path.stat()
            modified = datetime.fromtimestamp(stat.st_mtime, UTC)
            found.append(LogSource(source=path.stem, attempt=int(attempt[1]), bytes=stat.st_size, modified_at=modified))
    return sorted(found, key=lambda log: (-log.attempt, log.source != "driver", log.source))


def attempts_of(run_dir: Path, source: str) -> list[int]:
    """The attempts that have a log of a source, the newest first."""
    return [log.attempt for log in sources(run_dir) if log.source == source]


def path_of(run_dir: Path, source: str, attempt: int) -> Path:
    """The file of a source in an attempt. Raises RubatoError (404) when there is none."""
    # Only names that were found are opened, so no name leads out of the directory.
    return run_dir / "logs" / f"attempt-{attempt_of(run_dir, source, attempt)}" / f"{source}.log"


def attempt_of(run_dir: Path, source: str, attempt: int | None) -> int:
    """The newest attempt that has a log of a source, or the one that is asked for. Raises RubatoError (404)."""
    known = sources(run_dir)
    for log in known:
        if log.source == source and attempt in (None, log.attempt):
            return log.attempt
    names = ", ".join(dict.fromkeys(log.source for log in known)) or "none yet"
    where = "" if attempt is None else f" in attempt {attempt}"
    raise RubatoError(
        f"there is no log of '{source}'{where}", fix=f"use one of: {names}", code="log_not_found", status=404
    )


def source_of_rank(members: list[WorkerView], layout: LayoutView | None, rank: int) -> str:
    """The log of the worker that has a rank in the newest generation. Raises RubatoError (404)."""
    for member in members:
        if member.rank == rank and layout is not None:
            replica = Layout(1, layout.pipeline, layout.tensor)
            place = replica.rank(Coordinates(0, member.pipeline, member.tensor))
            return f"{member.replica}-rank-{place}"
    ranks = sorted(member.rank for member in members if member.rank is not None)
    known = f"use one of: {', '.join(map(str, ranks))}" if ranks else "wait until workers train, or use ?source="
    raise RubatoError(f"no worker has rank {rank}", fix=known, code="log_not_found", status=404)


def read_tail(path: Path, lines: int, most: int) -> tuple[bytes, int]:
    """The last lines of a file, at most so many bytes of them, and the offset of its end."""
    with path.open("rb") as file:
        end = file.seek(0, os.SEEK_END)
        start, ends, blocks = end, 0, []
        while start > 0 and ends <= lines and end - start < most:
            step = min(_BLOCK, start, most - (end - start))
            start -= step
            file.seek(start)
            blocks.append(file.read(step))
            ends += blocks[-1].count(b"\n")
    kept = b"".join(reversed(blocks)).splitlines(keepends=True)[-lines:] if lines else []
    return b"".join(kept), end


def read_from(path: Path, offset: int, most: int) -> tuple[bytes, int]:
    """What follows an offset, at most so many bytes, and the offset after it."""
    with path.open("rb") as file:
        file.seek(offset)
        content = file.read(most)
    return content, offset + len(content)
