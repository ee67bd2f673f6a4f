"""Every request of the REST API as a value, and how its reply is read; both clients send these and nothing else."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import Any, Generic, TypeVar
from urllib.parse import quote

import httpx
from pydantic import TypeAdapter, ValidationError

from rubato.plans import Calibration, Plan, PlanRequest
from rubato.problems import FieldProblem, RubatoError
from rubato.projects import ProjectRequest, ProjectView
from rubato.resources import (
    CancelRequest,
    Checkpoint,
    Cluster,
    Event,
    Job,
    LogSource,
    Metric,
    Operation,
    Page,
    Problem,
    StoredFileView,
)
from rubato.spec import JobSpec, as_given
from rubato.states import JobState

Reply = TypeVar("Reply")

UNREACHABLE = "unreachable"
PAGE = 1000


@dataclass(frozen=True)
class Call(Generic[Reply]):
    """One request.

    Attributes:
        read: makes the reply out of the body of a response that is no error.
        repeatable: sending it twice does what sending it once does, so it may be sent again when the connection broke
            before the reply came.
    """

    method: str
    path: str
    read: Callable[[bytes], Reply]
    query: Mapping[str, str | int] = field(default_factory=dict)
    body: Any = None
    headers: Mapping[str, str] = field(default_factory=dict)
    repeatable: bool = True


@dataclass(frozen=True)
class Stream(Generic[Reply]):
    """What goes on until its job is over, as server-sent events; the id of one is the cursor to go on from."""

    path: str
    read: Callable[[bytes], Reply]
    query: Mapping[str, str | int] = field(default_factory=dict)

    def headers(self, after: int | str | None) -> dict[str, str]:
        """What asks for the stream rather than for a page of it, and for what follows a cursor."""
        return {"Accept": "text/event-stream"} | ({} if after is None else {"Last-Event-ID": str(after)})


@dataclass(frozen=True)
class LogQuery:
    """Which log of a job: the driver's, or that of a world rank, or one named in its sources; and how much of it."""

    rank: int | None = None
    source: str | None = None
    attempt: int | None = None
    tail: int | None = None


DRIVER_LOG = LogQuery()


def new_idempotency_key() -> str:
    """A key that makes all submissions that carry it one job."""
    return str(uuid.uuid4())


def submit(spec: JobSpec | Mapping[str, Any], key: str) -> Call[Job]:
    """A spec that is not checked yet is checked by the control plane."""
    body = as_given(spec) if isinstance(spec, JobSpec) else dict(spec)
    return Call("POST", "/v1/jobs", _reader(Job), body=body, headers={"Idempotency-Key": key})


def plan(
    spec: JobSpec | Mapping[str, Any], cluster: str | None, sizes: Sequence[int] | None, price: float | None
) -> Call[Plan]:
    given = as_given(spec) if isinstance(spec, JobSpec) else dict(spec)
    request = PlanRequest(spec=given, cluster=cluster, sizes=None if sizes is None else list(sizes), price=price)
    return Call("POST", "/v1/plans", _reader(Plan), body=request.model_dump(mode="json"))


def calibrate(measured: Calibration) -> Call[Calibration]:
    return Call("PUT", "/v1/calibrations", _reader(Calibration), body=measured.model_dump(mode="json"))


def jobs(
    state: JobState | None = None,
    project: str | None = None,
    name: str | None = None,
    cursor: str | None = None,
    limit: int | None = None,
) -> Call[Page[Job]]:
    return Call("GET", "/v1/jobs", _reader(Page[Job]), _query(state, project, name, cursor, limit))


def _query(
    state: JobState | None, project: str | None, name: str | None, cursor: str | None, limit: int | None
) -> dict[str, str | int]:
    given = {"state": state, "project": project, "name": name, "cursor": cursor, "limit": limit}
    return {key: value for key, value in given.items() if value is not None}


def job(job: str) -> Call[Job]:
    return Call("GET", _job_path(job), _reader(Job))


def scale(job: str, workers: int | None, low: int | None, high: int | None) -> Call[Operation]:
    # Not a ScaleRequest: its own check would refuse zero without the sizes that are possible.
    asked = {"workers": workers, "min": low, "max": high}
    body = {name: count for name, count in asked.items() if count is not None}
    return Call("POST", _job_path(job, "scale"), _reader(Operation), body=body, repeatable=False)


def projects() -> Call[Page[ProjectView]]:
    return Call("GET", "/v1/projects", _reader(Page[ProjectView]))


def project(name: str) -> Call[ProjectView]:
    return Call("GET", f"/v1/projects/{quote(name, safe='')}", _reader(ProjectView))


