"""The client: requests as the API wants them, errors that can be acted on, streams that survive a restart."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from itertools import pairwise
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted_plane import SPEC, ControlPlane, event_stream, job, metric, operation, problem, project, stream

from rubato.client import AsyncClient, Client, LogQuery
from rubato.client.connection import Gap, Persistence
from rubato.client.sse import Decoder, ServerSentEvent
from rubato.problems import RubatoError
from rubato.projects import ProjectRequest
from rubato.resources import OperationState
from rubato.states import JobState


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Persistence, "PAUSES_S", (0.0, 0.0, 0.0))
    monkeypatch.setattr(Gap, "LONGEST_PAUSE_S", 0.0)


def refused(*_: Any) -> httpx.ConnectError:
    return httpx.ConnectError("connection refused")


@contextmanager
def raises(code: str) -> Iterator[None]:
    with pytest.raises(RubatoError) as caught:
        yield
    assert caught.value.code == code
    assert caught.value.fix


def test_submit_sends_the_spec_and_a_key_of_its_own() -> None:
    plane = ControlPlane({"POST /v1/jobs": [httpx.Response(201, json=job(state="QUEUED"))]})
    with plane.client() as client:
        assert client.submit(SPEC).state is JobState.QUEUED
        client.submit(SPEC)
    first, second = plane.requests
    assert json.loads(first.content) == SPEC
    assert first.headers["idempotency-key"] != second.headers["idempotency-key"]


def test_a_submission_whose_connection_broke_is_sent_again_as_the_same_job() -> None:
    answers = [httpx.ReadError("reset"), refused(), httpx.Response(201, json=job())]
    plane = ControlPlane({"POST /v1/jobs": answers})
    with plane.client() as client:
        assert client.submit(SPEC).id == "j1"
    assert len(plane.requests) == 3
    assert len({request.headers["idempotency-key"] for request in plane.requests}) == 1


def test_a_scale_whose_connection_broke_is_not_sent_twice() -> None:
    plane = ControlPlane({"POST /v1/jobs/demo/scale": [httpx.ReadError("reset")]})
    with plane.client() as client, raises("unreachable"):
        client.scale("demo", 8)
    assert len(plane.requests) == 1


def test_nobody_there_is_said_at_once() -> None:
    plane = ControlPlane({"GET /v1/jobs": [refused()]})
    with plane.client() as client, pytest.raises(RubatoError) as caught:
        client.jobs()
    assert caught.value.code == "unreachable"
    assert caught.value.status == 503
    assert "http://control" in caught.value.detail
    assert "rubato up" in caught.value.fix
    assert len(plane.requests) == 1


def test_a_problem_document_becomes_the_error_it_describes() -> None:
    errors = [{"field": "workers", "cause": "5 cannot be laid out", "fix": "use 4 or 8"}]
    plane = ControlPlane({"POST /v1/jobs/demo/scale": [problem(422, "impossible_size", errors=errors)]})
    with plane.client() as client, pytest.raises(RubatoError) as caught:
        client.scale("demo", 5)
    error = caught.value
    assert (error.status, error.code, error.detail, error.fix) == (
        422,
        "impossible_size",
        "impossible_size it is",
        "do better",
    )
    assert [str(found) for found in error.problems] == ["workers: 5 cannot be laid out; use 4 or 8"]


@pytest.mark.parametrize(
    "answer", [httpx.Response(404, text="<html>nginx"), httpx.Response(200, json={"hello": "world"})]
)
def test_something_else_at_the_address_is_recognised(answer: httpx.Response) -> None:
    plane = ControlPlane({"GET /v1/jobs/demo": [answer]})
    with plane.client() as client, raises("unexpected_reply"):
        client.job("demo")


@pytest.mark.parametrize("url", ["127.0.0.1:8700", "ftp://host", "http://", "http://[::1"])
def test_an_address_that_is_none(url: str) -> None:
    with raises("bad_url"):
        Client(url)


def test_the_address_comes_from_the_environment_then_from_the_running_stack(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setenv("RUBATO_HOME", str(tmp_path))
    monkeypatch.delenv("RUBATO_URL", raising=False)
    assert str(Client().url) == "http://127.0.0.1:8700"
    (tmp_path / "stack.json").write_text(json.dumps({"urls": {"api": "http://127.0.0.1:9123"}}))
    assert str(Client().url) == "http://127.0.0.1:9123"
    monkeypatch.setenv("RUBATO_URL", "http://cluster:80")
    assert Client().url.host == "cluster"
    assert str(Client("http://given:1").url) == "http://given:1"


def test_filters_and_names_are_quoted_into_the_request() -> None:
    page = httpx.Response(200, json={"items": [job()], "next": "abc"})
    plane = ControlPlane({"GET /v1/jobs": [page], "GET /v1/jobs/a/../b": [httpx.Response(200, json=job())]})
    with plane.client() as client:
        assert client.jobs(state=JobState.RUNNING, limit=5).next == "abc"
        client.job("a/../b")
    listed, shown = plane.requests
    assert dict(listed.url.params) == {"state": "RUNNING", "limit": "5"}
    assert shown.url.raw_path == b"/v1/jobs/a%2F..%2Fb"


def test_all_pages_of_a_list_are_read() -> None:
    def page(request: httpx.Request) -> httpx.Response:
        after = int(request.url.params["after"])
        steps = range(after + 1, min(after + 2, 5) + 1)
        following = str(steps[-1]) if steps and steps[-1] < 5 else None
        return httpx.Response(200, json={"items": [metric(step) for step in steps], "next": following})

    plane = ControlPlane({"GET /v1/jobs/demo/metrics": [page]})
    with plane.client() as client:
        assert [found.step for found in client.metrics("demo")] == [1, 2, 3, 4, 5]
        assert [found.step for found in client.metrics("demo", after=3)] == [4, 5]


def streams() -> ControlPlane:
    """A control plane that goes down in the middle of a stream, twice, and is back; then the job ends."""
    return ControlPlane(
        {
            "GET /v1/jobs/demo/events SSE": [
                event_stream(1, 2, end="breaks"),
                refused(),
                event_stream(3, end="cut"),  # ends in good order while the job goes on: a shutdown
                event_stream(4, 5),
            ],
            "GET /v1/jobs/demo": [httpx.Response(200, json=job(state="SUCCEEDED"))],
        }
    )


def followed(plane: ControlPlane) -> list[str | None]:
    return [
        request.headers.get("last-event-id")
        for request in plane.requests
        if request.headers.get("accept") == "text/event-stream"
    ]


def test_following_survives_restarts_without_loss_or_repetition() -> None:
    plane, notices = streams(), list[RubatoError]()
    with plane.client() as client:
        seen = [found.id for found in client.follow_events("demo", notice=notices.append)]
    assert seen == [1, 2, 3, 4, 5]
    assert followed(plane) == ["0", "2", "2", "3"]
    assert [notice.code for notice in notices] == ["unreachable", "unreachable"]


async def test_following_survives_restarts_async() -> None:
    plane, notices = streams(), list[RubatoError]()
    async with plane.async_client() as client:
        seen = [found.id async for found in client.follow_events("demo", notice=notices.append)]
    assert seen == [1, 2, 3, 4, 5]
    assert followed(plane) == ["0", "2", "2", "3"]
    assert len(notices) == 2


def test_following_gives_up_when_patience_is_at_its_end() -> None:
    plane = ControlPlane({"GET /v1/jobs/demo/metrics SSE": [refused()]})
    with plane.client() as client, raises("unreachable"):
        list(client.follow_metrics("demo", patience_s=0.01))
    assert len(plane.requests) > 1


def test_signs_of_life_restore_patience() -> None:
    quiet = [event_stream(end="cut"), event_stream(end="breaks"), event_stream(end="cut")]
    plane = ControlPlane({"GET /v1/jobs/demo/events SSE": [*quiet, event_stream(1)]})
    with plane.client() as client:
        assert [found.id for found in client.follow_events("demo", patience_s=0.0)] == [1]


def test_following_a_job_that_does_not_exist_is_an_error_not_a_retry() -> None:
    plane = ControlPlane({"GET /v1/jobs/demo/events SSE": [problem(404, "job_not_found")]})
    with plane.client() as client, raises("job_not_found"):
        list(client.follow_events("demo"))
    assert len(plane.requests) == 1


@pytest.mark.parametrize("query", [LogQuery(rank=3, tail=2), LogQuery(source="r0-rank-1", attempt=2), LogQuery()])
def test_a_log_is_followed_from_where_it_broke_off(query: LogQuery) -> None:
    plane = ControlPlane(
        {
            "GET /v1/jobs/demo/logs SSE": [
                stream("line", [(6, "hello"), (7, "")], "breaks"),
                stream("line", [(15, "wörld")]),
            ]
        }
    )
    with plane.client() as client:
        assert list(client.follow_logs("demo", query)) == ["hello", "", "wörld"]
    assert followed(plane) == [None, "7"]
    wanted = {key: str(value) for key, value in asdict(query).items() if value is not None}
    assert [dict(request.url.params) for request in plane.requests] == [wanted, wanted]


def test_waiting_for_an_operation_and_for_a_job() -> None:
    over = operation(state="DONE", finished_at="2026-01-02T03:04:06Z")
    plane = streams()
    plane.answers["GET /v1/operations/o1"] = [httpx.Response(200, json=operation()), httpx.Response(200, json=over)]
    with plane.client() as client:
        assert client.wait_for_operation("o1", every_s=0).state is OperationState.DONE
        assert client.wait("demo").state is JobState.SUCCEEDED


async def test_both_clients_send_the_same_requests() -> None:
    def plane() -> ControlPlane:
        page = httpx.Response(200, json={"items": [], "next": None})
        node = {"state": "reachable", "detail": "", "ray_version": "2", "dashboard_url": "", "nodes": []}
        cluster = httpx.Response(200, json={**node, "cpus": 8, "cpus_free": 8, "gpus": 0, "gpus_free": 0})
        return ControlPlane(
            {
                "POST /v1/jobs": [httpx.Response(201, json=job())],
                "GET /v1/jobs": [page],
                "GET /v1/jobs/demo": [httpx.Response(200, json=job())],
                "POST /v1/jobs/demo/scale": [httpx.Response(202, json=operation())],
                "POST /v1/jobs/demo/cancel": [httpx.Response(202, json=operation(kind="cancel"))],
                "POST /v1/jobs/demo/profile": [httpx.Response(202, json=operation(kind="profile"))],
                "GET /v1/jobs/demo/files": [page],
                "GET /v1/jobs/demo/files/profile/a b": [httpx.Response(200, content=b"\0trace")],
                "GET /v1/projects": [page],
                "GET /v1/projects/research": [httpx.Response(200, json=project())],
                "PUT /v1/projects/research": [httpx.Response(200, json=project())],
                "GET /v1/operations/o1": [httpx.Response(200, json=operation())],
                "GET /v1/jobs/demo/checkpoints": [page],
                "GET /v1/cluster": [cluster],
                "GET /v1/jobs/demo/logs": [httpx.Response(200, text="a line\n")],
                "GET /v1/jobs/demo/logs/sources": [page],
            }
        )

    def calls(client: Any) -> list[Any]:
        return [
            client.submit(SPEC, idempotency_key="k"),
            client.jobs(project="default", name="demo", cursor="c"),
            client.job("demo"),
            client.scale("demo", 8),
            client.scale("demo", low=4, high=8),
            client.projects(),
            client.project("research"),
            client.set_project("research", ProjectRequest(workers=4)),
            client.cancel("demo", force=True),
            client.profile("demo", steps=2, ranks=[0, 1]),
            client.files("demo"),
            client.file("demo", "profile/a b"),
            client.operation("o1"),
            client.checkpoints("demo"),
            client.cluster(),
            client.logs("demo", LogQuery(rank=1)),
            client.log_sources("demo"),
        ]

    sync, asynchronous = plane(), plane()
    with sync.client() as client:
        results = calls(client)
    async with asynchronous.async_client() as async_client:
        assert [await call for call in calls(async_client)] == results

    def sent(of: ControlPlane) -> list[tuple[str, str, bytes, str | None]]:
        return [(r.method, str(r.url), r.content, r.headers.get("idempotency-key")) for r in of.requests]

    assert sent(sync) == sent(asynchronous)
    assert len(sent(sync)) == 17


def test_every_call_of_one_client_is_a_call_of_the_other() -> None:
    def public(client: type) -> set[str]:
        return {name for name in vars(client) if not name.startswith("_")}

    assert public(Client) == public(AsyncClient)


async def test_a_cancelled_follower_lets_go_of_its_connection() -> None:
    plane = ControlPlane({"GET /v1/jobs/demo/events SSE": [refused()]})
    async with plane.async_client() as client:
        task = asyncio.ensure_future(anext(aiter(client.follow_events("demo"))))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


LINES = st.lists(
    st.sampled_from(["data: a", "data:b", "data: \u2028ü", "id: 7", "event: end", ": comment", "", "retry: 3", "data"])
)


@given(LINES, st.sampled_from(["\n", "\r\n", "\r"]), st.lists(st.integers(0, 60), max_size=5))
def test_the_decoder_sees_the_same_events_however_the_bytes_arrive(
    lines: list[str], ending: str, cuts: list[int]
) -> None:
    content = "".join(line + ending for line in lines).encode() + b"\n"  # the last byte settles a trailing \r
    whole = list(Decoder().feed(content))
    decoder, places = Decoder(), [0, *sorted(cuts), len(content)]
    pieces = [event for low, high in pairwise(places) for event in decoder.feed(content[low:high])]
    assert pieces == whole


def test_what_the_decoder_makes_of_a_stream() -> None:
    content = ': hi\nid: 4\nevent: metric\ndata: {"a":\ndata: 1}\n\ndata: \u2028x\n\nevent: nothing\n\n'
    assert list(Decoder().feed(content.encode())) == [
        ServerSentEvent("metric", '{"a":\n1}', "4"),
        ServerSentEvent("message", "\u2028x", "4"),
    ]
