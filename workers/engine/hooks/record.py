"""What a step came to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from rubato.spec import JobSpec
from workers.engine.optim import learning_rate
from workers.engine.state import TrainingState


@dataclass
class Record:
    """What a step came to; fields as in ``rubato.resources.Metric``.

    ``step_tokens`` are the real tokens of this step, ``loss_scale`` the scale after it. A step whose loss or gradient
    norm is not finite has None there, and was skipped.

    Attributes:
        again: the generation before took the step, and its reporter may have told of it.
    """

    step: int
    loss: float | None
    grad_norm: float | None
    lr: float
    tokens: int
    step_tokens: int
    step_s: float
    exposed_comm_s: float | None = None
    comm_bytes: int | None = None
    comm_bytes_saved: int | None = None
    loss_scale: int = 1
    validation_loss: float | None = None
    data_s: float | None = None
    gradient_norms: dict[str, float] | None = None
    workers: dict[str, dict[str, float]] | None = None
    again: bool = False

    @classmethod
    def of(cls, spec: JobSpec, state: TrainingState, commit: Mapping[str, float], **more: Any) -> Self:
        """What a commit came to that has led to a state, with what else is known of the step."""
        return cls(
            step=state.done,
            loss=commit.get("loss"),
            grad_norm=commit.get("grad_norm"),
            lr=learning_rate(spec.optimizer, state.done - 1, spec.train.steps),
            tokens=state.tokens,
            step_tokens=int(commit["tokens"]),
            step_s=commit["seconds"],
            exposed_comm_s=commit.get("exposed_comm_s"),
            comm_bytes=int(commit.get("comm_bytes", 0)),
            comm_bytes_saved=int(commit.get("comm_bytes_saved", 0)),
            loss_scale=state.scale.value,
            data_s=commit.get("data_s"),
            **more,
        )

    @property
    def skipped(self) -> bool:
        """Whether the step changed no weight."""
        return self.loss is None or self.grad_norm is None
