"""What a layer keeps for its backward on a tensor axis is what the arithmetic says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor

from rubato.arithmetic import ENGINE_CPU, FP32, Decoder, kept_bytes_per_token
from rubato.layout import Layout
from rubato.spec import JobSpec
from tests.engine.forked import TIMEOUT, run_ranks, start_group
from tests.engine.jobs import tiny_spec, write_corpus
from workers.engine.device import Device
from workers.engine.mesh import ReplicaMesh
from workers.engine.models import FAMILIES
from workers.engine.parallel.tensor import local, split_over_tensor_axis

SIZES = {"hidden_size": 64, "heads": 4, "kv_heads": 4, "ffn_size": 96}
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {"family": "gpt2"},
    "llama": {"kv_heads": 2},
    "qwen3": {"family": "qwen", "qk_norm": True, "head_size": 24},
}
LENGTH = 128


class OverTwoRanks:
    """Two ranks on the tensor axis, nothing recomputed."""

    tensor, pipeline, virtual_stages, micro_batch, shards = 2, 1, 1, 1, 1
    zero, schedule, recompute, sequence_parallel = 0, "1f1b", "none", True


def spec_of(corpus: Path, name: str, layers: int) -> JobSpec:
    model = {**SIZES, **MODELS[name], "layers": layers}
    data = {"sequence_length": LENGTH}
    return tiny_spec(corpus, model=model, data=data, parallelism={"tensor": 2}, workers=2)


def saved_bytes(spec: JobSpec, mesh: ReplicaMesh) -> int:
    """Bytes this rank's autograd saves in one forward pass, each storage once, parameters left out."""
    assert mesh.axes is not None
    family = FAMILIES[spec.model.family]
    part = family.part(family.configure(spec))
    split_over_tensor_axis(part, family.tensor_plan(part, 2), mesh.axes["tensor"])

    saved: dict[int, torch.UntypedStorage] = {}

    def save(tensor: Tensor) -> Tensor:
        held = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if isinstance(held, AsyncCollectiveTensor):
            held = held.wait()
        if not isinstance(held, FakeTensor):  # those are DTensor's own, to work out shapes with
            saved[held.untyped_storage().data_ptr()] = held.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        logits = part(torch.zeros(1, LENGTH, dtype=torch.int64))
    assert logits.requires_grad
    parameters = {local(parameter).untyped_storage().data_ptr() for parameter in part.parameters()}
    return sum(held.nbytes() for where, held in saved.items() if where not in parameters)


def test_a_layer_on_a_tensor_axis_keeps_what_the_arithmetic_says(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path)

    def ranks(rank: int, store: dist.Store) -> dict[str, int]:
        start_group(store, "world", rank, 2)
        mesh = ReplicaMesh.of_world(Layout(1, 1, 2), rank, Device.of_rank(0, gpu=False), TIMEOUT)
        one_more = {
            name: saved_bytes(spec_of(corpus, name, 3), mesh) - saved_bytes(spec_of(corpus, name, 2), mesh)
            for name in MODELS
        }
        dist.barrier()
        dist.destroy_process_group()
        return one_more

    found = run_ranks(2, ranks)[0]
    for name, kept in found.items():
        decoder = Decoder.of(spec_of(corpus, name, 2).model, 256)
        said, _ = kept_bytes_per_token(decoder, OverTwoRanks(), FP32, LENGTH, ENGINE_CPU)
        assert kept == pytest.approx(said * LENGTH, rel=0.02), name
