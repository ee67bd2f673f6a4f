"""Traces a step of one rank: the real model, parallelism, recomputation and optimizer on tensors without content.

The process group is a fake one of the size of the replica, so one process on one core stands for any rank of it. What
is traced is what the framework's tensors hold; a device also holds the fragments between them, and its context.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed.pipelining.schedules import InferenceMode, _PipelineSchedule
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.testing._internal.distributed.fake_pg import FakeStore

from rubato.layout import Layout, fewest_micro_batches, micro_batches, runs_in_schedule, sharding_degree
from rubato.spec import JobSpec
from workers.engine.comm.codecs import Codec
from workers.engine.device import Device
from workers.engine.mesh import ReplicaMesh
from workers.engine.optim import LossScale
from workers.engine.parallel import rows
from workers.engine.parallel.compose import ModelShare
from workers.engine.parallel.tensor import local
from workers.engine.parallel.unit import Unit
from workers.engine.parallel.zero import Rehearsal, Zero, exchange_of
from workers.engine.state import TrainingState
from workers.engine.tracing.ledger import Collective, Ledger, kernel_norm


@dataclass(frozen=True)
class StageTrace:
    """What one pipeline rank came to.

    Attributes:
        stage: the pipeline rank.
        peak_bytes: most that its tensors hold at once in a step.
        resident_bytes: of them, parameters, gradients and optimizer states.
        micro_batches: that were traced, as many as fill the pipeline; for those left out the peak has what stages
            receive of them, which is allocated for all of a step at once.
        collectives: calls for so many micro-batches.
    """

    stage: int
    peak_bytes: int
    resident_bytes: int
    micro_batches: int
    collectives: list[Collective]


def trace_stage(spec: JobSpec, stage: int, data: int) -> StageTrace:
    """Traces the first tensor rank of a pipeline rank, of the first of ``data`` replicas.

    Args:
        spec: with its layout.
        stage: the pipeline rank.
        data: replicas that share the global batch, and what ZeRO splits.
    """
    shape = spec.parallelism
    layout = Layout(1, shape.pipeline, shape.tensor)
    rank = stage * shape.tensor
    a_step = max(micro_batches(shape, spec.train.global_batch, data))
    count = _enough(spec, a_step)
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with _fake_world(rank, layout.world_size), _without_memory(fake):
        mesh = ReplicaMesh.of_world(layout, rank, Device(torch.device("cpu")))
        share = ModelShare(spec, mesh)
        with fake:
            ledger = Ledger([local(parameter) for parameter in share.parameters.values()])
            step = _Step(spec, share, mesh, count, data, ledger)
            step()  # so that what is made only once is there
            ledger.forget_sent()
            ledger.look_again()
            ledger.hold(step.resident())
            resident = ledger.peak = ledger.total
            with ledger, _seen_by(ledger), _nobodys(ledger):
                step()
    peak = ledger.peak + (a_step - count) * _received(spec, share, stage)
    return StageTrace(stage, peak, resident, count, ledger.collectives)


def _received(spec: JobSpec, share: ModelShare, stage: int) -> int:
    """Bytes a pipeline rank has room for what it receives of a micro-batch, both ways."""
    shape = spec.parallelism
    if shape.pipeline == 1:
        return 0
    neighbours = 2 * shape.virtual_stages - (stage == 0) - (stage == shape.pipeline - 1)
    hidden = share._boundary().hidden
    return neighbours * hidden.numel() * hidden.element_size()


class _Step:
    """What the loop does in a step, without looking at values; of the other replicas only sizes are known."""

    def __init__(
        self, spec: JobSpec, share: ModelShare, mesh: ReplicaMesh, count: int, data: int, ledger: Ledger
    ) -> None:
        self._share, self._ledger = share, ledger
        self._data = data
        sharded = spec.memory.zero > 0
        self._state = TrainingState(share.parameters, spec.optimizer, LossScale(spec.train), sharded=sharded)
        self._exchange = exchange_of(spec, share, self._state, mesh.tensor.group)
        if isinstance(self._exchange, Zero):
            self._exchange.hold(_Others(sharding_degree(data, spec.memory.shard_over), ledger))
        rows = count * spec.parallelism.micro_batch
        self._tokens = torch.zeros(rows, spec.data.sequence_length, dtype=torch.int64)
        self._runner = self._exchange.runner(share, [count], 0)
        self._state.begin()

    def __call__(self) -> None:
        with self._exchange.reducing(self._reduce):
            self._runner.train(self._tokens, self._tokens, 1.0, self._exchange.last_pass)
        self._share.sum_tied(self._exchange.buckets.gradients)
        self._exchange.buckets.scale(1.0)
        self._state.update(lr=0.0, tokens=0)

    def _reduce(self, bucket: Tensor) -> None:
        if self._data > 1:
            self._ledger.send("all_reduce, data axis", bucket)

    def resident(self) -> list[Any]:
        """What stays between steps beside the parameters: gradients, masters and the optimizer's states."""
        leaves = self._state.leaves
        moments = [held for leaf in leaves for held in self._state.optimizer.slots(leaf).values()]
        return [*leaves, *self._exchange.buckets.flat, *moments]


