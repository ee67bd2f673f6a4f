"""Memory of this worker: what it holds now, and the most it has held."""

from __future__ import annotations

import os
import resource
from functools import lru_cache
from typing import NamedTuple

import psutil
import torch


class Memory(NamedTuple):
    """Bytes. On a GPU those of its allocator, elsewhere those of the process in RAM."""

    now: int
    peak: int


def memory_of(device: torch.device) -> Memory:
    """The memory of this worker on its device."""
    if device.type == "cuda":
        return Memory(torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device))
    now = _process(os.getpid()).memory_info().rss
    # The kernel counts in KiB, and for a forked process from what its parent had.
    return Memory(now, max(now, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024))


@lru_cache(maxsize=1)
def _process(pid: int) -> psutil.Process:
    return psutil.Process(pid)  # making one costs more than asking it
