"""The pipeline axis: which layers a rank holds, and the order its micro-batches go through them.

A replica that is one stage runs its micro-batches one after the other with the same interface, so gradient
accumulation and pipelining are one thing to the loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from rubato.pipelines import SCHEDULES, stages_of
from rubato.spec import JobSpec, ParallelismSpec
from workers.engine.mesh import ReplicaMesh
from workers.engine.parallel.documents import Documents
from workers.engine.parallel.tensor import TokenLoss


@dataclass(frozen=True)
class Stretch:
    """The consecutive layers of one stage."""

    stage: int
    layers: range
    first: bool
    last: bool


def stretches(spec: JobSpec, rank: int) -> list[Stretch]:
    """The stages of a pipeline rank, ascending."""
    shape, counts = spec.parallelism, spec.stage_layers
    return [
        Stretch(
            stage,
            range(sum(counts[:stage]), sum(counts[: stage + 1])),
            first=stage == 0,
            last=stage == len(counts) - 1,
        )
        for stage in stages_of(shape.schedule, shape.pipeline, shape.virtual_stages, rank)
    ]


LastPass = Callable[[nn.Module], AbstractContextManager[None]]
"""Entered around the last backward pass of a step through a part: with it the gradients of the part are whole."""


def unobserved(part: nn.Module) -> AbstractContextManager[None]:
    """Nobody wants to know when gradients are whole."""
    return nullcontext()


class Runner(Protocol):
    """Runs the micro-batches of a replica, of a fixed number and shape."""

    def train(
        self, tokens_BS: Tensor, targets_BS: Tensor, scale: float = 1.0, last_pass: LastPass = unobserved
    ) -> Tensor:
        """Forward and backward; gradients, ``scale`` times as large, add up in the parameters.

        The sum of the losses, 0 without the last stage.
        """
        ...

    def evaluate(self, tokens_BS: Tensor, targets_BS: Tensor) -> Tensor:
        """Forward only. The sum of the losses, 0 without the last stage."""
        ...


class OneStage:
    """The whole model on this rank (or on its tensor axis)."""

    def __init__(self, part: nn.Module, micro_batch: int, loss: TokenLoss, documents: Documents) -> None:
        self._part = part
        self._documents = documents
        self._micro_batch = micro_batch
        self._loss = loss

    def train(
        self, tokens_BS: Tensor, targets_BS: Tensor, scale: float = 1.0, last_pass: LastPass = unobserved
    ) -> Tensor:
        def backward(loss: Tensor, is_last: bool) -> None:
            with last_pass(self._part) if is_last else nullcontext():
                loss.backward()

        with self._loss.scaled(scale):
            return self._run(tokens_BS, targets_BS, backward) / scale

    def evaluate(self, tokens_BS: Tensor, targets_BS: Tensor) -> Tensor:
        with self._loss.forward_only():
            return self._run(tokens_BS, targets_BS, lambda loss, is_last: None)

    def _run(self, tokens_BS: Tensor, targets_BS: Tensor, then: Callable[[Tensor, bool], None]) -> Tensor:
        total = torch.zeros((), dtype=torch.float64, device=tokens_BS.device)
        batches = [*zip(tokens_BS.split(self._micro_batch), targets_BS.split(self._micro_batch), strict=True)]
        with self._loss.computing():
            for number, (tokens, targets) in enumerate(batches, 1):
                loss = self._loss(self._part(tokens, **self._documents(tokens)), targets)
                then(loss, number == len(batches))
                total += loss.detach().to(total.device)
        return total


class ManyStages:
    """Stages on the ranks of a pipeline axis, by torch.distributed.pipelining.

    A stage freezes number and shape of its micro-batches, so another data degree needs other stages. They are told
    the shapes they exchange, which saves them a round of finding out.
    """

    def __init__(
        self,
        parts: Sequence[nn.Module],
        held: Sequence[Stretch],
        shape: ParallelismSpec,
        mesh: ReplicaMesh,
        count: int,
        boundary: Boundary,
        loss: TokenLoss,
        documents: Documents,
    ) -> None:
        self._documents = documents
        self._last_pass: LastPass = unobserved
        self._make = lambda: _schedule(parts, held, shape, mesh, count, boundary, loss, lambda: self._last_pass)
        self._first = any(stretch.first for stretch in held)
        self._last = any(stretch.last for stretch in held)
        self._loss = loss
        self._training = self._make()
        self._evaluation: Any = None

    def train(
        self, tokens_BS: Tensor, targets_BS: Tensor, scale: float = 1.0, last_pass: LastPass = unobserved
    ) -> Tensor:
        self._last_pass = last_pass
        with self._loss.scaled(scale):
            return self._run(self._training.step, tokens_BS, targets_BS) / scale

    def evaluate(self, tokens_BS: Tensor, targets_BS: Tensor) -> Tensor:
        # Stages of their own: those that train would be set up anew at each change.
        self._evaluation = self._evaluation or _forward_only(self._make())
        with self._loss.forward_only():
            return self._run(self._evaluation.eval, tokens_BS, targets_BS)

    def _run(self, step: Callable[..., object], tokens_BS: Tensor, targets_BS: Tensor) -> Tensor:
        losses: list[Tensor] = []
        with self._loss.computing():
            step(
                *([tokens_BS] if self._first else []),
                target=targets_BS if self._last else None,
                losses=losses if self._last else None,
                return_outputs=False,
                **self._documents(tokens_BS),
            )
        total = torch.zeros((), dtype=torch.float64, device=tokens_BS.device)
        for loss in losses:
            total += loss.detach()
        return total


@dataclass(frozen=True)
class Boundary:
    """What stages exchange, on the meta device: token ids in, hidden states between, what the loss is made of out."""

    tokens: Tensor
    hidden: Tensor
    output: Tensor


def _schedule(
    parts: Sequence[nn.Module],
    held: Sequence[Stretch],
    shape: ParallelismSpec,
    mesh: ReplicaMesh,
    count: int,
    boundary: Boundary,
    loss: TokenLoss,
    last_pass: Callable[[], LastPass],
) -> Any:
    # Imported when needed: it pulls in the compiler, half a second that a replica of one stage need not wait.
    from torch.distributed import pipelining

    stages = [
        pipelining.PipelineStage(
            part,
            stretch.stage,
            shape.pipeline * shape.virtual_stages,
            mesh.device.torch_device,
            input_args=boundary.tokens if stretch.first else boundary.hidden,
            output_args=boundary.output if stretch.last else boundary.hidden,
            group=mesh.pipeline.group,
        )
        for part, stretch in zip(parts, held, strict=True)
    ]
    for stage, part in zip(stages, parts, strict=True):
        stage.backward_one_chunk = _observed(stage.backward_one_chunk, part, last_pass)
        stage.backward_weight_one_chunk = _observed(stage.backward_weight_one_chunk, part, last_pass)
    kind = schedule_class(shape.schedule)
    several = SCHEDULES[shape.schedule].stages[0] > 1
    return kind(stages if several else stages[0], count, loss_fn=loss, scale_grads=False)


def _observed(backward: Callable[..., Any], part: nn.Module, last_pass: Callable[[], LastPass]) -> Callable[..., Any]:
    """A backward call of a stage, with a word around the one that the schedule says is the last."""

    def run(*arguments: Any, last_backward: bool = False, **options: Any) -> Any:
        with last_pass()(part) if last_backward else nullcontext():
            return backward(*arguments, last_backward=last_backward, **options)

    return run


_CLASSES = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved": "ScheduleInterleaved1F1B",
    "interleaved_zero_bubble": "ScheduleInterleavedZeroBubble",
    "zbv": "ScheduleZBVZeroBubble",
    "dualpipev": "ScheduleDualPipeV",
}


def schedule_class(name: str) -> Any:
    """What torch.distributed.pipelining runs a schedule with, by the name a spec calls it."""
    from torch.distributed import pipelining

    return getattr(pipelining, _CLASSES[name])


def _forward_only(schedule: Any) -> Any:
    """Leaves the forward passes, and what they send and receive, of a schedule that was just made.

    The schedules of one stage a rank do so by themselves. The others would wait for gradients between stages of one
    rank.
    """
    actions = getattr(schedule, "pipeline_order_with_comms", None)
    if actions is not None:
        kept = {"FORWARD", "SEND_F", "RECV_F"}
        schedule.pipeline_order_with_comms = {
            rank: [
                part
                for action in order
                for part in action.sub_actions or [action]
                if part.computation_type.name in kept
            ]
            for rank, order in actions.items()
        }
    return schedule
