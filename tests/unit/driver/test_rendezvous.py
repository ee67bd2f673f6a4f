"""The rendezvous over real sockets: its server in an event loop, the engine's client in threads."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from workers.driver.rendezvous import protocol
from workers.driver.rendezvous.client import RendezvousLostError, RendezvousMembership
from workers.driver.rendezvous.current import Patience
from workers.driver.rendezvous.orders import Ended, Formed
from workers.driver.rendezvous.policy import Policy
from workers.driver.rendezvous.server import Address, Link, Loss, Rendezvous, Watch
from workers.engine.membership import Generation, Standing

NEW = Standing(None)


class Ear:
    """Keeps all that is heard."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, Any]] = []
        self.changed = asyncio.Event()

    def __getattr__(self, name: str) -> Callable[..., None]:
        def hear(*arguments: Any) -> None:
            self.heard.append((name, arguments[0] if len(arguments) == 1 else arguments))
            self.changed.set()

        return hear

    def of(self, name: str) -> list[Any]:
        return [what for kind, what in self.heard if kind == name]

    async def wait(self, name: str, count: int = 1) -> Any:
        async with asyncio.timeout(10):
            while len(self.of(name)) < count:
                self.changed.clear()
                await self.changed.wait()
        return self.of(name)[count - 1]


class Meeting:
    """A rendezvous of replicas of two workers, and what happens there."""

    def __init__(self, watch: Watch | None = None) -> None:
        self.ear = Ear()
        self.killed: list[tuple[int, str]] = []
        self.rendezvous = Rendezvous(
            Policy(2, patience=Patience(assemble=5)),
            self.ear,
            kill=lambda link, cause: self.killed.append((link.hello.pid, cause)),
            host="127.0.0.1",
            secret="open sesame",
            tensor=2,
            watch=watch,
        )
        self.address = Address("", 0)

    async def member(self, replica: str, tensor: int, **options: Any) -> RendezvousMembership:
        hello = protocol.Hello(
            secret="open sesame",
            replica=replica,
            incarnation=f"{replica}-1",
            pipeline=0,
            tensor=tensor,
            pid=ord(replica) * 10 + tensor,
            node_ip="127.0.0.1",
            node_id="n",
        )
        return await asyncio.to_thread(RendezvousMembership, *self.address, hello, **options)

    async def replica(self, name: str) -> list[RendezvousMembership]:
        return [await self.member(name, 0), await self.member(name, 1)]


@asynccontextmanager
async def meeting(*wanted: str, watch: Watch | None = None) -> AsyncIterator[Meeting]:
    here = Meeting(watch)
    here.address = await here.rendezvous.start()
    here.rendezvous.want(list(wanted))
    try:
        yield here
    finally:
        await here.rendezvous.close()


def until(condition: Callable[[], bool]) -> None:
    """What a worker does between steps: look."""
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


async def join(*members: RendezvousMembership, standing: Standing = NEW) -> list[Generation | None]:
    async with asyncio.timeout(10):
        return list(await asyncio.gather(*(asyncio.to_thread(member.join, standing) for member in members)))


async def close(*members: RendezvousMembership, **options: Any) -> None:
    await asyncio.gather(*(asyncio.to_thread(member.close, **options) for member in members))


async def test_a_generation_forms_and_its_members_meet_at_its_store() -> None:
    async with meeting("a", "b") as here:
        a, b = await here.replica("a"), await here.replica("b")
        generations = await join(*a, *b)
        assert all(generations)
        first, _, third, _ = generations
        assert first
        assert third
        assert [one.replica for one in generations if one] == [0, 0, 1, 1]
        assert {(one.number, one.data, one.step, one.source) for one in generations if one} == {(1, 2, None, None)}
        first.store.set("here", "I am")
        assert await asyncio.to_thread(third.store.get, "here") == b"I am"
        formed: Formed = await here.ear.wait("generation_formed")
        assert formed.replicas == ("a", "b")
        assert not a[0].boundary_requested()
        await close(*a, *b)


