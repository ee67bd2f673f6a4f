"""From a job's spec to what the planner takes."""

from __future__ import annotations

from rubato.arithmetic import AUTOCAST, FP32, Decoder
from rubato.layout import layout_for
from rubato.pipelines import ScheduleName
from rubato.spec import JobSpec
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


def work_of(spec: JobSpec) -> Work:
    """The model, sequence and batch of a job."""
    decoder = Decoder.of(spec.model, spec.data.vocab_size)
    return Work(decoder, spec.data.sequence_length, spec.train.global_batch)


def runtime_of(spec: JobSpec) -> Runtime:
    """How Rubato's engine runs it: fused attention, and 32-bit parameters under any precision."""
    return Runtime(attention="flash2", precision=FP32 if spec.train.precision == "fp32" else AUTOCAST)


def layout_of(spec: JobSpec, workers: int) -> Layout | None:
    """The layout the spec asks for at so many workers; None where they are not a whole number of replicas."""
    shape = layout_for(spec.parallelism, workers)
    if shape is None:
        return None
    return Layout(
        tensor=shape.tensor,
        pipeline=shape.pipeline,
        data=shape.data,
        micro_batch=spec.parallelism.micro_batch,
        schedule=_SCHEDULES[spec.parallelism.schedule],
        virtual_stages=spec.parallelism.virtual_stages,
    )
