"""The sections of the spec beside model and data: training, optimizer, parallelism, workers, checkpoints, faults."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal, Self

from pydantic import Field, PositiveFloat, field_validator, model_validator

from rubato.layout import LARGEST_WORLD
from rubato.pipelines import SCHEDULES, ScheduleName
from rubato.problems import FieldProblem
from rubato.spec.section import LARGEST, NonNegativeInt, PositiveInt, Section, refuse

LARGEST_LOSS_SCALE = 2**24
"""Beyond, a loss of one would leave the range that fp32 counts whole numbers in."""

Fraction = Annotated[float, Field(ge=0.0, lt=1.0)]


class LossScaleSpec(Section):
    """fp16: the loss is multiplied so that gradients do not vanish, halved on an overflow, doubled when all is well."""

    start: PositiveInt = Field(2**16, description="the first scale, a power of 2")
    growth_interval: PositiveInt = Field(2000, description="steps in a row without an overflow before it doubles")

    @model_validator(mode="after")
    def _power_of_two(self) -> Self:
        if self.start & (self.start - 1) or self.start > LARGEST_LOSS_SCALE:
            near = min(LARGEST_LOSS_SCALE, 1 << (self.start.bit_length() - 1))
            cause = f"{self.start} is not a power of 2 of at most {LARGEST_LOSS_SCALE}: scaling would round"
            raise refuse([FieldProblem("start", cause, f"use {near}")])
        return self


class TrainSpec(Section):
    steps: PositiveInt
    global_batch: PositiveInt = Field(description="sequences a step, whatever the layout")
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    precision: Literal["fp32", "bf16", "bf16_pure", "fp16", "float8"] = Field(
        "fp32",
        description="bf16, fp16: autocast, with fp32 parameters and reductions; bf16_pure: bf16 parameters and "
        "activations, with fp32 master weights and reductions; float8: bf16 with the products of blocks in 8 bits",
    )
    loss_scale: LossScaleSpec = LossScaleSpec()
    compile: bool | Literal["auto"] = Field(
        "auto", description="layers run as compiled programs, which takes a while at first; auto: in runs long enough"
    )
    clip_norm: PositiveFloat | None = Field(1.0, description="largest global gradient norm; null: no clipping")


class ScheduleSpec(Section):
    """Learning rate over steps: linear warm-up, then constant, cosine, linear or warm-up-stable-decay."""

    name: Literal["constant", "cosine", "linear", "wsd"] = "cosine"
    warmup: NonNegativeInt = Field(0, description="steps of linear warm-up")
    decay: Fraction = Field(0.2, description="wsd: share of all steps spent decaying, at the end")
    floor: Fraction = Field(0.1, description="share of lr left at the last step")


NoDecay = Literal["norms", "biases", "embeddings"]


class OptimizerSpec(Section):
    name: Literal["adamw", "muon"] = Field(
        "adamw",
        description="muon: the matrices of blocks by Muon, at the learning rate and weight decay of AdamW; embeddings, "
        "head, norms and biases by AdamW",
    )
    lr: PositiveFloat = 3e-4
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    eps: PositiveFloat = 1e-8
    momentum: Fraction | None = Field(None, description="muon: what stays of its momentum at each step; 0.95")
    weight_decay: Annotated[float, Field(ge=0.0)] = 0.1
    no_decay: tuple[NoDecay, ...] = Field(
        ("norms", "biases", "embeddings"),
        description="what does not decay; a head that is tied to the embedding is one of the embeddings",
    )
    ema: Annotated[float, Field(gt=0.0, lt=1.0)] | None = Field(
        None, description="share of a moving average of the weights that stays at each step, such as 0.999; null: none"
    )
    schedule: ScheduleSpec = ScheduleSpec()

    @model_validator(mode="before")
    @classmethod
    def _momentum_of_muon(cls, given: Any) -> Any:
        if isinstance(given, dict) and given.get("name") == "muon":
            return {**given, "momentum": 0.95 if given.get("momentum") is None else given["momentum"]}
        return given

    @model_validator(mode="after")
    def _check_momentum(self) -> Self:
        if self.name != "muon" and self.momentum is not None:
            cause = f"{self.name} has betas, the first of which is its momentum"
            raise refuse([FieldProblem("momentum", cause, "leave momentum out, or use name: muon")])
        return self


class RecomputeSpec(Section):
    """Activations that a layer drops and computes again for its backward pass. Written short: one word."""

    mode: Literal["none", "full", "selective"] = Field(
        "none",
        description="full: a layer keeps its input alone; selective: also what is dear to compute (matrix products, "
        "attention, communication), and it computes again what is cheap (norms, activations, rotations)",
    )
    every: PositiveInt = Field(1, description="one layer in so many is recomputed; alone it means mode full")
    budget: Annotated[float, Field(ge=0.0, le=1.0)] | None = Field(
        None, description="share of the activations that may be kept, chosen by the compiler; needs train.compile: true"
    )

    @model_validator(mode="before")
    @classmethod
    def _short_forms(cls, given: Any) -> Any:
        if isinstance(given, str):
            return {"mode": given}
        if isinstance(given, dict) and "every" in given:
            return {"mode": "full", **given}
        return given

    @model_validator(mode="after")
    def _check_budget(self) -> Self:
        if self.budget is not None and self.mode != "none":
            cause = f"mode {self.mode} says what is kept, and a budget lets the compiler choose"
            raise refuse([FieldProblem("budget", cause, "give a mode or a budget")])
        if self.mode == "none" and self.every > 1:
            raise refuse([FieldProblem("every", "no layer is recomputed in mode none", "use mode full or selective")])
        return self


class MemorySpec(Section):
    recompute: RecomputeSpec = RecomputeSpec()
    loss_chunks: PositiveInt = Field(
        1,
        description="parts of a micro-batch whose logits are computed one after the other, and once more in the "
        "backward pass; for vocabularies so large that the logits fill the memory",
    )
    zero: Annotated[int, Field(ge=0, le=3)] = Field(
        0,
        description="what the replicas share out among them: 1 optimizer states and master weights, 2 gradients too, "
        "3 parameters too, which are gathered layer by layer",
    )
    shard_over: PositiveInt | None = Field(
        None,
        description="replicas that share one copy of what zero shards, such as those of one node; the copies are "
        "replicated. More where this does not divide the data degree; null: all replicas",
    )

    @model_validator(mode="after")
    def _something_to_shard(self) -> Self:
        if self.shard_over is not None and self.zero == 0:
            cause = f"zero 0 shards nothing, so not over {self.shard_over} replicas either"
            raise refuse([FieldProblem("shard_over", cause, "use zero 1, 2 or 3, or leave shard_over out")])
        return self


class ParallelismSpec(Section):
    """The shape of one replica. The data degree is not here: it follows the number of workers."""

    tensor: PositiveInt = 1
    pipeline: PositiveInt = 1
    schedule: ScheduleName = "1f1b"
    virtual_stages: PositiveInt = Field(1, description="stages a pipeline rank holds; what the schedule asks for")
    stages: tuple[PositiveInt, ...] | None = Field(
        None, description="layers of each stage, first to last; null: balanced by cost, embedding and head counted"
    )
    micro_batch: PositiveInt = Field(1, description="sequences a micro-batch")
    context: PositiveInt = Field(1, description="ranks a sequence is split over, beyond tensor; only 1 so far")
    device_map: Literal["balanced"] | dict[str, NonNegativeInt] | None = Field(
        None,
        description="layers on several devices of one worker, without process groups: balanced, or the device of each "
        "stretch of layers such as {0-3: 0, 4-7: 1}, counted over the worker's GPUs (its CPUs where it has none)",
    )

    @field_validator("device_map", mode="before")
    @classmethod
    def _layers_are_numbers_too(cls, given: Any) -> Any:
        return {str(layers): device for layers, device in given.items()} if isinstance(given, dict) else given

    @model_validator(mode="before")
    @classmethod
    def _as_many_stages_as_the_schedule_needs(cls, given: Any) -> Any:
        rules = SCHEDULES.get(str(given.get("schedule"))) if isinstance(given, dict) else None
        return given if rules is None else {"virtual_stages": rules.stages[0], **given}

    @model_validator(mode="after")
    def _check_stages(self) -> Self:
        problems = [*self._schedule_problems()]
        count = self.pipeline * self.virtual_stages
        if not problems and self.stages is not None and len(self.stages) != count:
            cause = f"{len(self.stages)} stages are placed, pipeline {self.pipeline} x virtual_stages"
            fix = f"give {count} numbers of layers, or leave stages out"
            problems.append(FieldProblem("stages", f"{cause} {self.virtual_stages} are {count}", fix))
        if problems:
            raise refuse(problems)
        return self

    def _schedule_problems(self) -> Iterator[FieldProblem]:
        if self.context > 1:
            yield FieldProblem(
                "context",
                "torch's context parallelism knows the attention of GPUs alone, and could not be proved equal to one "
                "process",
                "leave it out; tensor splits the sequence too, outside of attention, and memory.recompute saves memory",
            )
        fewest, most = SCHEDULES[self.schedule].stages
        several = fewest > 1
        if several and self.pipeline == 1:
            yield FieldProblem(
                "schedule",
                f"{self.schedule} is for several ranks with several stages each, not for pipeline 1",
                "use 1f1b, or a pipeline of 2 or more",
            )
        elif self.virtual_stages < fewest or (most is not None and self.virtual_stages > most):
            runs = "one stage" if most == 1 else f"{fewest} stages" if most == fewest else f"{fewest} or more stages"
            other = "1f1b for one stage a rank" if several else "interleaved for several stages a rank"
            yield FieldProblem(
                "virtual_stages",
                f"schedule {self.schedule} runs {runs} a rank, not {self.virtual_stages}",
                f"use virtual_stages {fewest} (or leave it out), or schedule {other}",
            )

    @property
    def replica_size(self) -> int:
        """Workers of one model copy."""
        return self.tensor * self.pipeline


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


class SpikeSpec(Section):
    """What to do when the loss of a step is far above what is usual for the job by then."""

    action: Literal["none", "skip", "rollback"] = Field(
        "none",
        description="skip: the step changes no weight; rollback: go back to the last checkpoint before the data steps "
        "that are jumped over, and train on without them",
    )
    deviations: PositiveFloat = Field(
        6.0, description="a loss so many standard deviations above the running mean of the job's losses is a spike"
    )
    after: PositiveInt = Field(50, description="losses to have seen before any is judged")
    jump: PositiveInt = Field(
        10, description="rollback: data steps jumped over, the one whose loss spiked and those right before it"
    )
    limit: Annotated[int, Field(ge=-1, le=LARGEST)] = Field(
        10, description="spikes that are acted upon; with the next one the job has failed. -1: any number"
    )


class FaultsSpec(Section):
    """What a job may suffer before it counts as failed."""

    hardware: Annotated[int, Field(ge=-1, le=LARGEST)] = Field(-1, description="losses of workers; -1: any number")
    nonfinite_steps: PositiveInt = Field(
        10, description="steps in a row that are skipped because gradients are NaN or Inf, whatever the loss scale"
    )
    spike: SpikeSpec = SpikeSpec()
