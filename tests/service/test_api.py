"""Submitting, finding, listing; and how the API refuses."""

from __future__ import annotations

import asyncio
import base64
import os
from pathlib import Path
from typing import Any

import pytest

from rubato.states import JobState, can_change
from service.database.tables import JobRow
from service.jobs import repository
from service.jobs.lifecycle import Why, change_state
from tests.service.world import SPEC, Host, World, spec

LONG = base64.urlsafe_b64encode(b"n" + b"9" * 5000).decode()  # more digits than Python reads


async def test_the_same_key_and_spec_are_the_same_job(world: World) -> None:
    first = await world.submit(SPEC, **{"Idempotency-Key": "k1"})
    again = await world.http.post("/v1/jobs", json=SPEC, headers={"Idempotency-Key": "k1"})
    assert (again.status_code, again.json()["id"]) == (201, first["id"])
    assert again.headers["Idempotency-Replayed"] == "true"
    assert again.headers["Location"] == f"/v1/jobs/{first['id']}"
    other = await world.http.post("/v1/jobs", json=spec(name="other"), headers={"Idempotency-Key": "k1"})
    assert (other.status_code, other.json()["code"]) == (409, "idempotency_key_reused")
    assert first["id"] in other.json()["detail"]
    assert (await world.submit())["id"] != first["id"]
    assert len(list(Path(first["run_dir"]).parent.iterdir())) == 2, "no run directory is left over"


async def test_the_same_key_many_times_at_once_is_one_job(world: World) -> None:
    jobs = await asyncio.gather(*(world.submit(SPEC, **{"Idempotency-Key": "k"}) for _ in range(8)))
    assert len({job["id"] for job in jobs}) == 1
    assert len((await world.get("/v1/jobs"))["items"]) == 1
    assert len(list(Path(jobs[0]["run_dir"]).parent.iterdir())) == 1


async def test_jobs_are_found_by_name_when_one_can_be_meant(world: World) -> None:
    first, driver = await world.running()
    assert (await world.job("small"))["id"] == first["id"]
    second = await world.submit()
    answer = await world.http.get("/v1/jobs/small")
    assert (answer.status_code, answer.json()["code"]) == (409, "name_ambiguous")
    assert first["id"] in answer.json()["fix"]
    await driver.sync("SUCCEEDED")
    assert (await world.job("small"))["id"] == second["id"], "the one that is not over"


async def test_pages_do_not_shift_when_jobs_are_added(world: World) -> None:
    made = [(await world.submit(spec(name=f"n{number}")))["name"] for number in range(5)]
    page = await world.get("/v1/jobs", limit=2)
    seen = [job["name"] for job in page["items"]]
    while page["next"]:
        await world.submit(spec(name="late"))
        page = await world.get("/v1/jobs", limit=2, cursor=page["next"])
        seen += [job["name"] for job in page["items"]]
    assert seen == made[::-1]


async def test_filters(world: World) -> None:
    await world.running()
    await world.submit(spec(name="b", project="research"))
    await world.submit(spec(name="c"))

    async def names(**query: Any) -> list[str]:
        return [job["name"] for job in (await world.get("/v1/jobs", **query))["items"]]

    assert await names() == ["c", "b", "small"]
    assert await names(state="QUEUED") == ["c", "b"]
    assert await names(state=["QUEUED", "RUNNING"], project="default") == ["c", "small"]
    assert await names(name="b") == ["b"]
    assert await names(project="none") == []


async def test_event_pages_follow_one_another(world: World) -> None:
    job, driver = await world.running()
    await driver.sync("RUNNING", events=[driver.event(f"kind.{number}") for number in range(6)])
    kinds: list[str] = []
    after: Any = 0
    while after is not None:
        page = await world.get(f"/v1/jobs/{job['id']}/events", after=after, limit=4)
        kinds += [event["kind"] for event in page["items"]]
        after = page["next"]
    assert kinds == await world.events(job["id"])
    assert kinds[-6:] == [f"kind.{number}" for number in range(6)]


