"""Sizes of models, layouts and the catalogue of accelerators."""

from __future__ import annotations

import json
from dataclasses import fields
from importlib.resources import files

import pytest
from planning_cases import GPT3_175B, LLAMA_8B, LLAMA_70B, PLAIN, SMALL

from rubato.arithmetic import AUTOCAST, FP32, Decoder
from rubato.problems import RubatoError
from rubato.spec import parse_spec
from service.planning.accelerators import accelerator, catalogue, weakest
from service.planning.constants import Constants, fitted
from service.planning.from_spec import layout_of, runtime_of, work_of
from service.planning.shapes import Cluster, Layout, Work


@pytest.mark.parametrize(
    ("model", "published"), [(LLAMA_8B, 8.030e9), (LLAMA_70B, 70.55e9), (GPT3_175B, 174.6e9)], ids=["8b", "70b", "175b"]
)
def test_parameters_are_those_published(model: Decoder, published: float) -> None:
    assert model.parameters == pytest.approx(published, rel=0.001)


def test_layers_go_to_ranks_evenly_with_the_longer_first() -> None:
    layout = Layout(pipeline=3)
    assert layout.layers_of(SMALL) == (3, 3, 2)
    assert [layout.layers_on(SMALL, rank) for rank in range(3)] == [3, 3, 2]
    given = Layout(pipeline=3, stage_layers=(4, 3, 1))
    assert given.layers_of(SMALL) == (4, 3, 1)
    assert given.layers_on(SMALL, 2) == 1


def test_a_step_waits_for_the_replica_with_most_micro_batches() -> None:
    assert Layout(data=3, micro_batch=2).micro_batches(16) == 3
    assert Layout(data=4, micro_batch=2).micro_batches(16) == 2
    assert Layout(tensor=2, pipeline=3, data=4, context=5).world_size == 120


def test_every_accelerator_is_plausible_and_names_its_sources() -> None:
    assert {"a100-40gb", "a100-80gb", "h100-80gb", "h200-141gb", "b200-180gb", "l40s-48gb", "rtx4090-24gb"} < set(
        catalogue()
    )
    entries = json.loads((files("service.planning") / "accelerators.json").read_text("utf-8"))
    for name, one in catalogue().items():
        assert one.single_flops < one.matmul_flops < one.peak_flops, name
        assert one.context_bytes < one.memory_bytes / 2, name
        assert one.network_bytes <= one.link_bytes, name
        assert 0 < one.older_kernel_share <= 1, name
        assert entries[name]["sources"], name


def test_an_accelerator_is_found_by_the_beginning_of_its_name() -> None:
    assert accelerator("h100").name == "h100-80gb"
    with pytest.raises(RubatoError, match="no accelerator is called 'a100'") as ambiguous:
        accelerator("a100")
    assert "a100-40gb" in ambiguous.value.fix
    with pytest.raises(RubatoError) as typo:
        accelerator("h10-80gb")
    assert "did you mean 'h100-80gb'?" in typo.value.fix


def test_unlike_devices_count_as_the_least_of_each() -> None:
    fast, slow = accelerator("h100"), accelerator("a100-40gb")
    both = weakest([fast, slow, fast])
    assert both.memory_bytes == slow.memory_bytes
    assert both.matmul_flops == slow.matmul_flops
    assert both.link_bytes == slow.link_bytes
    assert both.name == "h100-80gb + a100-40gb"
    assert weakest([fast, fast]) is fast
    with pytest.raises(ValueError, match="no accelerators"):
        weakest([])


def test_a_cluster_is_deployed_as_usual_unless_said() -> None:
    assert Cluster.of(PLAIN, 8) == Cluster(PLAIN, 8, node_size=4, network_bytes=1e8)


def test_ten_constants_are_fitted_and_they_are_shares_or_seconds() -> None:
    of_calibration = {"tensor_gap_s", "handover_s", "ends_s"}
    assert len({field.name for field in fields(Constants)} - of_calibration) == 10
    constants = fitted()
    assert {getattr(constants, name) for name in of_calibration} == {0.0}, "published runs do not tell them apart"
    for name in ("matmul_share", "memory_bandwidth_share", "attention_share", "link_share", "exposed_share"):
        assert 0 < getattr(constants, name) <= 1, name
    assert 0 < constants.hop_latency_s < 1e-4
    assert 1 <= constants.activation_factor < 2


def test_a_spec_becomes_work_a_runtime_and_a_layout() -> None:
    spec = parse_spec(
        {
            "name": "job",
            "model": {"preset": "8m"},
            "data": {"train": {"builtin": "python-stdlib"}, "sequence_length": 128},
            "train": {"steps": 1, "global_batch": 24, "precision": "bf16"},
            "parallelism": {"tensor": 2, "pipeline": 2, "micro_batch": 3},
            "workers": {"min": 4, "max": 8},
        }
    )
    assert work_of(spec) == Work(Decoder(8, 256, 8, 8, 1024, 256), sequence=128, global_batch=24)
    assert runtime_of(spec).precision == AUTOCAST
    whole = spec.model_copy(update={"train": spec.train.model_copy(update={"precision": "fp32"})})
    assert runtime_of(whole).precision == FP32
    averaged = spec.model_copy(update={"optimizer": spec.optimizer.model_copy(update={"ema": 0.999})})
    assert runtime_of(averaged).precision.optimizer == AUTOCAST.optimizer + 4
    assert layout_of(spec, 8) == Layout(
        tensor=2, pipeline=2, data=2, micro_batch=3, sequence_parallel=True, stage_layers=(4, 4)
    )
    assert layout_of(spec, 6) is None
