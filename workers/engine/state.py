"""Everything of a run that must survive a restart, in one place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rubato.spec import OptimizerSpec
from workers.engine.optim import LossScale, Optimizer
from workers.engine.parallel.data import DataGroup
from workers.engine.parallel.rows import Rows, Split
from workers.engine.parallel.tensor import local
from workers.engine.watch.losses import LossHistory

NARROW = (torch.bfloat16, torch.float16)


class AlsoSaved(Protocol):
    """What is no part of the state that replicas share, and yet must survive a restart."""

    def begin(self) -> None:
        """As at the first step."""
        ...

    def stepped(self) -> None:
        """Hears of a step that was taken, and not skipped."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """By names that nothing else in a checkpoint has; tensors share memory with what they stand for."""
        ...

    def loaded(self, state: Mapping[str, Any]) -> None:
        """Hears that tensors of `state_dict` were filled in place from a checkpoint, and all values of it."""
        ...


class TrainingState:
    """Weights, what the optimizer keeps of them, the loss scale, the number of steps done and of tokens seen.

    Args:
        sharded: holds nothing before `share_out`, and then this rank's rows.

    Attributes:
        weights: this worker's share, by global name: the parameters, or fp32 masters of those in a narrower format, or
            this rank's rows of either.
        leaves: the local tensors behind them, which the optimizer updates; same order.
        scale: of the loss.
        losses: what losses are usual by now.
        jumped: data steps that are left out, ascending.
        optimizer: of the leaves.
        step: steps done; None: what the tensors hold means nothing.
        updates: of these the ones that were not skipped.
        tokens: real tokens seen since the first step.
        also: what else of this worker is to be in a checkpoint; None: nothing.
        publish: makes the parameters of others of these rows; None: this worker holds all it computes with.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], spec: OptimizerSpec, scale: LossScale, *, sharded: bool = False
    ) -> None:
        self._parameters, self._spec = parameters, spec
        self.scale = scale
        self.optimizer: Optimizer
        if sharded:
            self._take({})
        else:
            self._take({name: _master(parameter) for name, parameter in parameters.items()})
        narrow = [
            (local(parameter), leaf)
            for parameter, leaf in zip(parameters.values(), self.leaves, strict=not sharded)
            if parameter.dtype != leaf.dtype
        ]
        self._copies = [copy for copy, _ in narrow]
        self._masters = [master for _, master in narrow]
        self.losses = LossHistory()
        self.jumped: list[int] = []
        self.also: AlsoSaved | None = None
        self.publish: Callable[[], None] | None = None

    def share_out(self, split: Split, *, apart: bool) -> None:
        """Holds the rows that a split gives this rank, and forgets what it held.

        Args:
            apart: in memory of their own; else in the parameters, where these are of the format that is updated.
        """
        self._take({})  # gives back what was there before
        self._take({name: _rows(each, split, apart=apart) for name, each in self._parameters.items()})

    def _take(self, weights: Mapping[str, Tensor]) -> None:
        self.weights = dict(weights)
        self.leaves = [weight.held if isinstance(weight, Rows) else local(weight) for weight in weights.values()]
        self.optimizer = Optimizer(self.weights, self.leaves, self._spec)
        self.step: int | None = None
        self.updates = self.tokens = 0

    @property
    def done(self) -> int:
        """Optimizer steps done, of a state that means something."""
        assert self.step is not None
        return self.step

    @torch.no_grad()
    def begin(self) -> None:
        """Declares the parameters to be those of step 0."""
        self.optimizer.begin()
        self.scale.begin()
        self.losses, self.jumped = LossHistory(), []
        if self.also:
            self.also.begin()
        self._declare(0, 0, 0)

    def drop(self) -> None:
        """Declares the tensors to mean nothing."""
        self.step = None

    def update(self, lr: float, tokens: int) -> None:
        """One optimizer step with the gradients of the leaves."""
        self.optimizer.step(lr, self.updates)
        self._publish()
        self.step = self.done + 1
        self.updates += 1
        if self.also:
            self.also.stepped()
        self.tokens += tokens
        self.scale.stepped()

    def skip(self, tokens: int) -> None:
        """One step that changes no weight: its gradients are not finite."""
        self.pass_over(tokens)
        self.scale.overflowed()

    def pass_over(self, tokens: int) -> None:
        """One step that changes nothing but the count of steps and tokens."""
        self.step = self.done + 1
        self.tokens += tokens

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """While it is entered, the weights are their moving average, where the spec asks for one."""
        self._exchange_average()
        try:
            yield
        finally:
            self._exchange_average()

    def _exchange_average(self) -> None:
        self.optimizer.exchange_average()
        self._publish()

    def receive(self, data: DataGroup, source: int, step: int, bucket_mb: float) -> None:
        """Takes the state after ``step`` steps from replica ``source``; the source gives it.

        Raises:
            DataAxisError: the data axis failed; who held another step may hold none now.
            RuntimeError: the source holds another step than it should.
        """
        counts = [-1 if self.step is None else self.step, self.updates, self.tokens, len(self.jumped)]
        header = torch.tensor([*counts, *self.scale.state_dict().values()], device=self.leaves[0].device)
        data.broadcast([header], source, bucket_mb)
        held, updates, tokens, jumps, *scale = header.tolist()
        if held != step:
            raise RuntimeError(f"replica {source} was to give the state of step {step}, it holds step {held}")
        if self.step != step:
            self.drop()
        own = [*self.losses.state_dict().values(), *self.jumped]
        others = torch.zeros(len(own) - len(self.jumped) + jumps, dtype=torch.float64, device=header.device)
        others[: len(own)] = others.new_tensor(own[: len(others)])
        data.broadcast([others], source, bucket_mb)
        data.broadcast(self._tensors(), source, bucket_mb)
        losses = dict(zip(self.losses.state_dict(), others.tolist(), strict=False))
        self.losses.load_state_dict(losses)
        self.jumped = [int(step) for step in others.tolist()[len(losses) :]]
        self.scale.load_state_dict(dict(zip(self.scale.state_dict(), scale, strict=True)))
        self._declare(step, updates, tokens)

    def state_dict(self) -> dict[str, Any]:
        """The state by global names, for a checkpoint: nested dicts of tensors that share memory with this object."""
        return {
            "model": {
                name: weight if isinstance(weight, Rows) else weight.detach() for name, weight in self.weights.items()
            },
            "optimizer": {
                f"state.{name}.{slot}": like(weight, held)
                for (name, weight), leaf in zip(self.weights.items(), self.leaves, strict=True)
                for slot, held in self.optimizer.slots(leaf).items()
            },
            "step": self.step or 0,
            "updates": self.updates,
            "tokens": self.tokens,
            "loss_scale": self.scale.state_dict(),
            "losses": self.losses.state_dict(),
            "jumped": " ".join(map(str, self.jumped)),  # a list would have to be as long as the one it is loaded into
            **(self.also.state_dict() if self.also else {}),
        }

    def loaded(self, state: Mapping[str, Any]) -> None:
        """Declares that ``state``, which `state_dict` gave, was filled in place from a checkpoint."""
        self.scale.load_state_dict(state["loss_scale"])
        self.losses.load_state_dict(state["losses"])
        self.jumped = [int(step) for step in state["jumped"].split()]
        if self.also:
            self.also.loaded(state)
        self._declare(state["step"], state["updates"], state["tokens"])

    def _declare(self, step: int, updates: int, tokens: int) -> None:
        self._publish()
        self.step, self.updates, self.tokens = step, updates, tokens
        self.optimizer.count(updates)

    @torch.no_grad()
    def _publish(self) -> None:
        """Makes the parameters that are computed with those that were updated or loaded. May raise DataAxisError."""
        if self.publish is not None:
            self.publish()
        elif self._copies:
            torch._foreach_copy_(self._copies, self._masters)

    def _tensors(self) -> list[Tensor]:
        return [*self.leaves, *(held for leaf in self.leaves for held in self.optimizer.slots(leaf).values())]


def _master(parameter: nn.Parameter) -> Tensor:
    """What the optimizer updates for a parameter: itself, unless its format is too narrow to add small steps to."""
    if parameter.dtype not in NARROW:
        return parameter
    return like(parameter, local(parameter).float())


def _rows(parameter: nn.Parameter, split: Split, *, apart: bool) -> Rows:
    tensor = local(parameter)
    rows = split.of(tensor.shape[0])
    narrow = parameter.dtype in NARROW
    if narrow or apart:
        dtype = torch.float32 if narrow else parameter.dtype
        held = tensor.new_zeros(rows.stop - rows.start, *tensor.shape[1:], dtype=dtype)
    else:
        held = tensor[rows]
    return Rows.of(parameter, split, held)


def like(parameter: Tensor, held: Tensor) -> Tensor:
    """A local tensor as a shard of the same kind as a parameter."""
    if isinstance(parameter, Rows):
        return parameter.like(held)
    if not isinstance(parameter, DTensor):
        return held
    return DTensor.from_local(
        held,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
