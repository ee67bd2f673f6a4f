"""The control plane's part of a run directory: making it, the spec in it, and the epoch that fences old attempts."""

from __future__ import annotations

import shutil
from pathlib import Path

from rubato.durable import write_durably
from rubato.problems import FieldProblem, RubatoError
from rubato.spec import JobSpec

# Lies in a run directory until its job is stored, and says whose job that is: a process killed in between can do
# neither, and a database that knows nothing of a run directory must not take it for one of its own.
_PENDING = ".submitting"


def make(runs: Path, job_id: str, spec: JobSpec, owner: str) -> Path:
    """A new run directory with ``spec.json`` in it, until ``keep`` one of a job that may never come to be.

    Args:
        owner: the database the job is to be stored in.

    Raises:
        RubatoError: it cannot be written.
    """
    path = runs / job_id
    try:
        path.mkdir(parents=True)
        (path / _PENDING).write_text(owner, encoding="utf-8")
        write_durably(path / "spec.json", spec.model_dump_json(indent=2))
    except OSError as error:
        fix = f"make {runs} writable for the control plane, or set RUBATO_RUNS to another folder and restart it"
        problem = FieldProblem("RUBATO_RUNS", f"the run directory {path} cannot be written: {error.strerror}", fix)
        raise RubatoError(
            str(problem), fix=fix, code="run_directory_not_writable", status=503, problems=[problem]
        ) from error
    return path


def keep(path: Path) -> None:
    """The job of a run directory is stored. Raises OSError."""
    (path / _PENDING).unlink(missing_ok=True)


def pending(runs: Path, owner: str, before: float) -> list[Path]:
    """Run directories made for jobs of ``owner`` before a moment (seconds since 1970) and not kept since.

    Raises:
        OSError: the folder cannot be read.
    """
    found = []
    for mark in runs.glob(f"*/{_PENDING}"):
        try:
            if mark.stat().st_mtime < before and mark.read_text(encoding="utf-8", errors="replace") == owner:
                found.append(mark.parent)
        except FileNotFoundError:
            continue  # kept, or taken back, by whoever made it
    return found


def remove(path: Path) -> None:
    """Takes back a run directory whose job never came to be."""
    shutil.rmtree(path, ignore_errors=True)


def write_epoch(run_dir: Path, epoch: int) -> None:
    """From now on only the attempt of this epoch may write checkpoints. Raises OSError."""
    write_durably(run_dir / "epoch", f"{epoch}\n")
