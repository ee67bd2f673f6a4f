"""What happens every so many steps beside training: evaluation, reports, checkpoints. The loop knows none by name."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Protocol

import torch

from rubato.problems import RubatoError
from rubato.spec import JobSpec
from workers.engine.checkpoint import CheckpointStore, FencedError
from workers.engine.data import Ahead
from workers.engine.membership import Generation, Membership
from workers.engine.mesh import ReplicaMesh
from workers.engine.parallel.data import DataGroup
from workers.engine.parallel.pipeline import Runner
from workers.engine.parallel.tensor import NOT_COUNTED
from workers.engine.state import TrainingState
from workers.engine.watch import Throughput, model_flops_utilization, peak_flops

log = logging.getLogger(__name__)


@dataclass
class Record:
    """What a step came to; fields as in ``rubato.resources.Metric``.

    ``step_tokens`` are the real tokens of this step, ``loss_scale`` the scale after it. A step whose loss or gradient
    norm is not finite has None there, and was skipped.
    """

    step: int
    loss: float | None
    grad_norm: float | None
    lr: float
    tokens: int
    step_tokens: int
    step_s: float
    loss_scale: int = 1
    validation_loss: float | None = None

    @property
    def skipped(self) -> bool:
        """Whether the step changed no weight."""
        return self.loss is None or self.grad_norm is None


@dataclass
class Session:
    """A generation as this worker lives it.

    Attributes:
        samples: this replica's places in the global batch.
        runner: runs them.
        record: of the step that led here; None when none did (at the first step, or right after a checkpoint was
            loaded).
    """

    generation: Generation
    data: DataGroup
    samples: range
    runner: Runner
    record: Record | None


class Hook(Protocol):
    """Called by all workers after every ``every`` steps, and after the last where ``at_end``.

    Called again for the step a generation begins with, since of the one before some may not have come to it; so
    doing it twice must be harmless.
    """

    every: int
    at_end: bool

    def __call__(self, session: Session) -> None: ...


@contextmanager
def busy(membership: Membership, doing: str) -> Iterator[None]:
    """Says that this worker takes no steps for a while and why, so that nobody takes it for one that hangs."""
    membership.report("busy", {"doing": doing})
    try:
        yield
    finally:
        membership.report("busy", {"doing": None})


def due(hook: Hook, step: int, steps: int) -> bool:
    """Whether a hook is to be called after ``step`` of ``steps`` steps."""
    return step > 0 and ((hook.every > 0 and step % hook.every == 0) or (hook.at_end and step == steps))


class Validation:
    """Loss on held-out text, split over the replicas like a training batch; into the record of the step."""

    def __init__(self, spec: JobSpec, membership: Membership, sampler: Ahead, mesh: ReplicaMesh) -> None:
        self.every = spec.data.validation.every
        self.at_end = self.every > 0
        self._membership = membership
        self._sampler = sampler
        self._mesh = mesh
        self._nominal = spec.train.global_batch * spec.data.sequence_length

    def __call__(self, session: Session) -> None:
        with busy(self._membership, "validation"):
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
            session.record.validation_loss = loss * self._nominal / float(sums[1])


class Report:
    """Hands the record of each step over; the first worker of the first replica does."""

    every = 1
    at_end = False

    def __init__(self, spec: JobSpec, membership: Membership, mesh: ReplicaMesh) -> None:
        self._spec = spec
        self._membership = membership
        self._mesh = mesh
        self._throughput = Throughput()
        self._generation: int | None = None
        self._reported: int | None = None
        self._first = mesh.pipeline.index == mesh.tensor.index == 0
        self._peak = peak_flops(mesh.device.torch_device, spec.train.precision) if self._first else 0.0

    def __call__(self, session: Session) -> None:
        if session.generation.replica == 0 and session.record is not None:
            self.tell(session.generation, session.record)

    def tell(self, generation: Generation, record: Record) -> None:
        """Hands over what a step of this generation came to, once; the first worker of a replica does."""
        if not self._first or record.step == self._reported:
            return
        if self._generation != generation.number:
            self._generation = generation.number
            self._throughput.restart()
        rate = self._throughput.add(record.step_tokens, record.step_s)
        workers = self._mesh.layout(generation.data).world_size
        metric = asdict(record) | {
            "tokens_per_s": rate,
            "mfu": model_flops_utilization(rate, self._spec, workers, self._peak),
            "generation": generation.number,
            "data": generation.data,
        }
        del metric["step_tokens"], metric["loss_scale"]
        if record.skipped:
            self._tell_skipped(record)
        else:
            self._membership.report("metric", metric)
        self._reported = record.step
        loss = record.validation_loss
        if loss is not None:
            message = f"validation loss {loss:.4f} at step {record.step}"
            event = {"kind": "validation", "message": message, "data": {"step": record.step, "loss": loss}}
            self._membership.report("event", event)

    def _tell_skipped(self, record: Record) -> None:
        what = "gradients" if record.loss is not None else "loss"
        message = f"step {record.step} was skipped: its {what} overflowed or came to no number"
        data = {"step": record.step, "loss": record.loss, "loss_scale": record.loss_scale}
        if self._spec.train.precision == "fp16":
            message += f"; the loss scale is {record.loss_scale} now"
        self._membership.report("event", {"kind": "step.skipped", "message": message, "data": data})


class Checkpoint:
    """Saves the state; the first replica does, all its workers together.

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

    def __call__(self, session: Session) -> None:
        if session.generation.replica != 0:
            return
        try:
            self.save(session.generation.data, session.record.loss if session.record else None)
        except FencedError:
            raise
        except RubatoError as error:  # all workers of the replica have heard it
            step = self._state.done
            if step >= self._spec.train.steps:
                raise
            log.exception("training goes on without a checkpoint of step %d", step)
            if self._first:
                message = f"no checkpoint of step {step}: {error.detail}; training goes on, the next save tries again"
                data = {"step": step, "cause": error.detail}
                self._membership.report("event", {"kind": "checkpoint.failed", "message": message, "data": data})

    def save(self, data: int, loss: float | None) -> None:
        """Saves, unless a checkpoint of this step is there.

        Args:
            data: data degree of the generation.
            loss: of the last step, when it is known.

        Raises:
            FencedError: a newer attempt writes here now.
            RubatoError: it could not be written.
        """
        step, began = self._state.done, datetime.now(UTC)
        with busy(self._membership, "checkpoint"):
            stored = self._store.save(
                step,
                self._state.state_dict(),
                layout=self._mesh.layout(data),
                spec=self._spec,
                loss=loss,
                group=self._mesh.group,
            )
        if stored.manifest.at >= began and self._first:
            seconds = (datetime.now(UTC) - began).total_seconds()
            size = sum(file.bytes for file in stored.manifest.files.values())
            event = {"step": step, "bytes": size, "seconds": seconds}
            self._membership.report(
                "event", {"kind": "checkpoint.saved", "message": f"checkpoint of step {step} saved", "data": event}
            )
