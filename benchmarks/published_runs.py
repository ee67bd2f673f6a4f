"""Reads a CSV of published training runs into what the planner takes, without looking at their results."""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from rubato.arithmetic import BF16, FP16, FP32, SHARDED, Decoder, Precision, Recompute
from service.planning.accelerators import accelerator, catalogue
from service.planning.shapes import Attention, Cluster, Layout, Runtime, Work

RECOMPUTE: dict[str, Recompute] = {
    "": "none",
    "none": "none",
    "full": "full",
    "selective": "selective",
    "selective-attention": "selective",
}

SIZES = ("layers", "hidden", "heads", "ffn_hidden", "vocab", "seq_len")
DEGREES = ("num_gpus", "tp", "pp", "dp", "micro_batch", "global_batch")

PRECISIONS = {"fp16": FP16, "bf16": BF16, "fp32": FP32}

# Bytes a second each way and GPU, where it is documented that a machine differs from what its GPU is usually sold with.
# Jean Zay (BigScience): four 100 Gb/s Omni-Path links for eight GPUs.
NETWORKS = {"bigscience": 6.25e9}

# Kernels by the documented software of the time. Trainers are named by how their names begin.
# Fused attention: llm-foundry's table is from the days of FlashAttention 1 (triton); NeMo and Megatron run cuDNN's
# through Transformer Engine, made for the GPU at hand. Others: FlashAttention 2.
FUSED: dict[str, Attention] = {"llm-foundry": "flash1", "NeMo": "native", "Megatron-LM": "native"}
# Recomputation by a function of their own, which runs a layer's forward to its end; others use PyTorch's.
OWN_CHECKPOINT = ("Megatron", "DeepSpeed", "nanotron")
# Trainers on Megatron's tensor parallelism of 2022 and later; its SC21 runs were before.
OVERLAPPED = ("Megatron-LM", "NeMo", "nanotron")

# BigScience's log dates its sections; until 25 February a PCIe/NUMA fault cost 4 to 8 %.
FAULTY = re.compile(r"section: .* 02-(1\d|2[0-4])\b")


@dataclass(frozen=True)
class Run:
    """One published run: what was run, and (apart) what came out."""

    line: int
    name: str
    source: str
    software: str
    work: Work
    layout: Layout
    cluster: Cluster
    runtime: Runtime
    measured_tokens: float | None
    measured_gib: float | None
    suspect: bool
    faulty: bool
    driver_memory: bool
    """The peak memory was read from nvidia-smi, not from the allocator."""

    @property
    def gpu(self) -> str:
        return self.cluster.accelerator.name

    @property
    def group(self) -> tuple[str, str, str]:
        """Decoder, source and GPU: rows that share them are near copies, and never both fitted and scored."""
        return self.name, self.source, self.gpu


def read_runs(path: str | Path) -> tuple[list[Run], dict[str, int]]:
    """The runs of a CSV file with the columns of the published runs, and what kept others out, counted by reason."""
    runs, kept_out = [], Counter[str]()
    with Path(path).open(newline="", encoding="utf-8") as file:
        for line, row in enumerate(csv.DictReader(file), start=2):
            reason = _not_modelled(row)
            if reason:
                kept_out[reason] += 1
            else:
                runs.append(_run(line, row))
    return runs, dict(kept_out)


def _not_modelled(row: Mapping[str, str]) -> str | None:
    """Why the planner has nothing to say about a row."""
    missing = [name for name in (*SIZES, *DEGREES) if not row[name]]
    if missing:
        return f"not given: {', '.join(missing)}"
    if row["gpu"] not in catalogue():
        return f"GPU not in the catalogue: {row['gpu']}"
    if row["precision"] not in PRECISIONS:
        return f"precision not modelled: {row['precision']}"
    if row["recompute"] not in RECOMPUTE:
        return f"recomputation not modelled: {row['recompute']}"
    return None


