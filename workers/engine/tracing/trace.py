"""Traces a step of one rank: the real model, parallelism, recomputation and optimizer on tensors without content.

The process group is a fake one of the size of the replica, so one process on one core stands for any rank of it. What
is traced is what the framework's tensors hold; a device also holds the fragments between them, and its context.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from rubato.layout import Layout, fewest_micro_batches, runs_in_schedule
from rubato.spec import JobSpec
from workers.engine.device import Device
from workers.engine.mesh import ReplicaMesh
from workers.engine.optim import LossScale
from workers.engine.parallel.compose import ModelShare
from workers.engine.parallel.data import GradientBuckets
from workers.engine.parallel.tensor import local_gradients
from workers.engine.state import TrainingState
from workers.engine.tracing.ledger import Collective, Ledger, kernel_norm


@dataclass(frozen=True)
class StageTrace:
    """What one pipeline rank came to.

    Attributes:
        stage: the pipeline rank.
        peak_bytes: most that its tensors held at once.
        resident_bytes: of them, parameters, gradients and optimizer states.
        micro_batches: that were traced, as many as the memory of the schedule depends on.
        collectives: calls inside the replica, for so many micro-batches.
        data_axis_bytes: gradients that it sums over the data axis in a step.
    """

    stage: int
    peak_bytes: int
    resident_bytes: int
    micro_batches: int
    collectives: list[Collective]
    data_axis_bytes: int


def trace_stage(spec: JobSpec, stage: int, micro_batches: int) -> StageTrace:
    """Traces the first tensor rank of a pipeline rank.

    Args:
        spec: with its layout.
        stage: the pipeline rank.
        micro_batches: of a replica in a step; fewer are traced where its memory does not depend on more.
    """
    shape = spec.parallelism
    layout = Layout(1, shape.pipeline, shape.tensor)
    rank = stage * shape.tensor
    count = _enough(spec, micro_batches)
    device = Device(torch.device("cpu"))
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with _fake_world(rank, layout.world_size), _without_memory(fake):
        share = ModelShare(spec, ReplicaMesh.of_world(layout, rank, device))
        with fake:
            step = _Step(spec, share, count)
            step()  # works out how operations are split, on tensors of the whole size, which are nobody's
            ledger = Ledger()
            ledger.hold(step.resident())
            resident = ledger.live
            with ledger:
                step()
    data_axis = sum(flat.numel() * flat.element_size() for flat in step.buckets.flat)
    return StageTrace(stage, ledger.peak, resident, count, ledger.collectives, data_axis)


class _Step:
    """What the loop does in a step, without the data axis and without looking at values."""

    def __init__(self, spec: JobSpec, share: ModelShare, count: int) -> None:
        self._share = share
        self._state = TrainingState(share.parameters, spec.optimizer, LossScale(spec.train))
        self.buckets = GradientBuckets(self._state.leaves, spec.communication.bucket_mb)
        rows = count * spec.parallelism.micro_batch
        self._tokens = torch.zeros(rows, spec.data.sequence_length, dtype=torch.int64)
        self._runner = share.runner(count)
        self._group = share._mesh.tensor.group
        self._state.begin()

    def __call__(self) -> None:
        self._runner.train(self._tokens, self._tokens)
        self.buckets.fill(local_gradients(self._share.parameters.items(), self._group))
        self._share.sum_tied(self.buckets.gradients)
        self.buckets.scale(1.0)
        self._state.update(lr=0.0, tokens=0)

    def resident(self) -> list[Any]:
        """Parameters, gradients and the optimizer's states."""
        moments = [value for state in self._state.optimizer.state.values() for value in state.values()]
        return [*self._share.parameters.values(), *self._state.leaves, *self.buckets.flat, *moments]


def _enough(spec: JobSpec, micro_batches: int) -> int:
    """The fewest micro-batches that fill the pipeline as much as the real number does."""
    shape = spec.parallelism
    if shape.schedule == "gpipe":
        return micro_batches
    least = max(fewest_micro_batches(shape), 2 * shape.pipeline if shape.pipeline > 1 else 2)
    return next((count for count in range(least, micro_batches) if runs_in_schedule(shape, count)), micro_batches)


@contextmanager
def _fake_world(rank: int, size: int) -> Iterator[None]:
    if size == 1:
        yield
        return
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def _without_memory(fake: FakeTensorMode) -> Iterator[None]:
    """Parts are built on the meta device as ever, and get tensors without content when they come to their device."""
    real = nn.Module.to_empty

    def to_empty(module: nn.Module, *, device: Any, recurse: bool = True) -> nn.Module:
        with fake:
            emptied = real(module, device=device, recurse=recurse)
        for part in emptied.modules():
            if isinstance(part, nn.RMSNorm):
                part.forward = kernel_norm(part)
        return emptied

    with mock.patch.object(nn.Module, "to_empty", to_empty):
        yield
