"""The run directory: where a run keeps all that outlives its processes, on storage that every worker reaches."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rubato.durable import append_whole, write_durably
from rubato.problems import FieldProblem, RubatoError
from rubato.spec import JobSpec, parse_spec
from rubato.spec.identity import curve_differences


class RunDirectory:
    """Paths of a run, and the few small files in it that are read and written as a whole.

    ::

        spec.json        the resolved spec
        epoch            the newest attempt that may write
        events.jsonl     what happened, an object a line
        metrics.jsonl    what each step reported, an object a line
        corpus/          the tokens, the same for all workers and attempts
        checkpoints/     step-00000100/, ...
        logs/            attempt-N/...
        compiled/        programs of compiled layers, a folder for each kind of machine
        tensorboard/     event files
        profile/         step-10/rank-0.json.gz, ...
    """

    def __init__(self, root: Path | str) -> None:
        self.root = Path(root).expanduser().absolute()
        self.spec = self.root / "spec.json"
        self.epoch = self.root / "epoch"
        self.events = self.root / "events.jsonl"
        self.metrics = self.root / "metrics.jsonl"
        self.corpus = self.root / "corpus"
        self.checkpoints = self.root / "checkpoints"
        self.logs = self.root / "logs"
        self.compiled = self.root / "compiled"
        self.tensorboard = self.root / "tensorboard"
        self.profile = self.root / "profile"

    @classmethod
    def create(cls, root: Path | str) -> RunDirectory:
        """A run directory that is there and can be written, made when it was missing.

        Raises:
            RubatoError: it cannot be made or written.
        """
        run = cls(root)
        try:
            for folder in (run.root, run.checkpoints, run.logs, run.corpus):
                folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=run.root) as probe:
                probe.write(b"x")
                probe.flush()
        except OSError as error:
            raise unwritable(run.root, error) from error
        return run

    def adopt(self, spec: JobSpec) -> None:
        """Makes this the run of ``spec``. Another layout of the same run goes on with it; another run does not.

        Raises:
            RubatoError: the directory holds a run with another curve, or cannot be read or written.
        """
        if self.spec.exists():
            differences = curve_differences(self.read_spec(), spec)
            if differences:
                raise RubatoError(
                    f"{self.root} holds another run: "
                    + "; ".join(f"{field} is {old} there, {new} here" for field, old, new in differences),
                    fix="use a new run directory, or the spec this one was made with",
                    code="run_directory_taken",
                    status=409,
                    problems=[
                        FieldProblem(field, f"is {old} in {self.root}, {new} here", f"use {old}, or a new directory")
                        for field, old, new in differences
                    ],
                )
        try:
            write_durably(self.spec, spec.model_dump_json(indent=2) + "\n")
        except OSError as error:
            raise unwritable(self.root, error) from error

    def read_spec(self) -> JobSpec:
        """The spec this run was made with.

        Raises:
            RubatoError: there is none, or it cannot be read.
            SpecError: what is there is not a spec.
        """
        try:
            return parse_spec(json.loads(self.spec.read_bytes()))
        except (OSError, ValueError) as error:
            raise RubatoError(
                f"{self.spec} cannot be read: {error}",
                fix="give the directory of a run, or a new one",
                code="run_directory_unreadable",
            ) from error

    def newest_epoch(self) -> int:
        """The epoch of the newest attempt; 0 when no attempt ever claimed the directory."""
        try:
            return int(self.epoch.read_text())
        except FileNotFoundError:
            return 0

    def claim(self, epoch: int) -> bool:
        """Makes ``epoch`` the newest, unless a newer one is there already; whether it may write now."""
        newest = self.newest_epoch()
        if epoch > newest:
            write_durably(self.epoch, f"{epoch}\n")
        return epoch >= newest

    def holds(self, epoch: int) -> bool:
        """Whether the attempt with this epoch may still write: no newer one has claimed the directory."""
        return epoch >= self.newest_epoch()

    @staticmethod
    def append(path: Path, record: Mapping[str, Any]) -> None:
        """Adds a line to ``events`` or ``metrics``, whole or not at all. One writer at a time.

        Raises:
            OSError: it could not be written.
        """
        line = json.dumps(record, separators=(",", ":"), default=str) + "\n"
        handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            append_whole(handle, line.encode())
        finally:
            os.close(handle)


def unwritable(root: Path, error: OSError) -> RubatoError:
    """The refusal of a run directory that cannot be written."""
    cause = f"{error.filename or root}: {error.strerror or error}"
    fix = "give a directory this user may write and that has room, on storage all workers share"
    return RubatoError(
        f"the run directory {root} cannot be written ({cause})",
        fix=fix,
        code="run_directory_unwritable",
        problems=[FieldProblem("run_dir", cause, fix)],
    )
