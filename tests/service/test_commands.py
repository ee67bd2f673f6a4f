"""Scale and cancel, in every state a job can be in."""

from __future__ import annotations

import pytest

from service.cluster.ray import RayJobState
from tests.service.world import Driver, World, members, spec


@pytest.mark.parametrize(
    ("workers", "fix"),
    [
        (5, "use 4 or 8 workers"),
        (17, "use 16 workers"),
        (20, "use 16 workers"),
        (3, "use 4 workers"),
        (1_000_000, "use 16 workers"),
    ],
)
async def test_impossible_sizes_are_refused_with_the_nearest(world: World, workers: int, fix: str) -> None:
    job, _ = await world.running()
    answer = await world.http.post(f"/v1/jobs/{job['id']}/scale", json={"workers": workers})
    problem = answer.json()
    assert (answer.status_code, problem["code"], problem["fix"]) == (422, "impossible_size", fix)
    assert problem["errors"] == [{"field": "workers", "cause": problem["errors"][0]["cause"], "fix": fix}]
    assert (await world.job(job["id"]))["workers"]["desired"] == 4


@pytest.mark.parametrize("workers", [0, -4, "many", None])
async def test_a_size_that_is_none_is_refused(world: World, workers: object) -> None:
    job = await world.submit()
    answer = await world.http.post(f"/v1/jobs/{job['id']}/scale", json={"workers": workers})
    assert (answer.status_code, answer.json()["errors"][0]["field"]) == (422, "workers")


async def test_scale_reaches_the_driver_and_its_phases_are_timed(world: World) -> None:
    job, driver = await world.running()
    operation = await world.post(f"/v1/jobs/{job['id']}/scale", {"workers": 8})
    assert (operation["state"], operation["finished_at"]) == ("RUNNING", None)
    assert [(phase["name"], phase["seconds"]) for phase in operation["phases"]] == [("accepted", None)]
    reply = await driver.sync("RUNNING")
    assert (reply["workers"], reply["operation"], reply["version"]) == (8, operation["id"], driver.seen)
    told = {"operation": operation["id"]}
    world.clock.turn(1)
    await driver.sync("RESIZING", events=[driver.event("replica.starting", **told, phase="starting")])
    world.clock.turn(5)
    await driver.sync("RESIZING", events=[driver.event("scale", **told, phase="regrouping")])
    world.clock.turn(0.5)
    await driver.sync("RUNNING", events=[driver.event("generation.formed", **told, done=True)])
    shown = await world.get(f"/v1/operations/{operation['id']}")
    assert shown["state"] == "DONE"
    assert [(phase["name"], phase["seconds"]) for phase in shown["phases"]] == [
        ("accepted", 1.0),
        ("starting", 5.0),
        ("regrouping", 0.5),
        ("done", 0.0),
    ]
    assert (await driver.sync("RUNNING"))["operation"] is None


async def test_a_scale_that_failed_says_so(world: World) -> None:
    job, driver = await world.running()
    operation = await world.post(f"/v1/jobs/{job['id']}/scale", {"workers": 8})
    failed = driver.event("scale", operation=operation["id"], done=True, failed=True)
    await driver.sync("RUNNING", events=[failed])
    shown = await world.get(f"/v1/operations/{operation['id']}")
    assert (shown["state"], shown["message"]) == ("FAILED", "about scale")


async def test_a_scale_ends_when_the_size_is_seen(world: World) -> None:
    job, driver = await world.started()
    operation = await world.post(f"/v1/jobs/{job['id']}/scale", {"workers": 8})
    await driver.sync("STARTING")
    driver.workers = 8
    await driver.sync("RUNNING", members=members(8, state="starting"))
    assert (await world.get(f"/v1/operations/{operation['id']}"))["state"] == "RUNNING"
    await driver.sync("RUNNING")
    assert (await world.get(f"/v1/operations/{operation['id']}"))["state"] == "DONE"


