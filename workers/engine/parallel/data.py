"""The data axis: replicas that hold the same state, compute different samples and sum their gradients.

The group of a position of the replica lives as long as a generation. Whatever goes wrong on it is a DataAxisError:
the replica itself is whole and can take part in the next generation.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from rubato.layout import sharding_degree
from workers.engine.comm.buckets import split_into_buckets
from workers.engine.comm.codecs import Codec
from workers.engine.comm.compression import begin_reduce_scatter
from workers.engine.device import BreakableGroup, Call, GroupError
from workers.engine.membership import Generation
from workers.engine.mesh import ReplicaMesh
from workers.engine.parallel.rows import Split

Result = TypeVar("Result")

TIMEOUT = timedelta(minutes=30)
"""How long a call waits for the other replicas, who may be saving; that one is gone is heard at once."""


class DataAxisError(Exception):
    """The data axis of a generation failed. Nobody's state is harmed beyond what the step has not yet committed."""


class DataGroup:
    """The workers at one position of all replicas of a generation.

    Every call is made by all workers of the replica, each on the group of its own position, and they vote on how it
    went: it succeeds for all of them, or all raise DataAxisError. The groups fail one by one, and if one worker left
    while another went on, their next call inside the replica would never return.

    Made unformed, so that `abort`, which alone may be called from another thread, can end the forming too.

    Args:
        on_failure: told at once, with the cause, when the axis fails here: mates may wait for workers elsewhere who
            wait for this one.
        shard_over: replicas that share one copy of the state, where it is sharded, at least; None: all.

    Attributes:
        size, index: replicas on the axis, and the place of this one.
        split: how state is sharded, if it is: neighbours on the axis share a copy.
        copies: of a sharded state that there are.
    """

    def __init__(
        self,
        generation: Generation,
        mesh: ReplicaMesh,
        on_failure: Callable[[str], None],
        shard_over: int | None = None,
        timeout: timedelta = TIMEOUT,
    ) -> None:
        self.size, self.index = generation.data, generation.replica
        degree = sharding_degree(generation.data, shard_over)
        self.split, self.copies = Split(degree, generation.replica % degree), generation.data // degree
        self._generation = generation
        self._mesh = mesh
        self._on_failure = on_failure
        self._timeout = timeout
        self._store = dist.PrefixStore(f"p{mesh.pipeline.index}t{mesh.tensor.index}", generation.store)
        self._group = mesh.device.breakable_group() if generation.data > 1 else None
        self._subgroups: list[BreakableGroup] = []
        self._beside = ThreadPoolExecutor(1, thread_name_prefix="data-axis")
        self._begun: list[Future[None]] = []
        self._sharded, self._across = self._group, None
        self._cause: str | None = None
        self._waited_s = 0.0

    @property
    def first(self) -> bool:
        """Whether this is the first of all workers of the generation."""
        return self.index == self._mesh.pipeline.index == self._mesh.tensor.index == 0

    def form(self) -> None:
        """Connects to the other replicas."""
        here = self._generation
        self._together(lambda group: group.form(self._store, here.replica, here.data, self._timeout))
        if self.copies > 1:
            degree, place = self.split.degree, self.split.index
            first = self.index - place
            copy, across = f"copy{first}", f"place{place}"
            members = {copy: range(first, first + degree), across: range(place, self.size, degree)}
            groups = self.subgroups(members)
            self._sharded, self._across = groups.get(copy), groups[across]

    def subgroups(self, members: Mapping[str, Sequence[int]]) -> dict[str, BreakableGroup]:
        """Groups within this one, of which each holds some replicas of the generation, by name; of which this is one.

        They break when this one does.
        """
        mine = {name: held for name, held in members.items() if self.index in held and len(held) > 1}
        formed = {name: self._mesh.device.breakable_group() for name in mine}

        def form(group: BreakableGroup) -> None:
            self._subgroups += formed.values()
            group.check()  # when it was aborted, these were not
            for name, held in mine.items():
                store = dist.PrefixStore(name, self._store)
                formed[name].form(store, held.index(self.index), len(held), self._timeout)

        self._together(form)
        return formed

    def begin(self, work: Callable[[BreakableGroup], None]) -> bool:
        """Begins some calls that depend on each other, in a thread beside this one, after those begun before.

        As with `begin_sum`, the next call that waits, waits for that too, and what goes wrong is told at once. False
        when this replica is alone, and nothing was begun.
        """
        if self._group is None:
            return False
        group = self._group

        def run() -> None:
            if self._cause is None:
                try:
                    work(group)
                except GroupError as error:
                    self._cause = str(error)
                    self._fail(self._cause)

        self._begun.append(self._beside.submit(self._mesh.device.apart(run)))
        return True

    def begin_sum(self, *tensors: Tensor) -> None:
        """Begins to sum each tensor over the replicas, in place; the next call that waits, waits for that too.

        A worker may be in the midst of a pass that its mates wait for, so this never raises: what goes wrong is told
        at once, and the next call that waits fails.
        """
        if self._group is not None:
            self._try(lambda group: group.begin_all_reduce(tensors, dist.ReduceOp.SUM), self._group)

    def begin_gather(self, whole: Tensor, own: Tensor) -> Call | None:
        """Begins to fill ``whole`` with the ``own`` of all that share one copy of the state, in their order.

        Like `begin_sum` it never raises, nor does `finish`; None when there is nothing to wait for.
        """
        if self._sharded is None:
            whole[: own.numel()].copy_(own)
            return None
        return self._try(lambda group: group.begin_all_gather(whole, own), self._sharded)

    def begin_reduce(
        self, own: Tensor, whole: Tensor, take: Callable[[], Tensor], codec: Codec | None = None
    ) -> Call | None:
        """Begins to fill ``own`` with its part of the sum of ``whole`` over all replicas, like `begin_gather`.

        ``take`` gives room of the size of ``whole``, where the backend needs any; ``codec`` says how values travel
        between those that share a copy, None: as they are.
        """
        if self._sharded is None:
            own.copy_(whole[: own.numel()])
            return None
        if codec is not None:
            return self._try(lambda group: begin_reduce_scatter(group, codec, own, whole), self._sharded)
        return self._try(lambda group: group.begin_reduce_scatter(own, whole, take), self._sharded)

    def finish_gather(self, call: Call | None) -> None:
        """Waits for what `begin_gather` gave. After a failure the result is anything, until the next call raises."""
        if call is not None and self._sharded is not None:
            began = time.perf_counter()
            self._try(lambda group: group.finish(call), self._sharded)
            self._waited_s += time.perf_counter() - began

    def finish_reduce(self, call: Call | None, own: Tensor) -> None:
        """Waits for what `begin_reduce` gave, whose ``own`` this is."""
        self.finish_gather(call)
        if self._across is not None:
            self._try(lambda group: group.all_reduce([own], dist.ReduceOp.SUM), self._across)

    def settle(self) -> None:
        """Raises if anything has failed that could not raise."""
        self._together(lambda group: None)

    def gather_objects(self, value: Any) -> list[Any]:
        """What each replica gives at this place, by replica; anything that can be pickled."""
        if self._group is None:
            return [value]
        device, size = self._mesh.device.torch_device, self._generation.data
        sent = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8).to(device)
        lengths = torch.zeros(size, dtype=torch.int64, device=device)
        lengths[self.index] = sent.numel()
        self._together(lambda group: group.all_reduce([lengths], dist.ReduceOp.SUM))
        longest = int(lengths.max())
        whole = sent.new_zeros(size * longest)
        own = torch.cat([sent, sent.new_zeros(longest - sent.numel())])
        self._together(lambda group: group.all_gather(whole, own))
        parts = whole.cpu().view(size, longest)
        return [
            pickle.loads(bytes(part[:length].tolist())) for part, length in zip(parts, lengths.tolist(), strict=True)
        ]

    def sum(self, tensors: Sequence[Tensor]) -> float:
        """Sums each tensor over the replicas, in place; all in flight at once.

        How many seconds that took, and what was begun before, beyond all computation that was queued; and how many
        were waited in the midst of it for what it could not go on without.
        """
        self._mesh.device.finish_computing()
        began = time.perf_counter()
        self._together(lambda group: group.all_reduce(tensors, dist.ReduceOp.SUM))
        waited_s, self._waited_s = self._waited_s, 0.0
        return time.perf_counter() - began + waited_s

    def max(self, values: Sequence[float]) -> list[float]:
        """The largest of the replicas' values, of each."""
        return self._extremes(values, dist.ReduceOp.MAX)

    def call(self, calls: Callable[[BreakableGroup], float]) -> float:
        """What some calls on the group come to; 0 when this replica is alone."""
        result = [0.0]

        def keep(group: BreakableGroup) -> None:
            result[0] = calls(group)

        self._together(keep)
        return result[0]

    def min(self, value: float) -> float:
        """The smallest of the replicas' values."""
        return self._extremes([value], dist.ReduceOp.MIN)[0]

    def broadcast(self, tensors: Sequence[Tensor], source: int, bucket_mb: float) -> None:
        """Fills each tensor with that of replica ``source``, in buckets. After a failure some are, some are not."""

        def send_or_receive(group: BreakableGroup) -> None:
            for bucket in split_into_buckets(tensors, bucket_mb):
                # Through memory that an aborted call may still write to without harm.
                flat = torch.cat([tensor.flatten() for tensor in bucket])
                group.broadcast([flat], source)
                for tensor, received in zip(bucket, flat.split([each.numel() for each in bucket]), strict=True):
                    tensor.copy_(received.view_as(tensor))

        self._together(send_or_receive)

    def abort(self) -> None:
        """Makes what this worker does on the axis fail now, and what the others do with it. From any thread."""
        for group in self._groups():
            group.abort()

    def close(self) -> None:
        """Frees the group, once everybody is done with it or it was aborted."""
        self._beside.shutdown()
        for group in self._groups():
            group.close()

    def _groups(self) -> list[BreakableGroup]:
        return [*self._subgroups, *([] if self._group is None else [self._group])]

    def _extremes(self, values: Sequence[float], operation: dist.ReduceOp.RedOpType) -> list[float]:
        tensor = torch.tensor(values, dtype=torch.float64, device=self._mesh.device.torch_device)
        self._together(lambda group: group.all_reduce([tensor], operation))
        return [float(value) for value in tensor]

    def _try(self, call: Callable[[BreakableGroup], Result], group: BreakableGroup) -> Result | None:
        """A call that must not raise: what fails is told at once, nothing more is tried, and the next vote raises."""
        if self._cause is None:
            try:
                return call(group)
            except RuntimeError as error:  # what torch.distributed raises, see `_together`
                self._cause = str(error)
                self._fail(self._cause)
        return None

    def _together(self, call: Callable[[BreakableGroup], None]) -> None:
        if self._group is None:
            return
        begun, self._begun = self._begun, []
        for work in begun:
            work.result()
        cause = self._cause
        if cause is None:
            try:
                call(self._group)
            except RuntimeError as error:  # what torch.distributed raises for lost peers, time-outs, broken connections
                cause = str(error)
                self._fail(cause)
        (failed,) = self._mesh.max([float(cause is not None)])
        if failed:
            if cause is None:
                cause = "a worker of this replica lost it"
                self._fail(cause)
            raise DataAxisError(f"the data axis of generation {self._generation.number} failed: {cause}")

    def _fail(self, cause: str) -> None:
        self.abort()
        self._on_failure(cause)
