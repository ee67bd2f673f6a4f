"""The optimizer of a spec over plain local tensors: AdamW for all, or Muon for the matrices of blocks.

Each rank updates the shards it holds. Elementwise rules see them as plain tensors, since the result is the same, while
DTensor would dispatch every operation on every tensor in Python.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from rubato.spec import OptimizerSpec
from rubato.spec.sections import NoDecay
from workers.engine.optim.muon import Muon

EMA = "ema"


def kind_of(name: str, weight: Tensor) -> NoDecay | None:
    """What a parameter is, as far as weight decay asks: None for matrices and whatever else always decays."""
    if name.endswith(".bias"):
        return "biases"
    if name in ("tok_embeddings.weight", "positions.weight"):
        return "embeddings"
    return "norms" if weight.ndim <= 1 else None


class Optimizer:
    """AdamW, or Muon with AdamW for the rest, with all state in place before the first step.

    In place, so that state can be received or loaded before any step was taken.

    Args:
        weights: by global name, DTensors where a tensor axis splits them, or rows of them where the data axis does.
        leaves: the local tensors behind them, which are updated; same order. Their ``grad`` is what to update with.
        spec: which rule, and its numbers.

    Attributes:
        state: of each leaf, by name: what the rule keeps (elementwise in the shape of the leaf), for AdamW a count of
            steps, and where the spec asks for it the moving average of the leaf itself.
    """

    def __init__(self, weights: Mapping[str, Tensor], leaves: Sequence[Tensor], spec: OptimizerSpec) -> None:
        self._spec = spec
        self._leaves = list(leaves)
        self.state: dict[Tensor, dict[str, Tensor]] = {}
        self._parts: list[torch.optim.Optimizer] = []
        rest: dict[float, list[Tensor]] = {}
        matrices: list[tuple[Tensor, Tensor]] = []
        for (name, weight), leaf in zip(weights.items(), leaves, strict=True):
            if spec.name == "muon" and is_muons(name, weight):
                matrices.append((leaf, weight))
            else:
                decay = 0.0 if kind_of(name, weight) in spec.no_decay else spec.weight_decay
                rest.setdefault(decay, []).append(leaf)
        if rest:
            groups = [{"params": held, "weight_decay": decay} for decay, held in rest.items()]
            adamw = torch.optim.AdamW(groups, lr=spec.lr, betas=spec.betas, eps=spec.eps, fused=True)
            self._add(adamw, ("exp_avg", "exp_avg_sq"), counts=True)
        if matrices:
            assert spec.momentum is not None  # the spec has it for this rule
            muon = Muon(matrices, spec.lr, spec.momentum, spec.weight_decay)
            self._add(muon, ("momentum_buffer",), counts=False)

    def _add(self, part: torch.optim.Optimizer, names: Iterable[str], *, counts: bool) -> None:
        names = [*names, *([EMA] if self._spec.ema is not None else [])]
        for leaf in [leaf for group in part.param_groups for leaf in group["params"]]:
            kept = {name: torch.zeros_like(leaf) for name in names}
            if counts:
                kept["step"] = torch.zeros((), dtype=torch.float32, device=leaf.device)
            part.state[leaf] = self.state[leaf] = kept
        self._parts.append(part)

    def slots(self, leaf: Tensor) -> dict[str, Tensor]:
        """What is kept of a leaf in its own shape, by name."""
        return {name: tensor for name, tensor in self.state[leaf].items() if name != "step"}

    @torch.no_grad()
    def begin(self) -> None:
        """As before the first step."""
        for leaf in self._leaves:
            for name, tensor in self.slots(leaf).items():
                tensor.copy_(leaf) if name == EMA else tensor.zero_()
        self.count(0)

    def count(self, updates: int) -> None:
        """Declares that so many steps have led to this state."""
        for kept in self.state.values():
            if "step" in kept:
                kept["step"].fill_(updates)

    @torch.no_grad()
    def step(self, lr: float, updates: int) -> None:
        """One step.

        The moving average of the weights has a short memory at first, so that it forgets the first values: at most
        (1 + updates) / (10 + updates) of it stays, as TensorFlow's ExponentialMovingAverage does it.

        Args:
            lr: learning rate.
            updates: steps taken before.
        """
        for part in self._parts:
            for group in part.param_groups:
                group["lr"] = lr
            part.step()
        if self._spec.ema is not None:
            kept = min(self._spec.ema, (1 + updates) / (10 + updates))
            torch._foreach_lerp_([self.state[leaf][EMA] for leaf in self._leaves], self._leaves, 1 - kept)

    @torch.no_grad()
    def exchange_average(self) -> None:
        """Exchanges the weights with their moving average; a second time gives them back to the last bit."""
        for leaf in self._leaves:
            held = leaf.clone()
            leaf.copy_(self.state[leaf][EMA])
            self.state[leaf][EMA].copy_(held)


def is_muons(name: str, weight: Tensor) -> bool:
    """Whether Muon is for this parameter: the matrices of blocks. Embeddings and the head are AdamW's."""
    return name.startswith("layers.") and weight.ndim == 2
