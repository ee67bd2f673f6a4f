"""Tells when the gradients of a part of the model vanish or explode, and when they are as before: once each."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

VANISHED, REAPPEARED = 1e-4, 1e-3
"""Shares of the median group's norm."""
EXPLODED, CALMED = 30.0, 5.0
"""Times what is usual for the group."""
MEMORY = 0.95
FEWEST = 20
PATIENCE = 3
"""Steps in a row that it takes to say so, and to take it back."""

Trouble = Literal["vanishing", "exploding"]


@dataclass
class _Group:
    usual: float = 0.0  # geometric mean of its norms, as a logarithm
    count: int = 0
    trouble: Trouble | None = None
    streak: int = 0


class GradientWatch:
    """Watches the norm of each group of layers.

    A group vanishes when its norm is a tiny share of the median group's, whatever it was before: a model may be born
    so. It explodes when its norm is many times what is usual for itself, since groups differ in size. Either is told
    after a few steps in a row, and taken back only once the norm is well away from where that began.
    """

    def __init__(self, groups: Iterable[str]) -> None:
        self._groups = {name: _Group() for name in groups}

    def see(self, step: int, norms: Mapping[str, float]) -> list[dict[str, Any]]:
        """Takes in the norms of a step; the events to tell."""
        median = statistics.median(norms.values())
        return [event for name, norm in norms.items() if (event := self._see(step, name, norm, median)) is not None]

    def _see(self, step: int, name: str, norm: float, median: float) -> dict[str, Any] | None:
        group = self._groups[name]
        usual = math.exp(group.usual) if group.count >= FEWEST else None
        if group.trouble == "vanishing":
            now = "vanishing" if norm < REAPPEARED * median else None
        elif group.trouble == "exploding":
            now = "exploding" if usual is not None and norm > CALMED * usual else None
        else:
            now = _trouble(norm, median, usual)
        if now == group.trouble:
            group.streak = 0
            if now is None and norm > 0:
                group.count += 1
                group.usual += max(1 - MEMORY, 1 / group.count) * (math.log(norm) - group.usual)
            return None
        group.streak += 1
        if group.streak < PATIENCE:
            return None
        before, group.trouble, group.streak = group.trouble, now, 0
        data = {"step": step, "group": name, "norm": norm, "median": median, "usual": usual}
        if now is None:
            kind, message = "gradients.recovered", f"the gradients of {name} are no longer {before}: norm {norm:.3g}"
        elif now == "vanishing":
            kind = "gradients.vanishing"
            message = f"the gradients of {name} vanish: norm {norm:.3g}, the median group's is {median:.3g}"
        else:
            kind = "gradients.exploding"
            message = f"the gradients of {name} explode: norm {norm:.3g}, usual is {usual:.3g}"
        return {"kind": kind, "message": f"{message} (step {step})", "data": data}


def _trouble(norm: float, median: float, usual: float | None) -> Trouble | None:
    if norm < VANISHED * median:
        return "vanishing"
    return "exploding" if usual is not None and norm > EXPLODED * usual else None
