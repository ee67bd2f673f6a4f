"""FLOPs are those the model really does; peaks and rates are what they say."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from rubato.arithmetic import Decoder, forward_flops_per_token
from rubato.spec import PRESETS
from workers.engine.models import whole_model
from workers.engine.watch import Throughput, flops_per_token, measured_peak, model_flops_utilization, peak_flops


@pytest.mark.parametrize(
    "model",
    [
        {"kv_heads": 4},
        {"kv_heads": 2},
        {"family": "gpt2"},
        {"family": "qwen", "kv_heads": 1},
        {"family": "qwen", "qk_norm": True, "head_size": 32},
    ],
)
def test_flops_are_those_of_the_model(make_spec, model: dict[str, Any]) -> None:
    spec = make_spec(model=model, data={"sequence_length": 32})
    built, tokens = whole_model(spec), torch.zeros(2, 32, dtype=torch.int64)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:  # of fused attention it sees nothing
        loss = built(tokens).sum()
        forward = forward_flops_per_token(Decoder.of(spec.model, 256), 32)
        assert counter.get_total_flops() == tokens.numel() * forward
        loss.backward()
    assert counter.get_total_flops() == tokens.numel() * flops_per_token(spec)


def test_flops_of_a_large_model_are_near_six_a_parameter(make_spec) -> None:
    spec = make_spec(model={"preset": "7b"}, data={"sequence_length": 4096})
    sizes = PRESETS["llama"]["7b"].sizes
    layer = 4 * sizes["hidden_size"] ** 2 + 3 * sizes["hidden_size"] * sizes["ffn_size"]
    multiplying = sizes["layers"] * layer + 256 * sizes["hidden_size"]
    attention = 12 * sizes["layers"] * sizes["hidden_size"] * 4096  # 12 L H Q T of the paper
    assert flops_per_token(spec) == 6 * multiplying + attention


def test_utilization_is_the_share_of_all_workers(make_spec) -> None:
    spec = make_spec()
    assert model_flops_utilization(100.0, spec, 4, 50.0 * flops_per_token(spec)) == 0.5


@pytest.mark.parametrize(
    ("name", "bf16", "fp32"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4e12, 66.9e12),
        ("NVIDIA H100 PCIe", 756e12, 51e12),
        ("NVIDIA H200", 989.4e12, 66.9e12),
        ("NVIDIA A100-SXM4-80GB", 312e12, 19.5e12),
        ("NVIDIA A10", 125e12, 31.2e12),
        ("NVIDIA L40S", 362e12, 91.6e12),
        ("NVIDIA L4", 121e12, 30.3e12),
        ("Tesla T4", 65e12, 8.1e12),
    ],
)
def test_the_peak_of_a_known_gpu_is_its_makers(
    monkeypatch: pytest.MonkeyPatch, name: str, bf16: float, fp32: float
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert peak_flops(torch.device("cuda"), "bf16") == pytest.approx(bf16)
    assert peak_flops(torch.device("cuda"), "fp32") == pytest.approx(fp32)


def test_the_peak_of_a_cpu_is_measured() -> None:
    peak = measured_peak(torch.device("cpu"), "fp32", size=128, seconds=0.01)
    assert 1e7 < peak < 1e14


def test_throughput_is_of_the_last_steps() -> None:
    throughput = Throughput(window=2)
    assert throughput.add(100, 1.0) == 100.0
    assert throughput.add(100, 3.0) == 50.0
    assert throughput.add(100, 1.0) == 50.0  # the first has left
    throughput.restart()
    assert throughput.add(100, 1.0) == 100.0
