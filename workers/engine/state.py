"""Everything of a run that must survive a restart, in one place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rubato.spec import OptimizerSpec
from workers.engine.optim import adamw
from workers.engine.parallel.data import DataGroup
from workers.engine.parallel.tensor import local

MOMENTS = ("exp_avg", "exp_avg_sq")


class TrainingState:
    """Parameters, both moments of AdamW, the number of steps done and of tokens seen.

    Attributes:
        parameters: this worker's share, by global name.
        leaves: the local tensors behind them, which the optimizer updates; same order.
        step: optimizer steps done; None: what the tensors hold means nothing.
        tokens: real tokens trained on since the first step.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], spec: OptimizerSpec) -> None:
        self.parameters = dict(parameters)
        self.leaves = [local(parameter) for parameter in self.parameters.values()]
        self.optimizer = adamw(self.leaves, spec)
        self.step: int | None = None
        self.tokens = 0

    @property
    def done(self) -> int:
        """Optimizer steps done, of a state that means something."""
        assert self.step is not None
        return self.step

    @torch.no_grad()
    def begin(self) -> None:
        """Declares the parameters to be those of step 0."""
        for leaf in self.leaves:
            for name in MOMENTS:
                self.optimizer.state[leaf][name].zero_()
        self._declare(0, 0)

    def drop(self) -> None:
        """Declares the tensors to mean nothing."""
        self.step = None

    def update(self, lr: float, tokens: int) -> None:
        """One optimizer step with the gradients of the leaves."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.step = self.done + 1
        self.tokens += tokens

    def receive(self, data: DataGroup, source: int, step: int, bucket_mb: float) -> None:
        """Takes the state after ``step`` steps from replica ``source``; the source gives it.

        Raises:
            DataAxisError: the data axis failed; who held another step may hold none now.
            RuntimeError: the source holds another step than it should.
        """
        header = torch.tensor([-1 if self.step is None else self.step, self.tokens], device=self.leaves[0].device)
        data.broadcast([header], source, bucket_mb)
        held, tokens = header.tolist()
        if held != step:
            raise RuntimeError(f"replica {source} was to give the state of step {step}, it holds step {held}")
        if self.step != step:
            self.drop()
        data.broadcast(self._tensors(), source, bucket_mb)
        self._declare(step, tokens)

    def state_dict(self) -> dict[str, Any]:
        """The state by global names, for a checkpoint: nested dicts of tensors that share memory with this object."""
        return {
            "model": {name: parameter.detach() for name, parameter in self.parameters.items()},
            "optimizer": {
                f"state.{name}.{moment}": _like(parameter, self.optimizer.state[leaf][moment])
                for (name, parameter), leaf in zip(self.parameters.items(), self.leaves, strict=True)
                for moment in MOMENTS
            },
            "step": self.step or 0,
            "tokens": self.tokens,
        }

    def loaded(self, state: Mapping[str, Any]) -> None:
        """Declares that ``state``, which `state_dict` gave, was filled in place from a checkpoint."""
        self._declare(state["step"], state["tokens"])

    def _declare(self, step: int, tokens: int) -> None:
        self.step, self.tokens = step, tokens
        for leaf in self.leaves:
            self.optimizer.state[leaf]["step"].fill_(step)

    def _tensors(self) -> list[Tensor]:
        moments = [self.optimizer.state[leaf][name] for name in MOMENTS for leaf in self.leaves]
        return [*self.leaves, *moments]


def _like(parameter: Tensor, held: Tensor) -> Tensor:
    """A local tensor as a shard of the same kind as a parameter."""
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
