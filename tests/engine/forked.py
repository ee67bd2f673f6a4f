"""Runs ranks as forks of the test process: torch is imported once, so eight of them are there in a second.

The test process itself must compute nothing with torch: threads do not survive a fork.
"""

from __future__ import annotations

import os
import pickle
import select
import signal
import socket
import time
import traceback
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import torch.distributed.checkpoint
import torch.distributed.pipelining
import torch.distributed.tensor.parallel

from workers.driver.forkserver.server import die_with

TIMEOUT = timedelta(seconds=120)


class RankError(Exception):
    """A rank raised, died or did not end in time; the text is its own traceback where there is one."""


class Rank:
    """A forked process that sends back what ``function`` returned, or the traceback of what it raised."""

    def __init__(self, name: str, function: Callable[[], Any]) -> None:
        self.name = name
        self.outcome: tuple[str, Any] | None = None
        self._reader, writer = os.pipe()
        parent = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            die_with(parent)  # a test run that is killed leaves nobody waiting for a peer
            os.close(self._reader)
            _child(writer, function)
        os.close(writer)
        self._received = b""

    def fileno(self) -> int:
        """Readable when there is something to `read`."""
        return self._reader

    @property
    def ended(self) -> bool:
        """Whether the process is over and reaped."""
        return self.outcome is not None

    def read(self) -> None:
        """Takes what has arrived; at the end of it, reaps the process."""
        part = os.read(self._reader, 1 << 20)
        self._received += part
        if part:
            return
        os.close(self._reader)
        status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        if self._received:
            self.outcome = pickle.loads(self._received)
        else:
            how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"exited with {status}"
            self.outcome = ("died", f"{self.name} {how}")

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Sends a signal, if the process is still there."""
        if not self.ended:
            os.kill(self.pid, number)

    def result(self) -> Any:
        """What the function returned. Raises RankError."""
        assert self.outcome is not None
        kind, value = self.outcome
        if kind != "returned":
            raise RankError(f"{self.name}: {value}")
        return value


def _child(writer: int, function: Callable[[], Any]) -> NoReturn:
    try:
        torch.set_num_threads(1)
        outcome: tuple[str, Any] = ("returned", function())
    except BaseException:  # noqa: BLE001 (everything is told, nothing goes on)
        outcome = ("raised", traceback.format_exc())
    data = pickle.dumps(outcome)
    while data:
        data = data[os.write(writer, data) :]
    os._exit(0)  # not through pytest, whose process this is a copy of


def wait(ranks: Iterable[Rank], until: Callable[[], bool], seconds: float) -> None:
    """Reads from ranks until something is so. Raises RankError when it is not in time."""
    deadline = time.monotonic() + seconds
    while not until():
        running = [rank for rank in ranks if not rank.ended]
        left = deadline - time.monotonic()
        if left <= 0 or not running:
            state = ", ".join(rank.name for rank in running) or "none"
            raise RankError(f"not there after {seconds:g} s; still running: {state}")
        for rank in select.select(running, [], [], left)[0]:
            rank.read()


def end_all(ranks: Iterable[Rank]) -> None:
    """Kills and reaps what is left."""
    left = [rank for rank in ranks if not rank.ended]
    for rank in left:
        rank.kill()
    for rank in left:
        while not rank.ended:
            rank.read()


def fork_ranks(size: int, function: Callable[[int, dist.Store], Any], name: str = "rank") -> list[Rank]:
    """Calls ``function(rank, store)`` in ``size`` processes that share a store, which rank 0 keeps."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return [
            Rank(f"{name} {rank}", lambda rank=rank: function(rank, _store(rank, listener))) for rank in range(size)
        ]


def run_ranks(size: int, function: Callable[[int, dist.Store], Any], *, seconds: float = 240) -> list[Any]:
    """Calls ``function(rank, store)`` in ``size`` processes; what they returned, by rank.

    Raises:
        RankError: with the traceback of the first rank that failed; the others are killed.
    """

    def stay_for_all(rank: int, store: dist.Store) -> Any:
        result = function(rank, store)
        store.set(f"done/{rank}", "")
        if rank == 0:  # it keeps the store
            store.wait([f"done/{other}" for other in range(size)])
        return result

    ranks = fork_ranks(size, stay_for_all)
    try:
        wait(ranks, lambda: all(rank.ended for rank in ranks) or any(map(_failed, ranks)), seconds)
        if any(map(_failed, ranks)):
            # Who lost a peer fails too, a moment later: the first to fail is the one to hear of.
            first = next(filter(_failed, ranks))
            first.result()
    finally:
        end_all(ranks)
    return [rank.result() for rank in ranks]


def _failed(rank: Rank) -> bool:
    return rank.outcome is not None and rank.outcome[0] != "returned"


def _store(rank: int, listener: socket.socket) -> dist.Store:
    host, port = listener.getsockname()
    if rank == 0:
        return dist.TCPStore(
            host, port, is_master=True, wait_for_workers=False, timeout=TIMEOUT, master_listen_fd=listener.detach()
        )
    listener.close()
    return dist.TCPStore(host, port, is_master=False, timeout=TIMEOUT)


def start_group(store: dist.Store, name: str, rank: int, size: int) -> None:
    """Makes ``size`` ranks the default process group; ``name`` is new for each."""
    dist.init_process_group("gloo", store=dist.PrefixStore(name, store), rank=rank, world_size=size, timeout=TIMEOUT)


def in_one_process(function: Callable[[], Any], *, seconds: float = 240) -> Any:
    """Calls ``function`` in a fork of its own."""
    return run_ranks(1, lambda rank, store: function(), seconds=seconds)[0]
