"""Checkpoints as they lie in a run directory: what makes one complete, and whether it still holds what was saved.

A checkpoint is a folder ``step-00000100`` with a manifest that names every other file in it. Writers fill a folder
under another name and rename it when all is on disk, so a folder of this name without a manifest, or with files that
do not match it, is damaged and counts as not there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from rubato.resources import Checkpoint, LayoutView

MANIFEST = "manifest.json"
_PREFIX = "step-"


class StoredFile(BaseModel):
    """A file of a checkpoint as it was written."""

    model_config = ConfigDict(frozen=True)

    bytes: int
    sha256: str


class Manifest(BaseModel):
    """What ``manifest.json`` says of a checkpoint."""

    model_config = ConfigDict(frozen=True)

    format: Literal[1] = 1
    step: int
    at: datetime
    loss: float | None
    layout: LayoutView
    spec_hash: str
    files: dict[str, StoredFile]


@dataclass(frozen=True)
class StoredCheckpoint:
    """A checkpoint whose manifest could be read."""

    path: Path
    manifest: Manifest

    @property
    def step(self) -> int:
        """Optimizer steps its state holds."""
        return self.manifest.step

    @property
    def bytes(self) -> int:
        """Size of its files, without the manifest."""
        return sum(file.bytes for file in self.manifest.files.values())

    def missing(self) -> list[str]:
        """What is wrong with it as far as sizes tell, a sentence a file; empty when nothing is."""
        return [found for name in self.manifest.files if (found := self._wrong_size(name))]

    def damage(self, names: Iterable[str] | None = None) -> list[str]:
        """What is wrong with the content of its files (or of those named), a sentence a file. Reads all of them."""
        return [
            found
            for name in (self.manifest.files if names is None else names)
            if (found := self._wrong_size(name) or self._wrong_content(name))
        ]

    def view(self) -> Checkpoint:
        """The checkpoint as the REST API shows it; ``verified`` is as far as sizes tell."""
        return Checkpoint(
            step=self.step,
            at=self.manifest.at,
            bytes=self.bytes,
            layout=self.manifest.layout,
            loss=self.manifest.loss,
            verified=not self.missing(),
            path=str(self.path),
        )

    def _wrong_size(self, name: str) -> str | None:
        expected = self.manifest.files[name].bytes
        try:
            size = (self.path / name).stat().st_size
        except OSError as error:
            return f"{name} cannot be read: {error.strerror}"
        return None if size == expected else f"{name} has {size} bytes instead of {expected}"

    def _wrong_content(self, name: str) -> str | None:
        try:
            found = sha256_of(self.path / name)
        except OSError as error:
            return f"{name} cannot be read: {error.strerror}"
        return None if found == self.manifest.files[name].sha256 else f"{name} does not match its checksum"


def checkpoint_name(step: int) -> str:
    """The folder of a checkpoint."""
    return f"{_PREFIX}{step:08d}"


def list_checkpoints(folder: Path) -> list[StoredCheckpoint]:
    """The complete checkpoints in a folder, by ascending step; empty when there is no such folder."""
    return [found.stored for found in survey(folder) if found.stored and not found.damage]


@dataclass(frozen=True)
class Found:
    """Something with the name of a checkpoint. ``stored`` is None when it has no manifest that can be read."""

    path: Path
    stored: StoredCheckpoint | None
    damage: list[str]


def survey(folder: Path) -> Iterator[Found]:
    """Everything that has the name of a checkpoint, by ascending step, with what is wrong with it by its sizes."""
    if not folder.is_dir():
        return
    for path in sorted(folder.glob(f"{_PREFIX}*"), key=lambda path: (len(path.name), path.name)):
        try:
            manifest = Manifest.model_validate_json((path / MANIFEST).read_bytes())
        except OSError as error:
            yield Found(path, None, [f"{MANIFEST} cannot be read: {error.strerror}"])
        except ValidationError as error:
            yield Found(path, None, [f"{MANIFEST} is no manifest: {error.errors()[0]['msg']}"])
        else:
            stored = StoredCheckpoint(path, manifest)
            named = path.name == checkpoint_name(stored.step)
            wrong = [] if named else [f"{MANIFEST} is that of step {stored.step}"]
            yield Found(path, stored, wrong + stored.missing())


def sha256_of(path: Path) -> str:
    """SHA-256 of a file in hex. Raises OSError when it cannot be read."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
