"""Calls that are held and streams that go on: who waits is woken, and the end of the service ends all waits."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.service.world import Host, World

STREAM = {"Accept": "text/event-stream"}
HANG = 45  # seconds after which a wait counts as endless; a call that nobody wakes is held for 60
PATIENT = {"heartbeat_timeout": 3000.0}


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(HANG):
        while not condition():
            await asyncio.sleep(0.01)


async def held(world: World) -> None:
    """Until a driver's call has been taken in and waits for news."""
    await until(lambda: world.plane.attempts.held == 1)


async def settled(world: World, waiting: int) -> None:
    await until(lambda: world.plane.wakeups.waiting == waiting)


def events_of(text: str) -> list[tuple[str, str, Any]]:
    """(id, kind, data) of each event of a stream."""
    found = []
    for block in text.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines() if not line.startswith(":"))
        if "data" in fields:
            found.append((fields["id"], fields.get("event", "message"), fields["data"]))
    return found


@contextlib.asynccontextmanager
async def supervised(world: World) -> AsyncIterator[None]:
    async with world.plane.supervising():
        yield


@pytest.fixture
async def world(host: Host) -> AsyncIterator[World]:
    """A control plane that holds calls as long as it is asked to."""
    async with host.world(**PATIENT) as found:
        yield found


@pytest.fixture(params=[False, True], ids=["same process", "another control plane"])
async def pair(request: pytest.FixtureRequest, host: Host) -> AsyncIterator[tuple[World, World]]:
    """Where a driver waits, and where its user commands. In one process only the wake-up itself can be what wakes."""
    async with host.world(database_poll=0.05 if request.param else 1000.0, **PATIENT) as waits:
        if not request.param:
            yield waits, waits
            return
        async with host.world(**PATIENT) as commands, supervised(waits):
            yield waits, commands


@pytest.mark.parametrize("command", ["scale", "cancel"])
async def test_a_held_call_is_answered_when_something_is_wanted(pair: tuple[World, World], command: str) -> None:
    waits, commands = pair
    job = await commands.submit()
    await commands.rounds()
    driver = waits.driver()
    await driver.sync("RUNNING")
    call = asyncio.create_task(driver.sync("RUNNING", wait_s=60))
    await held(waits)
    await commands.post(f"/v1/jobs/{job['id']}/{command}", {"workers": 8} if command == "scale" else {})
    async with asyncio.timeout(HANG):
        reply = await call
    assert (reply["workers"], reply["cancel"]) == ((8, "no") if command == "scale" else (4, "drain"))


async def test_a_held_call_ends_when_its_driver_calls_again(world: World) -> None:
    _, driver = await world.running()
    first = asyncio.create_task(driver.sync("RUNNING", wait_s=60))
    await held(world)
    second = asyncio.create_task(driver.sync("RUNNING", wait_s=60))
    async with asyncio.timeout(HANG):
        await first
    await held(world)
    assert not second.done()
    world.plane.wakeups.close()
    async with asyncio.timeout(HANG):
        await second
    assert world.plane.wakeups.waiting == 0


async def test_a_held_call_of_an_attempt_that_is_replaced_is_fenced(world: World) -> None:
    job, driver = await world.running()
    call = asyncio.create_task(driver.post("RUNNING", wait_s=60))
    await held(world)
    world.clock.turn(3001)
    world.ray.jobs.clear()
    await world.rounds(2)
    async with asyncio.timeout(HANG):
        answer = await call
    assert (answer.status_code, answer.json()["code"]) == (409, "fenced")
    assert (await world.job(job["id"]))["attempts"] == 2


async def test_events_are_followed_to_the_end(pair: tuple[World, World]) -> None:
    follows, acts = pair
    job = await acts.submit()
    stream = asyncio.create_task(follows.http.get(f"/v1/jobs/{job['id']}/events", headers=STREAM))
    await settled(follows, 1)
    await acts.rounds()
    await until(lambda: bool(acts.ray.submissions))  # it may be the other control plane that submits it
    driver = acts.driver()
    await driver.sync("RUNNING", events=[driver.event("attempt.started")])
    await driver.sync("SUCCEEDED", events=[driver.event("training.finished")])
    async with asyncio.timeout(HANG):
        answer = await stream
    assert answer.headers["content-type"].startswith("text/event-stream")
    *items, end = events_of(answer.text)
    listed = (await acts.get(f"/v1/jobs/{job['id']}/events"))["items"]
    assert [json.loads(data) for _, _, data in items] == listed
    assert [int(cursor) for cursor, _, _ in items] == [event["id"] for event in listed]
    assert end == (str(listed[-1]["id"]), "end", "{}")


