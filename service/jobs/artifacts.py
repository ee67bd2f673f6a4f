"""Files of a run directory that are there to be looked at: what the profiler recorded, and TensorBoard's."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from rubato.problems import RubatoError
from rubato.resources import StoredFileView

FOLDERS = ("profile", "tensorboard")


def listed(run_dir: Path) -> list[StoredFileView]:
    """All of them, by path. Links are left out: they may lead anywhere."""
    found = []
    for path in sorted(path for folder in FOLDERS for path in (run_dir / folder).rglob("*")):
        inside = not any(part.is_symlink() for part in (path, *path.parents) if part.is_relative_to(run_dir))
        if inside and path.is_file():
            stat = path.stat()
            modified = datetime.fromtimestamp(stat.st_mtime, UTC)
            name = path.relative_to(run_dir).as_posix()
            found.append(StoredFileView(path=name, bytes=stat.st_size, modified_at=modified))
    return found


def path_of(run_dir: Path, name: str) -> Path:
    """Where a file is. Raises RubatoError (404) when there is none of that name."""
    # Only names that were found are opened, so no name leads out of the directory.
    if name in {file.path for file in listed(run_dir)}:
        return run_dir / name
    raise RubatoError(
        f"there is no file '{name}' to be looked at in this run",
        fix="use one that GET /v1/jobs/{job}/files lists",
        code="file_not_found",
        status=404,
    )
