"""FLOPs and bytes are those of the papers they come from."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from rubato.arithmetic import (
    BF16,
    ENGINE_CPU,
    FP16,
    FP32,
    Decoder,
    Recompute,
    Software,
    engine_peak,
    forward_flops_per_token,
    in_flight,
    kept_bytes_per_token,
    memory_of_rank,
    recomputed_flops_per_token,
    training_flops,
    training_flops_per_token,
)
from rubato.spec import PRESETS, ModelSpec

LLAMA_8B = Decoder(layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, vocab=128256)
GPT_22B = Decoder(layers=48, hidden=6144, heads=64, kv_heads=64, ffn=24576, vocab=51200, gated=False, tied=True)
SMALL = Decoder(layers=8, hidden=512, heads=8, kv_heads=8, ffn=1536, vocab=1024)


@dataclass(frozen=True)
class Spread:
    """A layout, as far as memory depends on it."""

    tensor: int = 1
    pipeline: int = 1
    schedule: str = "1f1b"
    virtual_stages: int = 1
    micro_batch: int = 1
    zero: int = 0
    shards: int = 1
    recompute: Recompute = "none"
    sequence_parallel: bool = False


def test_gpt3_took_the_published_number_of_operations() -> None:
    """Brown et al. 2020, table D.1, without attention: 3.14e23 of 174,600M parameters."""
    sizes = {"layers": 96, "hidden": 12288, "sequence": 2048}
    weights, full = training_flops(175e9, 300e9), training_flops(175e9, 300e9, **sizes)
    assert f"{weights:.2e}" == "3.15e+23"
    assert f"{full:.2e}" == "3.24e+23"
    assert training_flops(175e9, 300e9, causal=True, **sizes) - weights == pytest.approx((full - weights) / 2)
    assert training_flops(174.6e9, 300e9) == pytest.approx(3.14e23, rel=0.002)


def test_attention_is_not_counted_once_a_token_for_the_whole_sequence() -> None:
    layers, hidden, sequence, tokens = 96, 12288, 2048, 300e9
    attention = training_flops(0, tokens, layers=layers, hidden=hidden, sequence=sequence)
    copied = 3 * 4 * layers * hidden * sequence**2 * tokens  # forward as it is often written, and twice that backward
    assert copied / attention == pytest.approx(sequence)


def test_a_token_of_a_decoder_costs_six_a_weight_and_the_square_of_attention() -> None:
    # A layer: 4 x 512 x 512 + 3 x 512 x 1536 weights; the head: 1024 x 512.
    assert SMALL.layer_weights == 3_407_872
    assert training_flops_per_token(SMALL, 256) == 6 * (8 * 3_407_872 + 524_288) + 12 * 8 * 512 * 256
    half = training_flops_per_token(SMALL, 256) - training_flops_per_token(SMALL, 256, causal=True)
    assert half == 6 * 8 * 512 * 256
    wide = Decoder(layers=2, hidden=64, heads=4, kv_heads=2, ffn=96, vocab=256, head_dim=32)
    weights = 2 * (2 * 64 * (128 + 64) + 3 * 64 * 96) + 64 * 256
    assert forward_flops_per_token(wide, 16) == 2 * weights + 2 * 4 * 128 * 16


def test_recomputation_does_layers_again_but_not_the_head() -> None:
    layers = forward_flops_per_token(SMALL, 256) - 2 * SMALL.embedding_parameters
    assert recomputed_flops_per_token(SMALL, 256, "full") == layers
    assert recomputed_flops_per_token(SMALL, 256, "selective") == 4 * 8 * 512 * 256
    assert recomputed_flops_per_token(SMALL, 256, "none") == 0


@pytest.mark.parametrize(("family", "preset"), [(family, name) for family in PRESETS for name in PRESETS[family]])
def test_a_preset_is_as_large_as_its_name_says(family: str, preset: str) -> None:
    digits, _, unit = preset.rpartition("-")[2], preset, preset[-1]
    published = PRESETS[family][preset].vocab_size
    if published is None:
        return
    decoder = Decoder.of(ModelSpec.model_validate({"family": family, "preset": preset}), published)
    assert decoder.parameters == pytest.approx(float(digits[:-1]) * {"m": 1e6, "b": 1e9}[unit], rel=0.25)


@pytest.mark.parametrize(("zero", "gigabytes"), [(0, 120.0), (1, 31.4), (2, 16.6), (3, 1.88)])
def test_zero_keeps_what_its_paper_says(zero: int, gigabytes: float) -> None:
    """Rajbhandari et al. 2020 (arXiv:1910.02054), figure 1: 7.5 billion parameters over 64 ranks."""
    decoder = Decoder(37, 4096, 32, 32, 16384, vocab=1, gated=False, tied=True)
    scale = 7.5e9 / decoder.parameters
    spread = Spread(zero=zero, shards=64)
    held = memory_of_rank(decoder, spread, FP16, sequence=1, micro_batches=1, rank=0, layers=37)
    assert scale * (held.parameters + held.gradients + held.optimizer) / 1e9 == pytest.approx(gigabytes, rel=0.005)


def test_activations_are_those_of_the_published_equations() -> None:
    """Korthikanti et al. 2022 (arXiv:2205.05198), equations 1 to 4, per token: s b is 1."""
    h, s, a, t = GPT_22B.hidden, 2048, GPT_22B.heads, 8

    def kept(spread: Spread) -> float:
        return kept_bytes_per_token(GPT_22B, spread, FP16, s, Software(unfused_attention=True))[0]

    assert kept(Spread()) == pytest.approx(h * (34 + 5 * a * s / h))
    assert kept(Spread(tensor=t)) == pytest.approx(h * (10 + 24 / t + 5 * a * s / (h * t)))
    assert kept(Spread(tensor=t, sequence_parallel=True)) == pytest.approx(h / t * (34 + 5 * a * s / h))
    assert kept(Spread(tensor=t, sequence_parallel=True, recompute="selective")) == pytest.approx(h / t * 34)
    assert kept(Spread(tensor=t, recompute="full")) == 2 * h


def test_fused_attention_keeps_no_scores_and_a_gate_keeps_two_more() -> None:
    kept, whole = kept_bytes_per_token(GPT_22B, Spread(), FP16, 2048)
    assert kept == whole == 32 * GPT_22B.hidden
    # Llama: 8 h for norms and inputs, 4 (h + h_kv) for attention, 8 ffn for the gated MLP.
    by_hand = 8 * 4096 + 4 * (4096 + 1024) + 8 * 14336
    assert kept_bytes_per_token(LLAMA_8B, Spread(), FP16, 8192)[0] == by_hand
    assert kept_bytes_per_token(LLAMA_8B, Spread(), FP32, 8192)[0] == 2 * by_hand


def test_inputs_that_stay_gathered_are_not_split_along_the_sequence() -> None:
    spread = Spread(tensor=4, sequence_parallel=True)
    again, _ = kept_bytes_per_token(LLAMA_8B, spread, FP16, 8192)
    stay, _ = kept_bytes_per_token(LLAMA_8B, spread, FP16, 8192, Software(gathered_inputs=True))
    assert stay - again == 4 * 4096 * 3 / 4


def test_micro_batches_in_flight_of_each_schedule() -> None:
    assert [in_flight(Spread(pipeline=4), rank, 16) for rank in range(4)] == [4, 3, 2, 1]
    assert [in_flight(Spread(pipeline=4), rank, 2) for rank in range(4)] == [2, 2, 2, 1]
    assert in_flight(Spread(pipeline=4, schedule="gpipe"), 3, 16) == 16
    assert in_flight(Spread(), 0, 16) == 1
    # p (1 + (p - 1) / (p v)) micro-batches on the first rank (arXiv:2205.05198, section 4.2.3), less half a chunk that
    # Megatron's schedule has finished by then.
    interleaved = Spread(pipeline=8, schedule="interleaved", virtual_stages=3)
    assert in_flight(interleaved, 0, 64) == (2 * 7 + 2 * 8 + 1) / 3
    assert in_flight(interleaved, 0, 64) == pytest.approx(8 * (1 + 7 / 24), rel=0.01)
    assert in_flight(interleaved, 7, 64) == (2 * 8 + 1) / 3


def test_a_rank_by_hand() -> None:
    spread = Spread(tensor=2, pipeline=4, micro_batch=3, sequence_parallel=True)
    first = memory_of_rank(SMALL, spread, BF16, sequence=256, micro_batches=8, rank=0, layers=2)
    held = (2 * SMALL.layer_parameters + SMALL.embedding_parameters) / 2
    assert (first.parameters, first.gradients, first.optimizer) == (2 * held, 6 * held, 12 * held)
    a_token = 2 * (4 * 512 + 4 * 512 + 4 * 1536) / 2
    assert first.activations == 4 * 2 * a_token * 3 * 256
    assert first.total == 20 * held + first.activations
    last = memory_of_rank(SMALL, spread, BF16, sequence=256, micro_batches=8, rank=3, layers=2)
    assert last.parameters == 2 * held + SMALL.norm_parameters
    assert last.activations == first.activations / 4


def test_the_engine_keeps_the_input_of_a_layer_and_what_products_and_attention_gave() -> None:
    kept, _ = kept_bytes_per_token(SMALL, Spread(recompute="selective"), FP32, 64, ENGINE_CPU)
    hidden, ffn = SMALL.hidden, SMALL.ffn
    products = 3 * hidden + hidden + 2 * ffn + hidden  # queries, keys, values; into the stream; gate and up; down
    assert kept == 4 * (hidden + products + hidden)  # the layer's input, and what attention gave


def test_the_peak_of_the_engine_by_hand() -> None:
    """Of sizes at which the logits are what comes on top."""
    model = Decoder(layers=2, hidden=64, heads=4, kv_heads=4, ffn=64, vocab=1024)
    tokens, micro_batches = 128, 2
    whole = engine_peak(model, Spread(), FP32, sequence=tokens, micro_batches=micro_batches, software=ENGINE_CPU)
    layer = 4 * 64**2 + 3 * 64**2 + 2 * 64
    rest = 2 * 1024 * 64 + 64
    held = 2 * layer + rest
    assert (whole.parameters, whole.gradients, whole.optimizer) == (4 * held, 8 * held, 8 * held)
    assert whole.activations == 2 * 4 * 64 * (4 + 2 + 4 + 4) * tokens
    assert whole.transient == 4 * tokens * (3 * 64 + 3 * 1024)
    sharded = engine_peak(
        model, Spread(zero=3, shards=4), FP32, sequence=tokens, micro_batches=micro_batches, software=ENGINE_CPU
    )
    assert sharded.parameters == 4 * (held / 4 + rest + 2 * layer)  # a quarter, what is in no layer, two on their way
    assert sharded.gradients == 4 * (held / 4 + 2 * layer + rest)
    assert sharded.optimizer == 8 * held / 4


def test_every_stage_of_zero_needs_less_than_the_one_before_where_there_are_many_layers() -> None:
    peaks = [
        engine_peak(LLAMA_8B, Spread(zero=zero, shards=8), BF16, sequence=2048, micro_batches=4, software=ENGINE_CPU)
        for zero in range(4)
    ]
    totals = [peak.total for peak in peaks]
    assert totals == sorted(totals, reverse=True)
    assert len(set(totals)) == 4
