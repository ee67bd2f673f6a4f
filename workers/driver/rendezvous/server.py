"""The rendezvous itself: one connection a worker, the policy behind it, and the store where generations meet."""

from __future__ import annotations

import asyncio
import hmac
import logging
import socket
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal, NamedTuple, Protocol

from pydantic import ValidationError
from torch.distributed import TCPStore

from rubato.placement import speeds
from workers.driver.rendezvous import protocol
from workers.driver.rendezvous.members import Incarnation, Member, State
from workers.driver.rendezvous.orders import (
    BoundaryOrder,
    BrokenOrder,
    Done,
    Ended,
    EvictOrder,
    Formed,
    FormOrder,
    Order,
    ReleaseOrder,
    Stopped,
)
from workers.driver.rendezvous.policy import Policy

log = logging.getLogger(__name__)

LINE_LIMIT = 1 << 20
GREETING_S = 30.0
STORE_TIMEOUT = timedelta(seconds=60)


class Address(NamedTuple):
    """Where workers connect."""

    host: str
    port: int


@dataclass(eq=False)
class Link:
    """A connected worker."""

    key: int
    hello: protocol.Hello
    place: int
    writer: asyncio.StreamWriter
    heard: float
    crashed: protocol.Crashed | None = None
    goodbye: bool = False
    finished: bool = False
    evicted: str | None = None
    open: bool = True

    @property
    def incarnation(self) -> Incarnation:
        """The workers it started with."""
        return Incarnation(self.hello.replica, self.hello.incarnation)

    def send(self, message: protocol.Message) -> None:
        """Writes a message; one for a connection that is going down is lost with it."""
        if not self.writer.is_closing():
            self.writer.write(message.line())


class Loss(NamedTuple):
    """How a worker was lost.

    ``fault``: what the worker said itself (protocol.Crashed), or "unknown" when it went without a word.
    """

    fault: Literal["user", "program", "replica", "unknown"]
    cause: str


class Listener(Protocol):
    """Who hears what happens at the rendezvous, from the event loop's thread."""

    def worker_arrived(self, link: Link) -> None: ...
    def worker_ready(self, link: Link) -> None: ...
    def worker_departed(self, link: Link) -> None: ...
    def worker_lost(self, link: Link, loss: Loss) -> None: ...
    def replica_in_trouble(self, replica: str, cause: str) -> None: ...
    def reported(self, link: Link, topic: str, record: dict[str, object]) -> None: ...
    def boundary_asked(self, generation: int) -> None: ...
    def generation_formed(self, formed: Formed) -> None: ...
    def generation_ended(self, ended: Ended) -> None: ...
    def all_done(self) -> None: ...
    def all_stopped(self, saved_by: str | None) -> None: ...


@dataclass(frozen=True)
class Watch:
    """Seconds of silence after which a worker counts as hung. Workers beat several times as often."""

    silence: float = 15.0
    every: float = 1.0


