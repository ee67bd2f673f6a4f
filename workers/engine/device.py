"""CPU with gloo and GPU with NCCL behind one interface: where tensors live, and groups that can be torn down.

A group of the data axis must let go of everybody at once when a member is gone. Neither backend does that by itself:
a gloo call waits for its timeout unless a connection closes, and an NCCL call waits for ever.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rubato.problems import RubatoError
from workers.engine.connections import Connection, tcp_connections

# A store cannot be waited for and interrupted at once, so it is asked again and again.
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.02


@dataclass(frozen=True)
class Device:
    """Where a rank computes, and which backend its groups use."""

    torch_device: torch.device

    @classmethod
    def of_rank(cls, local_rank: int, *, gpu: bool) -> Device:
        """The GPU with the number of the rank on its host, or the CPU."""
        return cls(torch.device("cuda", local_rank) if gpu else torch.device("cpu"))

    @property
    def type(self) -> str:
        """ "cpu" or "cuda"."""
        return self.torch_device.type

    @property
    def backend(self) -> str:
        """The name torch.distributed knows the backend by."""
        return "nccl" if self.type == "cuda" else "gloo"

    def place(self, number: int) -> Device:
        """One of several devices of this worker, counted from this one.

        On the CPU all are one device, but what is received there is in memory of its own, as it is on a GPU.

        Raises:
            RubatoError: there are not so many.
        """
        if self.type == "cpu":
            return self
        index = (self.torch_device.index or 0) + number
        if index >= torch.cuda.device_count():
            raise RubatoError(
                f"parallelism.device_map names device {number}, this worker sees {torch.cuda.device_count()} GPUs",
                fix="place the layers on fewer devices, or give the worker more GPUs",
                code="too_few_devices",
                status=422,
            )
        return Device(torch.device("cuda", index))

    def receive(self, tensor: Tensor) -> Tensor:
        """A tensor from another place, here; its gradient goes back to where it came from."""
        return tensor.to(self.torch_device, non_blocking=True, copy=True)

    def synchronize(self) -> None:
        """Returns when all that was queued on the device is done."""
        if self.type == "cuda":
            torch.cuda.synchronize(self.torch_device)

    def finish_computing(self) -> None:
        """Returns when what was computed so far is there; what travels meanwhile may go on."""
        if self.type == "cuda":
            torch.cuda.current_stream(self.torch_device).synchronize()

    def apart(self, work: Callable[[], None]) -> Callable[[], None]:
        """``work``, for another thread, done with what was computed until now, and when it returns with all it did."""
        if self.type != "cuda":
            return work
        computed = torch.cuda.Event()
        computed.record(torch.cuda.current_stream(self.torch_device))

        def run() -> None:
            stream = torch.cuda.Stream(self.torch_device)
            with torch.cuda.stream(stream):
                stream.wait_event(computed)
                work()
                stream.synchronize()

        return run

    def breakable_group(self) -> BreakableGroup:
        """A group that is yet to be formed."""
        return NcclGroup(self.torch_device) if self.type == "cuda" else GlooGroup()


class GroupError(RuntimeError):
    """A call on a group failed: a member is gone, or the group was aborted."""


@dataclass(eq=False)
class Call:
    """A call that has begun; ``over`` once the backend has said so. ``then`` completes its result."""

    work: dist.Work
    over: bool = False
    then: Callable[[], object] = lambda: None


class BreakableGroup(ABC):
    """A process group whose calls block until they are done, if not said otherwise, and fail at once after `abort`.

    Every method but `abort` is called by one thread at a time. Errors are GroupError, and while it forms RuntimeError.

    Attributes:
        rank, size: which member this is, and of how many; once it is formed.
    """

    def __init__(self) -> None:
        self.rank, self.size = 0, 1
        self._aborted = threading.Event()
        self._news: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._pending: list[Call] = []
        self._group: Any = None

    def form(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        """Connects to the others. ``store`` is unique to this group."""
        self.rank, self.size = rank, size
        self._form(store, rank, size, timeout)

    @abstractmethod
    def _form(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None: ...

    def begin_all_reduce(self, tensors: Sequence[Tensor], operation: dist.ReduceOp.RedOpType) -> None:
        """Begins to reduce each tensor in place. It is theirs until the next call that blocks, which waits for it."""
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(operation)
        for tensor in tensors:
            self._begin(lambda tensor=tensor: self._group.allreduce([tensor], options))

    def all_reduce(self, tensors: Sequence[Tensor], operation: dist.ReduceOp.RedOpType) -> None:
        """Reduces each tensor in place."""
        self.begin_all_reduce(tensors, operation)
        self._finish()

    def broadcast(self, tensors: Sequence[Tensor], source: int) -> None:
        """Fills each tensor in place with that of the member ``source``."""
        options = dist.BroadcastOptions()
        options.rootRank = source
        options.rootTensor = 0
        for tensor in tensors:
            self._begin(lambda tensor=tensor: self._group.broadcast([tensor], options))
        self._finish()

    def all_to_all(self, received: Tensor, sent: Tensor, sizes: Sequence[int] = ()) -> None:
        """Sends row i of ``sent`` to member i, whose row for this one becomes row i of ``received``.

        With ``sizes`` it is so many rows for each member, and from it.
        """
        self.begin_all_to_all(received, sent, sizes)
        self._finish()

    def begin_all_to_all(self, received: Tensor, sent: Tensor, sizes: Sequence[int] = ()) -> Call:
        """Begins what `all_to_all` does."""
        splits = list(sizes)
        return self._begin(lambda: self._group.alltoall_base(received, sent, splits, splits, dist.AllToAllOptions()))

    def all_gather(self, received: Tensor, sent: Tensor) -> None:
        """Makes what member i sends row i of ``received``, which has a row for each; all rows are of one size."""
        self.begin_all_gather(received, sent)
        self._finish()

    def begin_all_gather(self, received: Tensor, sent: Tensor) -> Call:
        """Begins to make what member i sends row i of ``received``, which has a row for each; all of one size."""
        return self._begin(lambda: self._group._allgather_base(received, sent))

    @abstractmethod
    def begin_reduce_scatter(self, own: Tensor, whole: Tensor, take: Callable[[], Tensor]) -> Call:
        """Begins to fill ``own`` with this member's part of the sum of all ``whole``; flat, parts of one size.

        ``take`` gives room of the size of ``whole``, where the backend needs any.
        """

    @abstractmethod
    def finish(self, call: Call) -> None:
        """Returns when what is computed from here on finds the result of a call. Not for one that was waited for."""

    def abort(self) -> None:
        """Makes the current call and all later ones fail, and those of members that wait for this one.

        From any thread.
        """
        self._aborted.set()
        self._disconnect()
        self._news.put(None)

    @abstractmethod
    def close(self) -> None:
        """Frees the group, whose members are all done with it or that was aborted."""

    @abstractmethod
    def _disconnect(self) -> None: ...

    def _begin(self, start: Callable[[], dist.Work]) -> Call:
        self.check()
        with _calling():
            call = Call(start())
        self._pending.append(call)
        return call

    def _finish(self) -> None:
        """Returns once all that was begun is done."""
        self.check()
        for call in [*self._pending]:
            self.finish(call)

    def check(self) -> None:
        """Raises when the group was aborted."""
        if self._aborted.is_set():
            raise GroupError("the group was aborted")


class GlooGroup(BreakableGroup):
    """gloo: torn down by shutting its connections.

    A call that is under way when that happens may never return (a send posted in that very moment is lost). So nobody
    waits for the call itself but for word from it, which `abort` gives as well; the call is then left behind, with all
    it refers to, until it ends.
    """

    _left_behind: list[tuple[Any, list[dist.Work]]] = []  # noqa: RUF012 (process-wide: freeing one would wait for its calls)

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._before: set[Connection] | None = None
        self._connections: set[Connection] | None = None

    def _form(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        patient = _InterruptibleStore(store, self._aborted)
        formed: list[Any] = []
        failed: list[Exception] = []

        def connect() -> None:
            try:
                formed.append(dist.ProcessGroupGloo(patient, rank, size, timeout))
            except RuntimeError as error:
                failed.append(error)
            self._news.put(None)

        with self._lock:
            self._before = tcp_connections()
        self.check()
        # In a thread of its own, since a connection to a peer that has died since it gave its address cannot be
        # interrupted.
        threading.Thread(target=connect, name="form-data-group", daemon=True).start()
        self._news.get()
        self.check()
        if failed:
            raise failed[0]
        self._group = formed[0]
        opened = tcp_connections() - self._before
        patient.set(f"ends/{rank}", json.dumps([list(each.local) for each in opened]))
        theirs = {tuple(end) for peer in range(size) if peer != rank for end in json.loads(patient.get(f"ends/{peer}"))}
        with self._lock:
            # Other threads of the process may have connected elsewhere in the meantime; those are none of ours.
            self._connections = {each for each in opened if each.remote in theirs}
        self.check()

    def close(self) -> None:
        group, self._group = self._group, None
        pending = [call.work for call in self._pending if not call.work.is_completed()]
        if pending:
            GlooGroup._left_behind.append((group, pending))
        GlooGroup._left_behind[:] = [
            (held, works) for held, works in GlooGroup._left_behind if not all(work.is_completed() for work in works)
        ]

    def _disconnect(self) -> None:
        with self._lock:
            if self._before is None:
                return  # not one of the process's connections is this group's yet
            connections = tcp_connections() - self._before if self._connections is None else self._connections
        for connection in connections:
            connection.shut()

    def _begin(self, start: Callable[[], dist.Work]) -> Call:
        call = super()._begin(start)

        def tell(future: Any) -> None:
            call.over = True
            self._news.put(future)

        call.work.get_future().add_done_callback(tell)
        return call

    def begin_reduce_scatter(self, own: Tensor, whole: Tensor, take: Callable[[], Tensor]) -> Call:
        # gloo's own reduces everything everywhere. This sends no byte more than must be.
        parts = take()
        call = self.begin_all_to_all(parts, whole)
        call.then = lambda: torch.sum(parts.view(-1, own.numel()), dim=0, out=own)
        return call

    def finish(self, call: Call) -> None:
        self.check()
        while not call.over:
            self._news.get()  # may be word of another call
            self.check()
        with _calling():
            call.work.wait()  # raises what went wrong
        self._pending.remove(call)
        call.then()


class NcclGroup(BreakableGroup):
    """NCCL: torn down by its own abort. Calls block the host, so that success means that all members took part."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

    def _form(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        # The default is to end the process on an error; here an error ends the generation.
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        self._group = dist.ProcessGroupNCCL(_InterruptibleStore(store, self._aborted), rank, size, options)
        # NCCL connects at the first call.
        self.all_reduce([torch.zeros(1, device=self._device)], dist.ReduceOp.SUM)

    def close(self) -> None:
        if self._group is not None:
            self._group.abort()
            self._group = None

    def _disconnect(self) -> None:
        if self._group is not None:
            self._group.abort()

    def begin_reduce_scatter(self, own: Tensor, whole: Tensor, take: Callable[[], Tensor]) -> Call:
        options = dist.ReduceScatterOptions()
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.SUM)
        return self._begin(lambda: self._group._reduce_scatter_base(own, whole, options))

    def finish(self, call: Call) -> None:
        with _calling():
            call.work.wait()  # makes the stream wait, not this thread
        self.check()
        self._pending.remove(call)
        call.then()

    def _finish(self) -> None:
        super()._finish()
        torch.cuda.current_stream(self._device).synchronize()
        self.check()


@contextlib.contextmanager
def _calling() -> Iterator[None]:
    """Names what torch.distributed raises, which has no exception of its own for lost peers."""
    try:
        yield
    except RuntimeError as error:
        raise GroupError(str(error)) from error


class _InterruptibleStore(dist.Store):
    """A store whose waits end when ``interrupted`` is set: a peer that died has nothing to say."""

    def __init__(self, store: dist.Store, interrupted: threading.Event) -> None:
        super().__init__()
        self._store = store
        self._interrupted = interrupted

    def set(self, key: str, value: Any) -> None:
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._store.get(key)

    def add(self, key: str, value: int) -> int:
        return self._store.add(key, value)

    def check(self, keys: list[str]) -> bool:
        return self._store.check(keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        deadline = time.monotonic() + (self._store.timeout if timeout is None else timeout).total_seconds()
        pause = _SHORTEST_PAUSE_S
        while not self._store.check(keys):
            if self._interrupted.wait(pause):
                raise RuntimeError("the group was aborted while it formed")
            if time.monotonic() > deadline:
                raise RuntimeError(f"a member did not come while the group formed; missing: {', '.join(keys)}")
            pause = min(2 * pause, _LONGEST_PAUSE_S)
