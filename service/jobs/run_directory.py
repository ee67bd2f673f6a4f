"""The control plane's part of a run directory: making it, the spec in it, and the epoch that fences old attempts."""

from __future__ import annotations

import glob
import os
import shutil
from pathlib import Path
from urllib.parse import urlsplit

from rubato.durable import write_durably
from rubato.problems import FieldProblem, RubatoError, SpecError
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


def check_corpus(spec: JobSpec, ray_dashboard: str) -> None:
    """Refuses a corpus that can be seen from here to be empty or unreadable.

    The workers may run where the control plane cannot look. So what is missing here is an error only when it ought to
    be here: when the folder it should lie in exists, or when the cluster is this very machine.

    Raises:
        SpecError: naming ``data.train.path``.
    """
    path = spec.data.train.path
    if path is None:
        return
    if "\0" in path:
        raise _corpus_error("no path holds a NUL character", "give an absolute path or glob")
    if not Path(path).expanduser().is_absolute():
        raise _corpus_error(
            f"'{path}' is relative, and workers run in folders of their own", "give an absolute path or glob"
        )
    matches = glob.iglob(str(Path(path).expanduser()), recursive=True)  # noqa: PTH207 (Path.glob takes hidden files)
    found = [match for match in matches if Path(match).is_file()]
    if not found:
        if _fixed_part(path).is_dir() or urlsplit(ray_dashboard).hostname in ("127.0.0.1", "localhost", "::1"):
            raise _corpus_error(f"no file matches '{path}'", "give the path or glob of text files that exist")
        return
    unreadable = next((name for name in found if not os.access(name, os.R_OK)), None)
    if unreadable is not None:
        raise _corpus_error(f"{unreadable} cannot be read", "make it readable, or leave it out of the glob")
    if not any(Path(name).stat().st_size for name in found):
        raise _corpus_error(f"all files that match '{path}' are empty", "give files with text in them")


def _fixed_part(path: str) -> Path:
    fixed = Path(path).expanduser()
    while glob.has_magic(fixed.name) or glob.has_magic(str(fixed.parent)):
        fixed = fixed.parent
    return fixed if fixed != Path(path).expanduser() else fixed.parent


def _corpus_error(cause: str, fix: str) -> SpecError:
    return SpecError([FieldProblem("data.train.path", cause, fix)])
