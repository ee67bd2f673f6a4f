"""A real control plane on a real port, with a driver that a test speaks for.

Only Ray and training are not there: Ray is what the control plane is told of a cluster, and the test sends the sync
calls a driver would send.
"""

from __future__ import annotations

import asyncio
import shlex
import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import uvicorn

from rubato.resources import NodeView
from service.app import create_app
from service.cluster.ray import RayJob, RayJobState, Sight
from service.plane import open_control_plane
from service.settings import Settings

SPEC: dict[str, Any] = {
    "name": "byte-llama",
    "model": {"preset": "tiny"},
    "data": {"train": {"builtin": "python-stdlib"}, "sequence_length": 64},
    "train": {"steps": 100, "global_batch": 8},
    "parallelism": {"tensor": 2, "pipeline": 2},
    "workers": {"min": 4, "max": 8},
}


class IdleRay:
    """A cluster with room that starts nothing; it keeps what it was asked to start."""

    def __init__(self) -> None:
        self.submitted: dict[str, tuple[list[str], Mapping[str, str]]] = {}
        self.arrived = asyncio.Condition()

    async def look(self) -> Sight:
        node = NodeView(id="n1", ip="10.0.0.1", alive=True, cpus=64, gpus=0, cpus_free=60, gpus_free=0)
        return Sight(session="s1", version="2.60.0", nodes=[node])

    async def submit(self, submission_id: str, entrypoint: str, environment: Mapping[str, str]) -> None:
        async with self.arrived:
            self.submitted[submission_id] = (shlex.split(entrypoint), environment)
            self.arrived.notify_all()

    async def job(self, submission_id: str) -> RayJob | None:
        return RayJob(RayJobState.RUNNING, "", None) if submission_id in self.submitted else None

    async def stop(self, submission_id: str) -> None:
        """Nothing runs."""

    async def close(self) -> None:
        """Nothing is open."""


@dataclass
class Driver:
    """What a driver says of one attempt, by hand."""

    http: httpx.AsyncClient
    attempt: str
    epoch: int
    token: str
    events: list[dict[str, Any]] = field(default_factory=list)
    metrics: list[dict[str, Any]] = field(default_factory=list)
    step: int = 0
    generation: int = 0

    def event(self, kind: str, message: str, **data: Any) -> None:
        at = datetime.now(UTC).isoformat()
        self.events.append({"seq": len(self.events) + 1, "at": at, "kind": kind, "message": message, "data": data})

    def train(self, steps: int, data: int) -> None:
        """Steps whose loss goes down."""
        for _ in range(steps):
            self.step += 1
            metric = {
                "step": self.step,
                "at": datetime.now(UTC).isoformat(),
                "loss": 1.5 + 4.0 * 0.97**self.step,
                "grad_norm": 1.0,
                "lr": 3e-4,
                "tokens": self.step * 512,
                "tokens_per_s": 900.0 * data,
                "step_s": 0.5,
                "generation": self.generation,
                "data": data,
            }
            self.metrics.append({"seq": len(self.metrics) + 1, "metric": metric})

    async def sync(self, state: str, message: str, data: int, lost: Sequence[int] = ()) -> dict[str, Any]:
        """One sync call with everything so far; its reply. ``lost`` are world ranks."""
        members = [
            {
                "replica": f"r{rank // 4}",
                "data": rank // 4,
                "pipeline": rank // 2 % 2,
                "tensor": rank % 2,
                "rank": rank,
                "state": "lost" if rank in lost else "training",
                "pid": 4100 + rank,
                "node_ip": "10.0.0.1",
                "node_id": "n1",
            }
            for rank in range(4 * data)
        ]
        layout = {"data": data, "pipeline": 2, "tensor": 2, "micro_batch": 1, "accumulation": 8 // data}
        reply = await self.http.post(
            f"/v1/attempts/{self.attempt}/sync",
            headers={"Authorization": f"Bearer {self.token}"},
            json={
                "epoch": self.epoch,
                "state": state,
                "reason_code": state.lower(),
                "reason_message": message,
                "generation": self.generation,
                "layout": layout,
                "members": members,
                "events": self.events,
                "metrics": self.metrics,
            },
        )
        reply.raise_for_status()
        answer: dict[str, Any] = reply.json()
        return answer


@dataclass
class Rubato:
    """The service under test."""

    url: str
    http: httpx.AsyncClient
    ray: IdleRay

    async def submit(self, **changes: Any) -> dict[str, Any]:
        reply = await self.http.post("/v1/jobs", json=SPEC | changes)
        reply.raise_for_status()
        job: dict[str, Any] = reply.json()
        return job

    async def driver(self, job: dict[str, Any]) -> Driver:
        """The driver of a job, once the control plane has started it."""
        async with asyncio.timeout(20), self.ray.arrived:
            while True:
                for attempt, (words, environment) in self.ray.submitted.items():
                    options = dict(zip(words[3::2], words[4::2], strict=True))
                    if options["--run-dir"] == job["run_dir"]:
                        token = environment["RUBATO_ATTEMPT_TOKEN"]
                        return Driver(self.http, attempt, int(options["--epoch"]), token)
                await self.ray.arrived.wait()

    def log(self, job: dict[str, Any], text: str) -> None:
        """Writes the log of the driver of a job."""
        folder = Path(job["run_dir"]) / "logs" / "attempt-1"
        folder.mkdir(parents=True)
        (folder / "driver.log").write_text(text + "\n")

    async def training(self, **changes: Any) -> tuple[dict[str, Any], Driver]:
        """A job that trains at four workers and has done 20 steps."""
        job = await self.submit(**changes)
        driver = await self.driver(job)
        driver.generation = 1
        driver.event("generation.formed", "generation 1: 1 replica from step 0", generation=1, data=1, step=0)
        driver.train(20, data=1)
        await driver.sync("RUNNING", "training at 4 workers", data=1)
        return job, driver


@asynccontextmanager
async def served(home: Path, ray: IdleRay, port: int = 0) -> AsyncIterator[Rubato]:
    """The service with its supervisor, on a port, by default a free one."""
    with socket.create_server(("127.0.0.1", port)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        settings = Settings(
            home=home,
            runs=home / "runs",
            control_url=url,
            reconcile_every=0.1,
            heartbeat_timeout=600,
            elastic=False,
        )
        async with open_control_plane(settings, ray) as plane, plane.supervising():
            config = uvicorn.Config(create_app(plane), log_config=None, lifespan="off", access_log=False)
            server = uvicorn.Server(config)
            serving = asyncio.create_task(server.serve(sockets=[listener]))
            async with httpx.AsyncClient(base_url=url, trust_env=False) as http:
                yield Rubato(url, http, ray)
            server.should_exit = True
            plane.wakeups.close()  # else the streams that pages hold would keep it waiting
            await serving
