"""What a rank holds at its peak against what the arithmetic says: ZeRO over four ranks, each kind of recomputation.

Peaks are those of torch's memory tracker, which counts every tensor from the model's making to the last update, so they
are the same on every machine. Prints one JSON line last; exit status 1 when a prediction is off by more than 10 %.
"""

import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._tools.mem_tracker import MemTracker
from torch.nn.modules.module import register_module_forward_pre_hook

from rubato.arithmetic import ENGINE_CPU, FP32, Decoder, Recompute, engine_peak
from rubato.layout import Layout, micro_batches
from rubato.spec import JobSpec, parse_spec
from tests.engine.forked import run_ranks
from tests.engine.jobs import train_at
from workers.engine.models.llama import Llama

BOUND = 0.10
MODEL = {"hidden_size": 64, "layers": 6, "heads": 4, "kv_heads": 4, "ffn_size": 192}
ZERO_RANKS = 4
CASES: list[tuple[str, int, dict[str, Any], int]] = [
    *((f"zero {stage}", ZERO_RANKS, {"zero": stage}, 1) for stage in range(4)),
    ("zero 3 in pairs", ZERO_RANKS, {"zero": 3, "shard_over": 2}, 1),
    ("recompute none", 1, {}, 8),
    ("recompute selective", 1, {"recompute": "selective"}, 8),
    ("recompute every 2", 1, {"recompute": {"every": 2}}, 8),
    ("recompute full", 1, {"recompute": "full"}, 8),
]


@dataclass(frozen=True)
class Spread:
    """A layout of one stage, as the arithmetic wants to be told."""

    spec: JobSpec
    shards: int
    tensor: int = 1
    pipeline: int = 1
    virtual_stages: int = 1
    schedule: str = "1f1b"
    sequence_parallel: bool = False

    @property
    def micro_batch(self) -> int:
        return self.spec.parallelism.micro_batch

    @property
    def zero(self) -> int:
        return self.spec.memory.zero

    @property
    def recompute(self) -> Recompute:
        return self.spec.memory.recompute.mode


def spec_of(ranks: int, memory: dict[str, Any], micro_batch: int) -> JobSpec:
    return parse_spec(
        {
            "name": "memory",
            "model": MODEL,
            "data": {"train": {"builtin": "python-stdlib"}, "sequence_length": 64},
            "train": {"steps": 2, "global_batch": 2 * ranks * micro_batch},
            "memory": memory,
            "parallelism": {"micro_batch": micro_batch},
            "workers": ranks,
        }
    )


def measured(ranks: int, spec: JobSpec, folder: Path) -> list[int]:
    """Peak bytes of each rank."""

    def rank_peak(rank: int, store: dist.Store) -> int:
        tracker = MemTracker()

        def begin_anew(module: nn.Module, inputs: object) -> None:
            if isinstance(module, Llama):  # the tracker keeps statistics of one pass through each module
                tracker.reset_mod_stats()

        register_module_forward_pre_hook(begin_anew)
        with tracker:
            train_at(Layout(ranks, 1, 1), spec, folder, rank, store, dtype=torch.float32)
        peak = tracker.get_tracker_snapshot("peak")
        return int(peak[torch.device("cpu")]["Total"])

    return run_ranks(ranks, rank_peak, seconds=300)


def predicted(ranks: int, spec: JobSpec) -> float:
    decoder = Decoder.of(spec.model, spec.data.vocab_size)
    spread = Spread(spec, shards=spec.memory.shard_over or ranks)
    return engine_peak(
        decoder,
        spread,
        FP32,
        sequence=spec.data.sequence_length,
        micro_batches=max(micro_batches(spec.parallelism, spec.train.global_batch, ranks)),
        every=spec.memory.recompute.every,
        software=ENGINE_CPU,
    ).total


def main() -> int:
    cases = []
    with tempfile.TemporaryDirectory(prefix="rubato-bench-") as folder:
        for name, ranks, memory, micro_batch in CASES:
            if len(sys.argv) > 1 and not any(wanted in name for wanted in sys.argv[1:]):
                continue
            spec = spec_of(ranks, memory, micro_batch)
            peaks, said = measured(ranks, spec, Path(folder) / name.replace(" ", "-")), predicted(ranks, spec)
            case = {"case": name, "ranks": ranks, "peak_bytes": peaks, "predicted_bytes": round(said)}
            cases.append(case | {"error": round(said / max(peaks) - 1, 4)})
            print(cases[-1], file=sys.stderr)
    worst = max(abs(case["error"]) for case in cases)
    print(json.dumps({"benchmark": "engine_memory", "worst_error": worst, "bound": BOUND, "cases": cases}))
    return 0 if worst <= BOUND else 1


if __name__ == "__main__":
    sys.exit(main())
