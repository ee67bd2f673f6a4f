"""Runs a function in several ranks of a gloo group, each a process forked from a server that has torch loaded."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["workers.engine.checkpoint", "torch.distributed.tensor"])


def run_ranks(world: int, work: Callable[..., Any], meeting: Path, *arguments: Any) -> list[Any]:
    """What ``work(*arguments)`` returned on each rank; raises what the first failing rank raised.

    Args:
        work: a function of a module; it is imported by the ranks.
        meeting: a file that does not exist yet, where the ranks meet.
    """
    with ProcessPoolExecutor(world, _CONTEXT, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        futures = [pool.submit(_in_group, rank, world, str(meeting), work, arguments) for rank in range(world)]
        return [future.result() for future in futures]


def _in_group(rank: int, world: int, meeting: str, work: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    store = dist.FileStore(meeting, world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=60))
    try:
        return work(*arguments)
    finally:
        dist.destroy_process_group()
