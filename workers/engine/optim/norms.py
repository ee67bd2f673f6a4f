"""The norm of a gradient that lies in pieces on many ranks: of the whole, and of each group of layers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

MOST_BLOCK_GROUPS = 8


def layer_groups(layers: int) -> list[str]:
    """The groups of a model: the embedding, its blocks one by one or in at most 8 stretches, the head."""
    return ["embedding", *(_stretch_name(stretch) for stretch in _stretches(layers)), "head"]


def group_of(name: str, layers: int) -> int:
    """Which of `layer_groups` a parameter belongs to, by its global name."""
    if name.startswith("layers."):
        number = int(name.split(".", 2)[1])
        return 1 + next(place for place, stretch in enumerate(_stretches(layers)) if number in stretch)
    return 0 if name.startswith(("tok_embeddings.", "positions.")) else 1 + len(_stretches(layers))


def _stretches(layers: int) -> list[range]:
    count = min(layers, MOST_BLOCK_GROUPS)
    return [range(layers * place // count, layers * (place + 1) // count) for place in range(count)]


def _stretch_name(stretch: range) -> str:
    return f"layer {stretch[0]}" if len(stretch) == 1 else f"layers {stretch[0]}-{stretch[-1]}"


class GroupNorms:
    """Squared norms by group, of what this rank holds.

    Args:
        names: of this rank's parameters, global.
        counted: of each, false where another rank of the model copy holds the same gradient and counts it.
        layers: of the whole model.
        device: of the gradients.

    Attributes:
        groups: names of the groups, the same on all ranks.
    """

    def __init__(self, names: Iterable[str], counted: Sequence[bool], layers: int, device: torch.device) -> None:
        self.groups = layer_groups(layers)
        self._counted = [place for place, count in enumerate(counted) if count]
        index = [group_of(name, layers) for name in names]
        self._index = torch.tensor([index[place] for place in self._counted], dtype=torch.int64, device=device)

    def squares(self, gradients: Sequence[Tensor]) -> list[float]:
        """This rank's part of the squared norm of each group: summed over the copy's ranks it is the whole.

        Args:
            gradients: of the local shards of all parameters.
        """
        sums = torch.zeros(len(self.groups), dtype=torch.float64, device=self._index.device)
        if self._counted:
            norms = torch._foreach_norm([gradients[place] for place in self._counted])
            here = torch.stack([norm.to(sums.device) for norm in norms])  # layers may be on several devices
            sums.index_add_(0, self._index, here.double().square())
        found: list[float] = sums.tolist()
        return found

    def by_group(self, squares: Sequence[float], factor: float) -> dict[str, float]:
        """The norms of the groups of the whole copy, from their squares; ``factor`` is what gradients are to be
        multiplied with."""
        return {name: square**0.5 * factor for name, square in zip(self.groups, squares, strict=True)}
