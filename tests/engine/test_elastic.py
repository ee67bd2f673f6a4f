"""Replicas that come, go and die leave no trace in the curve. With the real rendezvous, without Ray."""

from __future__ import annotations

import asyncio
import json
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rubato.layout import Layout
from rubato.spec import JobSpec
from tests.engine.forked import TIMEOUT, Rank, end_all, fork_ranks, in_one_process, start_group, wait
from tests.engine.jobs import tiny_spec, train_at, write_corpus
from workers.driver.rendezvous.client import RendezvousMembership
from workers.driver.rendezvous.policy import Patience, Policy
from workers.driver.rendezvous.protocol import Hello
from workers.driver.rendezvous.server import Rendezvous
from workers.engine.device import Device
from workers.engine.mesh import ReplicaMesh
from workers.engine.run import RunDirectory
from workers.engine.train import TrainResult, train

STEPS = 24
SHAPES = [{"pipeline": 2, "tensor": 1}, {"pipeline": 1, "tensor": 2}]


class Ear:
    """Writes down what the rendezvous tells its listener, a JSON object a line."""

    def __init__(self, writer: int) -> None:
        self._writer = writer

    def tell(self, kind: str, **what: Any) -> None:
        os.write(self._writer, (json.dumps({"kind": kind, **what}) + "\n").encode())

    def reported(self, link: Any, topic: str, record: dict[str, Any]) -> None:
        self.tell(topic, record=record)

    def generation_formed(self, formed: Any) -> None:
        self.tell("formed", replicas=formed.replicas, step=formed.step, source=formed.source)

    def all_done(self) -> None:
        self.tell("done")

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *arguments: self.tell(name)


def serve(commands: int, writer: int, tensor: int, size: int) -> None:
    """The rendezvous of a job. A line of ``commands`` is the list of replicas that are wanted; its end is the end."""

    async def main() -> None:
        ear = Ear(writer)
        policy = Policy(size, patience=Patience(batch=0.2, assemble=5.0, leave=20.0))
        rendezvous = Rendezvous(
            policy,
            ear,
            kill=lambda link, cause: os.kill(link.hello.pid, 9),
            host="127.0.0.1",
            secret="s",
            tensor=tensor,
        )
        address = await rendezvous.start()
        ear.tell("address", port=address.port)
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()

        def listen() -> None:
            for line in os.fdopen(commands):
                loop.call_soon_threadsafe(rendezvous.want, json.loads(line))
            loop.call_soon_threadsafe(ended.set)

        threading.Thread(target=listen, daemon=True).start()
        await ended.wait()
        await rendezvous.close()

    asyncio.run(main())


@dataclass
class Job:
    """A job under test: its rendezvous, its replicas, and what has been heard of it."""

    spec: JobSpec
    run: Path

    def __post_init__(self) -> None:
        reader, writer = os.pipe()
        commands, self._commands = os.pipe()
        shape = self.spec.parallelism

        def rendezvous() -> None:
            os.close(self._commands)
            serve(commands, writer, shape.tensor, shape.replica_size)

        self.server = Rank("rendezvous", rendezvous)
        os.close(writer)
        os.close(commands)
        os.set_blocking(reader, False)
        self._reader, self._rest = reader, b""
        self.heard: list[dict[str, Any]] = []
        self.replicas: dict[str, list[Rank]] = {}
        self.ranks: list[Rank] = []
        self.until(lambda: bool(self.all("address")))
        self.port = self.all("address")[0]["port"]

    def want(self, *replicas: str) -> None:
        os.write(self._commands, (json.dumps(replicas) + "\n").encode())

    def start(self, replica: str) -> None:
        """Starts the workers of a replica."""
        incarnation = f"{replica}-{len(self.ranks)}"

        def work(rank: int, store: dist.Store) -> TrainResult:
            torch.set_default_dtype(torch.float64)
            shape = self.spec.parallelism
            start_group(store, "replica", rank, shape.replica_size)
            mesh = ReplicaMesh.of_default_group(shape, Device.of_rank(0, gpu=False), TIMEOUT)
            hello = Hello(
                secret="s",
                replica=replica,
                incarnation=incarnation,
                pipeline=mesh.pipeline.index,
                tensor=mesh.tensor.index,
                pid=os.getpid(),
                node_ip="127.0.0.1",
                node_id="here",
            )
            membership = RendezvousMembership("127.0.0.1", self.port, hello)
            result = train(self.spec, membership=membership, mesh=mesh, run=RunDirectory.create(self.run))
            membership.close()
            return result

        self.replicas[replica] = fork_ranks(self.spec.parallelism.replica_size, work, incarnation)
        self.ranks += self.replicas[replica]

    def until(self, happened: Callable[[], bool], seconds: float = 60) -> None:
        """Waits until something has been heard."""
        deadline = time.monotonic() + seconds
        while not happened():
            wait([self.server, self], lambda: self._listen() or happened(), deadline - time.monotonic())

    # Read like a rank, so that one wait is for both.

    ended = False
    name = "the rendezvous's voice"

    def fileno(self) -> int:
        return self._reader

    def read(self) -> None:
        self._listen()

    def _listen(self) -> bool:
        try:
            part = os.read(self._reader, 1 << 20)
        except BlockingIOError:
            return False
        *lines, self._rest = (self._rest + part).split(b"\n")
        self.heard += map(json.loads, lines)
        return bool(lines)

    def all(self, kind: str) -> list[dict[str, Any]]:
        return [each for each in self.heard if each["kind"] == kind]

    @property
    def metrics(self) -> list[dict[str, Any]]:
        return [each["record"] for each in self.all("metric")]

    @property
    def step(self) -> int:
        """The last step reported."""
        return max((metric["step"] for metric in self.metrics), default=0)

    def reach(self, step: int) -> None:
        self.until(lambda: self.step >= step)

    def formed_with(self, replicas: int) -> Callable[[], bool]:
        return lambda: bool(self.all("formed")) and len(self.all("formed")[-1]["replicas"]) == replicas

    def kill_one(self, replica: str, place: int) -> None:
        """SIGKILL for one worker; its mates must end by themselves."""
        ranks = self.replicas[replica]
        ranks[place].kill()
        wait(ranks, lambda: all(rank.ended for rank in ranks), 30)

    def close(self) -> None:
        end_all([*self.ranks, self.server])
        os.close(self._commands)
        os.close(self._reader)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def spec_of(corpus: Path, shape: dict[str, int]) -> JobSpec:
    size = shape["pipeline"] * shape["tensor"]
    return tiny_spec(
        corpus,
        parallelism={**shape, "micro_batch": 2},
        train={"steps": STEPS, "global_batch": 12},
        checkpoint={"every": 4, "keep_last": 2},
        workers={"min": size, "max": 3 * size},
    )


