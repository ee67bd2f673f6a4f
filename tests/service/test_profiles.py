"""Recording steps on demand, the files that come of it, and what Prometheus reads of a step."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.service.world import World


async def test_an_order_reaches_the_driver_until_it_has_been_carried_out(world: World) -> None:
    job, driver = await world.running()
    operation = await world.post(f"/v1/jobs/{job['id']}/profile", {"steps": 5, "ranks": [0, 3]})
    assert (operation["kind"], operation["state"]) == ("profile", "RUNNING")
    expected = {"operation": operation["id"], "steps": 5, "ranks": [0, 3]}
    assert (await driver.sync("RUNNING"))["profile"] == expected
    told = {"operation": operation["id"]}
    assert (await driver.sync("RUNNING", events=[driver.event("profile.started", **told, phase="recording")]))[
        "profile"
    ] == expected
    reply = await driver.sync("RUNNING", events=[driver.event("profile.ended", **told, done=True)])
    assert reply["profile"] is None
    shown = await world.get(f"/v1/operations/{operation['id']}")
    assert (shown["state"], [phase["name"] for phase in shown["phases"]]) == ("DONE", ["accepted", "recording", "done"])


async def test_what_cannot_be_recorded_is_refused(world: World) -> None:
    queued = await world.submit()
    answer = await world.http.post(f"/v1/jobs/{queued['id']}/profile")
    assert (answer.status_code, answer.json()["code"]) == (409, "job_does_not_train")
    await world.rounds()
    await world.driver().sync("RUNNING")
    path = f"/v1/jobs/{queued['id']}/profile"
    answer = await world.http.post(path, json={"ranks": [0, 9]})
    assert (answer.status_code, answer.json()["code"]) == (422, "rank_not_found")
    assert answer.json()["fix"] == "use ranks of 0 to 3"
    for bad in ({"steps": 0}, {"ranks": []}, {"ranks": [-1]}, {"step": 3}):
        assert (await world.http.post(path, json=bad)).status_code == 422
    await world.post(path)
    answer = await world.http.post(path)
    assert (answer.status_code, answer.json()["code"]) == (409, "profile_under_way")


async def test_files_are_listed_and_fetched_and_nothing_else_is(world: World, tmp_path: Path) -> None:
    job = await world.submit()
    run = Path((await world.job(job["id"]))["run_dir"])
    (run / "profile" / "steps-2-3").mkdir(parents=True)
    (run / "profile" / "steps-2-3" / "rank-0.trace.json.gz").write_bytes(b"trace")
    (run / "tensorboard").mkdir()
    (run / "tensorboard" / "events.out.tfevents.1").write_bytes(b"board")
    secret = tmp_path / "secret"
    secret.write_text("secret")
    (run / "profile" / "link").symlink_to(secret)
    (run / "profile" / "folder").symlink_to(tmp_path)
    listed = (await world.get(f"/v1/jobs/{job['id']}/files"))["items"]
    assert [(file["path"], file["bytes"]) for file in listed] == [
        ("profile/steps-2-3/rank-0.trace.json.gz", 5),
        ("tensorboard/events.out.tfevents.1", 5),
    ]
    answer = await world.http.get(f"/v1/jobs/{job['id']}/files/profile/steps-2-3/rank-0.trace.json.gz")
    assert (answer.status_code, answer.content) == (200, b"trace")
    assert "attachment" in answer.headers["content-disposition"]


@pytest.mark.parametrize(
    "path",
    ["spec.json", "profile", "profile/../spec.json", "profile/%2e%2e/spec.json", "/etc/passwd", "..%2Fspec.json", "x"],
)
async def test_no_path_leads_out(world: World, path: str) -> None:
    job = await world.submit()
    answer = await world.http.get(f"/v1/jobs/{job['id']}/files/{path}")
    assert answer.status_code == 404, answer.text


async def test_gauges_of_the_newest_step(world: World) -> None:
    job, driver = await world.running()
    first = driver.metric(1, lr=0.5, data_s=0.25, memory_peak_bytes=4096)
    await driver.sync("RUNNING", metrics=[first, driver.metric(2, lr=0.125, data_s=0.5, memory_peak_bytes=8192)])
    text = (await world.http.get("/metrics")).text
    label = f'{{job="{job["id"]}",name="small"}}'
    for line in (
        f"rubato_job_learning_rate{label} 0.125",
        f"rubato_job_data_wait_seconds{label} 0.5",
        f"rubato_job_memory_peak_bytes{label} 8192.0",
        f"rubato_job_gradient_norm{label} 1.0",
        f"rubato_job_mfu{label} 0.25",
        f"rubato_job_step_seconds{label} 2.0",
    ):
        assert line in text
    assert f"rubato_job_model_flops_per_second{label}" not in text  # nobody has told of it
    await driver.sync("SUCCEEDED")
    assert "rubato_job_learning_rate{" not in (await world.http.get("/metrics")).text