async def test_a_newcomer_is_let_in_at_a_boundary_and_healed() -> None:
    async with meeting("a") as here:
        a = await here.replica("a")
        (first, _) = await join(*a)
        assert first
        here.rendezvous.want(["a", "b"])
        b = await here.replica("b")
        joining = asyncio.gather(*(asyncio.to_thread(member.join, NEW) for member in b))
        await here.ear.wait("boundary_asked")
        await asyncio.to_thread(until, lambda: all(member.boundary_requested() for member in a))
        second = await join(*a, standing=Standing(7, commit={"loss": float("inf"), "grad_norm": 0.1}))
        news = await joining
        assert [one.replica for one in [*second, *news] if one] == [0, 0, 1, 1]
        assert {(one.step, one.source) for one in [*second, *news] if one} == {(7, 0)}
        assert news[0]
        assert news[0].commit == {"loss": float("inf"), "grad_norm": 0.1}
        first.store.set("key", "of the first")
        assert second[0]
        assert not second[0].store.check(["key"]), "each generation has keys of its own"
        assert not any(member.boundary_requested() for member in a)
        await close(*a, *b)


async def test_a_dead_connection_breaks_the_generation_for_the_others_at_once() -> None:
    async with meeting("a", "b") as here:
        a, b = await here.replica("a"), await here.replica("b")
        await join(*a, *b)
        told = threading.Event()
        a[0].on_broken(told.set)
        b[1]._socket.shutdown(socket.SHUT_RDWR)  # what the kernel does for a process that is killed
        assert await asyncio.to_thread(told.wait, 5)
        link, loss = await here.ear.wait("worker_lost")
        assert isinstance(link, Link)
        assert (link.hello.replica, link.hello.tensor) == ("b", 1)
        assert loss.fault == "unknown"
        late = threading.Event()
        a[1].on_broken(late.set)  # registered after the news has come
        assert await asyncio.to_thread(late.wait, 5)
        again = await join(*a, standing=Standing(3, True, {"x": 1.0}))
        assert [(one.number, one.data, one.step) for one in again if one] == [(2, 1, 3), (2, 1, 3)]
        ended: Ended = await here.ear.wait("generation_ended")
        assert ended.cause
        await close(*a, b[0])


async def test_what_a_worker_says_before_it_ends_is_its_cause_of_loss() -> None:
    async with meeting("a") as here:
        a = await here.replica("a")
        a[0].report("event", {"kind": "x", "message": "before", "data": {}})
        a[0].crashed("user", "data.train.path: is empty")
        await close(a[0], goodbye=False)
        _, loss = await here.ear.wait("worker_lost")
        assert loss == Loss("user", "data.train.path: is empty")
        assert here.ear.of("reported")[0][1:] == ("event", {"kind": "x", "message": "before", "data": {}})
        await close(a[1])
        assert not here.ear.of("worker_lost")[1:], "a goodbye is no loss"


async def test_a_failure_of_the_data_axis_is_passed_on() -> None:
    async with meeting("a", "b") as here:
        a, b = await here.replica("a"), await here.replica("b")
        generations = await join(*a, *b)
        told = threading.Event()
        b[0].on_broken(told.set)
        assert generations[0]
        a[0].failed(generations[0], "connection reset")
        assert await asyncio.to_thread(told.wait, 5)
        again = await join(*a, *b, standing=Standing(2))
        assert {one.number for one in again if one} == {2}
        await close(*a, *b)


async def test_who_is_not_wanted_hears_it_in_the_welcome_and_who_was_is_let_go_later() -> None:
    async with meeting("a", "b") as here:
        a, b = await here.replica("a"), await here.replica("b")
        await join(*a, *b)
        here.rendezvous.want(["a"])
        gone, stay = await asyncio.gather(join(*b, standing=Standing(1)), join(*a, standing=Standing(1)))
        assert gone == [None, None]
        assert [one.data for one in stay if one] == [1, 1]
        assert not b[0].save_requested()
        await close(*b)
        late = await here.member("c", 0)
        assert late.released
        assert not a[0].released
        await close(*a, late)


async def test_stopping_asks_one_replica_to_save() -> None:
    async with meeting("a", "b") as here:
        a, b = await here.replica("a"), await here.replica("b")
        await join(*a, *b)
        here.rendezvous.stop()
        others = asyncio.gather(*(asyncio.to_thread(member.join, Standing(5)) for member in b))
        assert await join(*a, standing=Standing(5)) == [None, None]
        assert [member.save_requested() for member in a] == [True, True]
        await asyncio.sleep(0.1)
        assert not others.done(), "nobody goes before the state is saved"
        await close(*a)
        assert await others == [None, None]
        assert [member.save_requested() for member in b] == [False, False]
        assert await here.ear.wait("all_stopped") == "a"
        await close(*b)


