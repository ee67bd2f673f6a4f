"""A tiny job to train in tests, and the one call that trains it at a layout."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rubato.layout import Layout
from rubato.spec import JobSpec, parse_spec
from tests.engine.forked import TIMEOUT, start_group
from workers.engine.device import Device
from workers.engine.membership import StaticMembership
from workers.engine.mesh import ReplicaMesh
from workers.engine.run import RunDirectory
from workers.engine.train import train

TINY = {"hidden_size": 16, "layers": 4, "heads": 4, "kv_heads": 4, "ffn_size": 24}


def write_corpus(folder: Path) -> Path:
    """Some text; each line another."""
    path = folder / "text.txt"
    path.write_text("".join(f"line {number}: {number * number} is the square of {number}\n" for number in range(3000)))
    return path


def tiny_spec(corpus: Path, **sections: Any) -> JobSpec:
    """A spec of which ``sections`` replace or complete the parts."""
    content: dict[str, Any] = {
        "name": "tiny",
        "model": TINY,
        "data": {"train": {"path": str(corpus)}, "sequence_length": 16},
        "train": {"steps": 3, "global_batch": 8, "seed": 3, "clip_norm": 0.5},
        "optimizer": {"lr": 3e-2, "schedule": {"name": "wsd", "warmup": 2, "decay": 0.5}},
        "workers": 1,
    }
    for name, section in sections.items():
        content[name] = {**content[name], **section} if isinstance(content.get(name), dict) else section
    return parse_spec(content)


def train_at(
    layout: Layout,
    spec: JobSpec,
    run: Path,
    rank: int = 0,
    store: dist.Store | None = None,
    name: str = "world",
    dtype: torch.dtype = torch.float64,
    events: list[dict[str, Any]] | None = None,
    nodes: Sequence[str] = (),
) -> list[dict[str, Any]]:
    """Trains as one rank of a layout, in fp64 by default; the metrics, where this rank is the one that reports them.

    Events it reports are added to ``events``. ``nodes`` are those of the replicas.
    """
    torch.set_default_dtype(dtype)
    if layout.world_size > 1:
        assert store is not None
        start_group(store, name, rank, layout.world_size)
    metrics: list[dict[str, Any]] = []
    heard = defaultdict[str, list[dict[str, Any]]](list, metric=metrics, event=[] if events is None else events)
    membership = StaticMembership(
        layout.data,
        layout.coordinates(rank).data,
        dist.PrefixStore(f"{name}-data", store) if store is not None else None,
        on_report=lambda kind, record: heard[kind].append(record),
        nodes=nodes,
    )
    mesh = ReplicaMesh.of_world(layout, rank, Device.of_rank(0, gpu=False), TIMEOUT)
    result = train(spec, membership=membership, mesh=mesh, run=RunDirectory.create(run), warm_up_steps=0)
    assert result.finished
    if layout.world_size > 1:
        dist.barrier()  # a rank that leaves early closes connections that others still use
        dist.destroy_process_group()
    return metrics