@pytest.mark.parametrize(
    ("method", "path", "content", "status", "code", "fields"),
    [
        ("GET", "/v1/jobs/none", None, 404, "job_not_found", []),
        ("GET", "/v1/jobs/none/metrics", None, 404, "job_not_found", []),
        ("GET", "/v1/operations/none", None, 404, "operation_not_found", []),
        ("POST", "/v1/jobs/none/cancel", {}, 404, "job_not_found", []),
        ("GET", "/v1/nothing", None, 404, "not_found", []),
        ("DELETE", "/v1/jobs/none", None, 405, "method_not_allowed", []),
        ("GET", "/v1/jobs?limit=0", None, 422, "request_refused", ["limit"]),
        ("GET", "/v1/jobs?state=RUNING", None, 422, "request_refused", ["state.0"]),
        ("GET", "/v1/jobs?cursor=zzz", None, 422, "request_refused", ["cursor"]),
        ("GET", "/v1/jobs?cursor=bjEwMDAwMDAwMDAwMDAwMDAwMDAwMDA", None, 422, "request_refused", ["cursor"]),
        ("GET", f"/v1/jobs?cursor={LONG}", None, 422, "request_refused", ["cursor"]),
        ("GET", "/v1/jobs?name=a%00b", None, 400, "request_refused", []),
        ("GET", "/v1/jobs/a%00b", None, 400, "request_refused", []),
        ("GET", f"/v1/jobs/none/events?after={10**30}", None, 422, "request_refused", ["after"]),
        ("POST", "/v1/jobs", spec(data={"train": {"path": "/a\0b"}}), 422, "spec_refused", ["data.train.path"]),
        ("POST", "/v1/jobs", None, 422, "spec_refused", ["body"]),
        ("POST", "/v1/jobs", [1], 422, "spec_refused", ["body"]),
        ("POST", "/v1/jobs", b"{no json", 422, "spec_refused", ["body"]),
        ("POST", "/v1/jobs", spec(modle={}), 422, "spec_refused", ["modle"]),
        ("POST", "/v1/jobs", spec(model={"preset": "tinny"}), 422, "spec_refused", ["model.preset"]),
        ("POST", "/v1/jobs", spec(workers=5), 422, "spec_refused", ["workers"]),
        ("POST", "/v1/jobs/none/cancel", {"forse": True}, 422, "request_refused", ["forse"]),
    ],
)
async def test_everything_that_goes_wrong_is_a_problem(
    world: World, method: str, path: str, content: Any, status: int, code: str, fields: list[str]
) -> None:
    body = {"content": content} if isinstance(content, bytes) else {"json": content}
    answer = await world.http.request(method, path, **({} if content is None else body))
    problem = answer.json()
    assert (answer.status_code, problem["status"], problem["code"]) == (status, status, code)
    assert answer.headers["content-type"] == "application/problem+json"
    assert problem["detail"]
    assert problem["fix"]
    assert [error["field"] for error in problem["errors"]] == fields
    assert all(error["cause"] and error["fix"] for error in problem["errors"])


async def test_a_typo_is_answered_with_what_was_meant(world: World) -> None:
    answer = await world.http.post("/v1/jobs", json=spec(optimizer={"lrr": 1.0}))
    assert answer.json()["errors"] == [
        {"field": "optimizer.lrr", "cause": "unknown field", "fix": "did you mean 'lr'?"}
    ]


async def test_a_body_that_is_too_large_is_refused_before_it_is_read(world: World) -> None:
    for content in (b" " * (33 * 2**20), _endless()):
        answer = await world.http.post("/v1/jobs", content=content, headers={"Content-Type": "application/json"})
        assert (answer.status_code, answer.json()["code"]) == (413, "body_too_large")


async def _endless():
    for _ in range(64):
        yield b" " * 2**20