@pytest.fixture(scope="module")
def reference(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("reference")
    spec = spec_of(corpus, {"pipeline": 1, "tensor": 1})
    return in_one_process(lambda: train_at(Layout(1, 1, 1), spec, folder))


@pytest.fixture(params=SHAPES, ids=lambda shape: f"{shape['pipeline']}x{shape['tensor']}")
def job(request: pytest.FixtureRequest, corpus: Path, tmp_path: Path) -> Iterator[Job]:
    job = Job(spec_of(corpus, request.param), tmp_path)
    yield job
    job.close()


def assert_same_curve(job: Job, reference: list[dict[str, Any]]) -> None:
    found = {metric["step"]: metric for metric in job.metrics}
    assert sorted(found) == list(range(1, STEPS + 1))
    for metric in job.metrics:
        expected = reference[metric["step"] - 1]
        for name in ("loss", "grad_norm", "lr", "tokens"):
            assert metric[name] == pytest.approx(expected[name], rel=1e-9), (metric["step"], name)


def test_grow_lose_and_shrink(job: Job, reference: list[dict[str, Any]]) -> None:
    chance = random.Random(str(job.spec.parallelism))
    job.want("a")
    job.start("a")
    job.reach(2)
    job.want("a", "b", "c")
    job.start("b")
    job.start("c")
    job.until(job.formed_with(3))
    for _ in range(2):
        job.reach(job.step + 1)
        threading.Event().wait(chance.uniform(0, 0.05))  # somewhere in a step
        victim = chance.choice("abc")
        job.kill_one(victim, chance.randrange(job.spec.parallelism.replica_size))
        job.until(job.formed_with(2))
        job.start(victim)
        job.until(job.formed_with(3))
    job.want("b")
    job.until(lambda: bool(job.all("done")))
    everybody = job.replicas["a"] + job.replicas["b"] + job.replicas["c"]
    wait(everybody, lambda: all(rank.ended for rank in everybody), 30)
    assert [rank.result().finished for rank in job.replicas["b"]] == [True, True]
    assert_same_curve(job, reference)


def test_everybody_dies_and_the_newest_checkpoint_is_loaded(job: Job, reference: list[dict[str, Any]]) -> None:
    job.want("a", "b")
    job.start("a")
    job.start("b")
    job.reach(6)
    for rank in job.ranks:
        rank.kill()
    wait(job.ranks, lambda: all(rank.ended for rank in job.ranks), 30)
    reached = job.step
    job.want("a")
    job.start("a")
    job.until(lambda: bool(job.all("done")))
    restored = [each["record"]["data"]["step"] for each in job.all("event") if "restored" in each["record"]["kind"]]
    assert restored == [reached - reached % 4]
    assert_same_curve(job, reference)
