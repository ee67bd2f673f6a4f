"""The line to the control plane: order, acknowledgement, absence, fencing, the end."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from test_journal import STEP

from rubato.resources import DriverState, SyncReply, SyncRequest
from workers.driver.journal import Journal
from workers.driver.sync import ControlPlane
from workers.engine.run import RunDirectory

Answer = Callable[[SyncRequest], httpx.Response]


class Line:
    """A control plane in this process: ``answer`` may be replaced; by default it stores all and wants nothing new."""

    def __init__(self, run: RunDirectory) -> None:
        self.journal = Journal(run)
        self.requests: list[SyncRequest] = []
        self.heard: list[tuple[str, Any]] = []
        self.version = 1
        self.stored = [0, 0]
        self.held = asyncio.Event()
        self.answer: Answer = self.store
        self.control = ControlPlane(
            "http://control",
            "a1",
            "secret",
            self.journal,
            lambda: SyncRequest(
                epoch=1,
                state=DriverState.RUNNING,
                reason_code="training",
                reason_message="",
                generation=1,
                layout=None,
            ),
            self,
            transport=httpx.MockTransport(self.handle),
        )

    async def handle(self, http: httpx.Request) -> httpx.Response:
        assert http.url.path == "/v1/attempts/a1/sync"
        assert http.headers["Authorization"] == "Bearer secret"
        request = SyncRequest.model_validate(json.loads(http.content))
        self.requests.append(request)
        response = self.answer(request)
        if response.is_success and request.wait_s and self.version <= request.seen_version:
            await self.held.wait()
        return response

    def store(self, request: SyncRequest) -> httpx.Response:
        self.stored[0] = max([self.stored[0], *(event.seq for event in request.events)])
        self.stored[1] = max([self.stored[1], *(item.seq for item in request.metrics)])
        reply = SyncReply(
            version=self.version,
            workers=4,
            operation=None,
            events_acknowledged=self.stored[0],
            metrics_acknowledged=self.stored[1],
        )
        return httpx.Response(200, json=reply.model_dump(mode="json"))

    def wanted(self, reply: SyncReply) -> None:
        self.heard.append(("wanted", reply.version))

    def fenced(self, detail: str) -> None:
        self.heard.append(("fenced", detail))

    def control_unreachable(self, cause: str) -> None:
        self.heard.append(("unreachable", cause))

    def control_reachable(self) -> None:
        self.heard.append(("reachable", None))

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(10):
            while not condition():
                await asyncio.sleep(0.01)


@pytest.fixture
async def line(tmp_path: Path) -> Line:
    return Line(RunDirectory.create(tmp_path / "run"))


async def talking(line: Line, condition: Callable[[], bool]) -> None:
    task = asyncio.create_task(line.control.run())
    try:
        await line.until(condition)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_news_goes_up_at_once_though_a_call_is_held(line: Line) -> None:
    task = asyncio.create_task(line.control.run())
    await line.until(lambda: len(line.requests) == 2)
    assert line.requests[-1].wait_s > 0
    assert line.requests[-1].seen_version == 1
    line.journal.event("worker.lost", "one")
    line.control.tell()
    await line.until(lambda: line.journal.all_told)
    assert [event.kind for event in line.requests[2].events] == ["worker.lost"]
    assert line.requests[2].wait_s == 0, "so that it is acknowledged at once"
    await line.until(lambda: len(line.requests) == 4)
    assert line.requests[3].events == []
    assert line.heard == [("wanted", 1)]
    task.cancel()


async def test_what_is_told_often_is_told_together(line: Line) -> None:
    async def steps() -> None:
        for step in range(1, 31):
            line.journal.metric(STEP | {"step": step})
            line.control.tell()
            await asyncio.sleep(0.03)

    working = asyncio.create_task(steps())
    await talking(line, lambda: working.done() and line.journal.all_told)
    assert line.stored[1] == 30
    assert len(line.requests) < 12


async def test_while_it_is_away_everything_is_kept_and_told_afterwards(line: Line) -> None:
    def away(request: SyncRequest) -> httpx.Response:
        if len(line.requests) < 4:
            raise httpx.ConnectError("refused")
        return line.store(request)

    line.answer = away
    line.journal.event("a", "1")
    line.journal.event("b", "2")
    await talking(line, lambda: line.journal.all_told)
    assert [kind for kind, _ in line.heard] == ["unreachable", "reachable", "wanted"]
    assert [event.kind for event in line.requests[-1].events or line.requests[-2].events] == ["a", "b"]


async def test_an_error_of_the_control_plane_is_no_end_either(line: Line) -> None:
    line.answer = lambda request: line.store(request) if len(line.requests) > 2 else httpx.Response(500, text="oops")
    await talking(line, lambda: ("wanted", 1) in line.heard)
    assert line.heard[0][0] == "unreachable"
    assert "oops" in line.heard[0][1]


async def test_who_is_fenced_stops_talking(line: Line) -> None:
    line.answer = lambda request: httpx.Response(409, json={"code": "fenced", "detail": "epoch 2 runs the job"})
    async with asyncio.timeout(5):
        await line.control.run()
    assert line.heard[0][0] == "fenced"
    assert len(line.requests) == 1


async def test_the_end_is_told_until_it_is_taken(line: Line) -> None:
    line.answer = lambda request: line.store(request) if len(line.requests) > 2 else httpx.Response(503)
    line.journal.event("training.finished", "done")
    assert await line.control.tell_end(10)
    assert line.journal.all_told


async def test_the_end_is_not_told_for_ever(line: Line) -> None:
    line.answer = lambda request: httpx.Response(503)
    assert not await line.control.tell_end(0.2)


async def test_a_loss_that_is_no_number_can_be_told(line: Line) -> None:
    line.journal.metric(STEP | {"loss": math.nan})
    await talking(line, lambda: line.journal.all_told)
    assert any(math.isnan(item.metric.loss) for request in line.requests for item in request.metrics)


async def test_a_reply_that_cannot_be_parsed_does_not_end_the_line(line: Line) -> None:
    line.answer = lambda request: (
        line.store(request) if len(line.requests) > 2 else httpx.Response(200, content=b"<html>\xff")
    )
    await talking(line, lambda: ("wanted", 1) in line.heard)


@pytest.mark.parametrize("handler", ["wanted", "control_reachable", "control_unreachable"])
async def test_a_handler_that_raises_does_not_end_the_line(
    line: Line, handler: str, caplog: pytest.LogCaptureFixture
) -> None:
    original = getattr(line, handler)

    def stumbling(*what: Any) -> None:
        original(*what)
        if [kind for kind, _ in line.heard].count(handler.removeprefix("control_")) == 1:
            raise KeyError("a bug")

    setattr(line, handler, stumbling)
    line.answer = lambda request: line.store(request) if len(line.requests) > 1 else httpx.Response(503)
    line.journal.event("a", "1")
    await talking(line, lambda: line.journal.all_told and line.heard.count(("wanted", 1)) >= (handler == "wanted") + 1)
    assert "KeyError: 'a bug'" in caplog.text


async def test_an_unexpected_error_does_not_keep_the_end_from_being_told(line: Line) -> None:
    def buggy(request: SyncRequest) -> httpx.Response:
        if len(line.requests) == 1:
            raise KeyError("a bug")
        return line.store(request)

    line.answer = buggy
    line.journal.event("training.finished", "done")
    assert await line.control.tell_end(10)