async def test_a_bug_leaks_nothing(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(*_: object) -> None:
        raise RuntimeError("secret")

    monkeypatch.setattr(type(world.plane.jobs), "get", broken)
    answer = await world.http.get("/v1/jobs/any")
    assert (answer.status_code, answer.json()["code"]) == (500, "internal_error")
    assert "secret" not in answer.text


@pytest.mark.parametrize(
    ("path", "cause"),
    [
        ("corpus/*.txt", "relative"),
        ("{tmp}/none/*.txt", "no file matches"),
        ("{tmp}/none.txt", "does not exist"),
        ("{tmp}/empty.txt", "empty"),
        ("{tmp}", "is a folder"),
        ("~nosuchuser/x", "no such user"),
        ("{tmp}/" + "x" * 300, "cannot be read"),
        ("{tmp}/" + "x/" * 5000, "longer than"),
        ("{tmp}" + "/*" * 40, "wildcards"),
    ],
)
async def test_a_corpus_that_is_not_there_is_refused(world: World, tmp_path: Path, path: str, cause: str) -> None:
    (tmp_path / "empty.txt").touch()
    data = {"train": {"path": path.format(tmp=tmp_path)}}
    answer = await world.http.post("/v1/jobs", json=spec(data=data))
    assert answer.status_code == (201 if "none/" in path else 422), answer.text
    if answer.status_code == 422:
        (error,) = answer.json()["errors"]
        assert error["field"] == "data.train.path"
        assert cause in error["cause"]


async def test_on_one_machine_a_corpus_must_be_there(host: Host, tmp_path: Path) -> None:
    async with host.world(ray_dashboard="http://127.0.0.1:8265") as world:
        data = {"train": {"path": f"{tmp_path}/none/*.txt"}}
        assert (await world.http.post("/v1/jobs", json=spec(data=data))).status_code == 422
        (tmp_path / "there.txt").write_text("text")
        data = {"train": {"path": f"{tmp_path}/*.txt"}}
        assert (await world.http.post("/v1/jobs", json=spec(data=data))).status_code == 201


async def test_runs_that_cannot_be_written_are_told_before_anything_is_stored(host: Host, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    async with host.world(runs=tmp_path / "file") as world:
        answer = await world.http.post("/v1/jobs", json=SPEC)
        problem = answer.json()
        assert (answer.status_code, problem["code"]) == (503, "run_directory_not_writable")
        assert problem["errors"][0]["field"] == "RUBATO_RUNS"
        assert (await world.get("/v1/jobs"))["items"] == []


async def test_every_pair_of_states(world: World) -> None:
    job = await world.submit()
    for old in JobState:
        for new in JobState:
            async with world.plane.database.writing() as session:
                row = await repository.locked(session, job["id"])
                assert isinstance(row, JobRow)
                row.state, row.finished_at = old, None
            why = Why("tested", "a test", "user", world.clock())
            before = await world.events(job["id"])
            if not can_change(old, new):
                with pytest.raises(RuntimeError, match=f"from {old} to {new}"):
                    async with world.plane.database.writing() as session:
                        await change_state(session, await repository.locked(session, job["id"]), new, why)
                assert (await world.job(job["id"]))["state"] == old
                assert await world.events(job["id"]) == before
                continue
            async with world.plane.database.writing() as session:
                await change_state(session, await repository.locked(session, job["id"]), new, why)
            shown = await world.job(job["id"])
            assert (shown["state"], shown["reason"]["code"]) == (new, "tested")
            assert (shown["finished_at"] is not None) == new.terminal
            assert await world.events(job["id"]) == [*before, f"job.{new.lower()}"]


async def test_logs_by_source_and_rank(world: World) -> None:
    job, driver = await world.running()
    assert (await world.get(f"/v1/jobs/{job['id']}/logs/sources"))["items"] == []
    logs = Path(job["run_dir"], "logs")
    for attempt in (1, 2):
        folder = logs / f"attempt-{attempt}"
        folder.mkdir(parents=True)
        for source in ("driver", "r0-rank-0", "r0-rank-3"):
            (folder / f"{source}.log").write_text("".join(f"{source} {attempt} {line}\n" for line in range(5000)))
    (logs / "attempt-2" / "driver.log").unlink()
    sources = (await world.get(f"/v1/jobs/{job['id']}/logs/sources"))["items"]
    assert [(item["attempt"], item["source"]) for item in sources] == [
        (2, "r0-rank-0"),
        (2, "r0-rank-3"),
        (1, "driver"),
        (1, "r0-rank-0"),
        (1, "r0-rank-3"),
    ]

    async def read(**query: Any) -> str:
        answer = await world.http.get(f"/v1/jobs/{job['id']}/logs", params=query)
        assert answer.headers["content-type"] == "text/plain; charset=utf-8"
        return answer.text

    assert await read(tail=2) == "driver 1 4998\ndriver 1 4999\n"
    assert await read(tail=0) == ""
    assert (await read(tail=100_000)).count("\n") == 5000
    assert await read(rank=3, tail=1) == "r0-rank-3 2 4999\n"
    assert await read(source="r0-rank-0", attempt=1, tail=1) == "r0-rank-0 1 4999\n"
    size = sources[2]["bytes"]
    assert await read(offset=size - 14) == "driver 1 4999\n"
    for query in ({"source": "../../spec"}, {"rank": 7}, {"attempt": 9}, {"source": "none"}):
        answer = await world.http.get(f"/v1/jobs/{job['id']}/logs", params=query)
        assert (answer.status_code, answer.json()["code"]) == (404, "log_not_found")
    await driver.sync("SUCCEEDED")
    assert await read(rank=3, tail=1) == "r0-rank-3 2 4999\n", "the logs of a job that is over are still there"


async def test_health(world: World) -> None:
    assert (await world.get("/healthz"))["status"] == "ok"
    ready = await world.get("/readyz")
    assert (ready["status"], ready["database"]["status"], ready["ray"]["status"]) == ("ok", "ok", "ok")
    job, driver = await world.running()
    await driver.sync("RUNNING", metrics=[driver.metric(3)])
    text = (await world.http.get("/metrics")).text
    assert 'rubato_jobs{state="RUNNING"} 1.0' in text
    assert f'rubato_job_step{{job="{job["id"]}",name="small"}} 3.0' in text
    assert 'rubato_http_requests_total{method="POST",route="/v1/jobs",status="201"} 1.0' in text
    for number in range(3):
        await world.http.request(f"MADE-UP-{number}", "/v1/jobs")
    text = (await world.http.get("/metrics")).text
    assert "MADE-UP" not in text
    assert 'rubato_http_requests_total{method="other",route="/v1/jobs",status="405"} 3.0' in text
    world.ray.reachable = False
    answer = await world.http.get("/readyz")
    assert (answer.status_code, answer.json()["status"], answer.json()["ray"]["status"]) == (503, "failing", "failing")
    assert "rubato_ray_reachable 0.0" in (await world.http.get("/metrics")).text


async def test_documentation_is_complete_and_comes_from_here(world: World) -> None:
    document = await world.get("/openapi.json")
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            assert operation["summary"], (method, path)
            assert operation["description"], (method, path)
    page = (await world.http.get("/docs")).text
    assert "http://" not in page
    assert "https://" not in page
    assert (await world.http.get("/static-offline-docs/swagger-ui-bundle.js")).status_code == 200


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
async def test_an_unreadable_corpus_is_refused(world: World, tmp_path: Path) -> None:
    path = tmp_path / "closed.txt"
    path.write_text("text")
    path.chmod(0)
    answer = await world.http.post("/v1/jobs", json=spec(data={"train": {"path": str(path)}}))
    assert "cannot be read" in answer.json()["errors"][0]["cause"]
