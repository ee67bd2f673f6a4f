"""Saves and loads the state of a job: whatever is listed is complete, whatever is loaded was verified.

A checkpoint is written under a temporary name, described by a manifest with the checksum of every file, put on disk,
and renamed. Resharding is the business of torch.distributed.checkpoint: tensors are stored by global name and offset,
so any layout loads what any other has saved.
"""

from __future__ import annotations

import logging
import secrets
import shutil
import warnings
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load as load_state

from rubato.checkpoints import (
    MANIFEST,
    Manifest,
    StoredCheckpoint,
    StoredFile,
    checkpoint_name,
    list_checkpoints,
    sha256_of,
    survey,
)
from rubato.durable import sync_folder, write_durably
from rubato.layout import Layout
from rubato.problems import RubatoError
from rubato.resources import LayoutView
from rubato.spec import JobSpec
from rubato.spec.identity import curve_hash
from workers.engine.checkpoint.crew import Crew
from workers.engine.checkpoint.together import save_together

log = logging.getLogger(__name__)

State = dict[str, Any]
Report = Callable[[str, str, dict[str, Any]], None]


class FencedError(RubatoError):
    """This writer is no longer the one that may write: a newer attempt has taken over the run."""

    def __init__(self, folder: Path) -> None:
        super().__init__(
            f"a newer attempt writes to {folder}; this one may not",
            fix="leave the run to the newer attempt",
            code="fenced",
            status=409,
        )


class CheckpointStore:
    """The checkpoints of one run.

    Args:
        folder: where they are, on storage that all workers share.
        keep_last: how many to keep; older ones are removed once a newer one is complete.
        fence: whether this attempt may still write. Asked before anything is removed and right before a checkpoint
            gets its name.
        report: hears, as (kind, message, data), of damaged checkpoints that were passed over, and of old ones that
            could not be removed. Called by the first member of a group only.

    ``group`` in the methods is the process group of the workers that hold one copy of the state, all of which call
    together; None: this process holds all of it.
    """

    def __init__(
        self,
        folder: Path,
        *,
        keep_last: int,
        fence: Callable[[], bool] = lambda: True,
        report: Report = lambda kind, message, data: None,
    ) -> None:
        self._folder = folder
        self._keep_last = keep_last
        self._fence = fence
        self._report = report
        self._trusted: set[Path] = set()  # read back, or written, by this process: not read once more

    def checkpoints(self) -> list[StoredCheckpoint]:
        """Complete checkpoints by ascending step."""
        return list_checkpoints(self._folder)

    def newest(self, group: dist.ProcessGroup | None = None, latest: int | None = None) -> StoredCheckpoint | None:
        """The checkpoint with the highest step whose every file matches its checksum; None: there is none.

        Damaged ones are passed over and reported. The members of the group share the reading.

        Args:
            group: see the class.
            latest: those of later steps are not looked at.
        """
        crew = Crew(group)
        for found in reversed(crew.once(lambda: [*survey(self._folder)])):
            if latest is not None and found.stored and found.stored.step > latest:
                continue
            damage = found.damage
            if found.stored and not damage:
                damage = _damage(found.stored, crew)
                if not damage:
                    self._trusted.add(found.path)
                    return found.stored
            if crew.rank == 0:
                message = f"checkpoint {found.path.name} is damaged and is passed over: {'; '.join(damage)}"
                log.warning("%s", message)
                self._report("checkpoint.corrupt", message, {"path": str(found.path), "damage": damage})
        return None

    def load(self, step: int, state: State, group: dist.ProcessGroup | None = None) -> None:
        """Fills ``state`` in place from the checkpoint of a step, at whatever layout its tensors have now.

        Args:
            step: of a checkpoint that ``newest`` gave; content is not verified again.
            state: nested dicts of tensors (DTensors for what is sharded) and plain values, as for ``save``.
            group: see the class.

        Raises:
            RubatoError: there is no such checkpoint, or it is of a state with other names or shapes.
        """
        path = self._folder / checkpoint_name(step)
        if not path.is_dir():
            raise RubatoError(
                f"there is no checkpoint of step {step} in {self._folder}",
                fix=f"use one of {[stored.step for stored in self.checkpoints()]}",
                code="checkpoint_missing",
                status=404,
            )
        try:
            with quiet():
                load_state(
                    state,
                    storage_reader=FileSystemReader(path),
                    process_group=group,
                    no_dist=group is None,
                )
        except CheckpointException as error:
            raise RubatoError(
                f"checkpoint {path} cannot be loaded: {_causes(error)}",
                fix="load it with the model and the optimizer it was saved with",
                code="checkpoint_unloadable",
            ) from error

    def save(
        self,
        step: int,
        state: State,
        *,
        layout: Layout,
        spec: JobSpec,
        loss: float | None,
        group: dist.ProcessGroup | None = None,
        crew: Crew | None = None,
    ) -> StoredCheckpoint:
        """Saves the state after ``step`` optimizer steps; when it returns, it is on disk and complete.

        A verified checkpoint of this step that is there already is kept and returned: it is of the same curve.

        Args:
            step: optimizer steps the state holds.
            state: nested dicts of tensors (DTensors for what is sharded) and plain values.
            layout: of the whole job, for the manifest.
            spec: of the job, for the manifest.
            loss: of the last step, nats; None when it is not known.
            group: see the class.
            crew: all that hold a share of the state, where these are not one group.

        Raises:
            FencedError: a newer attempt writes here now; nothing was published.
            RubatoError: it could not be written; nothing was published.
        """
        crew = crew or Crew(group)
        final = self._folder / checkpoint_name(step)
        try:
            there = crew.once(lambda: self._verified(final))
            if there is not None:
                return there
            building = crew.once(lambda: self._begin(final))
            try:
                save_together(state, building, crew)
                manifest = Manifest(
                    step=step,
                    at=datetime.now(UTC),
                    loss=loss,
                    layout=LayoutView.of(layout, spec),
                    spec_hash=curve_hash(spec),
                    files=_checksums(building, crew),
                )
                stored = crew.once(lambda: self._publish(building, final, manifest))
                self._trusted.add(final)
            finally:
                if crew.rank == 0:
                    shutil.rmtree(building, ignore_errors=True)  # gone already when it was renamed
        except OSError as error:
            raise _unsaved(final, str(error)) from error
        crew.once(lambda: self._make_room(step))
        return stored

    def abandon(self, step: int, group: dist.ProcessGroup | None = None) -> None:
        """Removes the checkpoints after a step: the run has gone back there and takes another way.

        Raises:
            FencedError: a newer attempt writes here now; nothing was removed.
            RubatoError: they could not be removed.
        """

        def remove() -> None:
            if not self._fence():
                raise FencedError(self._folder)
            for stored in [stored for stored in self.checkpoints() if stored.step > step]:
                log.info("removing %s: the run has gone back to step %d", stored.path, step)
                self._discard(stored.path)

        try:
            Crew(group).once(remove)
        except OSError as error:
            raise RubatoError(
                f"checkpoints after step {step}, which are of another curve now, cannot be removed: {error}",
                fix=f"give write access to {self._folder}",
                code="checkpoint_not_removed",
                status=500,
            ) from error

    def _verified(self, path: Path) -> StoredCheckpoint | None:
        for stored in self.checkpoints():
            if stored.path == path and (path in self._trusted or not stored.damage()):
                return stored
        return None

    def _begin(self, final: Path) -> Path:
        """A fresh folder to write to. What killed saves have left is removed: only one writer passes the fence."""
        if not self._fence():
            raise FencedError(self._folder)
        self._folder.mkdir(parents=True, exist_ok=True)
        for leftover in self._folder.glob(".step-*.tmp"):
            log.info("removing %s, left by a save that never finished", leftover)
            shutil.rmtree(leftover)
        building = _temporary(final)
        building.mkdir()
        return building

    def _publish(self, building: Path, final: Path, manifest: Manifest) -> StoredCheckpoint:
        write_durably(building / MANIFEST, manifest.model_dump_json(indent=1))
        if not self._fence():
            raise FencedError(self._folder)
        if final.exists():
            self._discard(final)  # damaged, or `save` would have returned it
        building.rename(final)
        sync_folder(self._folder)
        return StoredCheckpoint(final, manifest)

    def _make_room(self, step: int) -> None:
        """Removes what is not kept. Where that fails, the new checkpoint is there all the same."""
        try:
            self._retain(step)
        except OSError as error:
            message = f"checkpoints that are not kept could not be removed: {error}"
            log.warning("%s", message)
            self._report("checkpoint.not_removed", message, {"step": step, "cause": str(error)})

    def _retain(self, step: int) -> None:
        """Removes all but the last ones up to ``step``, and what is damaged.

        Beyond ``step`` are checkpoints that a run which fell back to an earlier one has yet to reach again. Verified
        ones stay whatever their number: the newest verified checkpoint is never removed.
        """
        found = [*survey(self._folder)]
        whole = [each.stored for each in found if each.stored and not each.damage]
        for old in [stored for stored in whole if stored.step <= step][: -self._keep_last]:
            self._discard(old.path)
        broken = [(each.path, each.damage) for each in found if each.damage]
        broken += [(stored.path, damage) for stored in whole if stored.step > step and (damage := stored.damage())]
        for path, damage in broken:
            log.warning("removing %s: %s", path, "; ".join(damage))
            self._discard(path)

    def _discard(self, path: Path) -> None:
        """Removes a checkpoint so that half of one is never listed."""
        leaving = _temporary(path)
        path.rename(leaving)
        shutil.rmtree(leaving)


