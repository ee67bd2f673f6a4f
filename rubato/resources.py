"""What travels between users, control plane and driver: the JSON of the REST API as types."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any, Generic, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidatorFunctionWrapHandler, WrapValidator, model_validator

from rubato.layout import Layout, micro_batches
from rubato.problems import FieldProblem
from rubato.spec import JobSpec, stored_spec
from rubato.spec.section import refuse
from rubato.states import JobState

Item = TypeVar("Item")


Actor = Literal["user", "queue", "service", "driver", "cluster"]  # queue: what shares the cluster among jobs


class Resource(BaseModel):
    """A reply. Fields that a newer server adds are ignored, so an older client goes on working."""

    # A loss that is no number must reach whoever watches it; JSON has no word for it but a string.
    model_config = ConfigDict(frozen=True, ser_json_inf_nan="strings")


class Request(BaseModel):
    """A request body. Unknown fields are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")


def _as_stored(value: Any, judge: ValidatorFunctionWrapHandler) -> Any:
    # A reply tells of a spec that was accepted; a client with other checks must still be able to read it.
    if isinstance(value, JobSpec):
        return value
    return stored_spec(value) if isinstance(value, dict) else judge(value)


StoredSpec = Annotated[JobSpec, WrapValidator(_as_stored)]


class Reason(Resource):
    """Why a job is in its state, and who put it there."""

    code: str = Field(description="stable, snake_case")
    message: str
    actor: Actor
    at: datetime


class LayoutView(Resource):
    data: int
    pipeline: int
    tensor: int
    zero: int = Field(0, description="what the data axis shards: 1 optimizer states, 2 gradients too, 3 parameters too")
    micro_batch: int
    accumulation: int = Field(description="micro-batches of the busiest replica in a step")

    @classmethod
    def of(cls, layout: Layout, spec: JobSpec) -> LayoutView:
        """What running ``spec`` at a layout comes to."""
        shape = spec.parallelism
        counts = micro_batches(shape, spec.train.global_batch, layout.data)
        return cls(
            data=layout.data,
            pipeline=layout.pipeline,
            tensor=layout.tensor,
            zero=spec.memory.zero,
            micro_batch=shape.micro_batch,
            accumulation=max(counts),
        )


class WorkerView(Resource):
    """One worker as the driver sees it."""

    replica: str = Field(description="name of the replica it belongs to, stable over restarts")
    data: int | None = Field(description="its place on the data axis in the current generation; null: not in it")
    pipeline: int
    tensor: int
    rank: int | None = Field(description="world rank in the current generation; null: not in it")
    state: Literal["starting", "training", "lost"]
    pid: int | None = None
    node_ip: str | None = None
    node_id: str | None = None


class WorkersView(Resource):
    desired: int
    observed: int
    min: int
    max: int
    queue_min: int | None = Field(None, description="the queue chooses the size, from this; its user may narrow it")
    queue_max: int | None = Field(None, description="up to this; equal to queue_min after a scale to one size")
    members: list[WorkerView] = []


class Progress(Resource):
    step: int = 0
    steps: int
    tokens: int = 0
    loss: float | None = None
    tokens_per_s: float | None = None
    predicted_tokens_per_s: float | None = Field(None, description="at the layout it has, on the cluster as it is seen")
    mfu: float | None = None
    eta_s: float | None = None


class Restarts(Resource):
    hardware: int = 0
    preemption: int = 0
    user_error: int = 0
    resize: int = 0
    spike: int = 0


class Goodput(Resource):
    """Where the seconds of a job went. ``ratio`` is training over all but waiting."""

    ratio: float | None = None
    training_s: float = 0.0
    checkpoint_s: float = 0.0
    starting_s: float = 0.0
    recovering_s: float = 0.0
    resizing_s: float = 0.0
    redone_s: float = 0.0
    waiting_s: float = 0.0


class Job(Resource):
    id: str
    name: str
    project: str
    priority: int
    state: JobState
    reason: Reason
    spec: StoredSpec | None = Field(description="with all defaults; null: what was stored of it cannot be read")
    layout: LayoutView | None
    workers: WorkersView
    progress: Progress
    generation: int
    attempts: int
    restarts: Restarts
    goodput: Goodput
    created_at: datetime
    started_at: datetime | None
    finished_at: datetime | None
    run_dir: str
    links: dict[str, str]


class Page(Resource, Generic[Item]):
    """A page of a list. ``next`` is the cursor of the page after it, null on the last."""

    items: list[Item]
    next: str | None


class Event(Resource):
    """An entry of a job's timeline."""

    id: int = Field(description="ascending over all events of the service: the cursor")
    at: datetime
    kind: str = Field(description="stable, dotted, such as worker.lost or generation.formed")
    message: str
    actor: Actor
    data: dict[str, Any] = {}


class Spread(Resource):
    """The least and the most of something over all workers."""

    min: float
    max: float


class Metric(Resource):
    """What one optimizer step reported."""

    step: int = Field(description="1 for the first step of the job")
    at: datetime
    loss: float = Field(description="mean over the real tokens of the global batch, nats")
    grad_norm: float
    lr: float
    tokens: int = Field(description="tokens trained on since the first step")
    tokens_per_s: float
    step_s: float
    mfu: float | None = None
    generation: int
    data: int = Field(description="data-parallel degree the step ran at")
    validation_loss: float | None = None
    exposed_comm_s: float | None = Field(
        None, description="seconds the step waited for sums of gradients that its backward pass did not hide"
    )
    comm_bytes: int | None = Field(None, description="bytes a worker sent to sum gradients in the step")
    comm_bytes_saved: int | None = Field(None, description="how many fewer these are than without compression")
    data_s: float | None = Field(None, description="seconds of the step that the reporting worker waited for samples")
    flops_per_s: float | None = Field(None, description="model FLOP/s of all workers, what MFU is a share of")
    memory_bytes: int | None = Field(None, description="of the reporting worker: on its GPU, else of its process")
    memory_peak_bytes: int | None = Field(None, description="the most it has held so far")
    gradient_norms: dict[str, float] | None = Field(
        None, description="by group of layers, before clipping; every `monitor.every` steps"
    )
    workers: dict[str, Spread] | None = Field(
        None, description="of step_s, data_s and memory over all workers; every `monitor.every` steps"
    )


