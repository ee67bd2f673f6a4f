"""The sections of the spec beside the model: data, training, optimizer, parallelism, workers, checkpoints, faults."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, PositiveFloat, model_validator

from rubato.layout import LARGEST_WORLD
from rubato.problems import FieldProblem
from rubato.spec.section import LARGEST, NonNegativeInt, PositiveInt, Section, refuse

Fraction = Annotated[float, Field(ge=0.0, lt=1.0)]


class CorpusSpec(Section):
    """Where text comes from: a file or glob, or a corpus that every machine has."""

    path: str | None = Field(None, description="a text file or a glob such as corpus/**/*.txt")
    builtin: Literal["python-stdlib"] | None = Field(None, description="the sources of Python's standard library")

    @model_validator(mode="after")
    def _exactly_one_source(self) -> Self:
        if (self.path is None) == (self.builtin is None):
            given = "neither was given" if self.path is None else "both were given"
            raise refuse(
                [FieldProblem("path", f"a corpus is a path or a builtin, {given}", "give exactly one of path, builtin")]
            )
        return self


class ValidationSpec(Section):
    """Held-out loss: a share of the documents of the training corpus, never trained on."""

    fraction: Fraction = Field(0.02, description="share of documents held out")
    every: NonNegativeInt = Field(0, description="steps between evaluations; 0: never")
    batches: PositiveInt = Field(1, description="global batches an evaluation reads")


class DataSpec(Section):
    train: CorpusSpec
    validation: ValidationSpec = ValidationSpec()
    tokenizer: Literal["bytes"] = "bytes"
    sequence_length: PositiveInt = 256

    @property
    def vocab_size(self) -> int:
        """Number of token ids of the tokenizer."""
        return 256


class TrainSpec(Section):
    steps: PositiveInt
    global_batch: PositiveInt = Field(description="sequences a step, whatever the layout")
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    precision: Literal["fp32", "bf16"] = Field(
        "fp32", description="bf16: autocast, with fp32 parameters and reductions"
    )
    clip_norm: PositiveFloat | None = Field(1.0, description="largest global gradient norm; null: no clipping")


class ScheduleSpec(Section):
    """Learning rate over steps: linear warm-up, then constant, cosine or warm-up-stable-decay."""

    name: Literal["constant", "cosine", "wsd"] = "cosine"
    warmup: NonNegativeInt = Field(0, description="steps of linear warm-up")
    decay: Fraction = Field(0.2, description="wsd: share of all steps spent decaying, at the end")
    floor: Fraction = Field(0.1, description="share of lr left at the last step")


class OptimizerSpec(Section):
    name: Literal["adamw"] = "adamw"
    lr: PositiveFloat = 3e-4
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    eps: PositiveFloat = 1e-8
    weight_decay: Annotated[float, Field(ge=0.0)] = 0.1
    schedule: ScheduleSpec = ScheduleSpec()


class ParallelismSpec(Section):
    """The shape of one replica. The data degree is not here: it follows the number of workers."""

    tensor: PositiveInt = 1
    pipeline: PositiveInt = 1
    schedule: Literal["gpipe", "1f1b", "interleaved"] = "1f1b"
    virtual_stages: PositiveInt = Field(1, description="stages a pipeline rank holds; above 1 only when interleaved")
    micro_batch: PositiveInt = Field(1, description="sequences a micro-batch")

    @model_validator(mode="before")
    @classmethod
    def _interleaved_means_two(cls, given: Any) -> Any:
        if isinstance(given, dict) and given.get("schedule") == "interleaved":
            return {"virtual_stages": 2, **given}
        return given

    @model_validator(mode="after")
    def _check_stages(self) -> Self:
        interleaved = self.schedule == "interleaved"
        if interleaved and (self.pipeline == 1 or self.virtual_stages == 1):
            raise refuse(
                [
                    FieldProblem(
                        "schedule",
                        f"interleaving needs several ranks with several stages each, not pipeline {self.pipeline} "
                        f"with virtual_stages {self.virtual_stages}",
                        "use 1f1b, or pipeline and virtual_stages of 2 or more",
                    )
                ]
            )
        if not interleaved and self.virtual_stages > 1:
            raise refuse(
                [
                    FieldProblem(
                        "virtual_stages",
                        f"schedule {self.schedule} runs one stage a rank, not {self.virtual_stages}",
                        "use schedule: interleaved, or leave virtual_stages out",
                    )
                ]
            )
        return self

    @property
    def replica_size(self) -> int:
        """Workers of one model copy."""
        return self.tensor * self.pipeline


class CommunicationSpec(Section):
    bucket_mb: PositiveFloat = Field(25.0, description="MB of gradients reduced in one call over the data axis")


class WorkersSpec(Section):
    """How many workers a job may have. A plain number means exactly that many."""

    min: PositiveInt
    max: Annotated[PositiveInt, Field(le=LARGEST_WORLD)]
    gpus: NonNegativeInt = Field(0, description="GPUs a worker; 0: train on CPU with gloo")
    cpus: PositiveFloat = Field(1.0, description="CPUs a worker")

    @model_validator(mode="before")
    @classmethod
    def _plain_number(cls, given: Any) -> Any:
        if isinstance(given, int) and not isinstance(given, bool):
            return {"min": given, "max": given}
        if isinstance(given, dict) and "min" in given and "max" not in given:
            return {**given, "max": given["min"]}
        return given

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        if self.min > self.max:
            raise refuse([FieldProblem("min", f"min {self.min} is above max {self.max}", "make min at most max")])
        return self


class CheckpointSpec(Section):
    every: PositiveInt = Field(100, description="steps between checkpoints; the last step is always saved")
    keep_last: PositiveInt = 3


class FaultsSpec(Section):
    """How often a job may lose workers before it counts as failed; -1: any number of times."""

    hardware: Annotated[int, Field(ge=-1, le=LARGEST)] = -1
