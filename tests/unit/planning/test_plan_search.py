"""The search finds what looking at everything would find; it says why the rest does not fit, and changes seldom."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from math import log
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planning_cases import LLAMA_8B, LLAMA_70B, NEUTRAL, PLAIN, SMALL, SMALL_WORK, h100s, plain_cluster

from rubato.arithmetic import training_flops_per_token
from service.planning.candidates import Space, micro_batch_sizes, pipeline_degrees, replicas, tensor_degrees
from service.planning.elastic import elastic_plan
from service.planning.refusals import difference, refuse, refused
from service.planning.search import Choice, Search, runs
from service.planning.shapes import Cluster, Layout, Runtime, Work
from service.planning.throughput import TimeModel

MEGABYTE = 1e6


def search(memory_mb: float = 10_000, space: Space | None = None, work: Work = SMALL_WORK) -> Search:
    card = replace(PLAIN, memory_bytes=memory_mb * MEGABYTE, context_bytes=0.0)
    return Search(work, replace(plain_cluster(), accelerator=card), Runtime(), NEUTRAL, space, margin=0.0)


@given(
    workers=st.integers(1, 24),
    memory_mb=st.sampled_from([60, 90, 150, 400, 10_000]),
    zero=st.sampled_from([(1, 2, 3), (0,), (0, 3)]),
)
@settings(max_examples=60, deadline=None)
def test_bounding_finds_what_looking_at_everything_finds(workers: int, memory_mb: int, zero: tuple[int, ...]) -> None:
    found = search(memory_mb, Space(zero=zero))
    fitting = [found.judge(layout, workers) for layout in found.every(workers) if found.fits(layout)]
    best = found.best(workers)
    if not fitting:
        assert best is None
    else:
        assert best is not None
        assert found.fits(best.layout)
        assert best.step.seconds == pytest.approx(min(choice.step.seconds for choice in fitting))
        assert best.idle >= 0


def test_the_answer_does_not_depend_on_what_was_asked_before() -> None:
    asked = search(150)
    asked.within(12, 0.5)
    for workers in range(1, 17):
        asked.best(workers)
    assert asked.best(12) == search(150).best(12)


def test_a_choice_says_speed_with_a_range_and_how_many_workers_it_leaves_idle() -> None:
    found = search(space=Space(most_tensor=1, most_pipeline=4))
    choice = found.judge(Layout(pipeline=4, data=2), workers=11)
    assert choice.idle == 3
    assert choice.tokens_per_s == pytest.approx(16 * 256 / choice.step.seconds)
    low, high = choice.tokens_per_s_range
    assert low < choice.tokens_per_s < high
    flops = 16 * 256 * training_flops_per_token(SMALL, 256)
    assert choice.mfu == pytest.approx(flops / choice.step.seconds / (8 * 2e12))


def test_candidates_divide_what_they_split() -> None:
    # 8 heads, 1536 ffn, 1024 words, 256 tokens: up to 8, but a node has 4.
    assert tensor_degrees(SMALL_WORK, Space(), node_size=4) == [1, 2, 4]
    assert tensor_degrees(SMALL_WORK, Space(most_tensor=2), node_size=4) == [1, 2]
    few = replace(SMALL, kv_heads=2)
    assert tensor_degrees(Work(few, 256, 16), Space(), node_size=8) == [1, 2]
    # Of 8 layers, 5 to 7 stages leave two on the longest, as 4 stages do.
    assert pipeline_degrees(SMALL_WORK, Space()) == [1, 2, 3, 4, 8]
    assert pipeline_degrees(SMALL_WORK, Space(most_pipeline=3)) == [1, 2, 3]
    assert pipeline_degrees(Work(replace(SMALL, tied=True), 256, 16), Space()) == [1]
    assert micro_batch_sizes(Work(SMALL, 256, 12)) == [1, 2, 3, 4, 6, 12]


def test_replicas_leave_out_what_another_beats() -> None:
    fused = list(replicas(SMALL_WORK, Space(), tensor=2, pipeline=2, unfused=False))
    assert {layout.recompute for layout in fused} == {"none", "full"}
    assert {layout.virtual_stages for layout in fused} == {1, 2, 4}
    assert all(layout.sequence_parallel for layout in fused)
    unfused = list(replicas(SMALL_WORK, Space(interleaved=False), tensor=1, pipeline=2, unfused=True))
    assert {layout.recompute for layout in unfused} == {"none", "selective", "full"}
    assert {layout.schedule for layout in unfused} == {"1f1b"}


def test_a_layout_needs_micro_batches_enough_for_its_schedule() -> None:
    assert runs(Layout(pipeline=4, data=4), global_batch=16)
    assert not runs(Layout(pipeline=4, data=5), global_batch=16)  # some replicas would have three
    assert not runs(Layout(data=17), global_batch=16)


def test_the_pareto_set_trades_speed_for_memory() -> None:
    found = search(400)
    front = found.pareto(8)
    assert len(front) > 2
    assert front[0].step.seconds == pytest.approx(found.best(8).step.seconds)  # type: ignore[union-attr]
    for faster, smaller in pairwise(front):
        assert faster.step.seconds <= smaller.step.seconds
        assert faster.memory.needed > smaller.memory.needed
    for layout in found.every(8):
        if found.fits(layout):
            choice = found.judge(layout)
            assert any(
                known.step.seconds <= choice.step.seconds and known.memory.needed <= choice.memory.needed
                for known in front
            )


def test_a_refusal_names_stage_need_and_the_fastest_change_that_helps() -> None:
    found = search(110)
    layout = Layout(pipeline=2, data=4, zero=1, micro_batch=2)
    refusal = refuse(found, layout)
    assert refusal is not None
    assert refusal.stage == 0
    assert refusal.needed_bytes == found.memory.of_ranks(layout)[0].needed > found.limit
    assert refusal.remedy is not None
    assert found.fits(refusal.remedy)
    assert refusal.remedy.world_size == layout.world_size
    assert refusal.remedy_bytes == found.memory.peak(refusal.remedy).needed
    assert difference(layout, refusal.remedy) in refusal.reason
    assert refuse(search(), layout) is None


def test_a_reason_reads_as_people_say_it() -> None:
    found = Search(Work(LLAMA_8B, 8192, 64), h100s(8))
    refusal = refuse(found, Layout(data=8, zero=3, micro_batch=1))
    assert refusal is not None
    assert refusal.reason == "stage 0 needs 97 GiB of 71 GiB usable: tensor 2, data 4 brings it to 59 GiB"


def test_where_nothing_fits_a_refusal_says_so() -> None:
    found = search(1)
    assert found.best(8) is None
    assert found.pareto(8) == []
    assert elastic_plan(found, range(1, 9)) == []
    refusals = refused(found, 8)
    assert refusals
    assert all("nothing fits at this number of workers" in refusal.reason for refusal in refusals)


def test_near_misses_would_beat_the_best_and_do_not_fit() -> None:
    found = search(110)
    best = found.best(8)
    assert best is not None
    for refusal in refused(found, 8):
        assert refusal.needed_bytes > found.limit
        assert found.time.step(refusal.layout).seconds < best.step.seconds


def test_an_elastic_plan_changes_only_for_what_is_worth_it() -> None:
    found = Search(Work(LLAMA_70B, 8192, 256), h100s(256))
    sizes = range(64, 257, 8)
    restless, calm = elastic_plan(found, sizes, change_worth=0.0), elastic_plan(found, sizes)
    for choice in restless:
        best = found.best(choice.workers)
        assert best is not None
        assert choice.step.seconds == pytest.approx(best.step.seconds)
    assert [choice.workers for choice in calm] == list(sizes)
    assert changes(calm) <= changes(restless) / 3
    slowdowns = [calmer.step.seconds / best.step.seconds for calmer, best in zip(calm, restless, strict=True)]
    assert min(slowdowns) >= 1 - 1e-9
    assert max(slowdowns) <= 1.3
    assert all(found.fits(choice.layout) for choice in calm)
    # What is given up on average is less than the changes saved are worth.
    assert sum(map(log, slowdowns)) / len(sizes) <= 0.005 * (changes(restless) - changes(calm))


def changes(plan: list[Choice]) -> int:
    return sum(one.replica != other.replica for one, other in pairwise(plan))


def test_planning_a_70b_model_at_every_size_looks_at_few_layouts() -> None:
    found = Search(Work(LLAMA_70B, 8192, 1024), h100s(1024))
    steps, step = 0, TimeModel.step

    def counted(model: TimeModel, layout: Layout) -> object:
        nonlocal steps
        steps += 1
        return step(model, layout)

    with patch.object(TimeModel, "step", counted):
        plan = elastic_plan(found, range(64, 1025))
    everything = sum(1 for workers in range(64, 1025, 120) for _ in found.every(workers)) * 120
    assert [choice.workers for choice in plan] == list(range(64, 1025))
    assert steps < everything / 50
    assert changes(plan) < 10
    # More workers are not slower where the replica stays the same.
    for fewer, more in pairwise(plan):
        if fewer.replica == more.replica:
            assert more.tokens_per_s >= fewer.tokens_per_s * 0.98
    full = plan[-1]
    assert 0.25 < full.mfu < 0.6
    assert full.memory.needed <= found.limit


def test_unlike_networks_change_the_choice() -> None:
    work = Work(LLAMA_8B, 4096, 256)
    card = h100s(64).accelerator
    fast, slow = Search(work, Cluster(card, 64, 8, 50e9)), Search(work, Cluster(card, 64, 8, 0.1e9))
    best_fast, best_slow = fast.best(64), slow.best(64)
    assert best_fast is not None
    assert best_slow is not None
    assert best_slow.tokens_per_s < best_fast.tokens_per_s
    assert best_slow.layout != best_fast.layout