async def test_it_is_done_when_the_first_replica_has_finished() -> None:
    async with meeting("a") as here:
        a = await here.replica("a")
        await join(*a)
        for member in a:
            member.finish()
        await here.ear.wait("all_done")
        await close(*a)
        await here.ear.wait("worker_departed", 2)
        assert not here.ear.of("worker_lost")


async def test_a_silent_worker_is_killed_and_the_others_go_on() -> None:
    async with meeting("a", "b", watch=Watch(silence=0.6, every=0.1)) as here:
        a = [await here.member("a", place, beat_s=0.1) for place in (0, 1)]
        b = [await here.member("b", 0, beat_s=0.1), await here.member("b", 1, beat_s=3600)]
        await join(*a, *b)
        link, loss = await here.ear.wait("worker_lost")
        assert here.killed[0][0] == link.hello.pid == ord("b") * 10 + 1
        assert "no sign of life" in loss.cause
        again = await join(*a, standing=Standing(1))
        assert [one.data for one in again if one] == [1, 1]
        await close(*a, *b)


async def test_a_stranger_is_not_let_in() -> None:
    async with meeting("a") as here:
        hello = protocol.Hello(
            secret="guess", replica="a", incarnation="x", pipeline=0, tensor=0, pid=1, node_ip="", node_id=""
        )
        with pytest.raises(RendezvousLostError):
            await asyncio.to_thread(RendezvousMembership, *here.address, hello)
        reader, writer = await asyncio.open_connection(*here.address)
        writer.write(b"GET / HTTP/1.1\r\n")
        assert await reader.read() == b""
        writer.close()
        assert not here.ear.heard


async def test_ray_can_tell_of_workers_that_never_came() -> None:
    async with meeting("a") as here:
        _, writer = await asyncio.open_connection(*here.address)
        writer.write(protocol.Trouble(secret="open sesame", replica="a", cause="no module").line())
        assert await here.ear.wait("replica_in_trouble") == ("a", "no module")
        writer.close()


async def test_who_breaks_the_protocol_is_lost_and_nobody_else() -> None:
    async with meeting("a") as here:
        a = await here.replica("a")
        a[0]._socket.sendall(b"not json\n")
        _, loss = await here.ear.wait("worker_lost")
        assert "protocol" in loss.cause
        assert [link.hello.tensor for link in here.rendezvous.links()] == [1]
        await close(*a)


async def test_without_the_driver_a_worker_does_not_wait_for_ever() -> None:
    async with meeting("a", "b") as here:
        a = await here.replica("a")
        waiting = asyncio.gather(*(asyncio.to_thread(member.join, NEW) for member in a), return_exceptions=True)
        await here.ear.wait("worker_ready", 2)
    assert all(isinstance(result, RendezvousLostError) for result in await waiting)
    await close(*a)


async def test_the_others_go_on_though_the_news_of_a_loss_cannot_be_taken() -> None:
    async with meeting("a", "b") as here:

        def broken(*arguments: Any) -> None:
            raise OSError("No space left on device")

        here.ear.worker_lost = broken  # type: ignore[attr-defined]
        a, b = await here.replica("a"), await here.replica("b")
        await join(*a, *b)
        told = threading.Event()
        a[0].on_broken(told.set)
        b[1]._socket.shutdown(socket.SHUT_RDWR)
        assert await asyncio.to_thread(told.wait, 5)
        await close(*a, b[0])


async def test_the_policy_hears_who_steps_and_who_is_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[tuple[int, str | None]] = []
    monkeypatch.setattr(Policy, "progressed", lambda self, key, busy, now: heard.append((key, busy)) or [])
    async with meeting("a") as here:
        a = await here.replica("a")
        a[0].report("busy", {"doing": "checkpoint"})
        a[0].report("busy", {"doing": None})
        a[0].report("step", {"step": 3})
        a[0].report("event", {"kind": "x", "message": "", "data": {}})
        await here.ear.wait("reported", 4)
        assert heard == [(1, "checkpoint"), (1, None), (1, None)]
        await close(*a)
