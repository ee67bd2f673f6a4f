"""A worker's line to the rendezvous: the engine's Membership over one socket."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Literal

from torch.distributed import PrefixStore, Store, TCPStore

from workers.driver.rendezvous import protocol
from workers.engine.membership import Generation, Standing

CONNECT_S = 30.0
STORE_TIMEOUT = timedelta(seconds=60)


class RendezvousLostError(RuntimeError):
    """The driver cannot be reached any more; without it nobody can say who trains."""


class RendezvousMembership:
    """One worker's membership. Connects and says hello when made; ``close`` says goodbye.

    Args:
        host, port: where the rendezvous listens.
        hello: who this worker is.
        beat_s: seconds between signs of life.

    Raises:
        RendezvousLostError: it cannot be reached, or does not let this worker in.
    """

    def __init__(self, host: str, port: int, hello: protocol.Hello, *, beat_s: float = 1.0) -> None:
        self._beat_s = beat_s
        self._outbox: queue.SimpleQueue[protocol.Message | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._answer: protocol.Form | protocol.Release | None = None
        self._lost: str | None = None
        self._generation = 0
        self._broken = -1
        self._boundary = -1
        self._profile: int | None = None
        self._save = False
        self._on_broken: Callable[[], None] | None = None
        self._store: TCPStore | None = None
        try:
            self._socket = socket.create_connection((host, port), timeout=CONNECT_S)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._lines = self._socket.makefile("rb")
            self._socket.sendall(hello.line())
            self.released = protocol.welcome(self._lines.readline()).released
        except (OSError, ValueError) as error:
            raise RendezvousLostError(f"cannot join the rendezvous at {host}:{port}: {error}") from error
        self._socket.settimeout(None)
        self._reader = threading.Thread(target=self._read, name="rendezvous-read", daemon=True)
        self._writer = threading.Thread(target=self._write, name="rendezvous-write", daemon=True)
        self._reader.start()
        self._writer.start()

    # Membership.

    def join(self, standing: Standing) -> Generation | None:
        """Blocks until the next generation forms. None: the job is finished or this replica was let go.

        Raises:
            RendezvousLostError: the driver is gone.
        """
        self._send(protocol.Ready(step=standing.step, prepared=standing.prepared, commit=standing.commit))
        with self._changed:
            self._changed.wait_for(lambda: self._answer is not None or self._lost is not None)
            answer, self._answer = self._answer, None
            if answer is None:
                raise RendezvousLostError(f"the rendezvous is gone: {self._lost}")
            if isinstance(answer, protocol.Release):
                self._save = answer.save
                return None
        return Generation(
            number=answer.generation,
            data=answer.data,
            replica=answer.replica,
            step=answer.step,
            roll_forward=answer.roll_forward,
            source=answer.source,
            commit=answer.commit,
            store=self._open_store(answer),
            nodes=answer.nodes,
        )

    def save_requested(self) -> bool:
        """Whether this replica saves its state before it ends."""
        return self._save

    def boundary_requested(self) -> bool:
        """Whether the current generation is to be left at the end of a step."""
        return self._boundary == self._generation

    def profile_requested(self) -> int | None:
        """How many steps are to be recorded from now on; asked again, None."""
        with self._changed:
            steps, self._profile = self._profile, None
        return steps

    def on_broken(self, callback: Callable[[], None] | None) -> None:
        """Calls ``callback`` from another thread when a member of the current generation is gone, or is already."""
        with self._changed:
            self._on_broken = callback
            late = callback is not None and self._broken == self._generation
        if late and callback is not None:
            threading.Thread(target=callback, name="generation-broken", daemon=True).start()

    def failed(self, generation: Generation, cause: str) -> None:
        """Says that the data axis of this generation failed here."""
        self._send(protocol.Failed(generation=generation.number, cause=cause))

    def report(self, kind: str, record: dict[str, Any]) -> None:
        """Hands a record to the driver. Never blocks, never fails."""
        self._send(protocol.Report(topic=kind, record=record))

    def finish(self) -> None:
        """Says that all steps are done here, the last checkpoint included."""
        self._send(protocol.Finished())

    # Beyond what the engine needs.

    def crashed(self, fault: Literal["user", "program", "replica"], cause: str) -> None:
        """Says that this worker is about to end, and why."""
        self._send(protocol.Crashed(fault=fault, cause=cause))

    def close(self, *, goodbye: bool = True) -> None:
        """Sends what is still unsent, then ends the connection."""
        if goodbye:
            self._send(protocol.Goodbye())
        self._outbox.put(None)
        self._writer.join(timeout=CONNECT_S)
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._reader.join(timeout=CONNECT_S)
        self._lines.close()
        self._socket.close()

    # Threads.

    def _send(self, message: protocol.Message) -> None:
        self._outbox.put(message)

    def _write(self) -> None:
        while True:
            try:
                message = self._outbox.get(timeout=self._beat_s)
            except queue.Empty:
                message = protocol.Beat()
            if message is None:
                return
            try:
                self._socket.sendall(message.line())
            except OSError as error:
                self._set_lost(f"sending failed: {error}")
                return

    def _read(self) -> None:
        cause = "the connection was closed"
        try:
            while line := self._lines.readline():
                self._hear(protocol.to_worker(line))
        except (OSError, ValueError) as error:
            cause = str(error)
        self._set_lost(cause)

    def _hear(self, message: protocol.ToWorker) -> None:
        callback = None
        with self._changed:
            match message:
                case protocol.Form():
                    self._generation = message.generation
                    self._answer = message
                case protocol.Release():
                    self._answer = message
                case protocol.Boundary():
                    self._boundary = message.generation
                case protocol.Profile():
                    self._profile = message.steps
                case protocol.Broken():
                    self._broken = message.generation
                    callback = self._on_broken
                case protocol.Welcome():
                    raise ValueError("a second welcome on one connection")
            self._changed.notify_all()
        if callback is not None:
            callback()

    def _set_lost(self, cause: str) -> None:
        with self._changed:
            self._lost = self._lost or cause
            self._changed.notify_all()

    def _open_store(self, form: protocol.Form) -> Store:
        if self._store is None:
            self._store = TCPStore(form.store_host, form.store_port, is_master=False, timeout=STORE_TIMEOUT)
        return PrefixStore(f"g{form.generation}", self._store)
