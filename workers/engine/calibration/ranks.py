"""The ranks of a calibration: what one measures alone, what they do to one another, and the links between them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from rubato.layout import Layout
from workers.engine.calibration import probes
from workers.engine.device import Device
from workers.engine.mesh import ReplicaMesh

TIMEOUT = timedelta(minutes=5)
SMALL, LARGE = 1 << 12, 1 << 22
"""Bytes of the messages that tell a link's latency and its bandwidth."""

FEW, MANY = 1, 5
"""Layers of two models whose difference is what layers alone take; a pipeline of two ranks has twice as many."""

IDLE = {"hidden": 16, "length": 8}
"""Of a model that has next to nothing to compute."""


@dataclass(frozen=True)
class Alone:
    """What the first rank found while the others waited; rates are a second.

    Attributes:
        device: the GPU's name, or cpu.
        single_flops, half_flops: of products in fp32 and in bf16.
        attention_flops: of fused attention, in fp32 on a CPU and in bf16 on a GPU.
        copy_bytes: read and written by a copy.
        layer_s: passes of a layer of ``layer_hidden`` on ``layer_tokens`` in sequences of ``layer_length``.
        gap_s: passes of a layer that has next to nothing to compute.
        ends_s: the same of embedding, head and loss.
    """

    device: str
    single_flops: float
    half_flops: float
    attention_flops: float
    copy_bytes: float
    layer_s: float
    layer_hidden: int
    layer_tokens: int
    layer_length: int
    gap_s: float
    ends_s: float


@dataclass(frozen=True)
class Together:
    """What several ranks found.

    Attributes:
        workers: how many.
        slowdown: of products when all ranks compute at once.
        link_bytes, latency_s: of an all-reduce over all ranks: a second through a rank's link, and a hop.
        shared_gap_s: passes of a layer that two ranks share and that has next to nothing to compute.
        pipelined_s: what a micro-batch adds to a step of a pipeline of two ranks that have next to nothing to compute,
            a layer each.
    """

    workers: int
    slowdown: float
    link_bytes: float
    latency_s: float
    shared_gap_s: float
    pipelined_s: float


def rank_main(rank: int, size: int, port: int, gpu: bool, results: Any) -> None:
    """A process of its own: measures, and the first puts what was found into a queue, as a dict."""
    store = dist.TCPStore("127.0.0.1", port, size, is_master=rank == 0, timeout=TIMEOUT)
    found = measure(rank, size, store, gpu=gpu)
    if found is not None:
        results.put(found)


def measure(rank: int, size: int, store: dist.Store, *, gpu: bool) -> dict[str, Any] | None:
    """Measures as one rank of one or of an even number; the first returns what was found."""
    device = Device.of_rank(rank, gpu=gpu)
    if gpu:
        torch.cuda.set_device(device.torch_device)
    else:
        torch.set_num_threads(1)
    alone = _alone(device) if rank == 0 else None
    if size == 1:
        assert alone is not None
        return {"alone": asdict(alone), "together": None}
    dist.init_process_group(device.backend, store=store, rank=rank, world_size=size, timeout=TIMEOUT)
    try:
        together = _together(device, rank, size, alone)
        dist.barrier()
    finally:
        dist.destroy_process_group()
    return None if alone is None else {"alone": asdict(alone), "together": asdict(together)}


def _alone(device: Device) -> Alone:
    hidden, length = probes.HIDDEN[device.type], probes.SEQUENCE[device.type]
    mesh, gpu = ReplicaMesh.of_one(device), device.type == "cuda"
    sequences = 1 if gpu else 4
    few, many = (
        probes.pass_seconds(mesh, hidden=hidden, length=length, micro_batch=sequences, layers=layers)
        for layers in (FEW, MANY)
    )
    idle_few, idle_many = (probes.pass_seconds(mesh, **IDLE, layers=layers) for layers in (FEW, MANY))
    gap = _a_layer(idle_few, idle_many)
    return Alone(
        device=torch.cuda.get_device_name(device.torch_device) if gpu else "cpu",
        single_flops=probes.product_flops(device, torch.float32),
        half_flops=probes.product_flops(device, torch.bfloat16),
        attention_flops=probes.attention_flops(device, torch.bfloat16 if gpu else torch.float32),
        copy_bytes=probes.copied_bytes(device),
        layer_s=_a_layer(few, many),
        layer_hidden=hidden,
        layer_tokens=sequences * length,
        layer_length=length,
        gap_s=gap,
        ends_s=max(0.0, idle_few - FEW * gap),
    )


def _together(device: Device, rank: int, size: int, alone: Alone | None) -> Together:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    dist.barrier()
    seconds_a_flop = _slowest(1 / probes.product_flops(device, dtype), device)
    seconds = []
    for message in (SMALL, LARGE):
        tensor = torch.zeros(message // 4, device=device.torch_device)
        taken = probes.timed(lambda tensor=tensor: dist.all_reduce(tensor), device, 2 * probes.TOGETHER)
        seconds.append(_slowest(taken, device))
    hops = size - 1
    pairs = size // 2
    tensor_mesh = ReplicaMesh.of_world(Layout(pairs, 1, 2), rank, device, TIMEOUT)
    shared = [_slowest(probes.pass_seconds(tensor_mesh, **IDLE, layers=layers), device) for layers in (FEW, MANY)]
    pipeline_mesh = ReplicaMesh.of_world(Layout(pairs, 2, 1), rank, device, TIMEOUT)
    passed = [
        _slowest(probes.pass_seconds(pipeline_mesh, **IDLE, layers=2 * FEW, count=count), device) for count in (4, 12)
    ]
    fastest = 0.0 if alone is None else alone.half_flops if device.type == "cuda" else alone.single_flops
    return Together(
        workers=size,
        slowdown=max(1.0, fastest * seconds_a_flop),
        link_bytes=2 * (LARGE - SMALL) * hops / size / max(1e-9, seconds[1] - seconds[0]),
        latency_s=seconds[0] / (2 * hops),
        shared_gap_s=_a_layer(*shared),
        pipelined_s=max(0.0, passed[1] - passed[0]) / 8,
    )


def _a_layer(few: float, many: float) -> float:
    return max(0.0, many - few) / (MANY - FEW)


def _slowest(seconds: float, device: Device) -> float:
    """The largest value of all ranks."""
    slowest = torch.tensor([seconds], dtype=torch.float64, device=device.torch_device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return float(slowest)
