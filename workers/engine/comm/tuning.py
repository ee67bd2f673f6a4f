"""How large buckets should be on the links there are: a short measurement."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from workers.engine.comm.buckets import MB
from workers.engine.device import BreakableGroup
from workers.engine.parallel.data import DataGroup

SIZES_MB = (1.0, 4.0, 16.0, 64.0)
NEAR_ENOUGH = 1.15


def smallest_fast_bucket(data: DataGroup, device: torch.device) -> tuple[float, dict[float, float]]:
    """The smallest size (MB) whose sum takes little more time a byte than that of any other, and seconds of each.

    Smaller buckets set out earlier, so more of their way is hidden behind the backward pass; but every call costs.
    All members call together; each has its own figures. Two sums of each size, 170 MB in all.

    Raises:
        DataAxisError: the axis failed.
    """
    seconds: dict[float, float] = {}
    for size in SIZES_MB:
        probe = torch.zeros(int(size * MB) // torch.float32.itemsize, device=device, dtype=torch.float32)
        seconds[size] = min(data.call(lambda group, probe=probe: _time_sum(group, probe)) for _ in range(2))
    return choose(seconds), seconds


def choose(seconds: dict[float, float]) -> float:
    """The smallest size that is nearly as fast a byte as the fastest."""
    best = min(spent / size for size, spent in seconds.items())
    return min(size for size, spent in seconds.items() if spent / size <= NEAR_ENOUGH * best)


def _time_sum(group: BreakableGroup, probe: torch.Tensor) -> float:
    began = time.perf_counter()
    group.all_reduce([probe], dist.ReduceOp.SUM)
    return time.perf_counter() - began
