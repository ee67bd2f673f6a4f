"""Replicas that come, go and die leave no trace in the curve. With the real rendezvous, without Ray."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import select
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from rubato.layout import Layout
from rubato.spec import JobSpec
from tests.engine.forked import TIMEOUT, Rank, RankError, end_all, fork_ranks, in_one_process, start_group, wait
from tests.engine.jobs import tiny_spec, train_at, write_corpus
from workers.driver.rendezvous.client import RendezvousMembership
from workers.driver.rendezvous.policy import Patience, Policy
from workers.driver.rendezvous.protocol import Hello
from workers.driver.rendezvous.server import Rendezvous
from workers.engine.data import Sampler
from workers.engine.device import Device, GlooGroup
from workers.engine.mesh import ReplicaMesh
from workers.engine.run import RunDirectory
from workers.engine.train import TrainResult, train

STEPS = 24
SHAPES = [{"pipeline": 2, "tensor": 1, "micro_batch": 2}, {"pipeline": 1, "tensor": 2, "micro_batch": 4}]

GATES = range(3, STEPS, 2)

Sabotage = Callable[[str, int], None]


class Ear:
    """Writes down what the rendezvous tells its listener, a JSON object a line."""

    def __init__(self, writer: int) -> None:
        self._writer = writer

    def tell(self, kind: str, **what: Any) -> None:
        os.write(self._writer, (json.dumps({"kind": kind, **what}) + "\n").encode())

    def reported(self, link: Any, topic: str, record: dict[str, Any]) -> None:
        self.tell(topic, record=record)

    def generation_formed(self, formed: Any) -> None:
        self.tell("formed", replicas=formed.replicas, step=formed.step, healed=formed.healed)

    def all_done(self) -> None:
        self.tell("done")

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *arguments: self.tell(name)


def serve(commands: int, writer: int, tensor: int, size: int) -> None:
    """The rendezvous of a job. A line of ``commands`` is the list of replicas that are wanted; its end is the end."""

    async def main() -> None:
        ear = Ear(writer)
        policy = Policy(size, patience=Patience(batch=0.2, assemble=60.0, leave=60.0))
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


class Gates:
    """Steps that no worker begins before the test opens the way, so that nobody is done before all has happened."""

    def __init__(self) -> None:
        self._closed = {step: os.pipe() for step in GATES}
        self._readers = {step: reader for step, (reader, _) in self._closed.items()}

    def pass_through(self) -> None:
        """To be called in a fork: makes its sampler wait at closed gates."""
        for _, writer in self._closed.values():
            os.close(writer)
        batch, readers = Sampler.batch, self._readers

        def waiting(self: Sampler, step: int, samples: range) -> tuple[Tensor, Tensor]:
            if step in readers:
                os.read(readers[step], 1)  # returns once the last writer is closed
            return batch(self, step, samples)

        Sampler.batch = waiting  # type: ignore[method-assign]

    def open_next(self) -> None:
        step = min(self._closed)
        os.close(self._closed.pop(step)[1])

    def open_all(self) -> None:
        while self._closed:
            self.open_next()

    def close(self) -> None:
        self.open_all()
        for reader in self._readers.values():
            os.close(reader)


@dataclass
class Job:
    """A job under test: its rendezvous, its replicas, and what has been heard of it."""

    spec: JobSpec
    run: Path
    sabotage: Sabotage = lambda replica, rank: None

    def __post_init__(self) -> None:
        reader, writer = os.pipe()
        commands, self._commands = os.pipe()
        self.gates = Gates()
        shape = self.spec.parallelism

        def rendezvous() -> None:
            os.close(self._commands)
            self.gates.pass_through()
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
            os.close(self._commands)
            self.gates.pass_through()
            self.sabotage(replica, rank)
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

    def until(self, happened: Callable[[], bool], seconds: float = 150) -> None:
        """Waits until something has been heard."""
        deadline = time.monotonic() + seconds
        while not happened():
            try:
                wait([self.server, self], lambda: self._listen() or happened(), deadline - time.monotonic())
            except RankError as error:
                raise RankError(f"{error}\n{self._story()}") from error

    def _story(self) -> str:
        """What has been heard, and how those workers ended that have."""
        told = [f"{each['kind']} {each.get('replicas', '')}" for each in self.heard if each["kind"] != "metric"]
        lines = [f"{' x '.join([line, str(len([*same]))])}" for line, same in itertools.groupby(told)]
        for rank in self.ranks:
            while not rank.ended and select.select([rank], [], [], 0)[0]:
                rank.read()
            lines.append(f"{rank.name}: {rank.outcome or 'runs'}")
        return "\n".join(lines)

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

    def let_in(self, replicas: int) -> None:
        """Lets the workers that train go on until they are ``replicas``, but no further than they must."""
        formed = self.formed_with(replicas)
        while not formed():
            self.until(lambda: formed() or self._asked_to_leave())
            if not formed():
                before = len(self.all("formed"))
                self.gates.open_next()
                self.until(lambda before=before: len(self.all("formed")) > before)

    def _asked_to_leave(self) -> bool:
        latest = [each["kind"] for each in self.heard if each["kind"] in ("formed", "boundary_asked")]
        return latest[-1:] == ["boundary_asked"]

    def finish(self) -> None:
        """Lets the job run to its end."""
        self.gates.open_all()
        self.until(lambda: bool(self.all("done")))

    def kill_one(self, replica: str, place: int) -> None:
        """SIGKILL for one worker; its mates must end by themselves."""
        ranks = self.replicas[replica]
        ranks[place].kill()
        wait(ranks, lambda: all(rank.ended for rank in ranks), 90)

    def close(self) -> None:
        end_all([*self.ranks, self.server])
        self.gates.close()
        os.close(self._commands)
        os.close(self._reader)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def spec_of(corpus: Path, shape: dict[str, int]) -> JobSpec:
    size = shape["pipeline"] * shape["tensor"]
    return tiny_spec(
        corpus,
        parallelism=shape,
        train={"steps": STEPS, "global_batch": 12},
        checkpoint={"every": 4, "keep_last": 2},
        workers={"min": size, "max": 3 * size},
    )


@pytest.fixture(scope="module")
def reference(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("reference")
    spec = spec_of(corpus, {"pipeline": 1, "tensor": 1, "micro_batch": 4})
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
    job.let_in(3)
    for _ in range(2):
        job.reach(job.step + 1)
        threading.Event().wait(chance.uniform(0, 0.05))  # somewhere in a step
        victim = chance.choice("abc")
        job.kill_one(victim, chance.randrange(job.spec.parallelism.replica_size))
        job.gates.open_next()
        job.until(job.formed_with(2))
        job.start(victim)
        job.let_in(3)
    job.want("b")
    job.finish()
    everybody = job.replicas["a"] + job.replicas["b"] + job.replicas["c"]
    wait(everybody, lambda: all(rank.ended for rank in everybody), 90)
    assert [rank.result().finished for rank in job.replicas["b"]] == [True, True]
    assert_same_curve(job, reference)


def test_everybody_dies_and_the_newest_checkpoint_is_loaded(job: Job, reference: list[dict[str, Any]]) -> None:
    job.want("a", "b")
    job.start("a")
    job.start("b")
    job.gates.open_next()
    job.reach(5)  # and no further
    for rank in job.ranks:
        rank.kill()
    wait(job.ranks, lambda: all(rank.ended for rank in job.ranks), 90)
    job.want("a")
    job.start("a")
    job.finish()
    restored = [each["record"]["data"]["step"] for each in job.all("event") if "restored" in each["record"]["kind"]]
    assert restored == [4]
    assert_same_curve(job, reference)


def test_two_replicas_die_at_once(job: Job, reference: list[dict[str, Any]]) -> None:
    job.want("a", "b", "c")
    for replica in "abc":
        job.start(replica)
    job.reach(2)
    for replica in "ac":
        job.replicas[replica][-1].kill()
    lost = job.replicas["a"] + job.replicas["c"]
    job.gates.open_next()
    wait(lost, lambda: all(rank.ended for rank in lost), 90)
    job.until(lambda: job.all("formed")[-1]["replicas"] == ["b"])
    job.start("a")
    job.let_in(2)
    assert job.all("formed")[-1]["replicas"] == ["b", "a"]
    job.finish()
    assert_same_curve(job, reference)


@pytest.mark.long
def test_compressed_sums_outlive_losses_and_newcomers(
    corpus: Path, reference: list[dict[str, Any]], tmp_path: Path
) -> None:
    plain = spec_of(corpus, SHAPES[0]).model_dump(mode="json")
    communication = {"bucket_mb": 0.004, "compression": "int8"}
    job = Job(JobSpec.model_validate({**plain, "communication": communication}), tmp_path)
    try:
        job.want("a", "b")
        job.start("a")
        job.start("b")
        job.reach(3)
        job.kill_one("b", 1)
        job.gates.open_next()
        job.until(job.formed_with(1))
        job.start("b")
        job.let_in(2)
        job.finish()
        found = {metric["step"]: metric["loss"] for metric in job.metrics}
        assert sorted(found) == list(range(1, STEPS + 1))
        exact = [metric["loss"] for metric in reference]
        assert list(found.values()) != pytest.approx(exact, rel=1e-9)
        assert [found[step] for step in sorted(found)] == pytest.approx(exact, rel=0.02)
    finally:
        job.close()


class Lost(NamedTuple):
    """The ``call``-th reduction of a kind that fails at the workers ``ranks`` of replica b, though it went through."""

    operation: str
    call: int
    ranks: set[int]
    goes_on_from: int


@pytest.mark.parametrize(
    "lost",
    [
        # The gradients of step 6 are summed everywhere, but b does not know: all have 5 steps and repeat the sixth.
        Lost("SUM", 6, {0, 1}, 5),
        Lost("SUM", 6, {1}, 5),
        # One worker of b loses the axis in the midst of its sixth backward pass, which its mate needs it to finish.
        Lost("BEGIN", 6, {1}, 5),
        # Step 6 is committed, but b does not know: a has taken it, b catches up with the gradients it holds.
        Lost("MAX", 6, {0, 1}, 6),
        Lost("MAX", 6, {0}, 6),
    ],
    ids=lambda lost: f"{lost.operation}-{len(lost.ranks)}",
)
def test_step_is_whole_when_it_fails_between_two_calls(
    lost: Lost, corpus: Path, reference: list[dict[str, Any]], tmp_path: Path
) -> None:
    def sabotage(replica: str, rank: int) -> None:
        os.close(writer)
        if replica != "b" or rank not in lost.ranks:
            return
        reduce, calls = GlooGroup.all_reduce, itertools.count(1)
        begin, sums = GlooGroup.begin_all_reduce, itertools.count(1)
        step, failed = [next(sums)], threading.Event()
        groups: list[GlooGroup] = []

        def failing_to_begin(self: GlooGroup, tensors: Sequence[Tensor], operation: Any) -> None:
            if (
                lost.operation == "BEGIN"
                and operation == dist.ReduceOp.SUM
                and step == [lost.call]
                and not failed.is_set()
            ):
                failed.set()
                raise RuntimeError("the test says that this failed")
            begin(self, tensors, operation)

        def failing(self: GlooGroup, tensors: Sequence[Tensor], operation: Any) -> None:
            groups.append(self)  # a mate may fail first: then the call is never made, and is not made up for later
            kind = operation == getattr(dist.ReduceOp, lost.operation, None)
            this_one = self is groups[0] and kind and next(calls) == lost.call
            reduce(self, tensors, operation)
            if operation == dist.ReduceOp.SUM:
                step[0] = next(sums)
            if this_one:
                os.read(reader, 1)  # until a has gone as far as it can
                raise RuntimeError("the test says that this failed")

        GlooGroup.all_reduce = failing  # type: ignore[method-assign]
        GlooGroup.begin_all_reduce = failing_to_begin  # type: ignore[method-assign]

    job = Job(spec_of(corpus, SHAPES[0]), tmp_path, sabotage)
    reader, writer = os.pipe()  # made after the rendezvous was forked, which would keep it open
    try:
        job.want("a", "b")
        job.start("a")
        job.start("b")
        job.gates.open_all()
        job.reach(lost.goes_on_from)
        os.close(writer)
        job.finish()
        formed = job.all("formed")
        assert len(formed) == 2, formed
        first, second = formed
        assert (first["step"], second["step"], second["healed"]) == (None, lost.goes_on_from, [])
        assert_same_curve(job, reference)
    finally:
        job.close()
        os.close(reader)
