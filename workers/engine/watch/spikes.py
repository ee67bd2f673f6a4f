"""The loss-spike guard: judges each step's loss by the losses before it, before the step changes a weight."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rubato.problems import RubatoError
from rubato.spec.sections import SpikeSpec
from workers.engine.state import TrainingState
from workers.engine.watch.losses import LossHistory


class SpikesError(RubatoError):
    """More spikes than the spec allows: what is done about them does not help."""

    def __init__(self, step: int, limit: int) -> None:
        super().__init__(
            f"the loss of step {step} is one spike more than the {limit} that faults.spike.limit allows",
            fix="use a lower optimizer.lr or a longer warm-up, a larger faults.spike.jump or limit, and look at the "
            "samples of these steps",
            code="too_many_spikes",
        )


class SpikeGuard:
    """What a spec says of spikes.

    As in training PaLM a run can be taken back and sent past the batches around the spike (Chowdhery et al. 2022,
    https://arxiv.org/abs/2204.02311, section 5.1); and as that found, it is the meeting of some data with some state
    of the model: so what is jumped over reaches back before the step that spiked.
    """

    def __init__(self, spec: SpikeSpec) -> None:
        self._spec = spec

    @property
    def rolls_back(self) -> bool:
        """Whether the answer to a spike is to go back."""
        return self._spec.action == "rollback"

    @property
    def jump(self) -> int:
        """Data steps that are jumped over."""
        return self._spec.jump

    def judges(self, loss: float | None, history: LossHistory) -> bool:
        """Whether a loss is a spike to be acted upon. None: it is not finite, which is another matter."""
        if self._spec.action == "none" or loss is None or history.count < self._spec.after:
            return False
        return history.deviations(loss) > self._spec.deviations

    def pass_over(self, state: TrainingState, commit: Mapping[str, float]) -> dict[str, Any]:
        """Takes the step of a spike without changing a weight; what the timeline is told.

        Raises:
            SpikesError: it is one spike too many.
        """
        self.count(state.done + 1, state.losses)
        state.pass_over(int(commit["tokens"]))
        return self.event(state.done, commit["loss"], state.losses, None, [])

    def count(self, step: int, history: LossHistory) -> None:
        """Counts a spike. Raises SpikesError when it is one too many."""
        history.spikes += 1
        if 0 <= self._spec.limit < history.spikes:
            raise SpikesError(step, self._spec.limit)

    def event(self, step: int, loss: float, history: LossHistory, to: int | None, jumped: list[int]) -> dict[str, Any]:
        """What the timeline is told.

        Args:
            step: whose loss it is.
            history: before that loss.
            to: the step that training goes back to; None: it goes on.
            jumped: data steps that are left out.
        """
        away = history.deviations(loss)
        message = f"the loss of step {step}, {loss:.4f}, is {away:.1f} standard deviations above {history.mean:.4f}, "
        message += "the mean of those before: "
        data = {"step": step, "loss": loss, "mean": history.mean, "deviations": away, "spikes": int(history.spikes)}
        if to is None:
            return {"kind": "spike.skipped", "message": message + "the step changed no weight", "data": data}
        message += f"training goes back to step {to} and leaves out data steps {jumped[0] + 1} to {jumped[-1] + 1}"
        data |= {"to": to, "data_steps": [each + 1 for each in jumped]}
        return {"kind": "spike.rolled_back", "message": message, "data": data}
