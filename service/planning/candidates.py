"""Layouts worth looking at: what the engine can run, without what another layout beats in memory and in speed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd

from rubato.arithmetic import Recompute
from service.planning.shapes import Layout, Work

MOST_VIRTUAL_STAGES = 8
MOST_SEQUENCES = 32  # in a micro-batch


@dataclass(frozen=True)
class Space:
    """What the engine can run. The defaults are everything the models describe."""

    most_tensor: int | None = None
    """None: as many as share a node."""
    most_pipeline: int | None = None
    zero: tuple[int, ...] = (1, 2, 3)
    """ZeRO 0 is left out: ZeRO 1 needs less memory and moves no more bytes."""
    recompute: tuple[Recompute, ...] = ("none", "selective", "full")
    interleaved: bool = True
    sequence_parallel: bool = True


def tensor_degrees(work: Work, space: Space, node_size: int) -> list[int]:
    """Degrees that divide what they split, in powers of two, and stay in a node."""
    model = work.model
    splits = gcd(model.heads, model.kv_heads, model.ffn, model.positions, work.sequence)
    most = min(space.most_tensor or node_size, node_size)
    return [degree for degree in (2**power for power in range(10)) if degree <= most and splits % degree == 0]


def pipeline_degrees(work: Work, space: Space) -> list[int]:
    """Degrees at which the longest stage has fewer layers than at any smaller one; others only lengthen the bubble."""
    layers = work.model.layers
    most = 1 if work.model.tied else min(layers, space.most_pipeline or layers)
    degrees = range(1, most + 1)
    return [degree for degree in degrees if degree == 1 or -(-layers // degree) < -(-layers // (degree - 1))]


def micro_batch_sizes(work: Work) -> list[int]:
    """Sequences a micro-batch: divisors of the global batch."""
    return [size for size in range(1, MOST_SEQUENCES + 1) if work.global_batch % size == 0]


def replicas(work: Work, space: Space, tensor: int, pipeline: int, unfused: bool) -> Iterator[Layout]:
    """Layouts of one replica of given degrees; the data degree and the ZeRO stage are still open.

    GPipe is left out: 1F1B takes the same time and less memory. So is selective recomputation with fused attention,
    which keeps no scores to recompute.
    """
    recompute = [mode for mode in space.recompute if unfused or mode != "selective"]
    layers = work.model.layers
    virtual = [1]
    if space.interleaved and pipeline > 1:
        most = min(MOST_VIRTUAL_STAGES, layers // pipeline)
        virtual += [stages for stages in range(2, most + 1) if layers % (pipeline * stages) == 0]
    for micro_batch in micro_batch_sizes(work):
        for stages in virtual:
            for mode in recompute:
                yield Layout(
                    tensor=tensor,
                    pipeline=pipeline,
                    micro_batch=micro_batch,
                    schedule="interleaved" if stages > 1 else "1f1b",
                    virtual_stages=stages,
                    recompute=mode,
                    sequence_parallel=space.sequence_parallel and tensor > 1,
                )