class Checkpoint(Resource):
    step: int
    at: datetime
    bytes: int
    layout: LayoutView
    loss: float | None
    verified: bool
    path: str


class LogSource(Resource):
    """A log of a job: one a process and attempt."""

    source: str = Field(description="what to ask for with ?source=", examples=["driver", "replica-0-rank-1"])
    attempt: int
    bytes: int
    modified_at: datetime


class Phase(Resource):
    name: str
    at: datetime
    seconds: float | None = Field(description="how long it took; null while it lasts")


class OperationState(StrEnum):
    RUNNING = "RUNNING"
    DONE = "DONE"
    FAILED = "FAILED"


class Operation(Resource):
    """A commanded change of a job."""

    id: str
    job_id: str
    kind: Literal["scale", "cancel", "profile"]
    request: dict[str, Any]
    state: OperationState
    message: str | None
    phases: list[Phase]
    created_at: datetime
    finished_at: datetime | None


class NodeView(Resource):
    id: str
    ip: str
    alive: bool
    cpus: float
    gpus: float
    cpus_free: float
    gpus_free: float
    accelerator: str | None = Field(None, description="what Ray calls the kind of its GPUs")
    memory_bytes: float | None = Field(None, description="memory that Ray offers to workers on the node")


class Cluster(Resource):
    """What the control plane sees of the Ray cluster."""

    state: Literal["reachable", "unreachable"]
    detail: str
    ray_version: str | None
    dashboard_url: str
    nodes: list[NodeView]
    cpus: float
    cpus_free: float
    gpus: float
    gpus_free: float


class Problem(Resource):
    """An error, as application/problem+json (RFC 9457)."""

    type: str = "about:blank"
    title: str
    status: int
    code: str
    detail: str
    fix: str
    errors: list[dict[str, str]] = Field(default=[], description="field, cause and fix of each field at fault")


class ScaleRequest(Request):
    """Exactly so many ``workers``, or as many as the queue chooses between ``min`` and ``max``."""

    workers: int | None = Field(None, gt=0, description="exactly so many; the queue changes nothing about it any more")
    min: int | None = Field(None, gt=0, description="the queue chooses the size, no smaller than this")
    max: int | None = Field(None, gt=0, description="and no larger than this")

    @model_validator(mode="after")
    def _one_or_the_other(self) -> Self:
        ranged = self.min is not None or self.max is not None
        if (self.workers is not None) == ranged:
            cause = "is given together with min and max" if ranged else "is missing"
            raise refuse([FieldProblem("workers", cause, "give workers, or min and max")])
        if self.min is not None and self.max is not None and self.min > self.max:
            raise refuse([FieldProblem("min", f"{self.min} is above max ({self.max})", "make min at most max")])
        return self


class CancelRequest(Request):
    force: bool = Field(False, description="kill the workers at once instead of saving first")


class ProfileRequest(Request):
    steps: int = Field(3, gt=0, le=100, description="how many to record, from the next one on")
    ranks: list[Annotated[int, Field(ge=0)]] = Field([0], min_length=1, max_length=64, description="world ranks")


class StoredFileView(Resource):
    """A file that a run has made for people to look at."""

    path: str = Field(description="in the run directory; what to ask for below `files/`")
    bytes: int
    modified_at: datetime


# What the driver says to the control plane and hears from it.


class DriverEvent(Request):
    """Something that happened to an attempt. ``seq`` is its line in the run directory's events.jsonl."""

    seq: int
    at: datetime
    kind: str
    message: str
    data: dict[str, Any] = {}
    operation: str | None = Field(None, description="the operation this is a phase of")
    phase: str | None = None
    done: bool = Field(False, description="the operation is over")
    failed: bool = Field(False, description="with done: the operation did not reach what was wanted")


class SequencedMetric(Request):
    seq: int
    metric: Metric


class DriverState(StrEnum):
    """What a driver says of its attempt; the first four are JobState names."""

    STARTING = "STARTING"
    RUNNING = "RUNNING"
    RESIZING = "RESIZING"
    RECOVERING = "RECOVERING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"


class SyncRequest(Request):
    """A heartbeat, with all that the control plane has not yet acknowledged."""

    epoch: int
    state: DriverState
    reason_code: str
    reason_message: str
    generation: int
    layout: LayoutView | None
    members: list[WorkerView] = []
    restarts: Restarts = Restarts()
    events: list[DriverEvent] = []
    metrics: list[SequencedMetric] = []
    seen_version: int = Field(0, description="version of the last reply acted on")
    wait_s: float = Field(0.0, ge=0, le=60, description="hold the reply until there is news or this long")


class ProfileOrder(Resource):
    """Steps to record, and the operation that asked for it."""

    operation: str
    steps: int
    ranks: list[int]


class SyncReply(Resource):
    """What the control plane wants of the attempt. A higher version replaces a lower one."""

    version: int
    workers: int
    operation: str | None = Field(description="the operation that asked for ``workers`` or for the cancel")
    cancel: Literal["no", "drain", "force"] = "no"
    profile: ProfileOrder | None = None
    events_acknowledged: int = Field(description="highest event seq stored, 0: none")
    metrics_acknowledged: int
