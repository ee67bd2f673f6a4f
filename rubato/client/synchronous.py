"""The client for plain code: every call blocks until its reply is there."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx

from rubato.client import calls
from rubato.client.calls import DRIVER_LOG, Call, LogQuery, Stream
from rubato.client.connection import (
    HEADERS,
    STREAM_TIMEOUT,
    TIMEOUT,
    Gap,
    Notice,
    Persistence,
    base_url,
    stream_cut,
    through_proxies,
)
from rubato.client.sse import END, Decoder, ServerSentEvent
from rubato.plans import Calibration, Plan
from rubato.projects import ProjectRequest, ProjectView
from rubato.resources import (
    Checkpoint,
    Cluster,
    Event,
    Job,
    LogSource,
    Metric,
    Operation,
    OperationState,
    Page,
    StoredFileView,
)
from rubato.spec import JobSpec
from rubato.states import JobState

Reply = TypeVar("Reply")


class Client:
    """A connection to a control plane; use it as a context manager.

    Every method raises RubatoError: with the code the control plane gave, or ``unreachable`` when none answers.
    A job is named by its id or, where that is unique, its name.

    Args:
        url: address of the control plane; by default RUBATO_URL, the local stack, or http://127.0.0.1:8700.
        transport: how requests travel, for tests.
    """

    def __init__(self, url: str | None = None, *, transport: httpx.BaseTransport | None = None) -> None:
        self.url = base_url(url)
        self._http = httpx.Client(
            base_url=self.url,
            headers=HEADERS,
            timeout=TIMEOUT,
            transport=transport,
            trust_env=through_proxies(self.url),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    def submit(self, spec: JobSpec | Mapping[str, Any], *, idempotency_key: str | None = None) -> Job:
        """Hands a job in. All submissions with one key are one job, however often they are repeated."""
        return self._send(calls.submit(spec, idempotency_key or calls.new_idempotency_key()))

    def plan(
        self,
        spec: JobSpec | Mapping[str, Any],
        *,
        cluster: str | None = None,
        sizes: Sequence[int] | None = None,
        price: float | None = None,
    ) -> Plan:
        """What a spec would come to, on the cluster or on one named like h100:64; ``price`` is a worker's an hour."""
        return self._send(calls.plan(spec, cluster, sizes, price))

    def calibrate(self, measured: Calibration) -> Calibration:
        """Has plans rest on what was measured."""
        return self._send(calls.calibrate(measured))

    def jobs(
        self,
        *,
        state: JobState | None = None,
        project: str | None = None,
        name: str | None = None,
        cursor: str | None = None,
        limit: int | None = None,
    ) -> Page[Job]:
        """A page of the jobs, newest first."""
        return self._send(calls.jobs(state, project, name, cursor, limit))

    def job(self, job: str) -> Job:
        return self._send(calls.job(job))

    def scale(
        self, job: str, workers: int | None = None, *, low: int | None = None, high: int | None = None
    ) -> Operation:
        """Gives a job exactly so many workers, or lets the queue choose between ``low`` and ``high``."""
        return self._send(calls.scale(job, workers, low, high))

    def projects(self) -> Page[ProjectView]:
        """Projects that have quotas or jobs that hold workers."""
        return self._send(calls.projects())

    def project(self, name: str) -> ProjectView:
        return self._send(calls.project(name))

    def set_project(self, name: str, quotas: ProjectRequest) -> ProjectView:
        """Replaces all quotas of a project."""
        return self._send(calls.set_project(name, quotas))

    def cancel(self, job: str, *, force: bool = False) -> Operation:
        """Ends a job after a last checkpoint; with ``force`` at once."""
        return self._send(calls.cancel(job, force))

    def profile(self, job: str, *, steps: int = 3, ranks: Sequence[int] = (0,)) -> Operation:
        """Has workers record their next steps; the files are among ``files`` once the operation is done."""
        return self._send(calls.profile(job, steps, ranks))

    def files(self, job: str) -> Page[StoredFileView]:
        """Traces, tables and boards of a run."""
        return self._send(calls.files(job))

    def file(self, job: str, path: str) -> bytes:
        """The content of one of its files."""
        return self._send(calls.file(job, path))

    def operation(self, operation: str) -> Operation:
        return self._send(calls.operation(operation))

    def wait_for_operation(self, operation: str, *, every_s: float = 0.3) -> Operation:
        """The operation once it is over, done or failed."""
        while True:
            seen = self.operation(operation)
            if seen.state in (OperationState.DONE, OperationState.FAILED):
                return seen
            time.sleep(every_s)

    def checkpoints(self, job: str) -> Page[Checkpoint]:
        return self._send(calls.checkpoints(job))

    def cluster(self) -> Cluster:
        return self._send(calls.cluster())

    def events(self, job: str, *, after: int = 0) -> Iterator[Event]:
        """All events there are, oldest first, after the one with this id."""
        while True:
            page = self._send(calls.events(job, after))
            yield from page.items
            if page.next is None:
                return
            after = page.items[-1].id

    def metrics(self, job: str, *, after: int = 0) -> Iterator[Metric]:
        """All metrics there are, by step, after this step."""
        while True:
            page = self._send(calls.metrics(job, after))
            yield from page.items
            if page.next is None:
                return
            after = page.items[-1].step

    def logs(self, job: str, query: LogQuery = DRIVER_LOG) -> str:
        """The end of a log."""
        return self._send(calls.logs(job, query))

    def log_sources(self, job: str) -> Page[LogSource]:
        """Which logs there are, the newest attempt first."""
        return self._send(calls.log_sources(job))

    def follow_events(
        self, job: str, *, after: int = 0, patience_s: float = 120.0, notice: Notice | None = None
    ) -> Iterator[Event]:
        """Events as they happen, until the job is over.

        A stream that breaks is taken up again from the last event seen.

        Args:
            after: id of the event to begin after; 0: from the first.
            patience_s: seconds without the control plane after which RubatoError ``unreachable`` is raised.
            notice: called with that error as soon as the control plane is away.
        """
        return self._follow(calls.event_stream(job), after, patience_s, notice)

    def follow_metrics(
        self, job: str, *, after: int = 0, patience_s: float = 120.0, notice: Notice | None = None
    ) -> Iterator[Metric]:
        """Metrics as steps are made, until the job is over; as ``follow_events``."""
        return self._follow(calls.metric_stream(job), after, patience_s, notice)

    def follow_logs(
        self, job: str, query: LogQuery = DRIVER_LOG, *, patience_s: float = 120.0, notice: Notice | None = None
    ) -> Iterator[str]:
        """The lines of a log as they are written, until the job is over; as ``follow_events``."""
        return self._follow(calls.log_stream(job, query), None, patience_s, notice)

    def wait(self, job: str) -> Job:
        """The job once it is over."""
        for _ in self.follow_events(job):
            pass
        return self.job(job)

    def _send(self, call: Call[Reply]) -> Reply:
        persistence = Persistence(call.repeatable, self.url)
        while True:
            try:
                return self._send_once(call)
            except httpx.TransportError as error:
                time.sleep(persistence.pause_after(error))

    def _send_once(self, call: Call[Reply]) -> Reply:
        response = self._http.request(
            call.method, call.path, params=dict(call.query), json=call.body, headers=dict(call.headers)
        )
        if response.is_error:
            raise calls.refusal(response)
        return call.read(response.content)

    def _follow(
        self, stream: Stream[Reply], after: int | str | None, patience_s: float, notice: Notice | None
    ) -> Iterator[Reply]:
        gap = Gap(self.url, patience_s, notice)
        while True:
            try:
                for event in self._events_of(stream, after, gap):
                    if event.kind == END:
                        return
                    after = after if event.cursor is None else event.cursor
                    yield stream.read(event.data.encode())
                raise stream_cut()
            except httpx.TransportError as error:
                time.sleep(gap.pause_after(error))

    def _events_of(self, stream: Stream[Reply], after: int | str | None, gap: Gap) -> Iterator[ServerSentEvent]:
        with self._http.stream(
            "GET", stream.path, params=dict(stream.query), headers=stream.headers(after), timeout=STREAM_TIMEOUT
        ) as response:
            if response.is_error:
                response.read()
                raise calls.refusal(response)
            decoder = Decoder()
            for chunk in response.iter_bytes():
                gap.over()
                yield from decoder.feed(chunk)
