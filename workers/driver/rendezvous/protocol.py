"""What a worker and the rendezvous say to each other: one JSON object a line, each with its ``kind``."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter


class Message(BaseModel):
    """Frozen; both ends run the same release, so an unknown field is a bug and is refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="constants")

    def line(self) -> bytes:
        """The message as it travels."""
        return self.model_dump_json().encode() + b"\n"


# From a worker.


class Hello(Message):
    """The first message of a connection: who is there. The answer is a Welcome.

    ``incarnation`` is drawn anew by the workers of a replica each time they start together.
    """

    kind: Literal["hello"] = "hello"
    secret: str
    replica: str
    incarnation: str
    pipeline: int
    tensor: int
    pid: int
    node_ip: str
    node_id: str


class Ready(Message):
    """The worker stands between two generations and waits for the next (engine: ``Standing``)."""

    kind: Literal["ready"] = "ready"
    step: int | None
    prepared: bool
    commit: dict[str, float] | None


class Failed(Message):
    """The data axis of a generation failed under this worker."""

    kind: Literal["failed"] = "failed"
    generation: int
    cause: str


class Report(Message):
    """Something the driver keeps: a metric, an event, the step reached, or what the worker is busy with."""

    kind: Literal["report"] = "report"
    topic: str
    record: dict[str, Any]


class Finished(Message):
    """All steps are done at this worker, the last checkpoint included."""

    kind: Literal["finished"] = "finished"


class Crashed(Message):
    """The worker is about to end because of an error.

    ``fault`` says whose: "user" (spec or data, in words for the user), "program" (an error nobody expected: a retry
    would meet it again) or "replica" (a mate of the replica is gone, so this worker cannot go on either).
    """

    kind: Literal["crashed"] = "crashed"
    fault: Literal["user", "program", "replica"]
    cause: str


class Goodbye(Message):
    """The worker ends as it was told to: the end of the connection is no loss."""

    kind: Literal["goodbye"] = "goodbye"


class Beat(Message):
    """The process is alive, though it has nothing to say."""

    kind: Literal["beat"] = "beat"


class Trouble(Message):
    """Said on a connection of its own by Ray's controller of a replica: workers failed and will be started anew."""

    kind: Literal["trouble"] = "trouble"
    secret: str
    replica: str
    cause: str


FromWorker = Hello | Ready | Failed | Report | Finished | Crashed | Goodbye | Beat | Trouble


# To a worker.


class Welcome(Message):
    """The answer to Hello. ``released``: the replica is not wanted any more and ends before it builds anything."""

    kind: Literal["welcome"] = "welcome"
    released: bool


class Form(Message):
    """A generation begins (engine: ``Generation``); ``store_host``, ``store_port`` are the TCPStore it meets at."""

    kind: Literal["form"] = "form"
    generation: int
    data: int
    replica: int
    step: int | None
    roll_forward: bool
    source: int | None
    commit: dict[str, float] | None
    nodes: tuple[str, ...]
    store_host: str
    store_port: int


class Boundary(Message):
    """The set of replicas is about to change: leave the generation at the end of a step, all at the same one."""

    kind: Literal["boundary"] = "boundary"
    generation: int


class Broken(Message):
    """A member of the generation is gone: nobody waits for it."""

    kind: Literal["broken"] = "broken"
    generation: int


class Release(Message):
    """The worker may end. ``save``: its replica saves a checkpoint first."""

    kind: Literal["release"] = "release"
    save: bool


class Profile(Message):
    """Record the next ``steps`` steps with the profiler."""

    kind: Literal["profile"] = "profile"
    steps: int


ToWorker = Welcome | Form | Boundary | Broken | Release | Profile

_FROM_WORKER: TypeAdapter[FromWorker] = TypeAdapter(Annotated[FromWorker, Field(discriminator="kind")])
_TO_WORKER: TypeAdapter[ToWorker] = TypeAdapter(Annotated[ToWorker, Field(discriminator="kind")])


def from_worker(line: bytes) -> FromWorker:
    """The message in a line a worker sent. Raises pydantic.ValidationError."""
    return _FROM_WORKER.validate_json(line)


def to_worker(line: bytes) -> ToWorker:
    """The message in a line the rendezvous sent. Raises pydantic.ValidationError."""
    return _TO_WORKER.validate_json(line)


def welcome(line: bytes) -> Welcome:
    """The answer to Hello. Raises pydantic.ValidationError when the line is none."""
    return Welcome.model_validate_json(line)
