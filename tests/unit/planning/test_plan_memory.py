"""The memory model: numbers published for ZeRO and for activations, schedules by hand, and what must never grow."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planning_cases import GPT3_175B, GPT_22B, LLAMA_8B, NEUTRAL, PLAIN, SMALL, SMALL_WORK

from service.planning.constants import Constants
from service.planning.memory import MemoryModel, in_flight, kept_bytes_per_token
from service.planning.shapes import BF16, FP16, FP32, Layout, Model, Runtime, Work


def small_memory(runtime: Runtime | None = None, constants: Constants = NEUTRAL) -> MemoryModel:
    return MemoryModel(SMALL_WORK, PLAIN, runtime or Runtime(precision=FP16), constants)


@pytest.mark.parametrize(("zero", "gigabytes"), [(0, 120.0), (1, 31.4), (2, 16.6), (3, 1.88)])
def test_zero_keeps_what_its_paper_says(zero: int, gigabytes: float) -> None:
    """Rajbhandari et al. 2020 (arXiv:1910.02054), figure 1: 7.5 billion parameters over 64 ranks."""
    layer = 12 * 4096**2 + 2 * 4096
    model = Model(37, 4096, 32, 32, 16384, vocab=(7_500_000_000 - 37 * layer) // 4096, gated=False, tied=True)
    assert model.parameters == pytest.approx(7.5e9, rel=1e-4)
    peak = MemoryModel(Work(model, 1024, 64), PLAIN, Runtime(precision=FP16), NEUTRAL).peak(Layout(data=64, zero=zero))
    assert (peak.parameters + peak.gradients + peak.optimizer) / 1e9 == pytest.approx(gigabytes, rel=0.005)


def test_activations_are_those_of_the_published_equations() -> None:
    """Korthikanti et al. 2022 (arXiv:2205.05198), equations 1 to 4, per token: s b is 1."""
    h, s, a, t = GPT_22B.hidden, 2048, GPT_22B.heads, 8
    unfused = Runtime(attention="unfused", precision=FP16)

    def kept(layout: Layout) -> float:
        return kept_bytes_per_token(GPT_22B, layout, unfused, s)[0]

    assert kept(Layout()) == pytest.approx(h * (34 + 5 * a * s / h))
    assert kept(Layout(tensor=t)) == pytest.approx(h * (10 + 24 / t + 5 * a * s / (h * t)))
    assert kept(Layout(tensor=t, sequence_parallel=True)) == pytest.approx(h / t * (34 + 5 * a * s / h))
    assert kept(Layout(tensor=t, sequence_parallel=True, recompute="selective")) == pytest.approx(h / t * 34)
    assert kept(Layout(tensor=t, recompute="full")) == 2 * h


def test_fused_attention_keeps_no_scores_and_a_gate_keeps_two_more() -> None:
    flash = Runtime(precision=FP16)
    kept, whole = kept_bytes_per_token(GPT_22B, Layout(), flash, 2048)
    assert kept == whole == 32 * GPT_22B.hidden
    # Llama: 8 h for norms and inputs, 4 (h + h_kv) for attention, 8 ffn for the gated MLP.
    assert kept_bytes_per_token(LLAMA_8B, Layout(), flash, 8192)[0] == 8 * 4096 + 4 * (4096 + 1024) + 8 * 14336
    doubled = kept_bytes_per_token(LLAMA_8B, Layout(), Runtime(precision=FP32), 8192)[0]
    assert doubled == 2 * (8 * 4096 + 4 * (4096 + 1024) + 8 * 14336)


def test_micro_batches_in_flight_of_each_schedule() -> None:
    assert [in_flight(Layout(pipeline=4), rank, 16) for rank in range(4)] == [4, 3, 2, 1]
    assert [in_flight(Layout(pipeline=4), rank, 2) for rank in range(4)] == [2, 2, 2, 1]
    assert in_flight(Layout(pipeline=4, schedule="gpipe"), 3, 16) == 16
    assert in_flight(Layout(), 0, 16) == 1
    # p (1 + (p - 1) / (p v)) micro-batches on the first rank (arXiv:2205.05198, section 4.2.3), less half a chunk that
    # Megatron's schedule has finished by then.
    interleaved = Layout(pipeline=8, schedule="interleaved", virtual_stages=3)
    assert in_flight(interleaved, 0, 64) == (2 * 7 + 2 * 8 + 1) / 3
    assert in_flight(interleaved, 0, 64) == pytest.approx(8 * (1 + 7 / 24), rel=0.01)
    assert in_flight(interleaved, 7, 64) == (2 * 8 + 1) / 3


def test_one_worker_by_hand() -> None:
    peak = small_memory().peak(Layout())
    held = 8 * SMALL.layer_parameters + 2 * SMALL.embedding_parameters
    assert peak.parameters == peak.gradients == 2 * held
    assert peak.optimizer == 12 * held
    assert peak.activations == 8 * 256 * kept_bytes_per_token(SMALL, Layout(), Runtime(), 256)[0]
    # Optimizer temporaries of 4 bytes come when activations are gone; logits of 16 bytes while they are there.
    assert peak.transient == max(16 * 256 * 1024, 4 * held - peak.activations)
    assert peak.context == 1e9
    assert peak.needed == peak.allocated + 1e9


def test_constants_scale_activations_and_what_the_allocator_reserves() -> None:
    stretched = replace(NEUTRAL, activation_factor=1.5, reserved_share=0.2)
    plain, more = small_memory().peak(Layout()), small_memory(constants=stretched).peak(Layout())
    assert more.activations == pytest.approx(1.5 * plain.activations)
    assert more.device == pytest.approx(1.2 * more.allocated + 1e9)
    assert more.needed == more.allocated + 1e9


def test_bf16_accumulates_gradients_beside_those_computed() -> None:
    half, bf16 = small_memory().peak(Layout()), small_memory(Runtime(precision=BF16)).peak(Layout())
    assert bf16.gradients == 3 * half.gradients


def test_first_and_last_stage_hold_the_embeddings() -> None:
    ranks = small_memory().of_ranks(Layout(pipeline=4))
    middle = 2 * 2 * SMALL.layer_parameters
    assert set(ranks) == {0, 1, 3}
    assert ranks[1].parameters == middle
    assert ranks[0].parameters == ranks[3].parameters == middle + 2 * SMALL.embedding_parameters
    assert ranks[0].activations == 4 * ranks[3].activations


def test_a_tied_embedding_counts_once_on_one_rank_and_twice_over_a_pipeline() -> None:
    tied = MemoryModel(Work(replace(SMALL, tied=True), 256, 16), PLAIN, Runtime(precision=FP16), NEUTRAL)
    assert tied.peak(Layout()).parameters == 2 * (8 * SMALL.layer_parameters + SMALL.embedding_parameters)
    held = [memory.parameters for memory in tied.of_ranks(Layout(pipeline=2)).values()]
    assert held == [2 * (4 * SMALL.layer_parameters + SMALL.embedding_parameters)] * 2


def test_gathered_layers_are_held_whole_beside_the_shards() -> None:
    work = Work(GPT3_175B, 2048, 64)
    memory = MemoryModel(work, PLAIN, Runtime(precision=FP16), NEUTRAL)
    peak = memory.peak(Layout(data=64, zero=3, recompute="full"))
    # Two layers with 2 bytes of parameters and 2 of gradients, and the logits: more than one layer's activations.
    assert peak.transient == 2 * (2 + 2) * GPT3_175B.layer_parameters + 16 * 2048 * 51200
    assert memory.peak(Layout(data=64, zero=2, recompute="full")).transient < peak.transient


layouts = st.builds(
    Layout,
    tensor=st.sampled_from([1, 2, 4]),
    pipeline=st.sampled_from([1, 2, 4]),
    data=st.sampled_from([1, 2, 4, 8]),
    zero=st.integers(0, 3),
    micro_batch=st.sampled_from([1, 2, 4]),
    recompute=st.sampled_from(["none", "selective", "full"]),
    sequence_parallel=st.booleans(),
)


@given(layouts, st.sampled_from(["unfused", "flash2"]))
def test_memory_never_grows_with_what_is_there_to_save_it(layout: Layout, attention: str) -> None:
    memory = small_memory(Runtime(attention=attention, precision=FP16))  # type: ignore[arg-type]

    def needed(**changes: object) -> float:
        return memory.peak(replace(layout, **changes)).needed  # type: ignore[arg-type]

    now = needed() * (1 + 1e-9)
    assert needed(data=2 * layout.data) <= now
    assert needed(tensor=2 * layout.tensor) <= now
    assert needed(sequence_parallel=True) <= now
    assert needed(zero=max(1, layout.zero)) <= now
    assert needed(micro_batch=2 * layout.micro_batch) >= needed() * (1 - 1e-9)
