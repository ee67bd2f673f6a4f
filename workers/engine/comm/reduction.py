"""How the gradients of a step are summed over the data axis: as they are, or compressed, everywhere or between nodes.

Who leaves a job takes with it what it owes (``compression.py``), at most one step's share of one rank; who joins owes
nothing. Before a checkpoint and before the set of replicas changes in agreement, what all owe is summed and shared out
evenly, so a checkpoint holds all of it in one copy, at whatever layout it is loaded.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

from rubato.spec import CompressionSpec, JobSpec
from workers.engine.comm.buckets import GradientBuckets, ShardedGradients
from workers.engine.comm.codecs import codec_of
from workers.engine.comm.compression import Debt, Encoded, LowRank, Scheme, plain_bytes
from workers.engine.comm.exchange import Start
from workers.engine.comm.topology import measure_links, told
from workers.engine.comm.tuning import smallest_fast_bucket
from workers.engine.device import BreakableGroup
from workers.engine.hooks import Session
from workers.engine.membership import Generation
from workers.engine.mesh import ReplicaMesh
from workers.engine.parallel.data import DataGroup
from workers.engine.state import TrainingState, like

FP32_BYTES = 4

Tell = Callable[[str, str, dict[str, Any]], None]


class Places(NamedTuple):
    """This replica among the others of a generation, where sums inside a node are apart from those between nodes.

    Attributes:
        near: the replicas of its node; the first of them speaks for the node.
        speakers: the first replica of each node.
    """

    near: list[int]
    speakers: list[int]

    @classmethod
    def of(cls, nodes: tuple[str, ...], index: int) -> Places:
        """The places of replica ``index``, of replicas on these nodes."""
        first = dict[str, int]()
        for replica, node in enumerate(nodes):
            first.setdefault(node, replica)
        return cls([replica for replica, node in enumerate(nodes) if node == nodes[index]], list(first.values()))


class Reduction:
    """Sums the buckets of a worker, generation after generation.

    Also a hook (``hooks.py``), which makes ready what is owed for the checkpoints that are saved after it, and what
    they hold of that (``state.py``).

    Attributes:
        lossy: whether sums leave something out, which is part of the state.
    """

    at_end = True

    def __init__(
        self,
        spec: JobSpec,
        mesh: ReplicaMesh,
        buckets: GradientBuckets | ShardedGradients,
        state: TrainingState,
    ) -> None:
        self._device = mesh.device.torch_device
        self._first = mesh.pipeline.index == mesh.tensor.index == 0
        # Where state is sharded, gradients are reduced and encoded by who shards it.
        compression = CompressionSpec() if spec.memory.zero else spec.communication.compression
        self._compression, self._seed = compression, spec.train.seed
        self.lossy = compression.lossy
        self._auto = spec.communication.bucket_mb == "auto"
        self._tuned = not self._auto
        self.every = spec.checkpoint.every if self.lossy else 0
        self._between_nodes = compression.between == "nodes"
        self._buckets = buckets
        self._state = state
        self._adopt_buckets()
        self._shares = 1
        self._encodes, self._debtors = True, 1
        self._near: BreakableGroup | None = None
        self._between: BreakableGroup | None = None
        self._traffic: dict[str, float] = {"comm_bytes": 0, "comm_bytes_saved": 0}
        if self.lossy:
            state.also = self

    def _adopt_buckets(self) -> None:
        codec = codec_of(self._compression)
        self._scheme: Scheme | None = None if codec is None else Encoded(codec)
        if self._compression.name == "powersgd":
            assert self._compression.rank is not None
            self._scheme = LowRank(self._compression.rank, self._seed, self._buckets.shapes)
        self._debt = Debt(self._buckets.flat) if self.lossy else None

    @property
    def traffic(self) -> dict[str, float]:
        """Bytes that this worker sends in a step of the generation, and how many fewer than uncompressed."""
        if isinstance(self._buckets, ShardedGradients):
            return {"comm_bytes": self._buckets.sent_bytes, "comm_bytes_saved": self._buckets.saved_bytes}
        return self._traffic

    def form(self, data: DataGroup, generation: Generation, tell: Tell) -> None:
        """A generation begins: measures links, makes the groups that sums need, drops what is owed by another's state.

        Args:
            data: its group.
            generation: which.
            tell: hears, as (kind, message, data), what the first worker of the first replica has measured.

        Raises:
            DataAxisError: the axis failed.
        """
        tell = tell if self._first and data.index == 0 else _nothing
        nodes = generation.nodes or ("",) * generation.data
        began = time.perf_counter()
        links = measure_links(data, nodes, self._device)
        if links:
            slowest = min(links, key=lambda link: link.mb_s)
            seconds = time.perf_counter() - began
            message = f"of {len(links)} links between nodes the slowest carries {slowest.mb_s:.0f} MB/s"
            tell("topology.measured", message, {**told(links), "seconds": seconds})
        self._tune(data, generation.data, tell)
        size = generation.data
        self._encodes, self._debtors, self._near, self._between = True, size, None, None
        if self._scheme is not None and self._between_nodes:
            places = Places.of(nodes, data.index)
            groups = data.subgroups({f"near{places.near[0]}": places.near, "between": places.speakers})
            self._near, self._between = groups.get(f"near{places.near[0]}"), groups.get("between")
            self._encodes, self._debtors = data.index in places.speakers, len(places.speakers)
        if self._scheme is not None:
            self._scheme.begin_anew(generation.step or 0)
        if self._debt is not None and (generation.step is None or self._state.step != generation.step):
            self._debt.clear()
        self._count_bytes(size)

    def start(self, data: DataGroup, loss_scale: float) -> Start:
        """What is to be called with each bucket of a step, in their order; ``data.sum`` ends it."""
        if self._scheme is None:
            return data.begin_sum
        numbers = iter(range(len(self._buckets.flat)))

        def start(bucket: Tensor) -> None:
            number = next(numbers)
            if not data.begin(lambda group: self._sum(group, number, bucket, loss_scale)):
                self._sum(None, number, bucket, loss_scale)

        return start

    def begin(self) -> None:
        """Nothing is owed at the first step."""
        assert self._debt is not None
        assert self._scheme is not None
        self._debt.clear()
        self._scheme.begin_anew(0)

    def stepped(self) -> None:
        """The step is taken with the gradients that were summed."""
        assert self._debt is not None
        assert self._scheme is not None
        self._debt.commit()
        self._scheme.commit()
        self._shares = 1

    def __call__(self, session: Session) -> None:
        self.share_out(session.data)

    def share_out(self, data: DataGroup) -> None:
        """Spreads what all owe evenly, so that any of them can save it all. Raises DataAxisError."""
        if self._debt is not None and self._scheme is not None:
            self._debt.share_out(data.sum, self._debtors, self._encodes)
            self._shares = self._debtors
            self._scheme.begin_anew(self._state.done)

    def loaded(self, state: Mapping[str, Any]) -> None:
        """Takes over what a checkpoint says is owed."""
        assert self._debt is not None
        assert self._scheme is not None
        self._scheme.begin_anew(state["step"])
        for owed in self._debt.owed:
            owed.mul_(state["owed_shares"] / self._debtors if self._encodes else 0.0)
        self._shares = self._debtors

    def state_dict(self) -> dict[str, Any]:
        assert self._debt is not None
        owed = self._buckets.views(self._debt.owed)
        pairs = zip(self._state.weights.items(), owed, strict=True)
        return {
            "owed": {name: like(weight, view) for (name, weight), view in pairs},
            "owed_shares": self._shares,
        }

    def _sum(self, everybody: BreakableGroup | None, number: int, bucket: Tensor, loss_scale: float) -> None:
        assert self._scheme is not None
        if self._debt is not None:
            self._debt.pay(number, bucket, loss_scale)
        if self._near is not None:
            self._near.all_reduce([bucket], dist.ReduceOp.SUM)
        encoding = self._between if self._between_nodes else everybody
        left_out = None if encoding is None else self._scheme.sum(encoding, number, bucket)
        if self._near is not None and self._debtors > 1:
            self._near.broadcast([bucket], 0)
        if self._debt is not None:
            self._debt.remember(number, left_out, loss_scale)

    def _tune(self, data: DataGroup, size: int, tell: Tell) -> None:
        """Agrees on the size of buckets, when replicas first meet; who joins later takes that of the others."""
        if size == 1 or not self._auto:
            return
        (chosen,) = data.max([self._buckets.mb if self._tuned else 0.0])
        if not chosen:
            best, seconds = smallest_fast_bucket(data, self._device)
            (chosen,) = data.max([best])
            told_of = {str(mb): round(spent, 6) for mb, spent in seconds.items()}
            message = f"buckets of {chosen:g} MB: larger ones were summed no faster"
            tell("buckets.tuned", message, {"bucket_mb": chosen, "seconds": told_of})
        self._tuned = True
        if chosen != self._buckets.mb:
            self._buckets.resize(chosen)
            self._adopt_buckets()

    def _count_bytes(self, size: int) -> None:
        sizes = [bucket.numel() for bucket in self._buckets.flat]
        uncompressed = sum(plain_bytes(FP32_BYTES * count, size) for count in sizes)
        sent = uncompressed
        if self._scheme is not None:
            sent = 0
            if not self._between_nodes or self._between is not None:
                sent += sum(self._scheme.bytes_sent(number, count, self._debtors) for number, count in enumerate(sizes))
            if self._near is not None:
                sent += sum(plain_bytes(FP32_BYTES * count, self._near.size) for count in sizes)
                if self._encodes and self._debtors > 1:
                    sent += FP32_BYTES * sum(sizes) * (self._near.size - 1)
        self._traffic = {"comm_bytes": sent, "comm_bytes_saved": uncompressed - sent}


def _nothing(kind: str, message: str, data: dict[str, Any]) -> None:
    """Others tell of it."""
