"""What losses are usual for a run by now, so that one that is not can be told from one that is."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass

MEMORY = 0.98
"""Share of the statistic that stays at each step: it remembers some 50 losses."""
SMALLEST = 0.01
"""A deviation below this share of the mean is taken for it: where losses hardly vary, noise is no spike."""


@dataclass
class LossHistory:
    """Exponentially weighted mean and variance of the losses of a run (Finch 2009, "Incremental calculation of weighted
    mean and variance"). What was judged a spike is kept out of it. Part of the training state.

    Attributes:
        mean, variance: of the losses, nats and nats squared.
        count: losses in it.
        spikes: judged so in the whole run.
    """

    mean: float = 0.0
    variance: float = 0.0
    count: float = 0
    spikes: float = 0

    def add(self, loss: float) -> None:
        """Counts a usual loss in."""
        self.count += 1
        new = max(1 - MEMORY, 1 / self.count)  # the first ones weigh alike
        away = loss - self.mean
        self.mean += new * away
        self.variance = (1 - new) * (self.variance + new * away * away)

    def deviations(self, loss: float) -> float:
        """By how many standard deviations a loss is above the mean."""
        deviation = max(math.sqrt(self.variance), SMALLEST * abs(self.mean))
        return (loss - self.mean) / deviation if deviation > 0 else 0.0

    def state_dict(self) -> dict[str, float]:
        """All there is to know."""
        return asdict(self)

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Takes over what `state_dict` gave."""
        self.mean, self.variance, self.count, self.spikes = (
            state["mean"], state["variance"], state["count"], state["spikes"],
        )  # fmt: skip