async def test_a_stream_goes_on_where_it_was_cut(world: World) -> None:
    job, driver = await world.running()
    await driver.sync("RUNNING", metrics=[driver.metric(step) for step in range(1, 6)])
    await driver.sync("SUCCEEDED")
    path = f"/v1/jobs/{job['id']}/metrics"
    answer = await world.http.get(path, params={"after": 1}, headers={**STREAM, "Last-Event-ID": "3"})
    assert [cursor for cursor, kind, _ in events_of(answer.text) if kind == "message"] == ["4", "5"]
    answer = await world.http.get(path, params={"after": 1, "limit": 2}, headers=STREAM)
    assert [cursor for cursor, kind, _ in events_of(answer.text) if kind == "message"] == ["2", "3", "4", "5"]


async def test_a_log_is_followed_by_whole_lines(world: World) -> None:
    job, driver = await world.running()
    path = Path(job["run_dir"], "logs", "attempt-1", "driver.log")
    path.parent.mkdir(parents=True)
    path.write_text("zero\none\ntw")
    stream = asyncio.create_task(world.http.get(f"/v1/jobs/{job['id']}/logs", params={"tail": 2}, headers=STREAM))
    await settled(world, 1)
    with path.open("a") as log:
        log.write("o\nthree")
    await driver.sync("SUCCEEDED")
    async with asyncio.timeout(HANG):
        answer = await stream
    lines = [data for _, kind, data in events_of(answer.text) if kind == "message"]
    assert lines == ["one", "two", "three"]


async def test_a_log_is_followed_into_the_next_attempt_and_taken_up_where_it_was_cut(world: World) -> None:
    job, driver = await world.running()
    logs = Path(job["run_dir"], "logs")
    for attempt in (1, 2):
        (logs / f"attempt-{attempt}").mkdir(parents=True)
    (logs / "attempt-1" / "driver.log").write_text("one\ncut o")
    stream = asyncio.create_task(world.http.get(f"/v1/jobs/{job['id']}/logs", headers=STREAM))
    await settled(world, 1)
    (logs / "attempt-2" / "driver.log").write_text("two\nthree\n")
    await driver.sync("SUCCEEDED")
    async with asyncio.timeout(HANG):
        answer = await stream
    assert answer.headers["X-Accel-Buffering"] == "no"
    followed = [(cursor, data) for cursor, kind, data in events_of(answer.text) if kind == "message"]
    assert followed == [("1:driver:4", "one"), ("1:driver:9", "cut o"), ("2:driver:4", "two"), ("2:driver:10", "three")]
    for seen, left in (("1:driver:4", ["cut o", "two", "three"]), ("2:driver:4", ["three"])):
        path = f"/v1/jobs/{job['id']}/logs"
        answer = await world.http.get(path, params={"tail": 0}, headers={**STREAM, "Last-Event-ID": seen})
        assert [data for _, kind, data in events_of(answer.text) if kind == "message"] == left
        answer = await world.http.get(path, params={"attempt": 1}, headers={**STREAM, "Last-Event-ID": seen})
        expected = ["cut o"] if seen[0] == "1" else ["one", "cut o"]
        assert [data for _, kind, data in events_of(answer.text) if kind == "message"] == expected
    answer = await world.http.get(path, params={"tail": 0}, headers={**STREAM, "Last-Event-ID": "r0:" + "9" * 5000})
    assert answer.status_code == 200


async def test_the_end_of_the_service_ends_all_waits(world: World) -> None:
    job, driver = await world.running()
    path = Path(job["run_dir"], "logs", "attempt-1", "driver.log")
    path.parent.mkdir(parents=True)
    path.write_text("a line\n")
    waiting: list[asyncio.Task[httpx.Response]] = [asyncio.create_task(driver.post("RUNNING", wait_s=60))]
    waiting += [
        asyncio.create_task(world.http.get(f"/v1/jobs/{job['id']}/{what}", headers=STREAM))
        for what in ("events", "metrics", "logs")
    ]
    await settled(world, 4)
    world.plane.wakeups.close()
    async with asyncio.timeout(HANG):
        answers = await asyncio.gather(*waiting)
    assert [answer.status_code for answer in answers] == [200] * 4
    assert not any("event: end" in answer.text for answer in answers[1:]), "the jobs are not over"


async def test_the_supervisor_runs_by_itself(world: World) -> None:
    async with supervised(world):
        await world.submit()
        await until(lambda: bool(world.ray.submissions))
        await world.driver().sync("RUNNING")
        assert (await world.get("/healthz"))["status"] == "ok"


async def test_a_round_that_fails_is_shown_and_not_the_last(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken() -> None:
        raise RuntimeError("a bug")

    whole = world.plane.supervisor.round
    monkeypatch.setattr(world.plane.supervisor, "round", broken)
    async with supervised(world):
        async with asyncio.timeout(HANG):
            while (answer := await world.http.get("/readyz")).status_code == 200:
                await asyncio.sleep(0.01)
        assert "a bug" in answer.json()["supervisor"]["detail"]
        assert (await world.http.get("/healthz")).status_code == 200, "it goes on"
        monkeypatch.setattr(world.plane.supervisor, "round", whole)
        world.plane.wakeups.supervisor.set()
        async with asyncio.timeout(HANG):
            while (await world.http.get("/readyz")).status_code != 200:
                await asyncio.sleep(0.01)