class _Others(Rehearsal):
    """The ranks that share one copy of the state with this one: what goes to them is counted."""

    def __init__(self, degree: int, ledger: Ledger) -> None:
        super().__init__(degree)
        self._ledger = ledger

    def begin_gather(self, whole: Tensor, own: Tensor) -> None:
        """As in a rehearsal."""
        self._ledger.send("all_gather, data axis", whole)
        super().begin_gather(whole, own)

    def begin_reduce(self, own: Tensor, whole: Tensor, take: Callable[[], Tensor], codec: Codec | None) -> None:
        """As in a rehearsal."""
        sent = whole if codec is None else codec.encode(whole.view(self.split.degree, -1))
        self._ledger.send("reduce_scatter, data axis", sent)
        super().begin_reduce(own, whole, take, codec)


def _enough(spec: JobSpec, micro_batches: int) -> int:
    """The fewest micro-batches that fill the pipeline as much as the real number does."""
    shape = spec.parallelism
    if shape.schedule == "gpipe":
        return micro_batches
    least = max(fewest_micro_batches(shape), 2 * shape.pipeline if shape.pipeline > 1 else 2)
    return next((count for count in range(least, micro_batches) if runs_in_schedule(shape, count)), micro_batches)


@contextmanager
def _seen_by(ledger: Ledger) -> Iterator[None]:
    """Shows a ledger what ZeRO takes and gives back without an operation."""

    def then_look(real: Callable[[Unit], None]) -> Callable[[Unit], None]:
        def call(unit: Unit) -> None:
            real(unit)
            ledger.look_again()

        return call

    with (
        mock.patch.object(Unit, "allocate", then_look(Unit.allocate)),
        mock.patch.object(Unit, "release", then_look(Unit.release)),
    ):
        yield


@contextmanager
def _nobodys(ledger: Ledger) -> Iterator[None]:
    """Keeps from a ledger what DTensor works out shapes with: tensors of the whole size, which no rank makes."""
    real = ShardingPropagator._propagate_tensor_meta_non_cached

    def aside(*args: Any, **kwargs: Any) -> Any:
        with ledger.paused():
            return real(*args, **kwargs)

    with mock.patch.object(ShardingPropagator, "_propagate_tensor_meta_non_cached", aside):
        yield


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
    real, real_offsets = nn.Module.to_empty, rows.compute_local_shape_and_global_offset

    def to_empty(module: nn.Module, *, device: Any, recurse: bool = True) -> nn.Module:
        with fake:
            emptied = real(module, device=device, recurse=recurse)
        for part in emptied.modules():
            if isinstance(part, nn.RMSNorm):
                part.forward = kernel_norm(part)
        return emptied

    def shapes_are_known(schedule: Any, stages: Sequence[Any], *_: Any) -> None:
        for stage in stages:  # as the neighbours would find by a vote, whose outcome has no content here
            stage._inference_mode = InferenceMode.STATIC

    def offsets(*args: Any) -> Any:
        with unset_fake_temporarily():  # it counts on tensors
            return real_offsets(*args)

    with (
        mock.patch.object(nn.Module, "to_empty", to_empty),
        mock.patch.object(_PipelineSchedule, "_warmup_p2p", shapes_are_known),
        mock.patch.object(rows, "compute_local_shape_and_global_offset", offsets),
    ):
        yield
