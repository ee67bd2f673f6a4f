"""What compressed sums of gradients save and cost: bytes a step and the loss after training, beside those of fp32.

Two replicas train the same model from the same weights on the same real text with each scheme. The loss is that of
held-out text after the last step. Prints one JSON line last, and ends with 1 when 8-bit blocks miss what is asked of
them: a loss within 1 % at no more than 27 % of the bytes.
"""

import argparse
import json
import multiprocessing
import multiprocessing.connection
import socket
import statistics
import sys
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rubato.layout import Layout
from rubato.spec import JobSpec, parse_spec
from workers.engine.device import Device
from workers.engine.membership import StaticMembership
from workers.engine.mesh import ReplicaMesh
from workers.engine.run import RunDirectory
from workers.engine.train import train

RANKS = 2
SCHEMES: dict[str, Any] = {
    "none": "none",
    "bf16": "bf16",
    "fp16": "fp16",
    "int8": "int8",
    "topk 5 %": {"name": "topk", "ratio": 0.05},
    "topk 1 %": {"name": "topk", "ratio": 0.01},
    "powersgd rank 4": {"name": "powersgd", "rank": 4},
}
MOST_LOSS, MOST_BYTES = 1.01, 0.27


def spec_of(compression: Any, steps: int) -> JobSpec:
    return parse_spec(
        {
            "name": "bench-compression",
            "model": {"preset": "tiny"},
            "data": {
                "train": {"builtin": "python-stdlib"},
                "validation": {"every": steps, "batches": 16},
                "sequence_length": 64,
            },
            "train": {"steps": steps, "global_batch": 16},
            "optimizer": {"lr": 1e-3, "schedule": {"name": "cosine", "warmup": 20}},
            "parallelism": {"micro_batch": 8},
            "communication": {"bucket_mb": 0.25, "compression": compression},
            "workers": RANKS,
            "checkpoint": {"every": steps},
        }
    )


def rank_of(rank: int, listener: Any, spec: JobSpec, root: str, results: Any) -> None:
    """Trains as one replica of one worker; the first hands its metrics over."""
    torch.set_num_threads(1)
    host, port = listener.getsockname()
    store = dist.TCPStore(
        host,
        port,
        is_master=rank == 0,
        wait_for_workers=False,
        timeout=timedelta(minutes=2),
        **({"master_listen_fd": listener.detach()} if rank == 0 else {}),
    )
    metrics: list[dict[str, Any]] = []

    def hear(kind: str, record: dict[str, Any]) -> None:
        if kind == "metric":
            metrics.append(record)

    membership = StaticMembership(RANKS, rank, store, on_report=hear)
    mesh = ReplicaMesh.of_world(Layout(1, 1, 1), 0, Device.of_rank(0, gpu=False))
    train(spec, membership=membership, mesh=mesh, run=RunDirectory(root), warm_up_steps=0)
    store.set(f"done/{rank}", "")
    if rank == 0:  # it keeps the store
        store.wait([f"done/{other}" for other in range(RANKS)])
        results.send(metrics)


def measure(spec: JobSpec, folder: Path) -> dict[str, Any]:
    """Trains once; what is told of it."""

    run = RunDirectory.create(folder)
    context = multiprocessing.get_context("fork")
    reader, results = context.Pipe(duplex=False)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        arguments = [(rank, listener, spec, str(run.root), results) for rank in range(RANKS)]
        ranks = [context.Process(target=rank_of, args=each) for each in arguments]
        for process in ranks:
            process.start()
        multiprocessing.connection.wait([reader, *(process.sentinel for process in ranks)])
        if not reader.poll():
            for process in ranks:
                process.terminate()
            raise RuntimeError(f"a rank ended before it was done with {folder.name}")
        metrics = reader.recv()
        for process in ranks:
            process.join()
    last = metrics[-1]
    return {
        "bytes_a_step": last["comm_bytes"],
        "loss": round(last["validation_loss"], 4),
        "training_loss": round(statistics.fmean(metric["loss"] for metric in metrics[-20:]), 4),
        "step_ms": round(1000 * statistics.median(metric["step_s"] for metric in metrics), 2),
        "exposed_comm_ms": round(1000 * statistics.median(metric["exposed_comm_s"] for metric in metrics), 2),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--schemes", nargs="*", default=list(SCHEMES), choices=list(SCHEMES))
    options = parser.parse_args()
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="rubato-bench-") as folder:
        for name in dict.fromkeys(["none", *options.schemes]):
            spec = spec_of(SCHEMES[name], options.steps)
            found[name] = measure(spec, Path(folder, name.replace(" ", "-").replace("%", "percent")))
            found[name]["bytes_ratio"] = round(found[name]["bytes_a_step"] / found["none"]["bytes_a_step"], 4)
            found[name]["loss_ratio"] = round(found[name]["loss"] / found["none"]["loss"], 4)
            print(name, found[name], file=sys.stderr)
    blocks = found.get("int8")
    passed = blocks is None or (blocks["loss_ratio"] <= MOST_LOSS and blocks["bytes_ratio"] <= MOST_BYTES)
    print(json.dumps({"benchmark": "compression", "ranks": RANKS, "steps": options.steps, "schemes": found}))
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