class Rendezvous:
    """Serves the workers of one job.

    Args:
        policy: who trains together.
        listener: who is told.
        kill: ends the process of a worker that hangs or was evicted; must not block.
        host: the address to listen at, reachable from every worker.
        secret: what a worker has to know to be let in.
        tensor: tensor-parallel degree, which turns coordinates in a replica into a place.
    """

    def __init__(
        self,
        policy: Policy,
        listener: Listener,
        *,
        kill: Callable[[Link, str], None],
        host: str,
        secret: str,
        tensor: int,
        watch: Watch | None = None,
    ) -> None:
        self._policy = policy
        self._listener = listener
        self._kill = kill
        self._host = host
        self._secret = secret
        self._tensor = tensor
        self._watch = watch or Watch()
        self._links: dict[int, Link] = {}
        self._keys = 0
        self._timer: asyncio.TimerHandle | None = None
        self._server: asyncio.Server | None = None
        self._served: dict[asyncio.Task[None], asyncio.StreamWriter] = {}
        self._watcher: asyncio.Task[None] | None = None
        self._store: TCPStore | None = None
        self._store_port = 0

    async def start(self) -> Address:
        """Listens; returns where. Raises OSError when the host cannot be bound."""
        # The store would listen on every interface of the machine if it opened its socket itself.
        listening = socket.create_server((self._host, 0), family=_family(self._host))
        self._store_port = listening.getsockname()[1]
        self._store = TCPStore(
            self._host,
            self._store_port,
            is_master=True,
            wait_for_workers=False,
            timeout=STORE_TIMEOUT,
            master_listen_fd=listening.detach(),
        )
        self._server = await asyncio.start_server(self._serve, self._host, 0, limit=LINE_LIMIT)
        self._watcher = asyncio.create_task(self._watch_for_silence(), name="rendezvous-watch")
        return Address(self._host, self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        """Stops listening and drops all connections without telling the listener."""
        if self._timer:
            self._timer.cancel()
        if self._watcher:
            self._watcher.cancel()
        if self._server:
            self._server.close()
        for link in self._links.values():
            link.open = False
        self._links.clear()
        for writer in self._served.values():
            writer.close()
        await asyncio.gather(*self._served, return_exceptions=True)

    @property
    def generation(self) -> int:
        """The number of the newest generation."""
        return self._policy.generation

    @property
    def running(self) -> bool:
        """Whether a generation trains and nothing has broken it."""
        return self._policy.running

    def links(self) -> list[Link]:
        """The workers that are connected."""
        return list(self._links.values())

    def want(self, replicas: list[str]) -> None:
        """These replicas are to train, and no others."""
        self._carry_out(self._policy.want(replicas, self._now()))

    def stop(self) -> None:
        """The job is to end at the next boundary, with a checkpoint."""
        self._carry_out(self._policy.stop(self._now()))

    # Connections.

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._served[task] = writer
        link: Link | None = None
        cause = "its connection ended without a word: the process was killed or its node is gone"
        try:
            link = await self._greet(reader, writer)
            while link is not None and link.open and (line := await reader.readline()):
                link.heard = self._now()
                self._hear(link, protocol.from_worker(line))
        except (ConnectionError, TimeoutError) as error:
            cause = f"its connection failed: {error}"
        except (ValueError, KeyError) as error:  # ValidationError is a ValueError, and so is a line over the limit
            cause = f"it does not keep to the protocol: {error}"
            log.exception("closing the connection of a worker")
        finally:
            if link is not None and link.open:
                self._drop(link, cause)
            writer.close()
            del self._served[task]

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Link | None:
        line = await asyncio.wait_for(reader.readline(), GREETING_S)
        match self._let_in(line):
            case protocol.Hello() as hello:
                return self._welcome(hello, writer)
            case protocol.Trouble() as trouble:
                self._listener.replica_in_trouble(trouble.replica, trouble.cause)
            case _:
                log.warning("refused a connection from %s that did not say hello", writer.get_extra_info("peername"))
        return None

    def _let_in(self, line: bytes) -> protocol.Hello | protocol.Trouble | None:
        """What somebody who knows the secret begins with."""
        try:
            message = protocol.from_worker(line)
        except ValidationError:
            return None
        if isinstance(message, protocol.Hello | protocol.Trouble) and hmac.compare_digest(message.secret, self._secret):
            return message
        return None

    def _welcome(self, hello: protocol.Hello, writer: asyncio.StreamWriter) -> Link:
        self._keys += 1
        link = Link(self._keys, hello, hello.pipeline * self._tensor + hello.tensor, writer, self._now())
        orders = self._policy.arrived(Member(link.key, link.incarnation, link.place, hello.node_id), self._now())
        self._links[link.key] = link
        link.send(protocol.Welcome(released=self._policy.group(link.key).released))
        self._listener.worker_arrived(link)
        self._carry_out(orders)
        return link

    def _hear(self, link: Link, message: protocol.FromWorker) -> None:
        now = self._now()
        match message:
            case protocol.Ready():
                state = State(message.step, message.prepared, message.commit)
                self._listener.worker_ready(link)
                self._carry_out(self._policy.ready(link.key, state, now))
            case protocol.Failed():
                self._carry_out(self._policy.failed(link.key, message.generation, message.cause, now))
            case protocol.Report():
                if message.topic in ("step", "busy"):
                    self._carry_out(self._policy.progressed(link.key, message.record.get("doing"), now))
                if message.record.get("kind") == "topology.measured":
                    self._policy.link_speeds = speeds(message.record["data"]["links"])
                self._listener.reported(link, message.topic, message.record)
            case protocol.Finished():
                link.finished = True
                self._carry_out(self._policy.finished(link.key, now))
            case protocol.Crashed():
                link.crashed = message
            case protocol.Goodbye():
                link.goodbye = True
            case protocol.Hello() | protocol.Trouble():
                raise ValueError(f"{message.kind} on a connection that has begun")
            case protocol.Beat():
                pass

    def _drop(self, link: Link, cause: str) -> None:
        link.open = False
        del self._links[link.key]
        now = self._now()
        orders = (self._policy.departed if link.goodbye else self._policy.lost)(link.key, now)
        try:
            if link.goodbye or link.finished:
                self._listener.worker_departed(link)
            elif link.crashed is not None:
                self._listener.worker_lost(link, Loss(link.crashed.fault, link.crashed.cause))
            else:
                self._listener.worker_lost(link, Loss("unknown", link.evicted or cause))
        finally:
            self._carry_out(orders)  # even if the listener fails: nobody is to wait for one that is gone

    async def _watch_for_silence(self) -> None:
        checked = self._now()
        while True:
            await asyncio.sleep(self._watch.every)
            now = self._now()
            if now - checked > 2 * self._watch.every + 1:  # this process was held up itself, so nobody was heard
                for link in self._links.values():
                    link.heard = now
            checked = now
            for link in [link for link in self._links.values() if now - link.heard > self._watch.silence]:
                cause = f"no sign of life for {self._watch.silence:g} s: the process hangs or its node is unreachable"
                self._kill(link, cause)
                self._drop(link, cause)
                link.writer.close()

    # Orders.

    def _carry_out(self, orders: list[Order]) -> None:
        for order in orders:
            match order:
                case FormOrder():
                    self._tell(
                        order.key,
                        protocol.Form(
                            generation=order.number,
                            data=order.data,
                            replica=order.replica,
                            step=order.step,
                            roll_forward=order.roll_forward,
                            source=order.source,
                            commit=order.commit,
                            nodes=order.nodes,
                            store_host=self._host,
                            store_port=self._store_port,
                        ),
                    )
                case BoundaryOrder():
                    self._tell(order.key, protocol.Boundary(generation=order.number))
                case BrokenOrder():
                    self._tell(order.key, protocol.Broken(generation=order.number))
                case ReleaseOrder():
                    self._tell(order.key, protocol.Release(save=order.save))
                case EvictOrder():
                    if link := self._links.get(order.key):
                        link.evicted = order.cause
                        self._kill(link, order.cause)
                case Formed():
                    self._listener.generation_formed(order)
                case Ended():
                    self._listener.generation_ended(order)
                case Done():
                    self._listener.all_done()
                case Stopped():
                    self._listener.all_stopped(order.saved_by)
        asked = {order.number for order in orders if isinstance(order, BoundaryOrder)}
        for generation in asked:
            self._listener.boundary_asked(generation)
        self._set_timer()

    def _tell(self, key: int, message: protocol.Message) -> None:
        if link := self._links.get(key):
            link.send(message)

    def _set_timer(self) -> None:
        if self._timer:
            self._timer.cancel()
            self._timer = None
        deadline = self._policy.deadline
        if deadline is not None:
            self._timer = asyncio.get_running_loop().call_at(deadline, self._tick)

    def _tick(self) -> None:
        self._carry_out(self._policy.tick(self._now()))

    def _now(self) -> float:
        return asyncio.get_running_loop().time()


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
