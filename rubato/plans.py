"""What is predicted of a job before it runs: the JSON of /v1/plans as types."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any

from pydantic import Field, NonNegativeFloat, PositiveFloat

from rubato.resources import Request, Resource
from rubato.spec.section import PositiveInt


class PlanRequest(Request):
    """A spec, checked like one that is submitted, and what to plan it for."""

    spec: dict[str, Any] = Field(description="a job spec; with parallelism left out the layout is chosen")
    cluster: str | None = Field(
        None, description="accelerator:count, such as h100:64; left out: the cluster as it is now", max_length=100
    )
    sizes: list[PositiveInt] | None = Field(
        None,
        description="numbers of workers to plan for; left out: some from workers.min to workers.max",
        max_length=64,
    )
    price: PositiveFloat | None = Field(None, description="of a worker for an hour, in any currency")


class PlannedLayout(Resource):
    """A layout in full."""

    data: int
    pipeline: int
    tensor: int
    zero: int = Field(description="0 none, 1 optimizer states, 2 gradients too, 3 parameters too")
    micro_batch: int
    accumulation: int = Field(description="micro-batches of the busiest replica in a step")
    schedule: str
    virtual_stages: int
    recompute: str


class MemoryView(Resource):
    """Bytes of the worker that needs most, by what they are for."""

    needed: float
    usable: float | None = Field(description="what may be used, with a margin kept free; null: not known")
    parameters: float
    gradients: float
    optimizer: float
    activations: float
    transient: float
    context: float

    @property
    def allocated(self) -> float:
        """What the framework's tensors hold: what a trace shows."""
        return self.parameters + self.gradients + self.optimizer + self.activations + self.transient


class Prediction(Resource):
    """A layout and what is predicted for it."""

    layout: PlannedLayout
    memory: MemoryView
    step_s: float
    tokens_per_s: float
    tokens_per_s_range: tuple[float, float] = Field(description="where nine of ten measurements should lie")
    mfu: float
    finish_s: float = Field(description="seconds of training to the last step")
    cost: float | None = Field(None, description="to the last step, where a price was given")


class RefusedLayout(Resource):
    """A layout that does not fit, and why."""

    layout: PlannedLayout
    reason: str


class PlannedSize(Resource):
    """A number of workers. ``chosen`` is null where the job's layout cannot run or does not fit: see ``reason``."""

    workers: int
    chosen: Prediction | None
    reason: str | None = None
    fastest: Prediction | None = Field(description="the best of this size alone, whatever other sizes use")
    refused: list[RefusedLayout] = Field(description="of the largest size: layouts that would be faster if they fitted")


class Plan(Resource):
    """What a job would come to on a cluster."""

    cluster: str
    calibrated: bool = Field(description="whether constants were measured on this cluster")
    planned: bool = Field(description="whether the layout was chosen here; else it is the spec's own")
    spec: dict[str, Any] = Field(description="the resolved spec, with the chosen layout")
    sizes: list[PlannedSize]
    not_covered: list[str] = Field(description="what of the spec the model does not describe")


class Collective(Resource):
    """Calls of one kind in a step, on one rank."""

    kind: str
    calls: int
    bytes: int = Field(description="of their tensors, the larger side, together")


class StageTrace(Resource):
    """What a pipeline rank came to when a step of it ran on tensors without content."""

    stage: int
    peak_bytes: int
    resident_bytes: int = Field(description="of them, what stays between steps")
    micro_batches: int = Field(description="that the collectives are of")
    collectives: list[Collective]


class Trace(Resource):
    """The stages of a layout that differ."""

    stages: list[StageTrace]


class MeasuredAlone(Request):
    """What one worker measured while the others waited; rates are a second."""

    device: str = Field(description="cpu, or the GPU's name", max_length=100)
    single_flops: PositiveFloat = Field(description="of products in fp32")
    half_flops: PositiveFloat = Field(description="of products in bf16")
    attention_flops: PositiveFloat
    copy_bytes: PositiveFloat
    layer_s: PositiveFloat = Field(description="passes of a layer of the size below")
    layer_hidden: PositiveInt
    layer_tokens: PositiveInt
    layer_length: PositiveInt
    gap_s: NonNegativeFloat = Field(description="passes of a layer that has next to nothing to compute")
    ends_s: NonNegativeFloat = Field(description="the same of embedding, head and loss")


class MeasuredTogether(Request):
    """What several workers measured at once and of the links between them."""

    workers: PositiveInt
    slowdown: Annotated[float, Field(ge=1.0)] = Field(description="of products when all compute at once")
    link_bytes: PositiveFloat
    latency_s: NonNegativeFloat
    shared_gap_s: NonNegativeFloat = Field(description="passes of a layer that two share, with nothing to compute")
    pipelined_s: NonNegativeFloat = Field(description="what a micro-batch adds to an idle pipeline of two")


class Calibration(Request):
    """What `rubato calibrate` measured of a cluster's workers."""

    measured_at: datetime
    host: str = Field(max_length=255)
    cores: PositiveInt = Field(description="cores, or GPUs, of the machine it ran on")
    alone: MeasuredAlone
    together: MeasuredTogether | None
