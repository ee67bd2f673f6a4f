"""The adapter to Ray's dashboard, against answers as Ray 2.60 gives them."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import httpx
import pytest

from service.cluster.ray import RayJobState, RayRefused, RayUnreachable
from service.cluster.ray_http import HttpRay

NODE = "b4a2f1edcebb41b9f99526929e92843c190588ed715b01d5d1f6db24"
VERSION = {"version": "4", "ray_version": "2.60.0", "ray_commit": "b7f4", "session_name": "session_2026-12-01_1"}
NODES = {
    "result": True,
    "msg": "",
    "data": {
        "result": {
            "total": 2,
            "result": [
                {"node_id": NODE, "node_ip": "10.0.0.1", "state": "ALIVE", "resources_total": {"CPU": 8.0, "GPU": 2.0}},
                {"node_id": "dead", "node_ip": "10.0.0.2", "state": "DEAD", "resources_total": {"CPU": 8.0}},
            ],
        }
    },
}
USAGE = {NODE: {"memory": [0.0, 1.0], "CPU": [3.0, 8.0], "GPU": [0.5, 2.0]}}


def status(usage: object) -> dict[str, Any]:
    report = None if usage is None else {"loadMetricsReport": {"usageByNode": usage}}
    return {"result": True, "msg": "", "data": {"clusterStatus": report}}


def ray(answers: dict[str, Any]) -> HttpRay:
    def answer(request: httpx.Request) -> httpx.Response:
        found = answers[f"{request.method} {request.url.path}"]
        if isinstance(found, Exception):
            raise found
        if callable(found):
            found = found(request)
        return found if isinstance(found, httpx.Response) else httpx.Response(200, json=found)

    return HttpRay("http://ray.test:8265", 1.0, httpx.MockTransport(answer))


async def test_a_look_at_the_cluster() -> None:
    sight = await ray(
        {"GET /api/version": VERSION, "GET /api/v0/nodes": NODES, "GET /api/cluster_status": status(USAGE)}
    ).look()
    assert (sight.session, sight.version) == ("session_2026-12-01_1", "2.60.0")
    alive, dead = sight.nodes
    assert (alive.id, alive.ip, alive.alive) == (NODE, "10.0.0.1", True)
    assert (alive.cpus, alive.cpus_free, alive.gpus, alive.gpus_free) == (8, 5, 2, 1.5)
    assert (dead.alive, dead.cpus, dead.cpus_free) == (False, 0, 0)


@pytest.mark.parametrize("usage", [None, {}])
async def test_a_monitor_that_has_not_reported_yet(usage: object) -> None:
    sight = await ray(
        {"GET /api/version": VERSION, "GET /api/v0/nodes": NODES, "GET /api/cluster_status": status(usage)}
    ).look()
    assert sight.nodes[0].cpus_free == 8


@pytest.mark.parametrize(
    "answer",
    [
        httpx.ConnectError("refused"),
        httpx.ReadTimeout(""),
        httpx.Response(500, text="Traceback\nboom"),
        httpx.Response(200, text="<html>"),
        {"hello": "world"},
    ],
)
async def test_what_is_no_answer_of_ray_is_unreachable(answer: object) -> None:
    with pytest.raises(RayUnreachable, match=r"ray\.test:8265"):
        await ray(dict.fromkeys(("GET /api/version", "GET /api/v0/nodes", "GET /api/cluster_status"), answer)).look()


async def test_jobs_are_found_or_unknown() -> None:
    body = {"status": "FAILED", "message": "died", "end_time": 1796119033132, "type": "SUBMISSION"}
    cluster = ray({"GET /api/jobs/a": body, "GET /api/jobs/b": httpx.Response(404, text="Job b does not exist")})
    found = await cluster.job("a")
    assert found is not None
    assert (found.state, found.message) == (RayJobState.FAILED, "died")
    assert found.ended_at == datetime(2026, 12, 1, 9, 57, 13, 132000, tzinfo=UTC)
    assert await cluster.job("b") is None


async def test_submission() -> None:
    sent: list[dict[str, Any]] = []

    def take(request: httpx.Request) -> dict[str, str]:
        sent.append(json.loads(request.content))
        return {"submission_id": "a", "job_id": "a"}

    await ray({"POST /api/jobs/": take}).submit("a", "python -m workers.driver", {"TOKEN": "t"})
    (body,) = sent
    assert (body["submission_id"], body["entrypoint"]) == ("a", "python -m workers.driver")
    assert body["runtime_env"] == {"env_vars": {"TOKEN": "t"}}


async def test_a_refusal_says_why() -> None:
    trace = "Traceback (most recent call last):\n  ...\nValueError: Job with submission_id a already exists.\n.\n"
    with pytest.raises(RayRefused, match="already exists"):
        await ray({"POST /api/jobs/": httpx.Response(400, text=trace)}).submit("a", "x", {})


@pytest.mark.parametrize("status", [500, 503])
async def test_ray_that_cannot_take_a_job_now_has_not_refused_it(status: int) -> None:
    answer = httpx.Response(status, text="Exception: No available agent to submit job, please try again later.")
    with pytest.raises(RayUnreachable, match="try again later"):
        await ray({"POST /api/jobs/": answer}).submit("a", "x", {})


@pytest.mark.parametrize("usage", [{NODE: {"CPU": 3.0}}, {NODE: {"CPU": [1, 2, 3]}}, {NODE: [1]}, {NODE: None}])
async def test_usage_of_another_shape_is_told(usage: object) -> None:
    cluster = ray({"GET /api/version": VERSION, "GET /api/v0/nodes": NODES, "GET /api/cluster_status": status(usage)})
    with pytest.raises(RayUnreachable, match="does not answer as Ray does"):
        await cluster.look()


async def test_stopping_what_is_gone_is_no_error() -> None:
    cluster = ray({"POST /api/jobs/a/stop": httpx.Response(404, text="no"), "POST /api/jobs/b/stop": {"stopped": True}})
    await cluster.stop("a")
    await cluster.stop("b")
    with pytest.raises(RayUnreachable):
        await ray({"POST /api/jobs/a/stop": httpx.Response(500, text="no")}).stop("a")
