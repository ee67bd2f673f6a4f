"""What a worker measures: products, attention, copies, and passes through a small model.

A machine does other things too, which only ever makes a call slower; so not the mean of its repetitions counts.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from rubato.spec import JobSpec, parse_spec
from workers.engine.device import Device
from workers.engine.mesh import ReplicaMesh
from workers.engine.parallel.compose import ModelShare

# [rows, depth] x [depth, columns] as in layers of small and of middling models; large ones reach a GPU's best.
PRODUCTS = {"cpu": ((512, 256, 1024), (1024, 512, 512), (1024, 1024, 256)), "cuda": ((8192, 4096, 14336),) * 3}
SEQUENCE = {"cpu": 256, "cuda": 4096}
HIDDEN = {"cpu": 256, "cuda": 4096}
SHORT_S = 0.25
"""How long a probe is repeated."""
FEWEST = 5
TOGETHER = 15
"""How often ranks repeat what they do together."""


def timed(call: Callable[[], object], device: Device, times: int | None = None) -> float:
    """Seconds of a call, after one that does not count: a quarter of all were faster.

    Args:
        times: exactly so often, as ranks need that call one another; None: for a while.
    """
    call()
    device.synchronize()
    taken: list[float] = []
    until = time.perf_counter() + SHORT_S
    while len(taken) < (times or FEWEST) or (times is None and time.perf_counter() < until):
        began = time.perf_counter()
        call()
        device.synchronize()
        taken.append(time.perf_counter() - began)
    return sorted(taken)[len(taken) // 4]


def product_flops(device: Device, dtype: torch.dtype) -> float:
    """FLOP/s of products, the mean over their shapes."""
    rates = []
    for rows, depth, columns in PRODUCTS[device.type]:
        left = torch.randn(rows, depth, dtype=dtype, device=device.torch_device)
        right = torch.randn(depth, columns, dtype=dtype, device=device.torch_device)
        seconds = timed(lambda left=left, right=right: torch.mm(left, right), device)
        rates.append(2 * rows * depth * columns / seconds)
    return statistics.mean(rates)


def attention_flops(device: Device, dtype: torch.dtype) -> float:
    """FLOP/s of fused causal attention, forward and backward, by what the mask leaves: half the square of scores."""
    length, heads, size = SEQUENCE[device.type], 8, 32 if device.type == "cpu" else 128
    shape = (4, heads, length, size)
    query, key, value = (
        torch.randn(shape, dtype=dtype, device=device.torch_device, requires_grad=True) for _ in range(3)
    )

    def both() -> None:
        functional.scaled_dot_product_attention(query, key, value, is_causal=True).sum().backward()

    seconds = timed(both, device)
    forward = 4 * heads * length * length * size * 4 / 2
    return 3.5 * forward / seconds


def pass_seconds(
    mesh: ReplicaMesh, *, hidden: int, length: int, layers: int, micro_batch: int = 1, count: int = 1
) -> float:
    """Seconds of the passes of ``count`` micro-batches through a Llama of so many layers, with embedding and head.

    Where the mesh is of several ranks all of them call this together.
    """
    device, shape = mesh.device, (mesh.tensor.size, mesh.pipeline.size)
    spec = _spec(hidden, length, layers, micro_batch, count, *shape)
    share = ModelShare(spec, mesh)
    share.initialise(share.parameters)
    tokens = torch.zeros(count * micro_batch, length, dtype=torch.int64, device=device.torch_device)
    runner = share.runner(count)
    return timed(lambda: runner.train(tokens, tokens), device, None if shape == (1, 1) else TOGETHER)


def _spec(
    hidden: int, length: int, layers: int, micro_batch: int = 1, count: int = 1, tensor: int = 1, pipeline: int = 1
) -> JobSpec:
    return parse_spec(
        {
            "name": "calibration",
            "model": {"hidden_size": hidden, "layers": layers, "heads": 8, "ffn_size": 4 * hidden},
            "data": {"train": {"builtin": "python-stdlib"}, "sequence_length": length},
            "train": {"steps": 1, "global_batch": count * micro_batch, "compile": False},
            "parallelism": {"tensor": tensor, "pipeline": pipeline, "micro_batch": micro_batch},
            "workers": tensor * pipeline,
        }
    )


def copied_bytes(device: Device, size: int = 1 << 25) -> float:
    """Bytes a second that a copy of a large tensor reads and writes."""
    source: Tensor = torch.ones(size // 4, device=device.torch_device)
    target = torch.empty_like(source)
    return 2 * size / timed(lambda: target.copy_(source), device)