async def test_a_newer_scale_replaces_an_older(world: World) -> None:
    job, driver = await world.running()
    older = await world.post(f"/v1/jobs/{job['id']}/scale", {"workers": 8})
    assert await world.post(f"/v1/jobs/{job['id']}/scale", {"workers": 8}) == older
    newer = await world.post(f"/v1/jobs/{job['id']}/scale", {"workers": 4})
    shown = await world.get(f"/v1/operations/{older['id']}")
    assert (shown["state"], shown["message"]) == ("FAILED", f"replaced by {newer['id']}")
    reply = await driver.sync("RUNNING")
    assert (reply["workers"], reply["operation"]) == (4, newer["id"])
    await driver.sync("RUNNING")
    assert (await world.get(f"/v1/operations/{newer['id']}"))["state"] == "DONE"


async def test_the_size_a_job_has_is_done_at_once(world: World) -> None:
    job, driver = await world.running()
    operation = await world.post(f"/v1/jobs/{job['id']}/scale", {"workers": 4})
    assert (operation["state"], operation["phases"][-1]["name"]) == ("DONE", "done")
    assert (await driver.sync("RUNNING"))["operation"] is None


async def test_scaling_a_queued_job_changes_what_it_starts_with(world: World) -> None:
    job = await world.submit()
    operation = await world.post(f"/v1/jobs/{job['id']}/scale", {"workers": 8})
    assert operation["state"] == "DONE"
    await world.rounds()
    assert world.driver().workers == 8


async def in_state(world: World, state: str) -> tuple[str, Driver | None]:
    if state == "QUEUED":
        return (await world.submit(spec(workers={"min": 16, "max": 16})))["id"], None
    job, driver = await world.started()
    if state in ("RUNNING", "RESIZING", "RECOVERING"):
        await driver.sync("RUNNING")
        await driver.sync(state)
    elif state == "CANCELLING":
        await world.post(f"/v1/jobs/{job['id']}/cancel")
    elif state in ("SUCCEEDED", "FAILED", "CANCELLED"):
        await driver.sync(state)
    assert (await world.job(job["id"]))["state"] == state
    return job["id"], driver


@pytest.mark.parametrize("state", ["CANCELLING", "SUCCEEDED", "FAILED", "CANCELLED"])
async def test_a_job_that_is_over_or_ending_is_not_scaled(world: World, state: str) -> None:
    job_id, _ = await in_state(world, state)
    answer = await world.http.post(f"/v1/jobs/{job_id}/scale", json={"workers": 8})
    code = "job_is_ending" if state == "CANCELLING" else "job_is_over"
    assert (answer.status_code, answer.json()["code"]) == (409, code)


@pytest.mark.parametrize("state", ["STARTING", "RUNNING", "RESIZING", "RECOVERING"])
async def test_cancel_drains(world: World, state: str) -> None:
    job_id, driver = await in_state(world, state)
    assert driver is not None
    scale = await world.post(f"/v1/jobs/{job_id}/scale", {"workers": 8})
    operation = await world.post(f"/v1/jobs/{job_id}/cancel")
    assert (await world.job(job_id))["state"] == "CANCELLING"
    assert await world.post(f"/v1/jobs/{job_id}/cancel") == operation, "asking twice is asking once"
    reply = await driver.sync("RUNNING")
    assert (reply["cancel"], reply["operation"]) == ("drain", operation["id"])
    assert (await world.job(job_id))["state"] == "CANCELLING"
    await driver.sync("CANCELLED")
    shown = await world.job(job_id)
    assert (shown["state"], shown["workers"]["observed"]) == ("CANCELLED", 0)
    assert (await world.get(f"/v1/operations/{operation['id']}"))["state"] == "DONE"
    assert (await world.get(f"/v1/operations/{scale['id']}"))["state"] == "FAILED"


@pytest.mark.parametrize("state", ["SUCCEEDED", "FAILED", "CANCELLED"])
async def test_what_is_over_is_not_cancelled(world: World, state: str) -> None:
    job_id, _ = await in_state(world, state)
    answer = await world.http.post(f"/v1/jobs/{job_id}/cancel")
    assert (answer.status_code, answer.json()["code"]) == (409, "job_is_over")


async def test_cancel_of_a_queued_job_is_done_at_once(world: World) -> None:
    job_id, _ = await in_state(world, "QUEUED")
    operation = await world.post(f"/v1/jobs/{job_id}/cancel", {})
    assert operation["state"] == "DONE"
    assert (await world.job(job_id))["state"] == "CANCELLED"
    await world.rounds()
    assert not world.ray.submissions


