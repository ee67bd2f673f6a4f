"""/v1/jobs: submit, list, look, scale, cancel, metrics, logs, checkpoints."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Body, Header, Query, Request, Response
from fastapi.responses import FileResponse, PlainTextResponse

from rubato.resources import (
    CancelRequest,
    Checkpoint,
    Job,
    LogSource,
    Metric,
    Operation,
    Page,
    ProfileRequest,
    ScaleRequest,
    StoredFileView,
)
from rubato.spec import JobSpec
from rubato.states import JobState
from service import streams
from service.cursors import LARGEST
from service.dependencies import FilesDep, JobsDep, Limit, WakeupsDep
from service.jobs.files import LogPlace
from service.jobs.repository import JobFilter
from service.jobs.schemas import SPEC_EXAMPLE
from service.problems import problems_doc

router = APIRouter(prefix="/v1/jobs", tags=["jobs"])

_LOG_OFFSET = "X-Log-Offset"
_LOG_ATTEMPT = "X-Log-Attempt"
_LOG_POLL = 0.5  # seconds between two looks at a file that is followed


@router.post(
    "",
    status_code=201,
    summary="Submit a job",
    responses={201: {"headers": {"Location": {"schema": {"type": "string"}}}}, **problems_doc(409, 413, 422, 503)},
)
async def submit_job(
    spec: Annotated[JobSpec, Body(openapi_examples={"tiny": {"summary": "a small model", "value": SPEC_EXAMPLE}})],
    response: Response,
    jobs: JobsDep,
    idempotency_key: Annotated[
        str | None,
        Header(min_length=1, max_length=255, description="sending the same key and spec again returns the same job"),
    ] = None,
) -> Job:
    """Queues a job. The reply holds the resolved spec, with all defaults filled in.

    `curl -X POST URL/v1/jobs -H 'Content-Type: application/json' -H 'Idempotency-Key: my-run-1' -d @spec.json`
    """
    job, replayed = await jobs.submit(spec, idempotency_key)
    response.headers["Location"] = f"/v1/jobs/{job.id}"
    if replayed:
        response.headers["Idempotency-Replayed"] = "true"
    return job


@router.get("", summary="List jobs, newest first", responses=problems_doc(422))
async def list_jobs(
    jobs: JobsDep,
    state: Annotated[list[JobState] | None, Query(description="only jobs in one of these states")] = None,
    project: Annotated[str | None, Query(description="only jobs of a project")] = None,
    name: Annotated[str | None, Query(description="only jobs of this name")] = None,
    cursor: Annotated[str | None, Query(description="the `next` of the page before")] = None,
    limit: Annotated[int, Query(ge=1, le=500)] = 50,
) -> Page[Job]:
    """A page of jobs; `next` is the cursor of the page after it, null on the last."""
    return await jobs.list_page(JobFilter(state or (), project, name), cursor, limit)


@router.get("/{job}", summary="A job", responses=problems_doc(404, 409))
async def get_job(job: str, jobs: JobsDep) -> Job:
    """A job by its id, or by its name. A name of several jobs means the one that is not over yet."""
    return await jobs.get(job)


@router.post("/{job}/scale", status_code=202, summary="Change the size of a job", responses=problems_doc(404, 409, 422))
async def scale_job(
    job: str,
    request: Annotated[
        ScaleRequest,
        Body(openapi_examples={"eight": {"value": {"workers": 8}}, "shared": {"value": {"min": 4, "max": 16}}}),
    ],
    jobs: JobsDep,
) -> Operation:
    """Asks for another number of workers; training goes on meanwhile. Follow it at `/v1/operations/{id}`.

    A size the job cannot run at is refused with the nearest it can. With `workers` the job keeps that size; with `min`
    and `max` the queue chooses again, between these, by what is free and who waits.
    """
    return await jobs.scale(job, request)


@router.post("/{job}/cancel", status_code=202, summary="End a job", responses=problems_doc(404, 409, 422))
async def cancel_job(
    job: str,
    jobs: JobsDep,
    request: Annotated[CancelRequest | None, Body(openapi_examples={"force": {"value": {"force": True}}})] = None,
) -> Operation:
    """Lets a job save a checkpoint and stop; with `{"force": true}` stops it at once. The body may be left out."""
    return await jobs.cancel(job, request is not None and request.force)


@router.post(
    "/{job}/profile", status_code=202, summary="Record steps of a running job", responses=problems_doc(404, 409, 422)
)
async def profile_job(
    job: str,
    jobs: JobsDep,
    request: Annotated[
        ProfileRequest | None, Body(openapi_examples={"two ranks": {"value": {"steps": 3, "ranks": [0, 1]}}})
    ] = None,
) -> Operation:
    """Has workers record their next steps with the profiler, while training goes on. The body may be left out.

    Once the operation is done, `files` lists the traces and tables.
    """
    return await jobs.profile(job, request or ProfileRequest())


@router.get("/{job}/files", summary="Traces, tables and boards of a run", responses=problems_doc(404, 409))
async def list_files(job: str, files: FilesDep) -> Page[StoredFileView]:
    """What the profiler has recorded, and the TensorBoard files."""
    return await files.stored(job)


@router.get(
    "/{job}/files/{path:path}",
    summary="A file of a run",
    response_class=FileResponse,
    responses=problems_doc(404, 409),
)
async def get_file(job: str, path: str, files: FilesDep) -> FileResponse:
    """One of those that `files` lists."""
    return FileResponse(await files.stored_path(job, path), filename=path.replace("/", "-"))


@router.get(
    "/{job}/metrics",
    summary="Loss, speed and the like of each step",
    response_model=Page[Metric],
    responses={**streams.documented("metrics"), **problems_doc(404, 409, 422)},
)
async def list_metrics(
    request: Request,
    job: str,
    jobs: JobsDep,
    wakeups: WakeupsDep,
    after: Annotated[int, Query(ge=0, le=2**31 - 1, description="only steps above this one")] = 0,
    limit: Limit = 1000,
    last_event_id: streams.LastEventId = None,
) -> Page[Metric] | Response:
    """Metrics by step, ascending. A step that was done again after a loss shows what it said the second time."""
    if not streams.wanted(request):
        return await jobs.metrics(job, after, limit)
    found = await jobs.get(job)

    async def load(cursor: int) -> streams.Chunk[int]:
        over = (await jobs.get(found.id)).state.terminal
        page = await jobs.metrics(found.id, cursor, limit)
        items = [(metric.step, metric.model_dump_json()) for metric in page.items]
        return streams.Chunk(items, more=page.next is not None, over=over)

    return streams.response(wakeups, found.id, streams.start_of(after, last_event_id), load)


@router.get("/{job}/checkpoints", summary="Checkpoints, newest first", responses=problems_doc(404, 409))
async def list_checkpoints(job: str, files: FilesDep) -> Page[Checkpoint]:
    """What a run can be taken up from. `verified` is false when files are missing or have another size than saved."""
    return await files.checkpoints(job)


@router.get("/{job}/logs/sources", summary="Which logs there are", responses=problems_doc(404, 409))
async def list_log_sources(job: str, files: FilesDep) -> Page[LogSource]:
    """One log a process and attempt, the newest attempt first."""
    return await files.log_sources(job)


@router.get(
    "/{job}/logs",
    summary="A log",
    response_class=PlainTextResponse,
    responses={
        200: {
            "content": {
                streams.MEDIA_TYPE: {
                    "schema": {"type": "string"},
                    "example": "id: 1:driver:17\ndata: the next line\n\n",
                }
            },
            "headers": {
                _LOG_OFFSET: {"schema": {"type": "integer"}, "description": "where this text ends, in bytes"},
                _LOG_ATTEMPT: {"schema": {"type": "integer"}, "description": "the attempt it is of"},
            },
        },
        **problems_doc(404, 409, 422),
    },
)
async def get_log(
    request: Request,
    job: str,
    files: FilesDep,
    jobs: JobsDep,
    wakeups: WakeupsDep,
    rank: Annotated[int | None, Query(ge=0, description="the worker of this world rank")] = None,
    source: Annotated[str | None, Query(description="a name from logs/sources; `driver` when left out")] = None,
    attempt: Annotated[int | None, Query(ge=1, description="of this attempt instead of the newest")] = None,
    tail: Annotated[int, Query(ge=0, le=100_000, description="how many lines from the end")] = 1000,
    offset: Annotated[
        int | None, Query(ge=0, le=LARGEST, description="what follows this byte, instead of the tail")
    ] = None,
    last_event_id: streams.LastEventId = None,
) -> Response:
    """The end of a log as plain text, or what follows `offset`: X-Log-Offset of the reply before.

    With `Accept: text/event-stream` the log is followed until the job is over, into the attempts that come after;
    the data of an event is a line, its id the place to go on from.
    """
    log = await files.log(job, source, rank, attempt)
    text = await files.tail(log, tail) if offset is None else await files.text_from(log, offset)
    if not streams.wanted(request):
        return PlainTextResponse(text.content, headers={_LOG_OFFSET: str(text.end), _LOG_ATTEMPT: str(log.attempt)})
    seen = LogPlace.read(last_event_id)
    if (
        seen is None
        or seen.source != log.source
        or seen.attempt > log.attempt
        or (log.pinned and seen.attempt != log.attempt)
    ):
        seen = LogPlace(log.attempt, log.source, text.end - len(text.content))

    async def load(place: LogPlace) -> streams.Chunk[LogPlace]:
        over = (await jobs.get(log.job_id)).state.terminal
        lines = await files.lines_from(log, place, over)
        return streams.Chunk(lines, more=bool(lines), over=over)

    return streams.response(wakeups, log.job_id, seen, load, every=_LOG_POLL)
