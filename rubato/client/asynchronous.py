"""The client for asyncio: the same calls as ``Client``, awaited."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing
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


class AsyncClient:
    """A connection to a control plane; use it as an async context manager. Arguments and errors are ``Client``'s."""

    def __init__(self, url: str | None = None, *, transport: httpx.AsyncBaseTransport | None = None) -> None:
        self.url = base_url(url)
        self._http = httpx.AsyncClient(
            base_url=self.url,
            headers=HEADERS,
            timeout=TIMEOUT,
            transport=transport,
            trust_env=through_proxies(self.url),
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await self._http.aclose()

    async def submit(self, spec: JobSpec | Mapping[str, Any], *, idempotency_key: str | None = None) -> Job:
        return await self._send(calls.submit(spec, idempotency_key or calls.new_idempotency_key()))

    async def plan(
        self,
        spec: JobSpec | Mapping[str, Any],
        *,
        cluster: str | None = None,
        sizes: Sequence[int] | None = None,
        price: float | None = None,
    ) -> Plan:
        """What a spec would come to, on the cluster or on one named like h100:64; ``price`` is a worker's an hour."""
        return await self._send(calls.plan(spec, cluster, sizes, price))

    async def calibrate(self, measured: Calibration) -> Calibration:
        """Has plans rest on what was measured."""
        return await self._send(calls.calibrate(measured))

    async def jobs(
        self,
        *,
        state: JobState | None = None,
        project: str | None = None,
        name: str | None = None,
        cursor: str | None = None,
        limit: int | None = None,
    ) -> Page[Job]:
        return await self._send(calls.jobs(state, project, name, cursor, limit))

    async def job(self, job: str) -> Job:
        return await self._send(calls.job(job))

    async def scale(
        self, job: str, workers: int | None = None, *, low: int | None = None, high: int | None = None
    ) -> Operation:
        return await self._send(calls.scale(job, workers, low, high))

    async def projects(self) -> Page[ProjectView]:
        return await self._send(calls.projects())

    async def project(self, name: str) -> ProjectView:
        return await self._send(calls.project(name))

    async def set_project(self, name: str, quotas: ProjectRequest) -> ProjectView:
        return await self._send(calls.set_project(name, quotas))

    async def cancel(self, job: str, *, force: bool = False) -> Operation:
        return await self._send(calls.cancel(job, force))

    async def profile(self, job: str, *, steps: int = 3, ranks: Sequence[int] = (0,)) -> Operation:
        """Has workers record their next steps; the files are among ``files`` once the operation is done."""
        return await self._send(calls.profile(job, steps, ranks))

    async def files(self, job: str) -> Page[StoredFileView]:
        """Traces, tables and boards of a run."""
        return await self._send(calls.files(job))

    async def file(self, job: str, path: str) -> bytes:
        """The content of one of its files."""
        return await self._send(calls.file(job, path))

    async def operation(self, operation: str) -> Operation:
        return await self._send(calls.operation(operation))

    async def wait_for_operation(self, operation: str, *, every_s: float = 0.3) -> Operation:
        while True:
            seen = await self.operation(operation)
            if seen.state in (OperationState.DONE, OperationState.FAILED):
                return seen
            await asyncio.sleep(every_s)

    async def checkpoints(self, job: str) -> Page[Checkpoint]:
        return await self._send(calls.checkpoints(job))

    async def cluster(self) -> Cluster:
        return await self._send(calls.cluster())

    async def events(self, job: str, *, after: int = 0) -> AsyncIterator[Event]:
        while True:
            page = await self._send(calls.events(job, after))
            for event in page.items:
                yield event
            if page.next is None:
                return
            after = page.items[-1].id

    async def metrics(self, job: str, *, after: int = 0) -> AsyncIterator[Metric]:
        while True:
            page = await self._send(calls.metrics(job, after))
            for metric in page.items:
                yield metric
            if page.next is None:
                return
            after = page.items[-1].step

    async def logs(self, job: str, query: LogQuery = DRIVER_LOG) -> str:
        return await self._send(calls.logs(job, query))

    async def log_sources(self, job: str) -> Page[LogSource]:
        return await self._send(calls.log_sources(job))

    def follow_events(
        self, job: str, *, after: int = 0, patience_s: float = 120.0, notice: Notice | None = None
    ) -> AsyncIterator[Event]:
        return self._follow(calls.event_stream(job), after, patience_s, notice)

    def follow_metrics(
        self, job: str, *, after: int = 0, patience_s: float = 120.0, notice: Notice | None = None
    ) -> AsyncIterator[Metric]:
        return self._follow(calls.metric_stream(job), after, patience_s, notice)

    def follow_logs(
        self, job: str, query: LogQuery = DRIVER_LOG, *, patience_s: float = 120.0, notice: Notice | None = None
    ) -> AsyncIterator[str]:
        return self._follow(calls.log_stream(job, query), None, patience_s, notice)

    async def wait(self, job: str) -> Job:
        async for _ in self.follow_events(job):
            pass
        return await self.job(job)

    async def _send(self, call: Call[Reply]) -> Reply:
        persistence = Persistence(call.repeatable, self.url)
        while True:
            try:
                return await self._send_once(call)
            except httpx.TransportError as error:
                await asyncio.sleep(persistence.pause_after(error))

    async def _send_once(self, call: Call[Reply]) -> Reply:
        response = await self._http.request(
            call.method, call.path, params=dict(call.query), json=call.body, headers=dict(call.headers)
        )
        if response.is_error:
            raise calls.refusal(response)
        return call.read(response.content)

    async def _follow(
        self, stream: Stream[Reply], after: int | str | None, patience_s: float, notice: Notice | None
    ) -> AsyncIterator[Reply]:
        gap = Gap(self.url, patience_s, notice)
        while True:
            try:
                async with aclosing(self._events_of(stream, after, gap)) as events:
                    async for event in events:
                        if event.kind == END:
                            return
                        after = after if event.cursor is None else event.cursor
                        yield stream.read(event.data.encode())
                raise stream_cut()
            except httpx.TransportError as error:
                await asyncio.sleep(gap.pause_after(error))

    async def _events_of(
        self, stream: Stream[Reply], after: int | str | None, gap: Gap
    ) -> AsyncGenerator[ServerSentEvent, None]:
        async with self._http.stream(
            "GET", stream.path, params=dict(stream.query), headers=stream.headers(after), timeout=STREAM_TIMEOUT
        ) as response:
            if response.is_error:
                await response.aread()
                raise calls.refusal(response)
            decoder = Decoder()
            async for chunk in response.aiter_bytes():
                gap.over()
                for event in decoder.feed(chunk):
                    yield event
