"""Loss scaling: keeps the gradients of narrow formats in range, and counts the steps whose gradients are not finite."""

from __future__ import annotations

from collections.abc import Mapping

from rubato.problems import RubatoError
from rubato.spec import TrainSpec
from rubato.spec.sections import LARGEST_LOSS_SCALE


class LossScale:
    """What the loss is multiplied by before the backward pass (Micikevicius et al. 2018, section 3.2).

    Halved on every overflow, doubled after ``growth_interval`` steps without one; a power of 2, so that scaling never
    rounds. Formats with the range of fp32 have a scale of 1 that stays. It is part of the training state: all workers
    hear of an overflow in the same step, so all hold the same scale.

    Attributes:
        value: the scale, from 1 up.
        steady: steps in a row without an overflow since the scale last changed.
        failing: steps in a row whose gradients were not finite at a scale of 1, for which scaling is no cure.
    """

    def __init__(self, spec: TrainSpec) -> None:
        fixed = spec.precision != "fp16"
        self._start = 1 if fixed else spec.loss_scale.start
        self._largest = 1 if fixed else LARGEST_LOSS_SCALE
        self._interval = spec.loss_scale.growth_interval
        self.begin()

    def begin(self) -> None:
        """As at the first step."""
        self.value, self.steady, self.failing = self._start, 0, 0

    def stepped(self) -> None:
        """Hears of a step with finite gradients."""
        self.steady, self.failing = self.steady + 1, 0
        if self.steady >= self._interval:
            self.value, self.steady = min(2 * self.value, self._largest), 0

    def overflowed(self) -> None:
        """Hears of a step with gradients that are not finite."""
        if self.value == 1:
            self.failing += 1
        self.value, self.steady = max(1, self.value // 2), 0

    def state_dict(self) -> dict[str, int]:
        """All there is to know."""
        return {"value": self.value, "steady": self.steady, "failing": self.failing}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Takes over what `state_dict` gave, also that of a run in another format."""
        self.value, self.steady, self.failing = min(state["value"], self._largest), state["steady"], state["failing"]


class NotFiniteError(RubatoError):
    """Gradients are NaN or Inf step after step: going on would only waste machines."""

    def __init__(self, step: int, times: int) -> None:
        super().__init__(
            f"the gradients of {times} steps in a row, up to step {step}, were NaN or Inf; they changed no weight",
            fix="use a lower optimizer.lr or a longer warm-up, train.precision bf16 or fp32, and look at the "
            "samples of these steps",
            code="gradients_not_finite",
        )
