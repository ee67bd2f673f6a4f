"""The whole spec, and the checks that need more than one section."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Annotated, Any, Self

from pydantic import Field, StringConstraints, model_validator

from rubato.arithmetic import Decoder
from rubato.layout import (
    fewest_micro_batches,
    largest_divisor,
    layout_for,
    micro_batches,
    nearest_sizes,
    possible_sizes,
    runs_in_schedule,
)
from rubato.pipelines import SCHEDULES, balanced
from rubato.problems import FieldProblem
from rubato.spec.communication import CommunicationSpec, with_large_buckets
from rubato.spec.data import DataSpec
from rubato.spec.device_map import device_map_problems, devices_of_worker, layers_of
from rubato.spec.model import ModelSpec
from rubato.spec.monitor import MonitorSpec, ProfileSpec
from rubato.spec.pretrained import with_pretrained
from rubato.spec.section import Section, refuse
from rubato.spec.sections import (
    CheckpointSpec,
    FaultsSpec,
    MemorySpec,
    OptimizerSpec,
    ParallelismSpec,
    TrainSpec,
    WorkersSpec,
)
from rubato.tokenizers import NONE

NAME_PATTERN = r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$"
Name = Annotated[str, StringConstraints(pattern=NAME_PATTERN)]


class JobSpec(Section):
    """What a job is to do. Everything a run depends on is in here, so two runs of one spec are one curve."""

    name: Name
    project: Name = "default"
    priority: Annotated[int, Field(ge=-100, le=100)] = 0
    model: ModelSpec
    data: DataSpec
    train: TrainSpec
    optimizer: OptimizerSpec = OptimizerSpec()
    memory: MemorySpec = MemorySpec()
    parallelism: ParallelismSpec = Field(
        ParallelismSpec(), description="left out: planned, for the cluster and the numbers of workers of this job"
    )
    communication: CommunicationSpec = CommunicationSpec()
    workers: WorkersSpec
    checkpoint: CheckpointSpec = CheckpointSpec()
    faults: FaultsSpec = FaultsSpec()
    monitor: MonitorSpec = MonitorSpec()
    profile: ProfileSpec = ProfileSpec()

    @model_validator(mode="before")
    @classmethod
    def _what_other_sections_say(cls, given: Any) -> Any:
        return with_large_buckets(with_pretrained(given)) if isinstance(given, dict) else given

    @model_validator(mode="after")
    def _check_across_sections(self) -> Self:
        checks = (
            _position_problems,
            _tensor_problems,
            _pipeline_problems,
            _split_backward_problems,
            _batch_problems,
            _precision_problems,
            _compile_problems,
            device_map_problems,
            _average_problems,
            _monitor_problems,
            _zero_problems,
        )
        problems = [problem for check in checks for problem in check(self)]
        if not problems and "parallelism" in self.model_fields_set:  # else the planner finds sizes for it
            problems = [*_size_problems(self)]
        if problems:
            raise refuse(problems)
        return self

    @property
    def stage_layers(self) -> tuple[int, ...]:
        """Layers of each pipeline stage, first to last: as placed by hand, else balanced by cost."""
        shape = self.parallelism
        return shape.stages or tuple(_balanced(self, shape.pipeline * shape.virtual_stages))

    @property
    def layer_devices(self) -> tuple[int, ...] | None:
        """The device of each layer among those of its worker, by ``parallelism.device_map``; None: there is none."""
        given = self.parallelism.device_map
        if given is None:
            return None
        if given == "balanced":
            counts = _balanced(self, devices_of_worker(self.workers))
            return tuple(device for device, count in enumerate(counts) for _ in range(count))
        placed = {layer: device for text, device in given.items() for layer in layers_of(text) or ()}
        return tuple(placed[layer] for layer in range(self.model.layers))

    def compiles(self, *, pays: bool) -> bool:
        """Whether layers are to be compiled, where ``pays`` says whether this run is long enough for it."""
        if self.train.compile == "auto":
            return pays and not any(_cannot_compile(self))
        return self.train.compile

    @property
    def sizes(self) -> list[int]:
        """Worker counts this job can run at, ascending; never empty where ``parallelism`` was given."""
        return possible_sizes(self.parallelism, self.train.global_batch, self.workers.min, self.workers.max)


def _balanced(spec: JobSpec, stages: int) -> list[int]:
    """Layers of each stage by the multiply-adds of a token, of which a lookup in the embedding takes next to none."""
    model, vocab = spec.model, spec.data.vocab_size
    decoder = Decoder.of(model, vocab)
    attention = decoder.query_hidden * spec.data.sequence_length  # scores and weighted values, over the causal half
    layer = decoder.layer_weights + attention
    return balanced(model.layers, stages, first=decoder.hidden / layer, last=decoder.hidden * vocab / layer)


def _tensor_problems(spec: JobSpec) -> Iterator[FieldProblem]:
    degree, model = spec.parallelism.tensor, spec.model
    split = {
        "model.heads": model.heads,
        "model.ffn_size": model.ffn_size,
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
    elif spec.parallelism.stages is not None and sum(spec.parallelism.stages) != spec.model.layers:
        even = ", ".join(map(str, _balanced(spec, stages)))
        yield FieldProblem(
            "parallelism.stages",
            f"{sum(spec.parallelism.stages)} layers are placed, the model has {spec.model.layers}",
            f"place {spec.model.layers}, such as [{even}], or leave stages out",
        )


def _batch_problems(spec: JobSpec) -> Iterator[FieldProblem]:
    batch, micro_batch = spec.train.global_batch, spec.parallelism.micro_batch
    if batch % micro_batch:
        yield FieldProblem(
            "parallelism.micro_batch",
            f"{micro_batch} does not divide train.global_batch ({batch})",
            f"use micro_batch {largest_divisor(batch, micro_batch)}, or a global_batch that {micro_batch} divides",
        )
    chunks, share = spec.memory.loss_chunks, spec.data.sequence_length // spec.parallelism.tensor
    if share % chunks:
        yield FieldProblem(
            "memory.loss_chunks",
            f"{chunks} does not divide the {share} positions of a sequence on a rank",
            f"use loss_chunks {largest_divisor(share, chunks)}",
        )
    if spec.optimizer.schedule.warmup > spec.train.steps:
        yield FieldProblem(
            "optimizer.schedule.warmup",
            f"{spec.optimizer.schedule.warmup} warm-up steps are more than train.steps ({spec.train.steps})",
            f"use at most {spec.train.steps}",
        )


def _split_backward_problems(spec: JobSpec) -> Iterator[FieldProblem]:
    schedule = spec.parallelism.schedule
    if not SCHEDULES[schedule].splits_backward:
        return
    if spec.memory.recompute.mode == "selective":
        yield FieldProblem(
            "memory.recompute",
            f"what mode selective has kept is given out once, and {schedule} goes through each layer twice, for the "
            "gradients of inputs and of weights",
            "use recompute: full, or schedule interleaved, 1f1b or gpipe",
        )
    if spec.memory.loss_chunks > 1:
        yield FieldProblem(
            "memory.loss_chunks",
            f"the head is computed with the loss then, whose gradients {schedule} does not take apart",
            "use loss_chunks: 1, or schedule interleaved, 1f1b or gpipe",
        )
    if spec.memory.zero > 1:
        trouble = "would no longer have the layers" if spec.memory.zero == 3 else "would have to keep the layers whole"
        yield FieldProblem(
            "memory.zero",
            f"{schedule} computes the gradients of weights apart, long after those of inputs: zero {spec.memory.zero} "
            f"{trouble} whose turn it is not",
            "use zero 1, or schedule interleaved, 1f1b or gpipe",
        )
    if spec.train.precision == "float8":
        yield FieldProblem(
            "train.precision",
            f"float8 computes both gradients of a product at once, {schedule} wants them apart",
            "use bf16, or schedule interleaved, 1f1b or gpipe",
        )
    if spec.train.precision == "bf16_pure":
        yield FieldProblem(
            "train.precision",
            f"bf16_pure adds micro-batches up in fp32, which {schedule} with its gradients of weights apart goes round",
            "use bf16, or schedule interleaved, 1f1b or gpipe",
        )


def _zero_problems(spec: JobSpec) -> Iterator[FieldProblem]:
    if spec.memory.zero == 0:
        return
    compression = spec.communication.compression
    if compression.name in ("topk", "powersgd"):
        yield FieldProblem(
            "communication.compression",
            f"what {compression.name} leaves out of a step has to be kept for whole parameters, which takes the memory "
            f"that zero {spec.memory.zero} spares",
            "use compression int8, bf16, fp16 or none, or zero 0",
        )
    if compression.between == "nodes":
        yield FieldProblem(
            "communication.compression.between",
            f"zero {spec.memory.zero} sends each rank the sums of its own rows, inside a node and between nodes alike",
            "leave between out, or use zero 0",
        )
    if spec.optimizer.name == "muon":
        yield FieldProblem(
            "optimizer.name",
            f"muon makes whole matrices orthogonal, of which zero {spec.memory.zero} gives a rank some rows",
            "use adamw, or zero 0",
        )
    if spec.parallelism.device_map is not None:
        yield FieldProblem(
            "memory.zero",
            "device_map places the layers of a copy on several devices of a process, where zero gathers them on one",
            "use zero 0, or leave device_map out",
        )
    if spec.communication.bucket_mb == "auto":
        cause = f"zero {spec.memory.zero} sends layer by layer, so there is no size to measure"
        yield FieldProblem("communication.bucket_mb", cause, "leave it out, or use zero 0")


def _precision_problems(spec: JobSpec) -> Iterator[FieldProblem]:
    if spec.train.precision != "float8":
        return
    if spec.parallelism.tensor > 1:
        yield FieldProblem(
            "train.precision",
            "float8 scales a matrix by its largest value, of which tensor ranks would each know their own",
            "use bf16, or parallelism.tensor 1",
        )
    positions = spec.parallelism.micro_batch * spec.data.sequence_length
    if positions % 16:
        yield FieldProblem(
            "train.precision",
            f"float8 multiplies matrices of 16 rows or a multiple, a micro-batch has {positions} positions",
            "use bf16, or a data.sequence_length that is a multiple of 16",
        )
    if spec.workers.gpus == 0:
        yield FieldProblem(
            "train.precision",
            "float8 needs GPUs with products of matrices in it (compute capability 8.9 or newer), workers.gpus is 0",
            "use bf16, or workers with gpus",
        )


def _cannot_compile(spec: JobSpec) -> Iterator[tuple[str, str]]:
    """Why layers of this job cannot be compiled, and what would have to be otherwise."""
    schedule = spec.parallelism.schedule
    if SCHEDULES[schedule].splits_backward:
        yield (
            f"{schedule} computes gradients of inputs and of weights apart, and a compiled layer computes them at once",
            "schedule interleaved, 1f1b or gpipe",
        )
    if spec.train.precision == "float8":
        yield "the products of float8 are not written for the compiler", "train.precision bf16"
    if spec.parallelism.tensor > 1:
        yield "gradients get lost between the collectives of a tensor axis and a compiled layer", "parallelism.tensor 1"
    if spec.memory.zero == 3:
        yield "zero 3 takes away the memory of parameters that a compiled layer holds on to", "memory.zero 2"


def _compile_problems(spec: JobSpec) -> Iterator[FieldProblem]:
    budget = spec.memory.recompute.budget
    if spec.train.compile is True:
        for cause, otherwise in _cannot_compile(spec):
            yield FieldProblem("train.compile", cause, f"use compile: false, or {otherwise}")
    elif budget is not None:
        near = "none" if budget >= 0.75 else "full"
        if near == "full" and budget > 0.25:
            near = "{every: 2}"
        yield FieldProblem(
            "memory.recompute.budget",
            "what to keep within a budget is chosen by the partitioner of torch.compile, and layers are not sure to be "
            f"compiled (train.compile is {str(spec.train.compile).lower()})",
            f"use train.compile: true, or recompute: {near}, which is nearest to {budget:g}, or selective",
        )


def _average_problems(spec: JobSpec) -> Iterator[FieldProblem]:
    if spec.data.validation.ema and spec.optimizer.ema is None:
        yield FieldProblem(
            "data.validation.ema",
            "no moving average of the weights is kept",
            "set optimizer.ema, such as 0.999, or leave it out",
        )


def _monitor_problems(spec: JobSpec) -> Iterator[FieldProblem]:
    most = spec.data.sequence_length - 1
    if spec.monitor.samples.every and spec.monitor.samples.tokens > most:
        yield FieldProblem(
            "monitor.samples.tokens",
            f"{spec.monitor.samples.tokens} tokens and a prompt do not fit into data.sequence_length "
            f"({spec.data.sequence_length})",
            f"use at most {most}",
        )
    if spec.monitor.samples.every and spec.data.tokenizer == NONE:
        yield FieldProblem(
            "monitor.samples.every",
            "prompts are text, and data.tokenizer is none",
            "use 0, or give the tokenizer the corpus was made with",
        )
    if spec.profile.steps is not None and spec.profile.steps[1] > spec.train.steps:
        yield FieldProblem(
            "profile.steps",
            f"step {spec.profile.steps[1]} is after the last one ({spec.train.steps})",
            "use steps of the run",
        )


def _size_problems(spec: JobSpec) -> Iterator[FieldProblem]:
    low, high = spec.workers.min, spec.workers.max
    if spec.sizes:
        return
    parallelism, batch = spec.parallelism, spec.train.global_batch
    near = nearest_sizes(parallelism, batch, low)
    first = layout_for(parallelism, low)
    if first is not None and low == high and batch // parallelism.micro_batch >= first.data:
        yield _schedule_problem(spec, first.data)
        return
    asked = f"{low} workers" if low == high else f"any number of workers from {low} to {high}"
    cause = f"{asked} cannot be laid out at tensor {parallelism.tensor} x pipeline {parallelism.pipeline}"
    if first is not None:
        cause += f" with a global batch of {batch} in micro-batches of {parallelism.micro_batch}"
    fix = f"use {' or '.join(map(str, near))} workers" if near else "use a larger global_batch or a smaller micro_batch"
    yield FieldProblem("workers", cause, fix)


def _schedule_problem(spec: JobSpec, data: int) -> FieldProblem:
    """Why the pipeline schedule cannot run what ``data`` replicas would each be given."""
    shape, batch = spec.parallelism, spec.train.global_batch
    count = next(each for each in micro_batches(shape, batch, data) if not runs_in_schedule(shape, each))
    fewest = fewest_micro_batches(shape)
    rule = f"at least {fewest}" if count < fewest else f"a multiple of {count // shape.pipeline}, or fewer rounds"
    # Upwards: a larger batch is always one that can run; and the nearest number of workers at this one.
    larger = next(
        each * shape.micro_batch * data
        for each in itertools.count(batch // (shape.micro_batch * data) or 1)
        if each * shape.micro_batch * data > batch and runs_in_schedule(shape, each)
    )
    near = nearest_sizes(shape, batch, spec.workers.min)
    fixes = [f"train.global_batch {larger}", *([f"{' or '.join(map(str, near))} workers"] if near else [])]
    return FieldProblem(
        "parallelism.schedule",
        f"{shape.schedule} over {shape.pipeline} ranks cannot run {count} micro-batches a replica (it needs {rule}), "
        f"which is what a global batch of {batch} in micro-batches of {shape.micro_batch} gives {data} of them",
        f"use {', or '.join(fixes)}",
    )
