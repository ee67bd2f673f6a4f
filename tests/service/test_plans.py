"""Plans over the API: a spec is planned on a named or the live cluster, and at submission where it leaves that open."""

from __future__ import annotations

from typing import Any

import pytest

from tests.service.world import Host, World, spec
from tests.unit.planning.measured import calibration

pytestmark = pytest.mark.parametrize("host", ["sqlite"], indirect=True)

GIB = 2**30
OPEN = {key: value for key, value in spec().items() if key != "parallelism"}
LARGE: dict[str, Any] = {
    **OPEN,
    "model": {"preset": "8b"},
    "train": {"steps": 10, "global_batch": 1024, "precision": "bf16"},
    "workers": {"min": 8, "max": 64, "gpus": 1},
}


def give_memory(world: World, memory: float) -> None:
    world.ray.nodes = [node.model_copy(update={"memory_bytes": memory}) for node in world.ray.nodes]


async def test_a_plan_for_a_named_cluster_says_size_by_size_what_to_expect(world: World) -> None:
    plan = await world.post("/v1/plans", {"spec": LARGE, "cluster": "h100:64", "sizes": [8, 64], "price": 2.0})
    assert plan["planned"]
    assert not plan["calibrated"]
    assert [size["workers"] for size in plan["sizes"]] == [8, 64]
    small, large = (size["chosen"] for size in plan["sizes"])
    assert large["layout"]["data"] == 8 * small["layout"]["data"]
    assert 4 < large["tokens_per_s"] / small["tokens_per_s"] <= 8
    assert 0.2 < large["mfu"] < 0.7
    for chosen, workers in ((small, 8), (large, 64)):
        assert chosen["memory"]["needed"] <= chosen["memory"]["usable"]
        assert chosen["finish_s"] == pytest.approx(10 * chosen["step_s"])
        assert chosen["cost"] == pytest.approx(chosen["finish_s"] / 3600 * 2.0 * workers)
        low, high = chosen["tokens_per_s_range"]
        assert low < chosen["tokens_per_s"] < high
    assert plan["spec"]["parallelism"]["micro_batch"] == large["layout"]["micro_batch"]


async def test_sizes_that_do_not_fit_say_why(world: World) -> None:
    given = {**LARGE, "parallelism": {"tensor": 1}, "model": {"preset": "70b"}}
    plan = await world.post("/v1/plans", {"spec": given, "cluster": "h100:64", "sizes": [64]})
    (size,) = plan["sizes"]
    assert not plan["planned"]
    assert size["chosen"] is None
    assert "GiB of 71 GiB usable" in size["reason"]
    assert size["fastest"]["layout"]["tensor"] > 1


async def test_a_job_that_leaves_its_layout_out_gets_the_one_of_its_plan(world: World) -> None:
    plan = await world.post("/v1/plans", {"spec": OPEN})
    job = await world.submit(OPEN)
    assert job["spec"]["parallelism"] == plan["spec"]["parallelism"]
    sizes = {size["workers"] for size in plan["sizes"]}
    assert sizes <= set(range(4, 17))
    assert job["workers"]["desired"] == min(sizes)
    given = await world.submit(spec())
    assert given["spec"]["parallelism"]["tensor"] == 2


async def test_the_same_open_spec_under_one_key_is_one_job_though_the_cluster_has_changed(world: World) -> None:
    first = await world.submit(OPEN, **{"Idempotency-Key": "k"})
    world.ray.resize(2)
    await world.plane.cluster.look()
    assert (await world.submit(OPEN, **{"Idempotency-Key": "k"}))["id"] == first["id"]


async def test_what_cannot_fit_is_refused_with_the_nearest_that_can(world: World) -> None:
    give_memory(world, 16 * GIB)
    eight = {"model": {"preset": "8b"}, "workers": {"min": 1, "max": 8}}
    for content in ({**OPEN, **eight}, {**spec(), **eight, "parallelism": {"tensor": 4, "pipeline": 2}, "workers": 8}):
        answer = await world.http.post("/v1/jobs", json=content)
        assert answer.status_code == 422, answer.text
        problem = answer.json()
        assert problem["code"] == "spec_refused"
        (error,) = problem["errors"]
        assert error["field"] in ("workers", "parallelism")
        assert "GiB" in error["cause"]
        assert error["fix"]
    assert (await world.get("/v1/jobs"))["items"] == []
    await world.submit({**OPEN, "workers": 2})


