"""Attempts that are lost, and drivers that come back from the dead."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from service.cluster.ray import RayJobState
from tests.service.world import Host, World, spec


async def test_a_lost_attempt_is_followed_by_one_of_a_higher_epoch(world: World) -> None:
    job, driver = await world.running()
    await driver.sync("RUNNING", metrics=[driver.metric(1)], restarts={"hardware": 2})
    world.clock.turn(31)
    world.ray.ends(driver.attempt, RayJobState.FAILED, "killed")
    await world.rounds()
    shown = await world.job(job["id"])
    assert (shown["state"], shown["reason"]["code"]) == ("RECOVERING", "attempt_lost")
    assert "killed" in shown["reason"]["message"]
    assert (shown["restarts"]["hardware"], shown["workers"]["observed"]) == (3, 0)
    await world.rounds()
    successor = world.driver()
    assert (successor.attempt, successor.epoch) == (f"{job['id']}-a2", 2)
    assert Path(job["run_dir"], "epoch").read_text() == "2\n"
    reply = await successor.sync("RUNNING", restarts={"hardware": 1})
    assert reply["metrics_acknowledged"] == 1
    shown = await world.job(job["id"])
    assert (shown["state"], shown["attempts"], shown["restarts"]["hardware"]) == ("RUNNING", 2, 4)
    back = await driver.post("RUNNING", metrics=[driver.metric(2)])
    assert (back.status_code, back.json()["code"]) == (409, "fenced")
    assert (await world.job(job["id"]))["progress"]["step"] == 1, "a fenced driver is not believed"


@pytest.mark.parametrize("sign", ["silence", "ray", "unknown"])
async def test_one_sign_alone_is_no_loss(world: World, sign: str) -> None:
    job, driver = await world.running()
    if sign == "silence":
        world.clock.turn(1000)
    elif sign == "ray":
        world.ray.ends(driver.attempt, RayJobState.FAILED)
    else:
        world.ray.jobs.clear()
    await world.rounds(3)
    assert (await world.job(job["id"]))["state"] == "RUNNING"
    assert len(world.ray.submissions) == 1


async def test_unreachable_is_not_failed(world: World) -> None:
    job, _ = await world.running()
    world.ray.reachable = False
    world.clock.turn(1000)
    await world.rounds(3)
    assert (await world.job(job["id"]))["state"] == "RUNNING"
    cluster = await world.get("/v1/cluster")
    assert (cluster["state"], cluster["nodes"]) == ("unreachable", [])
    assert "refused" in cluster["detail"]
    waiting = await world.submit(spec(name="second"))
    await world.rounds()
    assert (await world.job(waiting["id"]))["reason"]["code"] == "cluster_unreachable"


async def test_a_new_cluster_has_none_of_the_old_attempts(world: World) -> None:
    job, driver = await world.running()
    world.ray.restart()
    await world.rounds()
    assert (await world.job(job["id"]))["state"] == "RUNNING", "the driver was heard a moment ago"
    world.clock.turn(31)
    await world.rounds(2)
    assert world.driver().epoch == driver.epoch + 1
    events = await world.get(f"/v1/jobs/{job['id']}/events")
    lost = next(event for event in events["items"] if event["kind"] == "attempt.lost")
    assert "another one answers" in lost["message"]


async def test_a_driver_heard_in_the_last_moment_is_not_lost(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    job, driver = await world.running()
    world.clock.turn(31)
    world.ray.ends(driver.attempt, RayJobState.FAILED)
    asked = world.ray.job

    async def answers_late(submission_id: str) -> object:
        answer = await asked(submission_id)
        await driver.sync("RUNNING")
        return answer

    monkeypatch.setattr(world.ray, "job", answers_late)
    await world.rounds()
    assert (await world.job(job["id"]))["state"] == "RUNNING"


async def test_what_a_dead_driver_could_not_tell_is_read_from_its_record(world: World) -> None:
    job, driver = await world.running()
    run_dir = Path(job["run_dir"])
    done = {"at": world.clock().isoformat(), "kind": "training.finished", "message": "10 steps"}
    (run_dir / "events.jsonl").write_text(json.dumps(done) + "\n" + '{"at": "cut o')
    steps = [driver.metric(step)["metric"] for step in range(1, 11)]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    world.clock.turn(31)
    world.ray.ends(driver.attempt, RayJobState.SUCCEEDED)
    await world.rounds()
    shown = await world.job(job["id"])
    assert (shown["state"], shown["reason"]["message"]) == ("SUCCEEDED", "10 steps")
    assert shown["progress"]["step"] == 10
    assert len((await world.get(f"/v1/jobs/{job['id']}/metrics"))["items"]) == 10


async def test_a_failure_a_dead_driver_could_not_tell_fails_the_job(world: World) -> None:
    job, driver = await world.running()
    failed = {"at": world.clock().isoformat(), "kind": "attempt.failed", "message": "the corpus is gone"}
    Path(job["run_dir"], "events.jsonl").write_text(json.dumps(failed) + "\n")
    world.clock.turn(31)
    world.ray.ends(driver.attempt, RayJobState.FAILED)
    await world.rounds(2)
    shown = await world.job(job["id"])
    assert (shown["state"], shown["reason"]["message"]) == ("FAILED", "the corpus is gone")
    assert len(world.ray.submissions) == 1


async def test_attempts_that_lead_nowhere_end(world: World) -> None:
    job = await world.submit()
    for _ in range(40):
        await world.rounds()
        for attempt, seen in list(world.ray.jobs.items()):
            if not seen.state.over:
                world.ray.ends(attempt, RayJobState.FAILED, "No module named workers")
        world.clock.turn(70)
    shown = await world.job(job["id"])
    assert (shown["state"], shown["reason"]["code"]) == ("FAILED", "no_progress")
    assert "No module named workers" in shown["reason"]["message"]
    assert len(world.ray.submissions) == 5


async def test_losses_beyond_the_budget_fail_the_job(world: World) -> None:
    job, driver = await world.running(spec(faults={"hardware": 0}))
    await driver.sync("RUNNING", metrics=[driver.metric(1)])
    world.clock.turn(31)
    world.ray.ends(driver.attempt, RayJobState.FAILED)
    await world.rounds(2)
    shown = await world.job(job["id"])
    assert (shown["state"], shown["reason"]["code"]) == ("FAILED", "too_many_losses")


async def test_stopped_through_ray_means_cancelled(world: World) -> None:
    job, driver = await world.running()
    await world.ray.stop(driver.attempt)
    world.clock.turn(31)
    await world.rounds(2)
    shown = await world.job(job["id"])
    assert (shown["state"], shown["reason"]["code"], shown["reason"]["actor"]) == (
        "CANCELLED",
        "stopped_in_ray",
        "cluster",
    )


async def test_a_job_that_lost_its_workers_takes_fewer_rather_than_wait_for_ever(world: World) -> None:
    job, driver = await world.running()
    await world.post(f"/v1/jobs/{job['id']}/scale", {"workers": 8})
    await driver.sync("RUNNING", metrics=[driver.metric(1)])
    world.ray.restart()
    world.ray.resize(8, free=4)
    world.clock.turn(31)
    await world.rounds(2)
    shown = await world.job(job["id"])
    assert (shown["state"], shown["reason"]["code"]) == ("RECOVERING", "waiting_for_room")
    world.clock.turn(21)
    await world.rounds()
    assert world.driver().workers == 4
    assert (await world.job(job["id"]))["workers"]["desired"] == 4
    assert "job.shrunk" in await world.events(job["id"])


# Between the row and Ray: a crash or a broken line at any place leads to one run, no more.


async def test_an_answer_that_was_lost_does_not_run_it_twice(world: World) -> None:
    job = await world.submit()
    world.ray.loses_answers = True
    await world.rounds()
    world.ray.loses_answers = False
    await world.rounds(3)
    assert len(world.ray.submissions) == 1
    await world.driver().sync("RUNNING")
    assert (await world.job(job["id"]))["state"] == "RUNNING"


async def test_a_crash_between_row_and_ray_is_repaired_with_the_same_token(host: Host) -> None:
    host.ray.reachable = True
    async with host.world() as world:
        job = await world.submit()
        sight = await host.ray.look()
        await world.plane.supervisor._admission.admit(sight, "")  # and here the process dies
    async with host.world() as world:
        await world.rounds(2)
        assert [attempt for attempt, _ in host.ray.submissions] == [f"{job['id']}-a1"]
        await world.driver().sync("RUNNING")
        assert (await world.job(job["id"]))["state"] == "RUNNING"


async def test_a_lease_that_was_not_returned_runs_out(host: Host) -> None:
    async with host.world() as world:
        job = await world.submit()
        await world.plane.supervisor._admission.admit(await host.ray.look(), "")
        assert await world.plane.supervisor._take_lease(f"{job['id']}-a1")
    async with host.world() as world:
        await world.rounds()
        assert not host.ray.submissions, "another control plane may be acting on it"
        host.clock.turn(16)
        await world.rounds()
        assert len(host.ray.submissions) == 1


async def test_two_control_planes_start_a_job_once(host: Host) -> None:
    async with host.world() as one, host.world() as two:
        await one.submit()
        await two.submit(spec(name="other"))
        await asyncio.gather(*(world.rounds(2) for world in (one, two)))
        await asyncio.gather(*(world.rounds(2) for world in (one, two)))
        assert len(host.ray.submissions) == len(set(host.ray.jobs)) == 2


async def test_ray_that_refuses_is_told(world: World) -> None:
    job = await world.submit()
    world.ray.refuses = "runtime_env is not allowed"
    await world.rounds()
    shown = await world.job(job["id"])
    assert (shown["state"], shown["reason"]["code"]) == ("RECOVERING", "attempt_lost")
    assert "runtime_env is not allowed" in shown["reason"]["message"]


async def test_a_run_directory_that_vanished_is_waited_for(world: World) -> None:
    job = await world.submit()
    gone = Path(job["run_dir"])
    gone.rename(gone.with_suffix(".away"))
    await world.rounds()
    shown = await world.job(job["id"])
    assert (shown["state"], shown["reason"]["code"]) == ("STARTING", "run_directory_not_writable")
    gone.with_suffix(".away").rename(gone)
    await world.rounds()
    assert len(world.ray.submissions) == 1


async def test_a_job_that_is_over_leaves_nothing_running(world: World) -> None:
    _, driver = await world.running()
    await driver.sync("SUCCEEDED")
    await world.rounds()
    assert not world.ray.stopped, "it has time to leave by itself"
    world.clock.turn(61)
    await world.rounds(2)
    assert world.ray.stopped == [driver.attempt]
    world.clock.turn(61)
    await world.rounds(2)
    assert world.ray.stopped == [driver.attempt]


async def test_what_is_said_of_a_loss_is_kept_up_to_date(world: World) -> None:
    job, driver = await world.running()
    said = "lost worker 3 of r1; {} of 8 wanted workers train"
    for count in (7, 4):
        await driver.sync("RECOVERING", reason_code="worker_lost", reason_message=said.format(count))
        shown = await world.job(job["id"])
        assert (shown["reason"]["code"], shown["reason"]["message"]) == ("worker_lost", said.format(count))
