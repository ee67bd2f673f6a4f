"""Traced against predicted peak memory: four published models in six layouts each, without a GPU. One JSON line last.

Each layout is traced in processes of its own, on tensors without content: its seconds and host memory are told too.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rubato.layout import distinct_stages
from rubato.plans import Trace
from rubato.spec import JobSpec, parse_spec
from service.planning.accelerators import catalogue
from service.planning.constants import fitted
from service.planning.engine_memory import memory_model
from service.planning.from_spec import layout_of, runtime_of, work_of

MODELS = {
    "llama-8b": ({"family": "llama", "preset": "8b"}, 4096, 128256),
    "llama-70b": ({"family": "llama", "preset": "70b"}, 4096, 128256),
    "llama-405b": ({"family": "llama", "preset": "405b"}, 4096, 128256),
    "gpt3-175b": ({"family": "gpt2", "preset": "3-175b"}, 2048, 50304),
}
# (tensor, pipeline, data, recompute, zero)
LAYOUTS = {
    "llama-8b": ((1, 1, 8, "full", 3), (1, 1, 8, "none", 3), (2, 1, 4, "full", 0), (4, 2, 4, "none", 0),
                 (2, 4, 2, "full", 0), (8, 1, 4, "none", 1)),
    "llama-70b": ((8, 8, 2, "full", 0), (8, 4, 4, "full", 0), (4, 16, 2, "full", 0), (8, 1, 32, "full", 3),
                  (8, 1, 32, "full", 2), (8, 8, 4, "none", 1)),
    "llama-405b": ((8, 16, 4, "full", 0), (8, 18, 4, "full", 0), (8, 14, 8, "full", 1), (8, 1, 128, "full", 3),
                   (8, 8, 8, "full", 1), (8, 16, 8, "none", 1)),
    "gpt3-175b": ((8, 12, 4, "full", 0), (8, 16, 4, "full", 0), (8, 8, 8, "full", 1), (8, 1, 64, "full", 3),
                  (4, 24, 4, "full", 0), (8, 12, 8, "none", 1)),
}  # fmt: skip


def spec_of(name: str, layout: tuple[int, int, int, str, int]) -> JobSpec:
    model, length, vocabulary = MODELS[name]
    tensor, pipeline, data, recompute, zero = layout
    workers = tensor * pipeline * data
    return parse_spec(
        {
            "name": "bench",
            "model": model,
            "data": {"train": {"builtin": "python-stdlib"}, "sequence_length": length, "vocab_size": vocabulary},
            "train": {"steps": 1, "global_batch": 4 * max(pipeline, 2) * data, "precision": "bf16", "compile": False},
            "memory": {"recompute": recompute, "zero": zero},
            "parallelism": {"tensor": tensor, "pipeline": pipeline},
            "workers": {"min": workers, "max": workers, "gpus": 1},
        }
    )


def compare(name: str, layout: tuple[int, int, int, str, int], folder: Path) -> dict[str, Any]:
    """The stage that holds most, as traced and as predicted."""
    spec = spec_of(name, layout)
    file = folder / "spec.json"
    file.write_text(spec.model_dump_json(), encoding="utf-8")
    began = time.perf_counter()
    command = [sys.executable, "-m", "workers.engine.tracing", str(file), "--data", str(layout[2])]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise SystemExit(ended.stderr)
    found = Trace.model_validate_json(ended.stdout.splitlines()[-1])
    seconds = time.perf_counter() - began
    asked = layout_of(spec, spec.workers.min)
    assert asked is not None  # the spec is of this size
    model = memory_model(work_of(spec), catalogue()["h100-80gb"], runtime_of(spec), fitted())
    predicted = max(model.of_rank(asked, stage).allocated for stage in distinct_stages(asked.pipeline))
    traced = max(stage.peak_bytes for stage in found.stages)
    return {
        "model": name,
        "layout": "t{} p{} d{} {} zero {}".format(*layout),
        "traced_gib": round(traced / 2**30, 2),
        "error": round(predicted / traced - 1, 3),
        "seconds": round(seconds, 1),
        "host_gib": round(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=MODELS, help="only this one")
    parser.add_argument("--layouts", type=int, default=6, help="of each model")
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory(prefix="rb-trace-") as folder:
        for name in [options.model] if options.model else MODELS:
            for layout in LAYOUTS[name][: options.layouts]:
                rows.append(compare(name, layout, Path(folder)))
                print(rows[-1], file=sys.stderr)
    print(
        json.dumps(
            {
                "benchmark": "planner_trace",
                "worst_error": max(abs(row["error"]) for row in rows),
                "slowest_s": max(row["seconds"] for row in rows),
                "host_gib": max(row["host_gib"] for row in rows),
                "layouts": rows,
            }
        )
    )


if __name__ == "__main__":
    main()
