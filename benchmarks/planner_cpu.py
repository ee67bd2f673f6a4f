"""Predicted against measured tokens a second on this machine, for six layouts of a small model on one to four workers.

Calibrates first, as `rubato calibrate` does, then predicts all, then trains each layout for some steps in forked ranks.
More workers than cores share them, and the prediction has to know. Run it while nothing else runs. One JSON line last.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from datetime import UTC, datetime
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint
import torch.distributed.pipelining
import torch.distributed.tensor.parallel

from rubato.layout import Layout
from rubato.plans import Calibration
from rubato.resources import NodeView
from rubato.spec import JobSpec, parse_spec
from service.planning.calibration import measured_by
from service.planning.fleet import live_fleet
from service.planning.from_spec import layout_of
from service.planning.job_plan import JobPlanner
from workers.engine.device import Device
from workers.engine.membership import StaticMembership
from workers.engine.mesh import ReplicaMesh
from workers.engine.run import RunDirectory
from workers.engine.train import train

WARM_UP = 2  # steps that are not counted
LOGICAL_CPUS = 4


@dataclass(frozen=True)
class Case:
    """A layout: degrees, and sequences a micro-batch."""

    data: int
    pipeline: int
    tensor: int
    micro_batch: int

    @property
    def layout(self) -> Layout:
        return Layout(self.data, self.pipeline, self.tensor)

    def __str__(self) -> str:
        return f"{self.data}x{self.pipeline}x{self.tensor}"


CASES = (
    Case(1, 1, 1, 4),
    Case(2, 1, 1, 4),
    Case(1, 2, 1, 2),
    Case(1, 1, 2, 4),
    Case(4, 1, 1, 4),
    Case(2, 2, 1, 2),
)


def spec_of(case: Case, steps: int) -> JobSpec:
    shape = {"tensor": case.tensor, "pipeline": case.pipeline, "micro_batch": case.micro_batch}
    return parse_spec(
        {
            "name": "bench",
            "model": {"hidden_size": 256, "layers": 4, "heads": 8, "ffn_size": 1024},
            "data": {"train": {"builtin": "python-stdlib"}, "sequence_length": 128},
            "train": {"steps": steps, "global_batch": 16, "compile": False},
            "parallelism": shape,
            "workers": case.layout.world_size,
            "checkpoint": {"every": steps},
        }
    )


def calibrate() -> Calibration:
    """What `rubato calibrate` would store."""
    ended = subprocess.run(
        [sys.executable, "-m", "workers.engine.calibration"], check=True, capture_output=True, text=True
    )
    found = json.loads(ended.stdout.splitlines()[-1])
    return Calibration.model_validate({**found, "measured_at": datetime.now(UTC), "host": "here"})


def predict(spec: JobSpec, calibration: Calibration) -> float:
    """Tokens a second."""
    node = NodeView(id="n", ip="-", alive=True, cpus=LOGICAL_CPUS, gpus=0, cpus_free=LOGICAL_CPUS, gpus_free=0)
    fleet = live_fleet([node], spec.workers, dict([measured_by(calibration)]))
    layout = layout_of(spec, spec.workers.min)
    assert fleet is not None  # the node has CPUs
    assert layout is not None  # the spec is of this size
    return JobPlanner(spec, fleet).search(spec.workers.min).judge(layout).tokens_per_s


def measure(case: Case, spec: JobSpec, folder: Path) -> float:
    """Tokens a second, by a step than which a quarter were faster: what else runs only ever makes one slower."""
    context = get_context("fork")
    results = context.SimpleQueue()
    ranks = [
        context.Process(target=_rank, args=(rank, case, spec, folder, results))
        for rank in range(case.layout.world_size)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    if any(rank.exitcode for rank in ranks):
        raise SystemExit(f"{case} did not train")
    seconds = results.get()
    return (
        spec.train.global_batch * spec.data.sequence_length / sorted(seconds[WARM_UP:])[(len(seconds) - WARM_UP) // 4]
    )


def _rank(rank: int, case: Case, spec: JobSpec, folder: Path, results: Any) -> None:
    torch.set_num_threads(1)
    layout, seconds = case.layout, []
    store = None
    if layout.world_size > 1:
        store = dist.FileStore(str(folder / f"store-{case}"), layout.world_size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=layout.world_size)

    def heard(kind: str, record: dict[str, Any]) -> None:
        if kind == "metric":
            seconds.append(record["step_s"])

    membership = StaticMembership(
        layout.data,
        layout.coordinates(rank).data,
        None if store is None else dist.PrefixStore("data", store),
        on_report=heard,
    )
    mesh = ReplicaMesh.of_world(layout, rank, Device.of_rank(0, gpu=False))
    train(spec, membership=membership, mesh=mesh, run=RunDirectory.create(folder / f"run-{case}"), warm_up_steps=0)
    if store is not None:
        dist.barrier()
        dist.destroy_process_group()
    if seconds:
        results.put(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--calibration", type=Path, help="measured before; else it is measured first")
    options = parser.parse_args()
    calibration = (
        Calibration.model_validate_json(options.calibration.read_bytes()) if options.calibration else calibrate()
    )
    print(calibration.model_dump_json(), file=sys.stderr)
    rows = []
    with tempfile.TemporaryDirectory(prefix="rb-bench-") as folder:
        for case in CASES:
            spec = spec_of(case, options.steps)
            predicted, measured = predict(spec, calibration), measure(case, spec, Path(folder))
            row = {"layout": str(case), "workers": case.layout.world_size, "predicted": round(predicted)}
            rows.append({**row, "measured": round(measured), "error": round(predicted / measured - 1, 3)})
            print(rows[-1], file=sys.stderr)
    chosen = max(rows, key=lambda row: row["predicted"])
    best = max(rows, key=lambda row: row["measured"])
    print(
        json.dumps(
            {
                "benchmark": "planner_cpu",
                "cores": len(os.sched_getaffinity(0)),
                "worst_error": max(abs(row["error"]) for row in rows),
                "predicted_best": chosen["layout"],
                "measured_best": best["layout"],
                "share_of_best": round(chosen["measured"] / best["measured"], 3),
                "layouts": rows,
            }
        )
    )


if __name__ == "__main__":
    main()
