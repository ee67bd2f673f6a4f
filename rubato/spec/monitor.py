"""The sections of the spec about what is told of a run while it trains."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from rubato.problems import FieldProblem
from rubato.spec.section import NonNegativeInt, PositiveInt, Section, refuse


class SamplesSpec(Section):
    """Text that the model is asked for while it trains; events of kind ``sample``."""

    every: NonNegativeInt = Field(0, description="steps between samples; 0: never")
    prompts: Annotated[tuple[str, ...], Field(min_length=1)] = ("The ",)
    tokens: PositiveInt = Field(64, description="how many to make, at most what is left of sequence_length")
    temperature: Annotated[float, Field(ge=0.0)] = Field(0.0, description="0: always the likeliest token")


class MonitorSpec(Section):
    """What is told of a run beside loss and speed."""

    every: PositiveInt = Field(
        10, description="steps between lines in the log, and between comparisons of all workers' times and memory"
    )
    tensorboard: bool = Field(True, description="write TensorBoard files to the run directory")
    samples: SamplesSpec = SamplesSpec()


class ProfileSpec(Section):
    """Steps that are recorded by torch.profiler, into ``profile/`` of the run directory."""

    steps: tuple[PositiveInt, PositiveInt] | None = Field(None, description="first and last; null: none")
    ranks: tuple[NonNegativeInt, ...] = Field((0,), description="world ranks that record")

    @model_validator(mode="after")
    def _check_steps(self) -> Self:
        if self.steps is None:
            return self
        first, last = self.steps
        if first == 1:
            cause = "the first step of a worker sets things up and is like no other"
            raise refuse([FieldProblem("steps", cause, f"use [2, {max(2, last)}]")])
        if last < first:
            raise refuse([FieldProblem("steps", f"{last} is before {first}", f"use [{last}, {first}]")])
        return self
