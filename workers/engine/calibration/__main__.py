"""Measures this machine for the planner: ``python -m workers.engine.calibration``, one JSON object on stdout.

Its processes compute alone, then at once and with one another, for about half a minute. What else runs meanwhile is
measured with it.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys

import torch
from torch import multiprocessing

from workers.engine.calibration.ranks import rank_main


def main(arguments: list[str] | None = None) -> int:
    """Runs the command; 2 for workers that make no pairs."""
    parser = argparse.ArgumentParser("python -m workers.engine.calibration", description=__doc__)
    parser.add_argument("--workers", type=int, help="processes: 1, or an even number; by default one a core or GPU")
    parser.add_argument("--gpu", action="store_true", help="measure GPUs instead of the cores")
    options = parser.parse_args(arguments)
    there = torch.cuda.device_count() if options.gpu else len(os.sched_getaffinity(0))
    if not there:
        parser.error("torch sees no GPU here")
    size = options.workers or max(1, there - there % 2)
    if size > 1 and size % 2:
        parser.error(f"{size} workers make no pairs: use {size - 1} or {size + 1}")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    results = multiprocessing.get_context("spawn").SimpleQueue()
    multiprocessing.start_processes(rank_main, (size, port, options.gpu, results), size, start_method="spawn")
    sys.stdout.write(json.dumps({**results.get(), "cores": there}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
