"""What the queue decides is done: on jobs in the database, through operations, with reasons; and projects."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import text

from service.cluster.ray import RayJobState
from service.jobs import repository
from tests.service.world import Driver, Host, World, members, metric, spec

LONG = {"steps": 100_000, "global_batch": 8}


@pytest.fixture
async def sharing(host: Host) -> Any:
    """A control plane that shares, on a cluster of 16 CPUs."""
    host.ray.resize(16)
    async with host.world(elastic=True) as found:
        yield found


async def last(world: World, job_id: str, kind: str) -> dict[str, Any]:
    events = (await world.get(f"/v1/jobs/{job_id}/events"))["items"]
    return [event for event in events if event["kind"] == kind][-1]


async def trains(driver: Driver, workers: int, **more: Any) -> dict[str, Any]:
    driver.workers = workers
    return await driver.sync("RUNNING", members=members(workers), **more)


async def test_running_jobs_are_shrunk_to_let_others_in(sharing: World) -> None:
    first = await sharing.submit(spec(train=LONG))
    await sharing.rounds()
    driver = sharing.driver()
    assert driver.workers == 16, "all that is free and possible"
    await trains(driver, 16)
    second = await sharing.submit(spec(name="second", train=LONG))
    await sharing.rounds()
    shown = await sharing.job("second")
    assert (shown["state"], shown["reason"]["code"]) == ("QUEUED", "room_is_made")
    decided = await last(sharing, first["id"], "queue.decided")
    assert (decided["actor"], decided["message"]) == ("queue", f"16 -> 12 workers to make room for {second['id']}")
    operation = await sharing.get(f"/v1/operations/{decided['data']['operation']}")
    assert (operation["kind"], operation["request"], operation["state"]) == ("scale", {"workers": 12}, "RUNNING")
    assert (await trains(driver, 16))["workers"] == 12
    await sharing.rounds(3)
    assert len(sharing.ray.submissions) == 1, "the places are not free yet"
    assert (await sharing.events(first["id"])).count("queue.decided") == 1, "asked for once"
    await trains(driver, 12)
    assert (await sharing.get(f"/v1/operations/{operation['id']}"))["state"] == "DONE"
    await sharing.rounds()
    assert (sharing.driver().attempt, sharing.driver().workers) == (f"{second['id']}-a1", 4)


async def test_free_room_is_given_where_it_brings_most(sharing: World) -> None:
    long, _ = await sharing.running(spec(name="long", train=LONG, workers=8))
    short = await sharing.submit(
        spec(name="short", train={"steps": 500, "global_batch": 8}, workers={"min": 4, "max": 8})
    )
    sharing.ray.resize(12)  # another user of the cluster took some of it
    await sharing.rounds()
    driver = sharing.driver()
    assert driver.workers == 4
    await trains(driver, 4, metrics=[driver.metric(1)])
    sharing.ray.resize(16)
    await sharing.rounds()
    assert "queue.decided" not in await sharing.events(short["id"]), "a size that is new is left alone"
    sharing.clock.turn(61)
    await sharing.rounds()
    decided = await last(sharing, short["id"], "queue.decided")
    assert decided["data"] | {"operation": ""} == {"operation": "", "from": 4, "to": 8}
    assert "sooner" in decided["message"]
    assert (await sharing.job(short["id"]))["workers"]["desired"] == 8
    assert "queue.decided" not in await sharing.events(long["id"]), "it can run at one size alone"


async def test_a_size_that_a_user_asks_for_is_kept(sharing: World) -> None:
    job = await sharing.submit(spec(train=LONG))
    await sharing.post(f"/v1/jobs/{job['id']}/scale", {"workers": 8})
    await sharing.rounds()
    driver = sharing.driver()
    assert driver.workers == 8
    await trains(driver, 8, metrics=[driver.metric(1)])
    sharing.clock.turn(1000)
    await trains(driver, 8)
    await sharing.rounds()
    await sharing.submit(spec(name="large", train=LONG, workers=12))
    await sharing.rounds()
    assert (await sharing.job("large"))["reason"]["code"] == "waiting_for_room"
    assert "queue.decided" not in await sharing.events(job["id"])
    await sharing.post("/v1/jobs/large/cancel")
    answer = await sharing.post(f"/v1/jobs/{job['id']}/scale", {"min": 4, "max": 12})
    assert (answer["request"], answer["state"]) == ({"min": 4, "max": 12}, "DONE")
    await sharing.rounds()
    shown = await sharing.job(job["id"])
    assert [shown["workers"][name] for name in ("desired", "max", "queue_min", "queue_max")] == [12, 16, 4, 12]


@pytest.mark.parametrize(
    ("content", "field", "fix"),
    [
        ({"min": 2, "max": 8}, "min", "use 4 workers"),
        ({"min": 8, "max": 17}, "max", "use 16 workers"),
        ({"min": 5, "max": 7}, "min", "use 4 or 8 workers"),
        ({"min": 8, "max": 4}, "min", "make min at most max"),
        ({"workers": 4, "max": 8}, "workers", "give workers, or min and max"),
        ({}, "workers", "give workers, or min and max"),
    ],
)
async def test_impossible_ranges_are_refused(world: World, content: dict[str, int], field: str, fix: str) -> None:
    job = await world.submit()
    answer = await world.http.post(f"/v1/jobs/{job['id']}/scale", json=content)
    (problem,) = answer.json()["errors"]
    assert (answer.status_code, problem["field"], problem["fix"]) == (422, field, fix)


async def test_a_range_moves_a_job_that_is_outside_of_it(world: World) -> None:
    job, driver = await world.running()
    operation = await world.post(f"/v1/jobs/{job['id']}/scale", {"min": 8})
    assert operation["state"] == "RUNNING"
    assert (await driver.sync("RUNNING"))["workers"] == 8
    await trains(driver, 8)
    assert (await world.get(f"/v1/operations/{operation['id']}"))["state"] == "DONE"


# Projects.


async def test_quotas_are_set_and_kept(world: World) -> None:
    assert (await world.get("/v1/projects"))["items"] == []
    answer = await world.http.put("/v1/projects/research", json={"workers": 4, "weight": 2})
    assert answer.status_code == 200, answer.text
    await world.running(spec(project="research"))
    second = await world.submit(spec(name="second", project="research"))
    other = await world.submit(spec(name="other"))
    await world.rounds()
    shown = await world.job(second["id"])
    assert (shown["state"], shown["reason"]["code"]) == ("QUEUED", "over_quota")
    assert shown["reason"]["message"].endswith("the quota of project research leaves room for 0")
    assert (await world.job(other["id"]))["state"] == "STARTING", "nobody else is held up"
    found = {project["name"]: project for project in (await world.get("/v1/projects"))["items"]}
    assert sorted(found) == ["default", "research"]
    assert {name: found["research"][name] for name in ("weight", "workers", "gpus", "held_workers", "held_jobs")} == {
        "weight": 2.0,
        "workers": 4,
        "gpus": None,
        "held_workers": 4,
        "held_jobs": 1,
    }
    await world.http.put("/v1/projects/research", json={"running_jobs": 2})
    world.ray.resize(16)
    await world.rounds()
    assert (await world.job(second["id"]))["state"] == "STARTING"
    assert (await world.get("/v1/projects/research"))["workers"] is None, "what is left out is no limit"


@pytest.mark.parametrize(
    ("name", "content", "field"),
    [
        ("research", {"workers": -1}, "workers"),
        ("research", {"weight": 0}, "weight"),
        ("research", {"quota": 4}, "quota"),
        ("No Name", {}, "name"),
    ],
)
async def test_quotas_that_are_none_are_refused(world: World, name: str, content: dict[str, Any], field: str) -> None:
    answer = await world.http.put(f"/v1/projects/{name}", json=content)
    assert (answer.status_code, answer.json()["errors"][0]["field"]) == (422, field)


async def test_whoever_had_less_of_late_goes_first(world: World) -> None:
    job, driver = await world.running(spec(project="busy", workers=8))
    world.clock.turn(24 * 3600)
    await driver.sync("RUNNING", members=members(8))
    await world.rounds()
    usage = (await world.get("/v1/projects/busy"))["usage"]
    assert usage == pytest.approx(8 * (1 - 0.5 ** (1 / 3)), rel=1e-3), "a day of eight, by a half-life of three"
    greedy = await world.submit(spec(name="greedy", project="busy", workers=8))
    modest = await world.submit(spec(name="modest", project="idle", workers=8))
    await driver.sync("SUCCEEDED")
    world.ray.jobs.clear()
    world.clock.turn(61)
    await world.rounds(2)
    assert (await world.job(modest["id"]))["state"] == "STARTING"
    shown = await world.job(greedy["id"])
    assert (shown["state"], shown["reason"]["code"]) == ("QUEUED", "waiting_for_room")
    assert (await world.job(job["id"]))["state"] == "SUCCEEDED"


# Rows that nobody can read.


@pytest.mark.parametrize("content", ["[]", "null", "7", '{"workers": 4}', '{"workers": {"min": "x"}}', "no json"])
async def test_a_row_that_cannot_be_read_is_shown_and_harms_nobody(host: Host, content: str) -> None:
    if content == "no json" and not host.database_url.startswith("sqlite"):
        pytest.skip("PostgreSQL itself keeps to JSON")
    async with host.world(elastic=True) as world:
        waiting = await world.submit(spec(name="waiting", workers=16))
        running, driver = await world.running()
        async with world.plane.database.writing() as session:
            await session.execute(text("UPDATE jobs SET spec = :spec"), {"spec": content})
        good = await world.submit(spec(name="good"))
        world.ray.resize(32)
        await world.rounds(2)
        shown = {job["name"]: job for job in (await world.get("/v1/jobs"))["items"]}
        assert (shown["good"]["state"], shown["good"]["spec"]["name"]) == ("STARTING", "good")
        for job in (waiting, running):
            broken = shown[job["name"]]
            assert (broken["id"], broken["spec"], broken["reason"]["code"]) == (job["id"], None, "job_unreadable")
            assert "cannot be read" in broken["reason"]["message"]
            assert (await world.job(job["id"]))["reason"] == broken["reason"]
        assert (shown["small"]["state"], shown["waiting"]["state"]) == ("RUNNING", "QUEUED")
        answer = await world.http.post(f"/v1/jobs/{waiting['id']}/scale", json={"workers": 8})
        assert (answer.status_code, answer.json()["code"]) == (409, "job_unreadable")
        assert (await world.http.get("/readyz")).status_code == 200
        await driver.sync("RUNNING", metrics=[{"seq": 1, "metric": metric(1, world.clock())}])
        await world.post(f"/v1/jobs/{waiting['id']}/cancel")
        assert (await world.job(waiting["id"]))["state"] == "CANCELLED"
        world.clock.turn(31)
        world.ray.ends(driver.attempt, RayJobState.FAILED)
        await world.rounds()
        assert (await world.job(running["id"]))["state"] == "FAILED"
        assert (await world.job(good["id"]))["state"] == "STARTING"


async def test_a_state_that_there_is_not_is_told(world: World) -> None:
    job = await world.submit()
    async with world.plane.database.writing() as session:
        row = await repository.locked(session, job["id"])
        assert row is not None
        row.state = "DREAMING"
    await world.rounds()
    shown = (await world.get("/v1/jobs"))["items"][0]
    assert (shown["state"], shown["reason"]["code"]) == ("FAILED", "job_unreadable")
    assert "its state is 'DREAMING'" in shown["reason"]["message"]
