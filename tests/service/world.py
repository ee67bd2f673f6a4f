"""A control plane without network: its routes through ASGI, a clock to turn, and a Ray cluster made of dictionaries."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx

from rubato.resources import NodeView
from service.app import create_app
from service.cluster.ray import RayJob, RayJobState, RayRefused, RayUnreachable, Sight
from service.plane import ControlPlane, open_control_plane
from service.settings import Settings

SPEC: dict[str, Any] = {
    "name": "small",
    "model": {"preset": "tiny"},
    "data": {"train": {"builtin": "python-stdlib"}},
    "train": {"steps": 10, "global_batch": 8},
    "parallelism": {"tensor": 2, "pipeline": 2},
    "workers": {"min": 4, "max": 16},
}


def spec(**changes: Any) -> dict[str, Any]:
    return {**SPEC, **changes}


class Clock:
    """Stands still until it is turned."""

    def __init__(self) -> None:
        self.now = datetime(2026, 1, 1, tzinfo=UTC)

    def __call__(self) -> datetime:
        return self.now

    def turn(self, seconds: float) -> None:
        self.now += timedelta(seconds=seconds)


@dataclass(frozen=True)
class Submission:
    entrypoint: str
    environment: Mapping[str, str]

    def argument(self, name: str) -> str:
        words = shlex.split(self.entrypoint)
        return words[words.index(name) + 1]


@dataclass
class FakeRay:
    """The interface of a cluster, kept in memory. What a real one decides, tests set."""

    clock: Clock
    session: str = "session-1"
    nodes: list[NodeView] = field(default_factory=list)
    jobs: dict[str, RayJob] = field(default_factory=dict)
    submissions: list[tuple[str, Submission]] = field(default_factory=list)
    stopped: list[str] = field(default_factory=list)
    reachable: bool = True
    refuses: str | None = None
    busy: str | None = None  # takes nothing for now
    loses_answers: bool = False  # takes a submission, and then the line breaks

    def __post_init__(self) -> None:
        self.resize(8)

    def resize(self, cpus: float, free: float | None = None) -> None:
        free = cpus if free is None else free
        self.nodes = [
            NodeView(id="n1", ip="10.0.0.1", alive=True, cpus=cpus, gpus=0, cpus_free=free, gpus_free=0),
            NodeView(id="n2", ip="10.0.0.2", alive=False, cpus=0, gpus=0, cpus_free=0, gpus_free=0),
        ]

    def restart(self) -> None:
        """Another cluster at the same address."""
        self.session += "'"
        self.jobs.clear()

    def ends(self, submission_id: str, state: RayJobState, message: str = "") -> None:
        self.jobs[submission_id] = RayJob(state, message, self.clock())

    def _answer(self) -> None:
        if not self.reachable:
            raise RayUnreachable("connection refused")

    async def look(self) -> Sight:
        self._answer()
        return Sight(self.session, "2.60.0", self.nodes)

    async def submit(self, submission_id: str, entrypoint: str, environment: Mapping[str, str]) -> None:
        self._answer()
        if self.busy is not None:
            raise RayUnreachable(self.busy)
        if self.refuses is not None:
            raise RayRefused(self.refuses)
        if submission_id in self.jobs:
            raise RayRefused(f"Job with submission_id {submission_id} already exists.")
        self.submissions.append((submission_id, Submission(entrypoint, environment)))
        self.jobs[submission_id] = RayJob(RayJobState.RUNNING, "", None)
        if self.loses_answers:
            raise RayUnreachable("connection reset")

    async def job(self, submission_id: str) -> RayJob | None:
        self._answer()
        return self.jobs.get(submission_id)

    async def stop(self, submission_id: str) -> None:
        self._answer()
        self.stopped.append(submission_id)
        found = self.jobs.get(submission_id)
        if found is not None and not found.state.over:
            self.jobs[submission_id] = replace(found, state=RayJobState.STOPPED)

    async def close(self) -> None:
        pass


class World:
    """One control plane, and what its users and drivers do."""

    def __init__(self, plane: ControlPlane, http: httpx.AsyncClient, ray: FakeRay, clock: Clock) -> None:
        self.plane = plane
        self.http = http
        self.ray = ray
        self.clock = clock

    async def submit(self, content: Mapping[str, Any] = SPEC, **headers: str) -> dict[str, Any]:
        answer = await self.http.post("/v1/jobs", json=content, headers=headers)
        assert answer.status_code == 201, answer.text
        return answer.json()

    async def get(self, path: str, **query: Any) -> dict[str, Any]:
        answer = await self.http.get(path, params=query)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def job(self, job_id: str) -> dict[str, Any]:
        return await self.get(f"/v1/jobs/{job_id}")

    async def post(self, path: str, content: Any = None) -> dict[str, Any]:
        answer = await self.http.post(path, json=content)
        assert answer.is_success, answer.text
        return answer.json()

    async def events(self, job_id: str) -> list[str]:
        return [event["kind"] for event in (await self.get(f"/v1/jobs/{job_id}/events"))["items"]]

    async def rounds(self, count: int = 1) -> None:
        for _ in range(count):
            await self.plane.supervisor.round()

    async def started(self, content: Mapping[str, Any] = SPEC) -> tuple[dict[str, Any], Driver]:
        """A job whose attempt Ray has, and its driver, not heard of yet."""
        job = await self.submit(content)
        await self.rounds()
        return job, self.driver()

    async def running(self, content: Mapping[str, Any] = SPEC) -> tuple[dict[str, Any], Driver]:
        """A job that trains."""
        job, driver = await self.started(content)
        await driver.sync("RUNNING")
        return job, driver

    def driver(self) -> Driver:
        """The driver of the newest submission."""
        attempt, submission = self.ray.submissions[-1]
        return Driver(self, attempt, submission)


class Driver:
    """Reports as a driver does."""

    def __init__(self, world: World, attempt: str, submission: Submission) -> None:
        self.world = world
        self.attempt = attempt
        self.submission = submission
        self.epoch = int(submission.argument("--epoch"))
        self.workers = int(submission.argument("--workers"))
        self.seen = 0
        self.event_seq = 0
        self.metric_seq = 0

    def event(self, kind: str, **more: Any) -> dict[str, Any]:
        self.event_seq += 1
        at = self.world.clock().isoformat()
        return {"seq": self.event_seq, "at": at, "kind": kind, "message": f"about {kind}", **more}

    def metric(self, step: int, **more: Any) -> dict[str, Any]:
        self.metric_seq += 1
        return {"seq": self.metric_seq, "metric": metric(step, self.world.clock(), **more)}

    async def post(self, state: str, **more: Any) -> httpx.Response:
        data = self.workers // 4
        request = {
            "epoch": self.epoch,
            "state": state,
            "reason_code": f"driver_{state.lower()}",
            "reason_message": f"says {state}",
            "generation": 1,
            "layout": {"data": data, "pipeline": 2, "tensor": 2, "micro_batch": 1, "accumulation": 8 // data},
            "members": members(self.workers),
            "seen_version": self.seen,
            **more,
        }
        token = self.submission.environment["RUBATO_ATTEMPT_TOKEN"]
        return await self.world.http.post(
            f"/v1/attempts/{self.attempt}/sync", json=request, headers={"Authorization": f"Bearer {token}"}
        )

    async def sync(self, state: str, **more: Any) -> dict[str, Any]:
        answer = await self.post(state, **more)
        assert answer.status_code == 200, answer.text
        reply = answer.json()
        self.seen = reply["version"]
        return reply


def metric(step: int, at: datetime, **more: Any) -> dict[str, Any]:
    return {
        "step": step,
        "at": at.isoformat(),
        "loss": 5.0 / step,
        "grad_norm": 1.0,
        "lr": 1e-3,
        "tokens": 2048 * step,
        "tokens_per_s": 1024.0,
        "step_s": 2.0,
        "mfu": 0.25,
        "generation": 1,
        "data": 1,
        **more,
    }


def members(count: int, state: str = "training") -> list[dict[str, Any]]:
    return [
        {
            "replica": f"r{rank // 4}",
            "data": rank // 4,
            "pipeline": rank % 4 // 2,
            "tensor": rank % 2,
            "rank": rank,
            "state": state,
            "pid": 1000 + rank,
        }
        for rank in range(count)
    ]


@dataclass
class Host:
    """Where control planes start: one database and one folder, which outlive them."""

    database_url: str
    home: Path
    clock: Clock = field(default_factory=Clock)

    def __post_init__(self) -> None:
        self.ray = FakeRay(self.clock)

    @contextlib.asynccontextmanager
    async def world(self, **settings: Any) -> AsyncIterator[World]:
        """A control plane, until the end of the block, where it dies without a word."""
        usual: dict[str, Any] = {
            "ray_dashboard": "http://ray.test:8265",
            "database_poll": 1000.0,
            "allowed_hosts": "rubato.test",
            "elastic": False,
        }
        chosen = Settings(home=self.home, database_url=self.database_url, **{**usual, **settings})
        async with open_control_plane(chosen, self.ray, self.clock) as plane:
            transport = httpx.ASGITransport(create_app(plane), raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://rubato.test") as http:
                yield World(plane, http, self.ray, self.clock)