async def test_without_a_sight_of_the_cluster_cpus_are_assumed_and_gpus_are_not(world: World) -> None:
    world.ray.reachable = False
    job = await world.submit(OPEN)
    assert job["workers"]["desired"] == 4
    answer = await world.http.post("/v1/jobs", json=LARGE)
    assert answer.status_code == 422
    (error,) = answer.json()["errors"]
    assert (error["field"], error["fix"]) == ("parallelism", "give parallelism, or submit when the cluster can be seen")
    answer = await world.http.post("/v1/plans", json={"spec": LARGE})
    assert answer.status_code == 422
    assert answer.json()["code"] == "cluster_unknown"


@pytest.mark.parametrize(
    ("change", "field"), [({"cluster": "h100"}, "cluster"), ({"cluster": "h100:4"}, "workers"), ({"prize": 1}, "prize")]
)
async def test_a_request_that_makes_no_sense_is_refused(world: World, change: dict[str, Any], field: str) -> None:
    answer = await world.http.post("/v1/plans", json={"spec": LARGE, **change})
    assert answer.status_code == 422
    assert [error["field"] for error in answer.json()["errors"]] == [field]


async def test_a_calibration_is_kept_and_plans_rest_on_it(world: World, host: Host) -> None:
    before = await world.post("/v1/plans", {"spec": OPEN, "cluster": "cpu:4"})
    measured = calibration(together={}).model_dump(mode="json")
    answer = await world.http.put("/v1/calibrations", json=measured)
    assert answer.status_code == 200, answer.text
    after = await world.post("/v1/plans", {"spec": OPEN, "cluster": "cpu:4"})
    assert (before["calibrated"], after["calibrated"]) == (False, True)
    assert before["sizes"][0]["chosen"]["tokens_per_s"] != after["sizes"][0]["chosen"]["tokens_per_s"]
    assert (await world.get("/v1/calibrations"))["items"] == [measured]
    async with host.world() as again:
        assert (await again.get("/v1/calibrations"))["items"] == [measured]
    (host.home / "calibration.json").write_text("{")
    answer = await world.http.get("/v1/calibrations")
    assert (answer.status_code, answer.json()["code"]) == (503, "calibration_unreadable")
    assert (await world.http.put("/v1/calibrations", json=measured)).status_code == 200
    assert (await world.get("/v1/calibrations"))["items"] == [measured]


async def test_a_device_the_planner_does_not_know_is_not_kept(world: World) -> None:
    measured = calibration(alone={"device": "Tesla T4"}).model_dump(mode="json")
    answer = await world.http.put("/v1/calibrations", json=measured)
    assert (answer.status_code, answer.json()["code"]) == (422, "accelerator_unknown")
    assert (await world.get("/v1/calibrations"))["items"] == []


async def differing(world: World) -> list[dict[str, Any]]:
    (job,) = (await world.get("/v1/jobs"))["items"]
    events = (await world.get(f"/v1/jobs/{job['id']}/events"))["items"]
    return [event for event in events if event["kind"] == "plan.differs"]


async def test_a_job_shows_its_prediction_and_an_event_says_once_that_it_is_far_off(world: World) -> None:
    job, driver = await world.running()
    predicted = (await world.job(job["id"]))["progress"]["predicted_tokens_per_s"]
    assert predicted > 0
    about = {"tokens_per_s": predicted * 1.2}
    await driver.sync("RUNNING", metrics=[driver.metric(step, **about) for step in range(1, 26)])
    assert await differing(world) == []
    slow = {"tokens_per_s": predicted / 4}
    await driver.sync("RUNNING", metrics=[driver.metric(step, **slow) for step in range(26, 30)])
    await driver.sync("RUNNING", metrics=[driver.metric(30, **slow)])
    (event,) = await differing(world)
    assert event["actor"] == "service"
    assert "the catalogue" in event["message"]
    assert event["data"]["calibrated"] is False
    assert event["data"]["predicted_tokens_per_s"] == pytest.approx(predicted)


async def test_the_first_steps_of_a_generation_say_nothing_of_its_speed(world: World) -> None:
    _, driver = await world.running()
    slow = {"tokens_per_s": 1e-3}
    await driver.sync("RUNNING", metrics=[driver.metric(step, **slow) for step in range(1, 11)])
    later = [driver.metric(step, generation=2, **slow) for step in range(11, 25)]
    await driver.sync("RUNNING", metrics=later)
    assert await differing(world) == []
    await driver.sync("RUNNING", metrics=[driver.metric(step, generation=2, **slow) for step in range(25, 32)])
    assert len(await differing(world)) == 1
