"""The memory model: numbers published for ZeRO and for activations, schedules by hand, and what must never grow."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planning_cases import GPT3_175B, NEUTRAL, PLAIN, SMALL, SMALL_WORK

from rubato.arithmetic import BF16, FP16, Decoder, kept_bytes_per_token
from service.planning.constants import Constants
from service.planning.memory import MemoryModel
from service.planning.shapes import Layout, Runtime, Work


def small_memory(runtime: Runtime | None = None, constants: Constants = NEUTRAL) -> MemoryModel:
    return MemoryModel(SMALL_WORK, PLAIN, runtime or Runtime(precision=FP16), constants)


@pytest.mark.parametrize(("zero", "gigabytes"), [(0, 120.0), (1, 31.4), (2, 16.6), (3, 1.88)])
def test_zero_keeps_what_its_paper_says(zero: int, gigabytes: float) -> None:
    """Rajbhandari et al. 2020 (arXiv:1910.02054), figure 1: 7.5 billion parameters over 64 ranks."""
    layer = 12 * 4096**2 + 2 * 4096
    model = Decoder(37, 4096, 32, 32, 16384, vocab=(7_500_000_000 - 37 * layer) // 4096, gated=False, tied=True)
    assert model.parameters == pytest.approx(7.5e9, rel=1e-4)
    peak = MemoryModel(Work(model, 1024, 64), PLAIN, Runtime(precision=FP16), NEUTRAL).peak(Layout(data=64, zero=zero))
    assert (peak.parameters + peak.gradients + peak.optimizer) / 1e9 == pytest.approx(gigabytes, rel=0.005)


def test_one_worker_by_hand() -> None:
    peak = small_memory().peak(Layout())
    held = SMALL.parameters
    assert peak.parameters == peak.gradients == 2 * held
    assert peak.optimizer == 12 * held
    assert peak.activations == 8 * 256 * kept_bytes_per_token(SMALL, Layout(), FP16, 256)[0]
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
    assert ranks[0].parameters == middle + 2 * SMALL.embedding_parameters
    assert ranks[3].parameters == ranks[0].parameters + 2 * SMALL.norm_parameters
    assert ranks[0].activations == 4 * ranks[3].activations


def test_a_tied_embedding_counts_once_on_one_rank_and_twice_over_a_pipeline() -> None:
    tied = MemoryModel(Work(replace(SMALL, tied=True), 256, 16), PLAIN, Runtime(precision=FP16), NEUTRAL)
    assert tied.peak(Layout()).parameters == 2 * replace(SMALL, tied=True).parameters
    first, last = (memory.parameters for memory in tied.of_ranks(Layout(pipeline=2)).values())
    assert first == 2 * (4 * SMALL.layer_parameters + SMALL.embedding_parameters)
    assert last == first + 2 * SMALL.norm_parameters


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
