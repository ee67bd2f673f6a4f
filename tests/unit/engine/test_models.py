"""Presets have the parameters that were published; families compute what their papers say."""

from __future__ import annotations

import math

import pytest
import torch

from rubato.arithmetic import ENGINE_CPU, FP32, Decoder, kept_bytes_per_token
from rubato.spec import PRESETS, RopeScalingSpec
from workers.engine.models import FAMILIES, whole_model
from workers.engine.models.llama import frequencies

# As the checkpoints of these models hold them; a tied head counts once.
PUBLISHED = {
    ("gpt2", "124m"): 124_439_808,
    ("gpt2", "355m"): 354_823_168,
    ("gpt2", "774m"): 774_030_080,
    ("gpt2", "1.5b"): 1_557_611_200,
    ("llama", "2-7b"): 6_738_415_616,
    ("llama", "2-13b"): 13_015_864_320,
    ("llama", "2-70b"): 68_976_648_192,
    ("llama", "3-8b"): 8_030_261_248,
    ("llama", "3-70b"): 70_553_706_496,
    ("llama", "3.1-8b"): 8_030_261_248,
    ("llama", "3.1-70b"): 70_553_706_496,
    ("llama", "3.1-405b"): 405_853_388_800,
    ("llama", "3.2-1b"): 1_235_814_400,
    ("llama", "3.2-3b"): 3_212_749_824,
    ("qwen", "2.5-0.5b"): 494_032_768,
    ("qwen", "2.5-1.5b"): 1_543_714_304,
    ("qwen", "2.5-3b"): 3_085_938_688,
    ("qwen", "2.5-7b"): 7_615_616_512,
    ("qwen", "2.5-14b"): 14_770_033_664,
    ("qwen", "2.5-32b"): 32_763_876_352,
    ("qwen", "2.5-72b"): 72_706_203_648,
    ("qwen", "3-0.6b"): 596_049_920,
    ("qwen", "3-1.7b"): 1_720_574_976,
    ("qwen", "3-4b"): 4_022_468_096,
    ("qwen", "3-8b"): 8_190_735_360,
    ("qwen", "3-14b"): 14_768_307_200,
    ("qwen", "3-32b"): 32_762_123_264,
}
# Brown et al. 2020, table D.1, in millions.
GPT3 = {"3-2.7b": 2_650, "3-6.7b": 6_660, "3-175b": 174_600}


def parameters(make_spec, family: str, preset: str) -> int:
    """Counted in the module itself, with the published vocabulary."""
    vocab = PRESETS[family][preset].vocab_size or 256
    spec = make_spec(model={"family": family, "preset": preset}, data={"vocab_size": vocab})
    with torch.device("meta"):
        model = FAMILIES[family].part(FAMILIES[family].configure(spec))
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(("family", "preset"), PUBLISHED, ids="-".join)
def test_a_preset_has_the_published_number_of_parameters(make_spec, family: str, preset: str) -> None:
    assert parameters(make_spec, family, preset) == PUBLISHED[family, preset]


@pytest.mark.parametrize("preset", GPT3)
def test_gpt3_has_the_published_number_of_parameters(make_spec, preset: str) -> None:
    assert parameters(make_spec, "gpt2", preset) == pytest.approx(GPT3[preset] * 1e6, rel=0.002)


@pytest.mark.parametrize(("family", "preset"), [(f, p) for f in PRESETS for p in ("1m", "8m")])
def test_a_small_preset_has_about_as_many_as_its_name_says(make_spec, family: str, preset: str) -> None:
    assert parameters(make_spec, family, preset) == pytest.approx(float(preset[:-1]) * 1e6, rel=0.25)


def test_what_was_published_names_its_source() -> None:
    for family, presets in PRESETS.items():
        for name, preset in presets.items():
            assert (preset.source is None) == (preset.vocab_size is None), (family, name)


def test_long_wavelengths_are_stretched_and_short_ones_kept() -> None:
    scaling = RopeScalingSpec(factor=8.0, original_length=8192)
    plain = frequencies(128, 500_000.0, None, torch.device("cpu"))
    stretched = frequencies(128, 500_000.0, scaling, torch.device("cpu"))
    wavelength = 2 * math.pi / plain
    kept, long = wavelength < 8192 / 4, wavelength > 8192
    assert torch.equal(stretched[kept], plain[kept])
    assert torch.allclose(stretched[long], plain[long] / 8)
    between = (stretched / plain)[~kept & ~long]
    assert len(between) > 2
    assert ((between[1:] < between[:-1]) & (between[1:] > 1 / 8) & (between[:-1] < 1)).all()


@pytest.mark.parametrize("family", PRESETS)
def test_the_future_does_not_change_what_was_predicted(make_spec, family: str) -> None:
    spec = make_spec(model={"family": family, "preset": "tiny"})
    model = FAMILIES[family].part(FAMILIES[family].configure(spec))
    tokens_BS = torch.arange(16)[None]
    changed_BS = torch.cat([tokens_BS[:, :10], tokens_BS[:, :6]], dim=1)
    with torch.no_grad():
        logits, other = model(tokens_BS), model(changed_BS)
    assert torch.allclose(logits[:, :10], other[:, :10], atol=1e-6)
    assert not torch.allclose(logits[:, 10:], other[:, 10:], atol=1e-3)
    assert not torch.allclose(logits[:, 0], logits[:, 1], atol=1e-3)


class Plain:
    """One rank, nothing recomputed."""

    tensor = pipeline = virtual_stages = micro_batch = shards = 1
    zero, schedule, recompute, sequence_parallel = 0, "1f1b", "none", False


VERSIONS = {
    "gpt2": {"family": "gpt2"},
    "gpt2, untied": {"family": "gpt2", "tie_embeddings": False, "positions": 96},
    "llama": {"kv_heads": 2},
    "qwen2": {"family": "qwen", "kv_heads": 1, "qk_norm": False},
    "qwen3": {"family": "qwen", "kv_heads": 2, "head_size": 24},
}


@pytest.mark.parametrize("version", VERSIONS)
def test_the_arithmetic_counts_the_parameters_of_the_module(make_spec, version: str) -> None:
    spec = make_spec(model=VERSIONS[version])
    with torch.device("meta"):
        held = sum(parameter.numel() for parameter in whole_model(spec).parameters())
    assert Decoder.of(spec.model, spec.data.vocab_size).parameters == held


@pytest.mark.parametrize("version", VERSIONS)
def test_the_arithmetic_counts_the_bytes_a_layer_keeps_for_backward(make_spec, version: str) -> None:
    """What autograd saves beyond parameters, each storage once; means of norms and sums of softmax are left out."""
    spec = make_spec(model=VERSIONS[version], data={"sequence_length": 64})

    def kept(layers: int) -> int:
        model = whole_model(make_spec(model={**VERSIONS[version], "layers": layers}, data={"sequence_length": 64}))
        held = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        saved: dict[int, torch.UntypedStorage] = {}

        def save(tensor: torch.Tensor) -> torch.Tensor:
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
            logits = model(torch.zeros(2, 64, dtype=torch.int64))
        assert logits.requires_grad
        return sum(storage.nbytes() for where, storage in saved.items() if where not in held)

    said, _ = kept_bytes_per_token(Decoder.of(spec.model, 256), Plain(), FP32, 64, ENGINE_CPU)
    assert kept(3) - kept(2) == pytest.approx(said * 2 * 64, rel=0.015)
