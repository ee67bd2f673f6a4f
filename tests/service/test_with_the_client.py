"""The client against the real routes: what one sends the other takes, what one gives the other reads."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from rubato.client import AsyncClient, LogQuery
from rubato.problems import RubatoError
from rubato.resources import OperationState
from rubato.spec import parse_spec
from rubato.states import JobState
from service.app import create_app
from tests.service.world import SPEC, World


@pytest.fixture
async def client(world: World) -> AsyncIterator[AsyncClient]:
    async with AsyncClient("http://rubato.test", transport=httpx.ASGITransport(create_app(world.plane))) as made:
        yield made


async def test_a_job_through_the_client(world: World, client: AsyncClient) -> None:
    job = await client.submit(parse_spec(SPEC), idempotency_key="once")
    assert (await client.submit(parse_spec(SPEC), idempotency_key="once")).id == job.id
    assert job.state is JobState.QUEUED
    assert [found.id for found in (await client.jobs(state=JobState.QUEUED, name="small", limit=1)).items] == [job.id]
    operation = await client.scale(job.id, 8)
    assert (await client.wait_for_operation(operation.id)).state is OperationState.DONE
    assert (await client.job("small")).workers.desired == 8
    with pytest.raises(RubatoError) as refused:
        await client.scale(job.id, 5)
    assert (refused.value.code, refused.value.status) == ("impossible_size", 422)
    assert [problem.field for problem in refused.value.problems] == ["workers"]
    await client.cancel(job.id, force=True)
    kinds = [event.kind async for event in client.follow_events(job.id)]
    assert kinds == [event.kind async for event in client.events(job.id)]
    assert (kinds[0], kinds[-1]) == ("job.queued", "job.cancelled")
    assert (await client.wait(job.id)).state is JobState.CANCELLED


async def test_what_a_run_leaves_through_the_client(world: World, client: AsyncClient) -> None:
    submitted, driver = await world.running()
    await driver.sync("RUNNING", metrics=[driver.metric(step) for step in range(1, 6)])
    logs = Path((await client.job(submitted["id"])).run_dir, "logs", "attempt-1")
    logs.mkdir(parents=True, exist_ok=True)
    (logs / "driver.log").write_text("one\n\ntwo\u2028three\n")
    job = submitted["id"]
    assert [metric.step async for metric in client.metrics(job)] == [1, 2, 3, 4, 5]
    assert await client.logs(job, LogQuery(tail=1)) == "two\u2028three\n"
    assert [log.source for log in (await client.log_sources(job)).items] == ["driver"]
    assert (await client.checkpoints(job)).items == []
    assert (await client.cluster()).state == "reachable"
    await driver.sync("SUCCEEDED")
    assert [metric.step async for metric in client.follow_metrics(job, after=3)] == [4, 5]
    assert [line async for line in client.follow_logs(job)] == ["one", "", "two\u2028three"]


async def test_what_is_not_there_is_said(client: AsyncClient) -> None:
    for call in (client.job("nobody"), client.operation("nobody"), client.checkpoints("nobody")):
        with pytest.raises(RubatoError) as missing:
            await call
        assert missing.value.status == 404
    with pytest.raises(RubatoError) as missing:
        await anext(aiter(client.follow_events("nobody")))
    assert missing.value.code == "job_not_found"