def set_project(name: str, quotas: ProjectRequest) -> Call[ProjectView]:
    body = quotas.model_dump(mode="json")
    return Call("PUT", f"/v1/projects/{quote(name, safe='')}", _reader(ProjectView), body=body)


def cancel(job: str, force: bool) -> Call[Operation]:
    body = CancelRequest(force=force).model_dump(mode="json")
    return Call("POST", _job_path(job, "cancel"), _reader(Operation), body=body, repeatable=False)


def profile(job: str, steps: int, ranks: Sequence[int]) -> Call[Operation]:
    body = {"steps": steps, "ranks": list(ranks)}
    return Call("POST", _job_path(job, "profile"), _reader(Operation), body=body, repeatable=False)


def operation(operation: str) -> Call[Operation]:
    return Call("GET", f"/v1/operations/{quote(operation, safe='')}", _reader(Operation))


def events(job: str, after: int) -> Call[Page[Event]]:
    return Call("GET", _job_path(job, "events"), _reader(Page[Event]), {"after": after, "limit": PAGE})


def metrics(job: str, after: int) -> Call[Page[Metric]]:
    return Call("GET", _job_path(job, "metrics"), _reader(Page[Metric]), {"after": after, "limit": PAGE})


def event_stream(job: str) -> Stream[Event]:
    return Stream(_job_path(job, "events"), _reader(Event))


def metric_stream(job: str) -> Stream[Metric]:
    return Stream(_job_path(job, "metrics"), _reader(Metric))


def logs(job: str, query: LogQuery) -> Call[str]:
    return Call("GET", _job_path(job, "logs"), _text, _given(query))


def log_stream(job: str, query: LogQuery) -> Stream[str]:
    return Stream(_job_path(job, "logs"), _text, _given(query))


def log_sources(job: str) -> Call[Page[LogSource]]:
    return Call("GET", _job_path(job, "logs/sources"), _reader(Page[LogSource]))


def _text(content: bytes) -> str:
    return content.decode(errors="replace")


def _given(query: LogQuery) -> dict[str, str | int]:
    return {key: value for key, value in asdict(query).items() if value is not None}


def checkpoints(job: str) -> Call[Page[Checkpoint]]:
    return Call("GET", _job_path(job, "checkpoints"), _reader(Page[Checkpoint]))


def files(job: str) -> Call[Page[StoredFileView]]:
    return Call("GET", _job_path(job, "files"), _reader(Page[StoredFileView]))


def file(job: str, path: str) -> Call[bytes]:
    return Call("GET", _job_path(job, f"files/{quote(path)}"), bytes)


def cluster() -> Call[Cluster]:
    return Call("GET", "/v1/cluster", _reader(Cluster))


def _job_path(job: str, below: str = "") -> str:
    return f"/v1/jobs/{quote(job, safe='')}" + (f"/{below}" if below else "")


@cache
def _reader(reply: type[Reply]) -> Callable[[bytes], Reply]:
    adapter = TypeAdapter(reply)

    def read(content: bytes) -> Reply:
        try:
            return adapter.validate_json(content)
        except ValidationError as error:
            raise not_rubato(f"its reply is no {reply.__name__}: {error.errors()[0]['msg']}") from error

    return read


def not_rubato(cause: str) -> RubatoError:
    """What to say when something answers, but not the way the control plane does."""
    return RubatoError(
        f"the address answers, but not as this version's control plane does: {cause}",
        fix="check --url (RUBATO_URL) and that client and control plane have the same version",
        code="unexpected_reply",
        status=502,
    )


def unreachable(url: str, error: httpx.TransportError) -> RubatoError:
    """The control plane cannot be reached: what that means and what to do."""
    cause = str(error) or type(error).__name__
    return RubatoError(
        f"cannot reach the control plane at {url}: {cause}",
        fix="start one with `rubato up`, or point --url (RUBATO_URL) at a running one; jobs go on training meanwhile",
        code=UNREACHABLE,
        status=503,
    )


def refusal(response: httpx.Response) -> RubatoError:
    """A response of 400 or above, its body already read, as the error it describes."""
    try:
        problem = Problem.model_validate_json(response.content)
    except ValidationError:
        return not_rubato(f"{response.status_code} {response.reason_phrase} without a problem document")
    return RubatoError(
        problem.detail,
        fix=problem.fix,
        code=problem.code,
        status=problem.status,
        problems=[
            FieldProblem(error.get("field", "?"), error.get("cause", ""), error.get("fix", ""))
            for error in problem.errors
        ],
    )
