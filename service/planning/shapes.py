"""What the planner reasons about: the work of a step, a layout, how it is run, and a cluster."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil, inf
from typing import Literal

from rubato.arithmetic import BF16, Decoder, Precision, Recompute, Software
from rubato.layout import sharding_degree, split_evenly

Schedule = Literal["1f1b", "gpipe", "interleaved"]
Attention = Literal["unfused", "flash1", "flash2", "native"]


@dataclass(frozen=True)
class Work:
    """One step: a global batch of sequences of one length."""

    model: Decoder
    sequence: int
    global_batch: int

    @property
    def tokens(self) -> int:
        return self.global_batch * self.sequence


@dataclass(frozen=True)
class Layout:
    """How the work is spread: degrees, ZeRO stage, micro-batch (sequences), schedule, recomputation.

    ``context``: ranks a sequence is split over (ring attention). ``virtual_stages`` above 1 means interleaving.
    ``stage_layers``: layers of every pipeline rank where they are not split evenly. ``shard_over``: replicas that share
    one copy of what ZeRO splits; None: all. ``data_inner``: data neighbours sit closer together than pipeline
    neighbours (Megatron's order); Rubato keeps a replica together instead.
    """

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    context: int = 1
    zero: int = 0
    micro_batch: int = 1
    schedule: Schedule = "1f1b"
    virtual_stages: int = 1
    recompute: Recompute = "none"
    sequence_parallel: bool = False
    stage_layers: tuple[int, ...] | None = None
    shard_over: int | None = None
    data_inner: bool = False

    @property
    def world_size(self) -> int:
        return self.tensor * self.pipeline * self.data * self.context

    @property
    def replica_size(self) -> int:
        return self.tensor * self.pipeline * self.context

    @property
    def shards(self) -> int:
        """Ranks over which ZeRO splits: those that hold the same parameters, or neighbours among them."""
        return sharding_degree(self.data, self.shard_over) * self.context

    def with_data(self, data: int, zero: int) -> Layout:
        """The same replica, so many times, at a ZeRO stage."""
        return replace(self, data=data, zero=zero)

    def layers_of(self, model: Decoder) -> tuple[int, ...]:
        """Layers of each pipeline rank, first to last."""
        return self.stage_layers or tuple(split_evenly(model.layers, self.pipeline))

    def layers_on(self, model: Decoder, rank: int) -> int:
        """Layers of one pipeline rank."""
        if self.stage_layers:
            return self.stage_layers[rank]
        each, rest = divmod(model.layers, self.pipeline)
        return each + (rank < rest)

    def micro_batches(self, global_batch: int) -> int:
        """Micro-batches of the replica that has most; it is the one the others wait for."""
        return ceil(ceil(global_batch / self.micro_batch) / self.data)


@dataclass(frozen=True)
class Runtime:
    """Properties of the software that change what a layer costs.

    ``attention``: unfused, or the generation of the fused kernels: FlashAttention 1 or 2, or ``native`` ones written
    for the matrix instructions of the GPU at hand (FlashAttention 3, cuDNN). ``compiled``: element-wise kernels are
    fused. ``early_stop``: recomputation ends with the last tensor that backward needs (torch.utils.checkpoint since
    2.1), so a layer's last product is not done again. ``overlapped_tensor``: backward's tensor-parallel collectives run
    beside the products of weight gradients (Megatron since arXiv:2205.05198). ``launch_blocking``: the host waits for
    every kernel (CUDA_LAUNCH_BLOCKING=1). ``engine``: how Rubato's engine computes a layer; None: other software, of
    which less is known. ``loss_chunks``: parts that logits and loss of a micro-batch are computed in.
    """

    attention: Attention = "flash2"
    precision: Precision = BF16
    compiled: bool = False
    early_stop: bool = True
    overlapped_tensor: bool = False
    launch_blocking: bool = False
    engine: Software | None = None
    loss_chunks: int = 1


@dataclass(frozen=True)
class Accelerator:
    """One device. Rates are per second.

    ``memory_bytes``: as torch reports it; ``context_bytes`` of it go to the driver and the communicators.
    ``peak_flops``: the data sheet's, dense, 16-bit; ``matmul_flops``: the best product measured on it;
    ``single_flops``: the same for 32-bit inputs (TF32 where there is one); ``vector_flops``: 32-bit FMA outside the
    matrix units; ``older_kernel_share``: what share of peak kernels reach that use the matrix instructions of the
    generation before; ``link_bytes``: to the neighbours in the node, one way; ``network_bytes`` and ``node_size``: what
    it is usually deployed with.
    """

    name: str
    memory_bytes: float
    context_bytes: float
    peak_flops: float
    matmul_flops: float
    single_flops: float
    vector_flops: float
    memory_bandwidth: float
    link_bytes: float
    older_kernel_share: float = 1.0
    network_bytes: float = 0.0
    node_size: int = 8


@dataclass(frozen=True)
class Cluster:
    """Equal accelerators in nodes of ``node_size``; ``network_bytes`` one way, per second and device.

    ``cores``: that the workers of a node share, if they do; ``cores_each``: how many one of them can use.
    """

    accelerator: Accelerator
    count: int
    node_size: int
    network_bytes: float
    cores: float = inf
    cores_each: float = 1.0

    def bubble_share(self, pipeline: int) -> float:
        """Time of a pipeline's bubble against one whose ranks have nothing to share: those who wait leave cores."""
        beside = min(self.count, self.node_size)
        busy = max(1.0, beside / pipeline)
        return min(self.cores_each, self.cores / beside) / min(self.cores_each, self.cores / busy)

    @classmethod
    def of(cls, accelerator: Accelerator, count: int) -> Cluster:
        """``count`` of them, in the nodes and on the network they are usually deployed with."""
        return cls(accelerator, count, accelerator.node_size, accelerator.network_bytes)