def _run(line: int, row: Mapping[str, str]) -> Run:
    model = _model(row)
    software = row["software"]
    stages, virtual = int(row["pp"]), int(row["virtual_stages"] or 1)
    layout = Layout(
        tensor=int(row["tp"]),
        pipeline=stages,
        data=int(row["dp"]),
        context=int(row["cp"] or 1),
        zero=int(row["zero_stage"] or 0),
        micro_batch=int(row["micro_batch"]),
        schedule="interleaved" if virtual > 1 else "1f1b",
        virtual_stages=virtual,
        recompute=RECOMPUTE[row["recompute"]],
        # nanotron's benchmark runs all use tp_mode REDUCE_SCATTER, which is sequence parallelism.
        sequence_parallel=row["sequence_parallel"] == "True" or (software == "nanotron" and row["tp"] != "1"),
        stage_layers=_stage_layers(model.layers, stages),
        data_inner=True,
    )
    card = accelerator(row["gpu"])
    network = next((rate for name, rate in NETWORKS.items() if name in row["source"]), card.network_bytes)
    fused: Attention = next((kind for name, kind in FUSED.items() if software.startswith(name)), "flash2")
    return Run(
        line=line,
        name=row["model"],
        source=row["source"],
        software=software,
        work=Work(model, int(row["seq_len"]), int(row["global_batch"])),
        layout=layout,
        cluster=Cluster(card, int(row["num_gpus"]), card.node_size, network),
        runtime=Runtime(
            attention="unfused" if row["attention"] == "unfused" else fused,
            precision=_precision(row["precision"], layout.zero),
            compiled=row["compiled"] == "True",
            early_stop=not software.startswith(OWN_CHECKPOINT),
            overlapped_tensor=software.startswith(OVERLAPPED) and "SC21" not in row["source"],
            launch_blocking=row["launch_blocking"] == "True",
        ),
        measured_tokens=float(row["tokens_per_s_per_gpu"]) if row["tokens_per_s_per_gpu"] else None,
        measured_gib=float(row["peak_mem_gib"]) if row["peak_mem_gib"] else None,
        suspect=row["suspect"] == "True",
        faulty="bigscience" in row["source"] and FAULTY.search(row["note"]) is not None,
        driver_memory=software == "Megatron-DeepSpeed",
    )


def _model(row: Mapping[str, str]) -> Decoder:
    hidden, ffn = int(row["hidden"]), int(row["ffn_hidden"])
    gated = ffn != 4 * hidden
    model = Decoder(
        layers=int(row["layers"]),
        hidden=hidden,
        heads=int(row["heads"]),
        kv_heads=int(row["kv_heads"] or row["heads"]),
        ffn=ffn,
        vocab=int(row["vocab"]),
        gated=gated,
        tied=not gated,
    )
    return _named_ties(row["model"], model)


def _named_ties(name: str, model: Decoder) -> Decoder:
    """A gated model ties its embeddings when its name gives three digits of its size, and only that gives them."""
    named = re.search(r"(\d+\.\d\d)B", name)
    if named is None or not model.gated:
        return model
    said = float(named.group(1)) * 1e9
    return min(model, replace(model, tied=True), key=lambda candidate: abs(candidate.parameters - said))


def _stage_layers(layers: int, stages: int) -> tuple[int, ...] | None:
    """Layers of each stage where the number does not divide.

    With embedding and head counted as layers when that comes out even (BigScience's balanced runs), otherwise all
    stages full but the last (DeepSpeed's partitioning).
    """
    if layers % stages == 0:
        return None
    if (layers + 2) % stages == 0:
        full = (layers + 2) // stages
        return (full - 1, *[full] * (stages - 2), full - 1)
    full = -(-layers // stages)
    return tuple(min(full, max(0, layers - full * stage)) for stage in range(stages))


def _precision(name: str, zero: int) -> Precision:
    return SHARDED if name == "bf16" and zero >= 2 else PRECISIONS[name]
