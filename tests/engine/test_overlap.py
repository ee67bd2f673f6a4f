"""Buckets set out while backward goes on, whole, in one order, under every schedule."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from rubato.layout import Layout
from rubato.pipelines import SCHEDULES
from tests.engine.forked import TIMEOUT, in_one_process, run_ranks, start_group
from tests.engine.jobs import tiny_spec, write_corpus
from workers.engine.comm.overlap import Overlap
from workers.engine.device import Device
from workers.engine.mesh import ReplicaMesh
from workers.engine.parallel.compose import ModelShare
from workers.engine.parallel.tensor import local, local_gradient, sum_partial

SMALL_MB = 0.004
MICRO_BATCHES = 4


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def prepare(shape: dict[str, Any], tied: bool, corpus: Path) -> tuple[ModelShare, Overlap, ReplicaMesh]:
    spec = tiny_spec(
        corpus,
        model={"tie_embeddings": tied},
        parallelism=shape,
        workers=shape.get("pipeline", 1) * shape.get("tensor", 1),
    )
    torch.set_default_dtype(torch.float64)
    layout = Layout(1, spec.parallelism.pipeline, spec.parallelism.tensor)
    rank = dist.get_rank() if dist.is_initialized() else 0
    mesh = ReplicaMesh.of_world(layout, rank, Device.of_rank(0, gpu=False), TIMEOUT)
    share = ModelShare(spec, mesh)
    share.initialise(share.parameters)
    leaves = [local(parameter) for parameter in share.parameters.values()]
    return share, Overlap(share, leaves, SMALL_MB, mesh.tensor.group), mesh


def batch() -> tuple[Tensor, Tensor]:
    tokens = torch.arange(MICRO_BATCHES * 17).view(MICRO_BATCHES, 17) * 7 % 256
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def compare(shape: dict[str, Any], tied: bool, corpus: Path) -> dict[str, Any]:
    share, overlap, mesh = prepare(shape, tied, corpus)
    runner, (tokens_BS, targets_BS) = share.runner(MICRO_BATCHES), batch()
    runner.train(tokens_BS, targets_BS)
    expected = [local_gradient(each.grad.clone(), each) for each in share.parameters.values() if each.grad is not None]
    sum_partial(expected, mesh.tensor.group)
    for parameter in share.parameters.values():
        parameter.grad = None
    set_out: list[Tensor] = []
    with overlap.reducing(lambda bucket: set_out.append(bucket.clone())):
        runner.train(tokens_BS, targets_BS, 1.0, overlap.last_pass)
        early = len(set_out)
    whole = [*zip(overlap.buckets.gradients, expected, strict=True)]
    return {
        "buckets": len(overlap.buckets.flat),
        "early": early,
        "as_they_set_out": all(map(torch.equal, set_out, overlap.buckets.flat)),
        "whole": all(torch.equal(found, wanted) for found, wanted in whole),
        "left": [name for name, parameter in share.parameters.items() if parameter.grad is not None],
    }


CASES: list[tuple[dict[str, Any], bool]] = [({"pipeline": 2, "schedule": name}, False) for name in SCHEDULES]
CASES += [({"pipeline": 2, "schedule": "zbv"}, True), ({"tensor": 2}, False)]


def test_buckets_are_whole_when_they_set_out_under_every_schedule(corpus: Path) -> None:
    def body(rank: int, store: dist.Store) -> list[dict[str, Any]]:
        start_group(store, "world", rank, 2)
        return [compare(shape, tied, corpus) for shape, tied in CASES]

    for rank, found in enumerate(run_ranks(2, body)):
        for (shape, tied), seen in zip(CASES, found, strict=True):
            assert seen["as_they_set_out"], (rank, shape)
            assert seen["whole"], (rank, shape)
            assert seen["left"] == [], (rank, shape)
            # What is summed over the tensor axis, or is in two stages of a rank, is whole only when all is over.
            late = "tensor" in shape or (tied and rank == 0)
            assert seen["early"] == seen["buckets"] - late > 2, (rank, shape)


def test_reduction_goes_on_during_the_last_pass_and_in_no_other(corpus: Path) -> None:
    def body() -> tuple[list[int], int]:
        share, overlap, _ = prepare({}, False, corpus)
        runner, (tokens_BS, targets_BS) = share.runner(MICRO_BATCHES), batch()
        set_out: list[Tensor] = []
        seen: list[int] = []
        for layer in share.parts[0].layers.values():
            layer.register_full_backward_pre_hook(lambda module, gradients: seen.append(len(set_out)))
        with overlap.reducing(set_out.append):
            runner.train(tokens_BS, targets_BS, 1.0, overlap.last_pass)
        return seen, len(overlap.buckets.flat)

    seen, buckets = in_one_process(body)
    passes = [seen[start : start + 4] for start in range(0, len(seen), 4)]
    assert len(passes) == MICRO_BATCHES
    assert passes[:-1] == [[0] * 4] * (MICRO_BATCHES - 1)
    assert all(before < after for before, after in pairwise([0, *passes[-1], buckets]))
