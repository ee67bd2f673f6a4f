"""The control plane's part of a run directory: making it, the spec in it, and the epoch that fences old attempts."""

from __future__ import annotations

import glob
import os
import shutil
from pathlib import Path
from urllib.parse import urlsplit

from rubato.problems import FieldProblem, RubatoError, SpecError
from rubato.spec import JobSpec


def make(runs: Path, job_id: str, spec: JobSpec) -> Path:
    """A new run directory with ``spec.json`` in it. Raises RubatoError when it cannot be written."""
    path = runs / job_id
    try:
        path.mkdir(parents=True)
        write_durably(path / "spec.json", spec.model_dump_json(indent=2))
    except OSError as error:
        fix = f"make {runs} writable for the control plane, or set RUBATO_RUNS to another folder and restart it"
        problem = FieldProblem("RUBATO_RUNS", f"the run directory {path} cannot be written: {error.strerror}", fix)
        raise RubatoError(
            str(problem), fix=fix, code="run_directory_not_writable", status=503, problems=[problem]
        ) from error
    return path


def remove(path: Path) -> None:
    """Takes back a run directory whose job never came to be."""
    shutil.rmtree(path, ignore_errors=True)


def write_epoch(run_dir: Path, epoch: int) -> None:
    """From now on only the attempt of this epoch may write checkpoints. Raises OSError."""
    write_durably(run_dir / "epoch", f"{epoch}\n")


def write_durably(path: Path, content: str) -> None:
    """Writes a file so that a reader, or a crash, meets the old content or the new one. Raises OSError."""
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


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
