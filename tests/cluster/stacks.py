"""A stack for a test, driven as a user drives it: by the ``rubato`` command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from rubato.client import Client
from rubato.stack.processes import family
from rubato.stack.record import StackRecord, read_record

UP_WITHIN_S = 180


@dataclass(frozen=True)
class Ran:
    """What a command said and how it ended."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        return json.loads(self.out)

    @property
    def problem(self) -> Any:
        return json.loads(self.err.splitlines()[-1])


@dataclass(frozen=True)
class Stack:
    """A home folder and the commands on it."""

    home: Path

    def run(self, *arguments: object, json: bool = True) -> Ran:
        """A ``rubato`` command on this stack; with --json unless told otherwise."""
        command = [sys.executable, "-m", "rubato", *map(str, arguments), *(["--json"] if json else [])]
        # What is tested here scales jobs itself.
        environment = {**_environment(), "RUBATO_HOME": str(self.home), "RUBATO_ELASTIC": "false"}
        ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=UP_WITHIN_S, check=False)
        return Ran(ran.returncode, ran.stdout, ran.stderr)

    def done(self, *arguments: object) -> Any:
        """The document of a command that has to succeed."""
        ran = self.run(*arguments)
        assert ran.code == 0, ran.err
        return ran.document

    @property
    def record(self) -> StackRecord:
        record = read_record(self.home)
        assert record is not None
        return record

    def client(self) -> Client:
        return Client(self.record.urls["api"])

    def processes(self) -> set[psutil.Process]:
        """All processes of the stack."""
        return family([self.record.ray, self.record.control_plane], self.record.temp_dir)

    def log(self) -> str:
        """What the control plane wrote, for the message of a failed assertion."""
        return (self.home / "logs" / "control-plane.log").read_text()[-3000:]


def _environment() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if not key.startswith("RUBATO_")}


@contextmanager
def stack(home: Path, cpus: int) -> Iterator[Stack]:
    """A stack that is up, and ended whatever happens."""
    made = Stack(home)
    try:
        made.done("up", "--cpus", cpus, "--port", 0)
        yield made
    finally:
        made.run("down")
