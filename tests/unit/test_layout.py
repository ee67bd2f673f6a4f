"""Layout arithmetic, over all layouts hypothesis can think of."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rubato.layout import (
    Coordinates,
    Layout,
    fewest_micro_batches,
    largest_divisor,
    layout_for,
    micro_batches,
    nearest_sizes,
    possible_sizes,
    runs_in_schedule,
    sample_range,
    split_evenly,
)
from rubato.pipelines import SCHEDULES, balanced, stages_of

degrees = st.integers(1, 6)


@dataclass(frozen=True)
class Shape:
    tensor: int = 1
    pipeline: int = 1
    schedule: str = "1f1b"
    virtual_stages: int = 1
    micro_batch: int = 1


shapes = st.builds(
    Shape,
    tensor=st.integers(1, 4),
    pipeline=st.integers(1, 4),
    schedule=st.sampled_from(["gpipe", "1f1b", "interleaved", "interleaved_zero_bubble", "zbv", "dualpipev"]),
    micro_batch=st.integers(1, 4),
)


@given(degrees, degrees, degrees)
def test_ranks_and_coordinates_are_one_to_one_with_tensor_fastest(data: int, pipeline: int, tensor: int) -> None:
    layout = Layout(data, pipeline, tensor)
    expected = [Coordinates(d, p, t) for d in range(data) for p in range(pipeline) for t in range(tensor)]
    assert [layout.coordinates(rank) for rank in range(layout.world_size)] == expected
    assert [layout.rank(at) for at in expected] == list(range(layout.world_size))


@pytest.mark.parametrize("rank", [-1, 8])
def test_a_rank_outside_the_world_is_refused(rank: int) -> None:
    with pytest.raises(ValueError, match="outside a world of 8"):
        Layout(2, 2, 2).coordinates(rank)


@given(st.integers(0, 1000), st.integers(1, 50))
def test_an_even_split_adds_up_and_differs_by_at_most_one(total: int, parts: int) -> None:
    split = split_evenly(total, parts)
    assert sum(split) == total
    assert len(split) == parts
    assert max(split) - min(split) <= 1
    assert split == sorted(split, reverse=True)


@given(shapes, st.integers(1, 64), st.integers(1, 9))
def test_the_replicas_cover_the_global_batch_once_in_order(shape: Shape, batches: int, data: int) -> None:
    global_batch = batches * shape.micro_batch
    ranges = [sample_range(shape, global_batch, data, replica) for replica in range(data)]
    assert [sample for part in ranges for sample in part] == list(range(global_batch))
    assert [len(part) // shape.micro_batch for part in ranges] == micro_batches(shape, global_batch, data)


@given(shapes, st.integers(1, 64), st.integers(1, 40), st.integers(0, 40))
def test_possible_sizes_are_exactly_those_that_every_replica_can_run(
    shape: Shape, batches: int, low: int, more: int
) -> None:
    global_batch, high = batches * shape.micro_batch, low + more
    expected = []
    for workers in range(low, high + 1):
        layout = layout_for(shape, workers)
        if layout and all(runs_in_schedule(shape, n) for n in micro_batches(shape, global_batch, layout.data)):
            expected.append(workers)
    assert possible_sizes(shape, global_batch, low, high) == expected


def test_a_data_degree_that_does_not_divide_the_batch_is_weighted_not_refused() -> None:
    shape = Shape(tensor=2, pipeline=2)
    assert possible_sizes(shape, 16, 4, 16) == [4, 8, 12, 16]
    assert micro_batches(shape, 16, 3) == [6, 5, 5]


@pytest.mark.parametrize(
    ("schedule", "count", "runs"),
    [
        ("gpipe", 1, True),
        ("gpipe", 0, False),
        ("1f1b", 3, False),
        ("1f1b", 4, True),
        ("1f1b", 5, True),
        ("interleaved", 4, True),
        ("interleaved", 6, True),
        ("interleaved", 9, False),
        ("interleaved_zero_bubble", 9, False),
        ("zbv", 1, True),
        ("dualpipev", 7, False),
        ("dualpipev", 9, True),
    ],
)
def test_what_a_schedule_of_four_ranks_can_run(schedule: str, count: int, runs: bool) -> None:
    assert runs_in_schedule(Shape(pipeline=4, schedule=schedule), count) is runs


@given(shapes, st.integers(1, 64), st.integers(1, 100))
def test_nearest_sizes_enclose_what_was_asked(shape: Shape, batches: int, workers: int) -> None:
    global_batch = batches * shape.micro_batch
    sizes = possible_sizes(shape, global_batch, 1, 10_000)
    near = nearest_sizes(shape, global_batch, workers)
    assert set(near) <= set(sizes)
    if workers in sizes:
        assert near == [workers]
    else:
        assert not [size for size in sizes if near and min(near) < size < max(near)]
        assert [size for size in near if size < workers] == [size for size in sizes if size < workers][-1:]
        assert [size for size in near if size > workers] == [size for size in sizes if size > workers][:1]


def test_nearest_sizes_stay_within_the_bounds_of_the_job() -> None:
    shape = Shape(tensor=2, pipeline=2)
    assert nearest_sizes(shape, 16, 5, 4, 8) == [4, 8]
    assert nearest_sizes(shape, 16, 12, 4, 8) == [8]
    assert nearest_sizes(shape, 16, 1, 4, 8) == [4]


def test_the_fewest_micro_batches_of_each_schedule() -> None:
    fewest = {name: fewest_micro_batches(Shape(pipeline=3, schedule=name)) for name in SCHEDULES}
    assert fewest == {
        "gpipe": 1,
        "1f1b": 3,
        "interleaved": 1,
        "interleaved_zero_bubble": 1,
        "zbv": 1,
        "dualpipev": 6,
    }


def test_every_stage_is_on_one_rank_and_a_v_turns_on_the_last() -> None:
    for name in SCHEDULES:
        fewest = SCHEDULES[name].stages[0]
        held = [stages_of(name, 4, fewest, rank) for rank in range(4)]
        assert sorted(stage for stages in held for stage in stages) == list(range(4 * fewest))
    assert [stages_of("zbv", 3, 2, rank) for rank in range(3)] == [[0, 5], [1, 4], [2, 3]]
    assert [stages_of("interleaved", 3, 2, rank) for rank in range(3)] == [[0, 3], [1, 4], [2, 5]]


@given(st.integers(1, 40), st.integers(1, 8), st.floats(0, 5), st.floats(0, 5))
def test_no_other_placement_has_a_cheaper_dearest_stage(more: int, stages: int, first: float, last: float) -> None:
    layers = stages + more
    counts = balanced(layers, stages, first, last)
    assert sum(counts) == layers
    assert min(counts) >= 1
    extra = [0.0] * stages
    extra[0] += first
    extra[-1] += last
    dearest = max(count + own for count, own in zip(counts, extra, strict=True))
    # With every stage just cheaper than that, fewer layers would find room, or a stage would have none.
    room = [max(1, math.ceil(dearest - own - 1e-9) - 1) for own in extra]
    assert sum(room) < layers or any(own + 1 >= dearest - 1e-9 for own in extra)


@pytest.mark.parametrize("number", [1, 2, 12, 97, 360, 2**31 - 1, 2**30])
@pytest.mark.parametrize("most", [1, 2, 7, 11, 100, 2**31 - 1])
def test_largest_divisor(number: int, most: int) -> None:
    found = largest_divisor(number, most)
    assert number % found == 0
    assert found <= most
    between = range(found + 1, min(number, most, found + 50_000) + 1)
    assert not any(number % larger == 0 for larger in between)
