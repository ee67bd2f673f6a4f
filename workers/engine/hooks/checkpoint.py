"""Saves the state every so many steps."""

from __future__ import annotations

import logging
from datetime import UTC, datetime

from rubato.problems import RubatoError
from rubato.spec import JobSpec
from workers.engine.checkpoint import CheckpointStore, Crew, FencedError, JobCrew
from workers.engine.hooks.hook import Session, busy
from workers.engine.membership import Membership
from workers.engine.mesh import ReplicaMesh
from workers.engine.state import TrainingState

log = logging.getLogger(__name__)


class Checkpoint:
    """Saves the state; the first replica does, all its workers together. All replicas do where each has a shard.

    A save that fails is reported, and the next one tries again: the state in memory is as good as before. Only the
    last one must not fail.
    """

    at_end = True

    def __init__(
        self, spec: JobSpec, membership: Membership, mesh: ReplicaMesh, store: CheckpointStore, state: TrainingState
    ) -> None:
        self.every = spec.checkpoint.every
        self._spec = spec
        self._membership = membership
        self._mesh = mesh
        self._store = store
        self._state = state
        self._first = mesh.pipeline.index == mesh.tensor.index == 0
        self._sharded = spec.memory.zero > 0

    def __call__(self, session: Session) -> None:
        replica = session.generation.replica
        if replica != 0 and not self._sharded:
            return
        loss = session.record.loss if session.record else None
        try:
            self.save(session.generation.data, loss, JobCrew(session.data, self._mesh) if self._sharded else None)
        except FencedError:
            raise
        except RubatoError as error:  # all workers of the replica have heard it
            step = self._state.done
            if step >= self._spec.train.steps:
                raise
            log.exception("training goes on without a checkpoint of step %d", step)
            if self._first and replica == 0:
                message = f"no checkpoint of step {step}: {error.detail}; training goes on, the next save tries again"
                data = {"step": step, "cause": error.detail}
                self._membership.report("event", {"kind": "checkpoint.failed", "message": message, "data": data})

    def save(self, data: int, loss: float | None, crew: Crew | None = None) -> None:
        """Saves, unless a checkpoint of this step is there.

        Args:
            data: data degree of the generation.
            loss: of the last step, when it is known.
            crew: who together have the state; None: the workers of this replica.

        Raises:
            FencedError: a newer attempt writes here now.
            RubatoError: it could not be written.
        """
        step, began = self._state.done, datetime.now(UTC)
        crew = crew or Crew(self._mesh.group)
        with busy(self._membership, "checkpoint"):
            stored = self._store.save(
                step,
                self._state.state_dict(),
                layout=self._mesh.layout(data),
                spec=self._spec,
                loss=loss,
                crew=crew,
            )
        if stored.manifest.at >= began and crew.rank == 0:
            seconds = (datetime.now(UTC) - began).total_seconds()
            size = sum(file.bytes for file in stored.manifest.files.values())
            event = {"step": step, "bytes": size, "seconds": seconds}
            self._membership.report(
                "event", {"kind": "checkpoint.saved", "message": f"checkpoint of step {step} saved", "data": event}
            )
