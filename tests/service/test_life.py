"""The life of a job as its users and its driver see it."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path

import pytest

from service.cluster.ray import RayJobState
from tests.service.world import Host, World, spec


async def test_whole_life_of_a_job(world: World) -> None:
    job = await world.submit()
    assert (job["state"], job["reason"]["code"], job["reason"]["actor"]) == ("QUEUED", "submitted", "user")
    bounds = {"min": 4, "max": 16, "queue_min": 4, "queue_max": 16}
    assert job["workers"] == {"desired": 4, "observed": 0, **bounds, "members": []}
    assert job["spec"]["optimizer"]["betas"] == [0.9, 0.95]
    assert json.loads(Path(job["run_dir"], "spec.json").read_text()) == job["spec"]
    world.clock.turn(3)
    await world.rounds()
    attempt, submission = world.ray.submissions[0]
    assert attempt == f"{job['id']}-a1"
    assert submission.argument("--run-dir") == job["run_dir"]
    assert submission.argument("--workers") == "4"
    assert submission.argument("--control") == "http://127.0.0.1:8700"
    assert Path(job["run_dir"], "epoch").read_text() == "1\n"
    driver = world.driver()
    reply = await driver.sync("STARTING", events=[driver.event("attempt.started")])
    assert (reply["workers"], reply["cancel"], reply["events_acknowledged"]) == (4, "no", 1)
    world.clock.turn(7)
    await driver.sync("RUNNING")
    for step in range(1, 11):
        world.clock.turn(2)
        reply = await driver.sync("RUNNING", metrics=[driver.metric(step)])
        assert reply["metrics_acknowledged"] == step
    shown = await world.job("small")
    assert shown["state"] == "RUNNING"
    assert shown["workers"]["observed"] == 4
    assert shown["layout"]["tensor"] == 2
    assert shown["progress"].pop("predicted_tokens_per_s") > 0
    assert shown["progress"] == {
        "step": 10,
        "steps": 10,
        "tokens": 20480,
        "loss": 0.5,
        "tokens_per_s": 1024.0,
        "mfu": 0.25,
        "eta_s": 0.0,
    }
    await driver.sync("SUCCEEDED", events=[driver.event("training.finished")])
    world.ray.ends(attempt, RayJobState.SUCCEEDED)
    await world.rounds(2)
    done = await world.job(job["id"])
    assert done["state"] == "SUCCEEDED"
    assert done["goodput"] == {
        "ratio": pytest.approx(20 / 27),
        "training_s": 20.0,
        "checkpoint_s": 0.0,
        "starting_s": 7.0,
        "recovering_s": 0.0,
        "resizing_s": 0.0,
        "redone_s": 0.0,
        "waiting_s": 3.0,
    }
    lived = datetime.fromisoformat(done["finished_at"]) - datetime.fromisoformat(done["created_at"])
    assert lived.total_seconds() == 30
    assert await world.events(job["id"]) == [
        "job.queued",
        "job.starting",
        "attempt.created",
        "attempt.started",
        "job.running",
        "training.finished",
        "job.succeeded",
    ]
    metrics = await world.get(f"/v1/jobs/{job['id']}/metrics", after=7)
    assert [item["step"] for item in metrics["items"]] == [8, 9, 10]
    assert len(world.ray.submissions) == 1
    assert not world.ray.stopped


async def test_reports_are_stored_once_and_in_order(world: World) -> None:
    job, driver = await world.running()
    events = [driver.event(f"kind.{number}") for number in range(4)]
    metrics = [driver.metric(step) for step in (1, 2, 3)]
    await driver.sync("RUNNING", events=events[:2], metrics=metrics[:2])
    reply = await driver.sync("RUNNING", events=events, metrics=metrics)
    assert (reply["events_acknowledged"], reply["metrics_acknowledged"]) == (4, 3)
    kinds = await world.events(job["id"])
    assert [kind for kind in kinds if kind.startswith("kind")] == [f"kind.{number}" for number in range(4)]
    reply = await driver.sync("RUNNING", events=[{**driver.event("lost"), "seq": 9}])
    assert reply["events_acknowledged"] == 4, "a gap that nobody can fill is not passed over"


async def test_an_old_copy_of_the_database_catches_up_from_the_run_directory(world: World) -> None:
    job, driver = await world.running()
    events = [driver.event(f"kind.{number}") for number in range(3)]
    metrics = [driver.metric(step) for step in (1, 2, 3)]
    lines = [json.dumps({key: value for key, value in event.items() if key != "seq"}) for event in events]
    Path(job["run_dir"], "events.jsonl").write_text("\n".join(lines) + "\n")
    Path(job["run_dir"], "metrics.jsonl").write_text("".join(json.dumps(m["metric"]) + "\n" for m in metrics))
    reply = await driver.sync("RUNNING", events=events[2:], metrics=metrics[2:])
    assert (reply["events_acknowledged"], reply["metrics_acknowledged"]) == (3, 3)
    assert [kind for kind in await world.events(job["id"]) if kind.startswith("kind")] == ["kind.0", "kind.1", "kind.2"]


async def test_states_a_driver_passed_unheard_are_passed_here_too(world: World) -> None:
    job, driver = await world.started()
    await driver.sync("SUCCEEDED")
    assert (await world.events(job["id"]))[-2:] == ["job.running", "job.succeeded"]


async def test_resizing_counts_steps_as_training_and_the_rest_as_resizing(world: World) -> None:
    job, driver = await world.running()
    await driver.sync("RESIZING")
    world.clock.turn(4)
    await driver.sync("RESIZING", metrics=[driver.metric(1)])
    world.clock.turn(3)
    await driver.sync("RUNNING")
    goodput = (await world.job(job["id"]))["goodput"]
    assert (goodput["training_s"], goodput["resizing_s"]) == (2.0, 5.0)


async def test_redone_steps_and_checkpoints_are_booked_apart(world: World) -> None:
    job, driver = await world.running()
    world.clock.turn(10)
    steps = [driver.metric(step) for step in (1, 2, 3, 2, 3)]
    steps[-1]["metric"]["loss"] = 0.125
    saved = driver.event("checkpoint.saved", data={"step": 3, "bytes": 1, "seconds": 1.5})
    validated = driver.event("validation", data={"step": 2, "loss": 4.0})
    await driver.sync("RUNNING", metrics=steps, events=[saved, validated])
    shown = await world.job(job["id"])
    goodput = shown["goodput"]
    assert (goodput["redone_s"], goodput["checkpoint_s"], goodput["training_s"]) == (4.0, 1.5, 4.5)
    assert shown["progress"]["loss"] == 0.125
    items = (await world.get(f"/v1/jobs/{job['id']}/metrics"))["items"]
    assert [(item["step"], item["validation_loss"]) for item in items] == [(1, None), (2, 4.0), (3, None)]


async def test_a_loss_that_is_no_number_is_told(world: World) -> None:
    job, driver = await world.running()
    broken = driver.metric(1, loss="NaN", grad_norm="Infinity")
    event = driver.event("worker.lost", data={"cause": "a\0b", "value": "NaN"})
    reply = await driver.sync("RUNNING", metrics=[broken], events=[event])
    assert (reply["metrics_acknowledged"], reply["events_acknowledged"]) == (1, 1)
    item = (await world.get(f"/v1/jobs/{job['id']}/metrics"))["items"][0]
    assert (item["loss"], item["grad_norm"]) == ("NaN", "Infinity")
    assert (await world.job(job["id"]))["state"] == "RUNNING"


async def test_a_driver_that_fails_fails_the_job(world: World) -> None:
    job, driver = await world.running()
    await driver.sync("FAILED", reason_code="out_of_memory", reason_message="no memory left")
    shown = await world.job(job["id"])
    assert shown["state"] == "FAILED"
    assert (shown["reason"]["code"], shown["reason"]["message"]) == ("out_of_memory", "no memory left")
    await world.rounds(2)
    assert len(world.ray.submissions) == 1, "a job that failed is not started again"


async def test_only_the_right_token_is_heard(world: World) -> None:
    _, driver = await world.started()
    wrong = {"Authorization": "Bearer wrong"}
    body = {"epoch": 1, "state": "RUNNING", "reason_code": "", "reason_message": "", "generation": 0, "layout": None}
    for headers in (wrong, {}):
        answer = await world.http.post(f"/v1/attempts/{driver.attempt}/sync", json=body, headers=headers)
        assert (answer.status_code, answer.json()["code"]) == (401, "wrong_token")
        assert answer.headers["WWW-Authenticate"] == "Bearer"
    answer = await world.http.post("/v1/attempts/job-x-a1/sync", json=body, headers=wrong)
    assert (answer.status_code, answer.json()["code"]) == (404, "attempt_not_found")


async def test_restart_in_the_middle_changes_nothing(host: Host) -> None:
    async with host.world() as world:
        job, driver = await world.running()
        await driver.sync("RUNNING", metrics=[driver.metric(1)])
        before = await world.job(job["id"])
        events = await world.events(job["id"])
    async with host.world() as world:
        await world.rounds(2)
        after = await world.job(job["id"])
        assert after == before
        assert await world.events(job["id"]) == events
        driver.world = world
        reply = await driver.sync("RUNNING", metrics=[driver.metric(2)])
        assert reply["metrics_acknowledged"] == 2
        assert len(host.ray.submissions) == 1


async def test_silence_from_before_the_start_is_no_sign(host: Host) -> None:
    async with host.world() as world:
        job, driver = await world.running()
    host.clock.turn(3600)
    host.ray.ends(driver.attempt, RayJobState.FAILED)  # wrong, as it can be after Ray's head came back
    async with host.world() as world:
        await world.rounds(2)
        assert (await world.job(job["id"]))["state"] == "RUNNING"
        driver.world = world
        await driver.sync("RUNNING")
        host.clock.turn(29)
        await world.rounds()
        assert (await world.job(job["id"]))["state"] == "RUNNING"


async def test_several_specs_run_side_by_side(world: World) -> None:
    first, _ = await world.running()
    second = await world.submit(spec(name="other"))
    await world.rounds()
    assert [attempt for attempt, _ in world.ray.submissions] == [f"{first['id']}-a1", f"{second['id']}-a1"]