def _temporary(path: Path) -> Path:
    # A name of its own, so that a writer who lost the run cannot mix its files with those of the one who has it.
    return path.with_name(f".{path.name}-{secrets.token_hex(4)}.tmp")


def _damage(stored: StoredCheckpoint, crew: Crew) -> list[str]:
    """What is wrong with the content of a checkpoint; the members share the reading."""
    mine = sorted(stored.manifest.files)[crew.rank :: crew.size]
    return [sentence for part in crew.each(lambda: stored.damage(mine)) for sentence in part]


def _checksums(building: Path, crew: Crew) -> dict[str, StoredFile]:
    names = crew.once(lambda: sorted(path.name for path in building.iterdir()))
    mine = names[crew.rank :: crew.size]
    parts = crew.each(lambda: {name: _stored_file(building / name) for name in mine})
    return {name: file for part in parts for name, file in part.items()}


def _stored_file(path: Path) -> StoredFile:
    return StoredFile(bytes=path.stat().st_size, sha256=sha256_of(path))


def _causes(error: CheckpointException) -> str:
    return "; ".join(f"rank {rank}: {cause}" for rank, (cause, _) in sorted(error.failures.items()))


def _unsaved(final: Path, cause: str) -> RubatoError:
    return RubatoError(
        f"checkpoint {final} could not be saved: {cause}",
        fix="give the run directory room and write access",
        code="checkpoint_unsaved",
        status=500,
    )


class quiet(warnings.catch_warnings):  # noqa: N801 (a context manager)
    """Hides the warning that a process without a group saves alone: here that is meant."""

    def __enter__(self) -> None:
        super().__enter__()
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
