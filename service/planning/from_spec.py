"""From a job's spec to what the planner takes, and from a layout it found back to the spec."""

from __future__ import annotations

from dataclasses import replace

from rubato.arithmetic import AUTOCAST, BF16, ENGINE_CPU, ENGINE_GPU, FP32, Decoder, Precision, Recompute
from rubato.layout import layout_for
from rubato.pipelines import ScheduleName, stages_of
from rubato.spec import JobSpec, parse_spec
from rubato.spec.planned import is_open
from service.planning.candidates import Space
from service.planning.shapes import Layout, Runtime, Schedule, Work

# What splits the backward pass fills bubbles of a schedule that is modelled; its memory is that one's or less.
_SCHEDULES: dict[ScheduleName, Schedule] = {
    "gpipe": "gpipe",
    "1f1b": "1f1b",
    "interleaved": "interleaved",
    "interleaved_zero_bubble": "interleaved",
    "zbv": "interleaved",
    "dualpipev": "interleaved",
}
_AVERAGE = 4  # bytes a parameter of a moving average, which is in fp32 like what it is of
_PRECISIONS: dict[str, Precision] = {"fp32": FP32, "bf16_pure": BF16}
_WITHOUT_AUTOCAST = ("fp32", "bf16_pure")


def work_of(spec: JobSpec) -> Work:
    """The model, sequence and batch of a job."""
    decoder = Decoder.of(spec.model, spec.data.vocab_size)
    return Work(decoder, spec.data.sequence_length, spec.train.global_batch)


def runtime_of(spec: JobSpec) -> Runtime:
    """How Rubato's engine runs it: fused attention, and 32-bit masters under any precision.

    Muon keeps one moment of a matrix; it counts as AdamW, which keeps two and bounds its memory from above.
    """
    precision = _PRECISIONS.get(spec.train.precision, AUTOCAST)
    if spec.optimizer.ema is not None:
        precision = replace(precision, optimizer=precision.optimizer + _AVERAGE)
    software = ENGINE_GPU if spec.workers.gpus else ENGINE_CPU
    return Runtime(
        attention="flash2",
        precision=precision,
        compiled=spec.train.compile is True,
        engine=replace(software, autocast=spec.train.precision not in _WITHOUT_AUTOCAST),
        loss_chunks=spec.memory.loss_chunks,
    )


def layout_of(spec: JobSpec, workers: int) -> Layout | None:
    """The layout the spec asks for at so many workers; None where they are not a whole number of replicas."""
    shape = layout_for(spec.parallelism, workers)
    if shape is None:
        return None
    parallelism, counts = spec.parallelism, spec.stage_layers
    ranks = range(shape.pipeline)
    held = [stages_of(parallelism.schedule, shape.pipeline, parallelism.virtual_stages, rank) for rank in ranks]
    return Layout(
        tensor=shape.tensor,
        pipeline=shape.pipeline,
        data=shape.data,
        zero=spec.memory.zero,
        shard_over=spec.memory.shard_over,
        micro_batch=parallelism.micro_batch,
        schedule=_SCHEDULES[parallelism.schedule],
        virtual_stages=parallelism.virtual_stages,
        recompute=_recompute_of(spec),
        sequence_parallel=shape.tensor > 1,
        stage_layers=tuple(sum(counts[stage] for stage in stages) for stages in held),
    )


def _recompute_of(spec: JobSpec) -> Recompute:
    """What the models know a spec's recomputation as.

    Mode selective keeps every product, so it counts as none, which bounds its memory from above; so does a mode that
    leaves layers out.
    """
    recompute = spec.memory.recompute
    return "full" if recompute.mode == "full" and recompute.every == 1 else "none"


def space_of(spec: JobSpec) -> Space:
    """What the planner may choose for a job: what its engine can run, and the spec does not say.

    The ZeRO stage is the spec's to say: with shards a job that loses a replica goes back to a checkpoint.
    """
    return Space(
        most_tensor=1 if spec.train.precision == "float8" else None,
        zero=(spec.memory.zero,),
        recompute=("none", "full") if is_open(spec, "memory.recompute") else (_recompute_of(spec),),
    )


def with_layout(spec: JobSpec, layout: Layout) -> JobSpec:
    """The spec with a layout in place of what it left open.

    Raises:
        SpecError: the engine cannot run it.
    """
    content = spec.model_dump(mode="json")
    content["parallelism"] = {
        "tensor": layout.tensor,
        "pipeline": layout.pipeline,
        "schedule": "interleaved" if layout.virtual_stages > 1 else "1f1b",
        "virtual_stages": layout.virtual_stages,
        "micro_batch": layout.micro_batch,
    }
    if is_open(spec, "memory.recompute"):
        content["memory"]["recompute"] = layout.recompute
    return parse_spec(content)