async def test_cancel_before_ray_has_it_withdraws_it(world: World) -> None:
    job = await world.submit()
    world.ray.reachable = False
    await world.plane.supervisor._admission.admit(await seen_before(world), "")
    await world.post(f"/v1/jobs/{job['id']}/cancel")
    world.ray.reachable = True
    await world.rounds()
    assert (await world.job(job["id"]))["state"] == "CANCELLED"
    assert not world.ray.submissions


async def seen_before(world: World):
    world.ray.reachable = True
    sight = await world.ray.look()
    world.ray.reachable = False
    return sight


async def test_a_driver_that_does_not_drain_is_stopped(world: World) -> None:
    job, driver = await world.running()
    await world.post(f"/v1/jobs/{job['id']}/cancel")
    world.clock.turn(119)
    await driver.sync("RUNNING")
    await world.rounds(2)
    assert not world.ray.stopped
    world.clock.turn(2)
    await world.rounds(2)
    assert world.ray.stopped == [driver.attempt]
    assert (await world.job(job["id"]))["state"] == "CANCELLED"
    reply = await driver.sync("RUNNING")
    assert reply["cancel"] == "force", "should it still be there, it must go"
    assert (await world.job(job["id"]))["state"] == "CANCELLED"


async def test_force_hurries_a_cancel(world: World) -> None:
    job, driver = await world.running()
    gentle = await world.post(f"/v1/jobs/{job['id']}/cancel")
    forced = await world.post(f"/v1/jobs/{job['id']}/cancel", {"force": True})
    assert forced["id"] != gentle["id"]
    assert (await driver.sync("RUNNING"))["cancel"] == "force"
    world.clock.turn(6)
    await world.rounds(2)
    assert world.ray.stopped == [driver.attempt]
    assert (await world.job(job["id"]))["state"] == "CANCELLED"
    for operation in (gentle, forced):
        assert (await world.get(f"/v1/operations/{operation['id']}"))["state"] == "DONE"


async def test_cancel_wins_over_a_driver_that_fails_meanwhile(world: World) -> None:
    job, driver = await world.running()
    await world.post(f"/v1/jobs/{job['id']}/cancel")
    await driver.sync("FAILED", reason_message="the disk is full")
    shown = await world.job(job["id"])
    assert shown["state"] == "CANCELLED"
    assert "the disk is full" in shown["reason"]["message"]


async def test_a_job_that_finishes_while_it_is_cancelled_has_finished(world: World) -> None:
    job, driver = await world.running()
    operation = await world.post(f"/v1/jobs/{job['id']}/cancel")
    await driver.sync("SUCCEEDED")
    assert (await world.job(job["id"]))["state"] == "SUCCEEDED"
    shown = await world.get(f"/v1/operations/{operation['id']}")
    assert (shown["state"], shown["message"]) == ("DONE", "the job was over first: SUCCEEDED")


async def test_cancel_of_a_job_between_two_attempts(world: World) -> None:
    job, driver = await world.running()
    world.clock.turn(31)
    world.ray.ends(driver.attempt, RayJobState.FAILED)
    await world.rounds()
    assert (await world.job(job["id"]))["state"] == "RECOVERING"
    await world.post(f"/v1/jobs/{job['id']}/cancel")
    assert (await world.job(job["id"]))["state"] == "CANCELLED"
    await world.rounds(2)
    assert len(world.ray.submissions) == 1


async def test_a_lost_attempt_of_a_cancelled_job_is_not_followed_by_another(world: World) -> None:
    job, driver = await world.running()
    await world.post(f"/v1/jobs/{job['id']}/cancel")
    world.ray.restart()
    world.clock.turn(31)
    await world.rounds(3)
    assert (await world.job(job["id"]))["state"] == "CANCELLED"
    assert [attempt for attempt, _ in world.ray.submissions] == [driver.attempt]


async def test_an_unreachable_ray_keeps_a_cancel_waiting(world: World) -> None:
    job, _ = await world.running()
    await world.post(f"/v1/jobs/{job['id']}/cancel", {"force": True})
    world.ray.reachable = False
    world.clock.turn(1000)
    await world.rounds(2)
    assert (await world.job(job["id"]))["state"] == "CANCELLING"
    world.ray.reachable = True
    await world.rounds(2)
    assert (await world.job(job["id"]))["state"] == "CANCELLED"
