"""Brings all workers of a generation to the state of one checkpoint: the newest, or one before a loss spiked."""

from __future__ import annotations

from dataclasses import replace

from workers.engine.checkpoint.store import CheckpointStore
from workers.engine.comm.exchange import Exchange
from workers.engine.data.jumps import data_step
from workers.engine.membership import Membership
from workers.engine.mesh import ReplicaMesh
from workers.engine.parallel.compose import ModelShare
from workers.engine.parallel.data import DataGroup
from workers.engine.state import TrainingState
from workers.engine.watch.spikes import SpikeGuard


class Recovery:
    """One worker's part in it. All workers of the generation call together."""

    def __init__(
        self,
        checkpoints: CheckpointStore,
        membership: Membership,
        mesh: ReplicaMesh,
        share: ModelShare,
        state: TrainingState,
        exchange: Exchange,
    ) -> None:
        self._checkpoints = checkpoints
        self._membership = membership
        self._mesh = mesh
        self._share = share
        self._state = state
        self._exchange = exchange

    def restore(self, data: DataGroup, latest: int | None = None) -> None:
        """Loads the newest checkpoint, or begins at step 0; the same step everywhere.

        Args:
            data: who has to agree.
            latest: no checkpoint of a later step; None: whichever is the newest.

        Raises:
            RubatoError: it cannot be loaded.
            DataAxisError: the data axis failed before anything was loaded.
        """
        newest = self._checkpoints.newest(self._mesh.group, latest)
        # Storage may show a checkpoint to one host before another: all take the newest that all can see.
        step = int(data.min(newest.step if newest else 0))
        reached = -int(data.min(-(self._state.step or 0)))  # the highest that anybody held
        self._exchange.hold(data)
        self._load(step)
        if not data.first:
            return
        if step:
            self._tell("checkpoint.restored", f"the checkpoint of step {step} was loaded", {"step": step})
        if reached > step and latest is None:
            message = f"a shard of the state was lost: training goes back from step {reached} to step {step}"
            self._tell("training.rolled_back", message, {"from": reached, "to": step})

    def _load(self, step: int) -> None:
        if step == 0:
            self._share.initialise(self._state.weights)
            self._state.begin()
            return
        state = self._state.state_dict()
        self._state.drop()
        self._checkpoints.load(step, state, self._mesh.group)
        self._state.loaded(state)

    def _tell(self, kind: str, message: str, data: dict[str, int]) -> None:
        self._membership.report("event", {"kind": kind, "message": message, "data": data})

    def roll_back(self, data: DataGroup, guard: SpikeGuard, loss: float) -> None:
        """Goes back to before the data steps that led to a spike, and leaves them out from now on.

        Until this worker holds the checkpoint, it holds the state before the spike, unchanged: should the data axis
        break meanwhile, the next generation goes on from there, meets the same spike and goes back anew.

        Args:
            data: who goes back together.
            guard: how far.
            loss: of the step that spiked and was not taken.
        """
        spiked, history, before = self._state.done + 1, replace(self._state.losses), self._state.jumped
        first = max(0, spiked - guard.jump)
        offending = [data_step(step, before) for step in range(first, spiked)]
        self.restore(data, latest=first)
        to = self._state.done
        if data.index == 0:
            self._checkpoints.abandon(to, self._mesh.group)
        guard.count(spiked, history)
        self._state.jumped = sorted({*before, *offending})
        self._state.losses.spikes = history.spikes
        if data.first:
            self._membership.report("event", guard.event(spiked, loss, history, to, offending))
