"""A control plane of a few lines for the client's tests: one job, what the test wants of it, every request kept."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from datetime import UTC, datetime
from typing import Any

import httpx

from rubato.client import AsyncClient, Client
from rubato.spec import JobSpec

AT = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC).isoformat()

SPEC: dict[str, Any] = {
    "name": "demo",
    "model": {"preset": "tiny"},
    "data": {"train": {"builtin": "python-stdlib"}, "sequence_length": 64},
    "train": {"steps": 10, "global_batch": 8},
    "parallelism": {"tensor": 2, "pipeline": 2},
    "workers": {"min": 4, "max": 8},
}


def job(**changes: Any) -> dict[str, Any]:
    """A job as the API gives it."""
    return {
        "id": "j1",
        "name": "demo",
        "project": "default",
        "priority": 0,
        "state": "RUNNING",
        "reason": {"code": "training", "message": "training at 4 workers", "actor": "driver", "at": AT},
        "spec": JobSpec.model_validate(SPEC).model_dump(mode="json"),
        "layout": {"data": 1, "pipeline": 2, "tensor": 2, "micro_batch": 1, "accumulation": 8},
        "workers": {"desired": 4, "observed": 4, "min": 4, "max": 8},
        "progress": {"step": 3, "steps": 10, "tokens": 1536, "loss": 5.1, "tokens_per_s": 900.0, "eta_s": 70},
        "generation": 1,
        "attempts": 1,
        "restarts": {},
        "goodput": {"ratio": 0.5, "training_s": 3.0},
        "created_at": AT,
        "started_at": AT,
        "finished_at": None,
        "run_dir": "/runs/j1",
        "links": {},
        **changes,
    }


def a_plan() -> dict[str, Any]:
    """A plan of two sizes, of which the second does not fit."""
    layout = {"data": 2, "pipeline": 2, "tensor": 2, "zero": 0, "micro_batch": 1, "accumulation": 16}
    gib = 2**30
    chosen = {
        "layout": {**layout, "schedule": "1f1b", "virtual_stages": 1, "recompute": "full"},
        "memory": {"needed": 40 * gib, "usable": 71.2 * gib, "parameters": 10 * gib, "gradients": 10 * gib}
        | {"optimizer": 10 * gib, "activations": 5 * gib, "transient": 3 * gib, "context": 2 * gib},
        "step_s": 1.0,
        "tokens_per_s": 1000.0,
        "tokens_per_s_range": [900.0, 1100.0],
        "mfu": 0.41,
        "finish_s": 10_000.0,
        "cost": 44.44,
    }
    return {
        "cluster": "16 x h100-80gb",
        "calibrated": False,
        "planned": True,
        "spec": SPEC,
        "sizes": [
            {"workers": 8, "chosen": chosen, "fastest": chosen, "refused": []},
            {"workers": 16, "chosen": None, "reason": "stage 0 needs too much", "fastest": None, "refused": []},
        ],
        "not_covered": [],
    }


def event(number: int, kind: str = "generation.formed", message: str = "two replicas") -> dict[str, Any]:
    return {"id": number, "at": AT, "kind": kind, "message": message, "actor": "driver", "data": {}}


def metric(step: int) -> dict[str, Any]:
    return {
        "step": step,
        "at": AT,
        "loss": 6.0 - step / 10,
        "grad_norm": 1.0,
        "lr": 1e-3,
        "tokens": 512 * step,
        "tokens_per_s": 900.0,
        "step_s": 0.5,
        "generation": 1,
        "data": 1,
    }


def operation(**changes: Any) -> dict[str, Any]:
    return {
        "id": "o1",
        "job_id": "j1",
        "kind": "scale",
        "request": {"workers": 8},
        "state": "RUNNING",
        "message": None,
        "phases": [{"name": "accepted", "at": AT, "seconds": 0.1}],
        "created_at": AT,
        "finished_at": None,
        **changes,
    }


def project(**changes: Any) -> dict[str, Any]:
    return {
        "name": "research",
        "weight": 1.0,
        "workers": 16,
        "gpus": None,
        "running_jobs": None,
        "usage": 3.25,
        "held_workers": 4,
        "held_gpus": 0.0,
        "held_jobs": 1,
        **changes,
    }


def problem(status: int, code: str, **more: Any) -> httpx.Response:
    content = {"title": code, "status": status, "code": code, "detail": f"{code} it is", "fix": "do better", **more}
    return httpx.Response(status, json=content, headers={"content-type": "application/problem+json"})


def stream(kind: str, items: Iterable[tuple[int, str]], end: str = "end") -> httpx.Response:
    """A stream of (id, data) that closes with ``end``, is ``cut`` in good order, or ``breaks`` off."""

    def parts() -> Iterator[bytes]:
        yield b"retry: 1000\n\n: nothing new\n\n"
        for number, data in items:
            yield f"id: {number}\nevent: {kind}\ndata: {data}\n\n".encode()
        if end == "end":
            yield b"id: 0\nevent: end\ndata: {}\n\n"
        elif end == "breaks":
            raise httpx.ReadError("connection reset")

    class Both(httpx.SyncByteStream, httpx.AsyncByteStream):
        def __iter__(self) -> Iterator[bytes]:
            return parts()

        async def __aiter__(self) -> AsyncIterator[bytes]:
            for part in parts():
                yield part

    return httpx.Response(200, headers={"content-type": "text/event-stream"}, stream=Both())


def event_stream(*numbers: int, end: str = "end") -> httpx.Response:
    return stream("event", [(number, json.dumps(event(number))) for number in numbers], end)


def metric_stream(*steps: int, end: str = "end") -> httpx.Response:
    return stream("metric", [(step, json.dumps(metric(step))) for step in steps], end)


Answer = httpx.Response | Exception
Script = Callable[[httpx.Request], Answer]


class ControlPlane:
    """Answers requests by (method, path), each from a list whose last answer repeats."""

    def __init__(self, answers: dict[str, list[Answer | Script]]) -> None:
        self.answers = {key: list(given) for key, given in answers.items()}
        self.requests: list[httpx.Request] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        followed = " SSE" if request.headers.get("accept") == "text/event-stream" else ""
        given = self.answers[f"{request.method} {request.url.path}{followed}"]
        answer = given.pop(0) if len(given) > 1 else given[0]
        if callable(answer):
            answer = answer(request)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def client(self) -> Client:
        return Client("http://control", transport=httpx.MockTransport(self))

    def async_client(self) -> AsyncClient:
        return AsyncClient("http://control", transport=httpx.MockTransport(self))
