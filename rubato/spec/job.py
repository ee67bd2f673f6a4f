"""The whole spec, and the checks that need more than one section."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Self

from pydantic import Field, StringConstraints, model_validator

from rubato.layout import largest_divisor, layout_for, nearest_sizes, possible_sizes
from rubato.problems import FieldProblem
from rubato.spec.model import ModelSpec
from rubato.spec.section import Section, refuse
from rubato.spec.sections import (
    CheckpointSpec,
    CommunicationSpec,
    DataSpec,
    FaultsSpec,
    OptimizerSpec,
    ParallelismSpec,
    TrainSpec,
    WorkersSpec,
)

Name = Annotated[str, StringConstraints(pattern=r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$")]


class JobSpec(Section):
    """What a job is to do. Everything a run depends on is in here, so two runs of one spec are one curve."""

    name: Name
    project: Name = "default"
    priority: Annotated[int, Field(ge=-100, le=100)] = 0
    model: ModelSpec
    data: DataSpec
    train: TrainSpec
    optimizer: OptimizerSpec = OptimizerSpec()
    parallelism: ParallelismSpec = ParallelismSpec()
    communication: CommunicationSpec = CommunicationSpec()
    workers: WorkersSpec
    checkpoint: CheckpointSpec = CheckpointSpec()
    faults: FaultsSpec = FaultsSpec()

    @model_validator(mode="after")
    def _check_across_sections(self) -> Self:
        problems = [
            *_position_problems(self),
            *_tensor_problems(self),
            *_pipeline_problems(self),
            *_batch_problems(self),
        ]
        problems = problems or [*_size_problems(self)]  # sizes of a replica that cannot exist mean nothing
        if problems:
            raise refuse(problems)
        return self

    @property
    def sizes(self) -> list[int]:
        """Worker counts this job can run at, ascending; never empty."""
        return possible_sizes(self.parallelism, self.train.global_batch, self.workers.min, self.workers.max)


def _tensor_problems(spec: JobSpec) -> Iterator[FieldProblem]:
    degree, model = spec.parallelism.tensor, spec.model
    split = {
        "model.heads": model.heads,
        "model.ffn_size": model.ffn_size,
        "the vocabulary": spec.data.vocab_size,
        "data.sequence_length": spec.data.sequence_length,
    }
    if model.positions is not None:
        split["model.positions"] = model.positions
    for what, size in split.items():
        if size % degree:
            yield FieldProblem(
                "parallelism.tensor",
                f"{degree} does not divide {what} ({size})",
                f"use tensor {largest_divisor(size, degree)}, or change {what}",
            )
    if model.kv_heads % degree and degree % model.kv_heads:
        good = degree // model.kv_heads * model.kv_heads or largest_divisor(model.kv_heads, degree)
        yield FieldProblem(
            "parallelism.tensor",
            f"{model.kv_heads} key/value heads can neither be split nor be repeated evenly over {degree} ranks",
            f"use tensor {good}, or a model.kv_heads that divides {degree} or that {degree} divides",
        )


def _position_problems(spec: JobSpec) -> Iterator[FieldProblem]:
    length, positions = spec.data.sequence_length, spec.model.positions
    if positions is not None and length > positions:
        yield FieldProblem(
            "data.sequence_length",
            f"{length} is more than the {positions} positions that the model learns",
            f"use at most {positions}, or a model.positions of {length}",
        )


def _pipeline_problems(spec: JobSpec) -> Iterator[FieldProblem]:
    stages = spec.parallelism.pipeline * spec.parallelism.virtual_stages
    if stages > spec.model.layers:
        yield FieldProblem(
            "parallelism.pipeline",
            f"{stages} stages need at least {stages} layers, the model has {spec.model.layers}",
            f"use at most {spec.model.layers} stages (pipeline x virtual_stages)",
        )


def _batch_problems(spec: JobSpec) -> Iterator[FieldProblem]:
    batch, micro_batch = spec.train.global_batch, spec.parallelism.micro_batch
    if batch % micro_batch:
        yield FieldProblem(
            "parallelism.micro_batch",
            f"{micro_batch} does not divide train.global_batch ({batch})",
            f"use micro_batch {largest_divisor(batch, micro_batch)}, or a global_batch that {micro_batch} divides",
        )
    if spec.optimizer.schedule.warmup > spec.train.steps:
        yield FieldProblem(
            "optimizer.schedule.warmup",
            f"{spec.optimizer.schedule.warmup} warm-up steps are more than train.steps ({spec.train.steps})",
            f"use at most {spec.train.steps}",
        )


def _size_problems(spec: JobSpec) -> Iterator[FieldProblem]:
    low, high = spec.workers.min, spec.workers.max
    if spec.sizes:
        return
    parallelism, batch = spec.parallelism, spec.train.global_batch
    near = nearest_sizes(parallelism, batch, low)
    asked = f"{low} workers" if low == high else f"any number of workers from {low} to {high}"
    cause = f"{asked} cannot be laid out at tensor {parallelism.tensor} x pipeline {parallelism.pipeline}"
    if layout_for(parallelism, low) is not None:
        cause += f" with a global batch of {batch} in micro-batches of {parallelism.micro_batch}"
    fix = f"use {' or '.join(map(str, near))} workers" if near else "use a larger global_batch or a smaller micro_batch"
    yield FieldProblem("workers", cause, fix)
