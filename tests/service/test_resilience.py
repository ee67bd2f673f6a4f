"""One job that goes wrong, in the database, on disk or in our own code, leaves all others alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from service.cluster.ray import RayJobState
from service.jobs import repository
from tests.service.world import World, spec


async def stored(world: World, job_id: str, **changes: Any) -> None:
    """Changes the stored spec of a job to what no check would let in."""
    async with world.plane.database.writing() as session:
        row = await repository.locked(session, job_id)
        assert row is not None
        row.spec = {**row.spec, **changes}


@pytest.mark.parametrize(
    "changes",
    [
        {"workers": {"min": 5, "max": 5, "gpus": 0, "cpus": 1.0}},
        {"priority": 5000},
        {"parallelism": {"tensor": 3, "pipeline": 2}},
        {"forgotten_field": 1},
    ],
)
async def test_a_stored_spec_is_not_judged_anew(world: World, changes: dict[str, Any]) -> None:
    odd, driver = await world.running()
    await stored(world, odd["id"], **changes)
    shown = (await world.get("/v1/jobs"))["items"][0]
    assert shown["id"] == odd["id"]
    assert {name: shown["spec"].get(name) for name in changes if name == "priority"} == {
        name: value for name, value in changes.items() if name == "priority"
    }
    assert (await world.http.post(f"/v1/jobs/{odd['id']}/scale", json={"workers": 7})).status_code == 422
    world.clock.turn(31)
    world.ray.ends(driver.attempt, RayJobState.FAILED)
    await world.submit(spec(name="other"))
    await world.rounds(2)
    assert (await world.job(odd["id"]))["attempts"] == 2, "it goes on"
    assert (await world.job("other"))["attempts"] == 1


async def test_a_row_that_cannot_be_read_keeps_nobody_waiting(world: World) -> None:
    broken = await world.submit(spec(name="broken"))
    async with world.plane.database.writing() as session:
        row = await repository.locked(session, broken["id"])
        assert row is not None
        row.spec = {"name": "broken", "workers": {}}
    good = await world.submit(spec(name="good"))
    await world.rounds()
    assert (await world.job(good["id"]))["state"] == "STARTING"
    async with world.plane.database.reading() as session:
        row = await repository.find(session, broken["id"])
        assert row is not None
        assert (row.state, row.reason_code) == ("QUEUED", "job_unreadable")


async def test_an_error_about_one_attempt_leaves_the_others_alone(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = await world.submit(spec(name="bad"))
    good = await world.submit(spec(name="good"))
    submit = world.ray.submit

    async def breaks(submission_id: str, *rest: Any) -> None:
        if submission_id.startswith(bad["id"]):
            raise KeyError("a bug")
        await submit(submission_id, *rest)

    monkeypatch.setattr(world.ray, "submit", breaks)
    await world.rounds()
    assert [attempt for attempt, _ in world.ray.submissions] == [f"{good['id']}-a1"]
    reason = (await world.job(bad["id"]))["reason"]
    assert (reason["code"], "a bug" in reason["message"]) == ("internal_error", True)
    answer = await world.http.get("/readyz")
    assert answer.status_code == 503
    assert "a bug" in answer.json()["supervisor"]["detail"]
    monkeypatch.setattr(world.ray, "submit", submit)
    world.clock.turn(16)
    await world.rounds()
    assert (await world.http.get("/readyz")).status_code == 200
    await world.driver().sync("STARTING")
    assert (await world.job(bad["id"]))["reason"]["code"] == "driver_starting"


async def test_an_admission_that_fails_does_not_keep_running_jobs_from_being_looked_after(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, driver = await world.running()

    async def breaks(*_: object) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr(world.plane.supervisor._admission, "admit", breaks)
    world.clock.turn(31)
    world.ray.ends(driver.attempt, RayJobState.FAILED)
    await world.rounds()
    assert (await world.job(job["id"]))["state"] == "RECOVERING"


@pytest.mark.parametrize("line", [b"\xff\xfe\n", b"[1]\n", b"7\n", b"[" * 100_000 + b"\n", b'{"at": "never"}\n'])
async def test_a_line_nobody_can_read_ends_the_record_and_nothing_else(world: World, line: bytes) -> None:
    job, driver = await world.running()
    told = {"at": world.clock().isoformat(), "kind": "told", "message": "in time"}
    Path(job["run_dir"], "events.jsonl").write_bytes(json.dumps(told).encode() + b"\n" + line)
    Path(job["run_dir"], "metrics.jsonl").write_bytes(line)
    world.clock.turn(31)
    world.ray.ends(driver.attempt, RayJobState.FAILED)
    await world.rounds()
    assert (await world.job(job["id"]))["reason"]["code"] == "attempt_lost"
    assert "told" in await world.events(job["id"])


async def test_ray_that_is_not_ready_yet_is_asked_again(world: World) -> None:
    world.ray.busy = "No available agent to submit job, please try again later."
    job = await world.submit()
    await world.rounds(2)
    shown = await world.job(job["id"])
    assert (shown["state"], shown["reason"]["code"]) == ("STARTING", "ray_not_ready")
    assert "No available agent" in shown["reason"]["message"]
    world.ray.busy = None
    await world.rounds()
    await world.driver().sync("RUNNING")
    shown = await world.job(job["id"])
    assert (shown["state"], shown["attempts"], shown["restarts"]["hardware"]) == ("RUNNING", 1, 0)


async def test_a_driver_that_cannot_be_heard_is_told(world: World) -> None:
    job, driver = await world.started()
    world.clock.turn(31)
    await world.rounds()
    shown = await world.job(job["id"])
    assert (shown["state"], shown["reason"]["code"]) == ("STARTING", "driver_unheard")
    assert "http://127.0.0.1:8700" in shown["reason"]["message"]
    assert "RUBATO_CONTROL_URL" in shown["reason"]["message"]
    await driver.sync("STARTING")
    assert (await world.job(job["id"]))["reason"]["code"] == "driver_starting"


async def test_a_scale_for_which_a_restart_had_no_room_has_failed(world: World) -> None:
    job, driver = await world.running()
    operation = await world.post(f"/v1/jobs/{job['id']}/scale", {"workers": 8})
    await driver.sync("RUNNING", metrics=[driver.metric(1)])
    world.ray.restart()
    world.ray.resize(8, free=4)
    world.clock.turn(31)
    await world.rounds(2)
    world.clock.turn(21)
    await world.rounds()
    successor = world.driver()
    assert successor.workers == 4
    reply = await successor.sync("RUNNING")
    assert (reply["workers"], reply["operation"]) == (4, None)
    shown = await world.get(f"/v1/operations/{operation['id']}")
    assert (shown["state"], shown["message"]) == ("FAILED", "restarted with 4: no room for 8")


async def test_a_scale_that_comes_while_admission_decides_is_not_overwritten(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    if world.plane.database.is_sqlite:
        pytest.skip("SQLite has one writer at a time")
    job = await world.submit()
    admission = world.plane.supervisor._admission
    look, looks = admission._look, 0

    async def slow(session: Any) -> Any:
        nonlocal looks
        seen, looks = await look(session), looks + 1
        if looks == 2:  # the first look only tells whether there is anything to do
            monkeypatch.undo()
            await world.post(f"/v1/jobs/{job['id']}/scale", {"workers": 8})
        return seen

    monkeypatch.setattr(admission, "_look", slow)
    await world.rounds()
    assert (await world.job(job["id"]))["workers"]["desired"] == 8
    await world.rounds()
    assert (world.driver().workers, looks) == (8, 2)


async def test_what_is_spent_of_the_budget_is_told_to_the_next_attempt(world: World) -> None:
    _, driver = await world.running()
    assert "--hardware-restarts" not in driver.submission.entrypoint
    await driver.sync("RUNNING", metrics=[driver.metric(1)], restarts={"hardware": 2})
    world.clock.turn(31)
    world.ray.ends(driver.attempt, RayJobState.FAILED)
    await world.rounds(2)
    assert world.driver().submission.argument("--hardware-restarts") == "3"
