"""Loss on text that is never trained on."""

from __future__ import annotations

import contextlib

import torch

from rubato.spec import JobSpec
from workers.engine.data import Ahead
from workers.engine.hooks.hook import Session, busy
from workers.engine.membership import Membership
from workers.engine.mesh import ReplicaMesh
from workers.engine.parallel.tensor import NOT_COUNTED
from workers.engine.state import TrainingState


class Validation:
    """Loss on held-out text, split over the replicas like a training batch; into the record of the step."""

    def __init__(
        self, spec: JobSpec, membership: Membership, sampler: Ahead, mesh: ReplicaMesh, state: TrainingState
    ) -> None:
        self.every = spec.data.validation.every
        self.at_end = self.every > 0
        self._membership = membership
        self._sampler = sampler
        self._mesh = mesh
        self._weights = state.averaged if spec.data.validation.ema else contextlib.nullcontext
        self._nominal = spec.train.global_batch * spec.data.sequence_length

    def __call__(self, session: Session) -> None:
        with busy(self._membership, "validation"), self._weights():
            self._validate(session)

    def _validate(self, session: Session) -> None:
        device = self._mesh.device.torch_device
        sums = torch.zeros(2, dtype=torch.float64, device=device)
        for index in range(self._sampler.validation_batches):
            tokens_BS, targets_BS = self._sampler.validation_batch(index, session.samples)
            loss_here = session.runner.evaluate(tokens_BS.to(device), targets_BS.to(device))
            sums += torch.stack([loss_here, (targets_BS != NOT_COUNTED).sum().to(loss_here)])
        session.data.sum([sums])
        # Only the last stage has losses, and each of its tensor ranks has the same.
        (loss,) = self._mesh.sum([float(sums[0]) if self._mesh.tensor.index == 0 else 0.0])
        if session.record is not None:
            session.record.validation_loss = loss * self._nominal / max(1.0, float(sums[1]))
