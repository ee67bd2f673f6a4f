"""The order of windows is a permutation, differs by seed and epoch, and looks random."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from workers.engine.data.permutation import permute


def order(size: int, seed: int, epoch: int) -> list[int]:
    return permute(np.arange(size, dtype=np.uint64), size, seed, epoch).tolist()


@given(st.integers(1, 3000), st.integers(0, 2**80), st.integers(0, 2**64 - 1))
def test_every_thing_comes_once(size: int, seed: int, epoch: int) -> None:
    assert sorted(order(size, seed, epoch)) == list(range(size))


@given(st.integers(1, 3000), st.integers(0, 2**40), st.data())
def test_a_place_goes_where_it_goes_whatever_is_asked_beside_it(size: int, seed: int, data: st.DataObject) -> None:
    some = data.draw(st.lists(st.integers(0, size - 1), max_size=20))
    whole = order(size, seed, 3)
    assert permute(np.array(some, dtype=np.uint64), size, seed, 3).tolist() == [whole[place] for place in some]


def test_seed_and_epoch_each_name_another_order() -> None:
    orders = {tuple(order(100, seed, epoch)) for seed in (0, 1, 2**64) for epoch in (0, 1, 2**63)}
    assert len(orders) == 9


def test_neighbours_are_torn_apart() -> None:
    size = 10_000
    places = np.array(order(size, 0, 0))
    # Of a random order: mean distance of neighbours size / 3, correlation with the place it came from 0 +- 0.01.
    assert abs(np.abs(np.diff(places)).mean() / (size / 3) - 1) < 0.05
    assert abs(np.corrcoef(places, np.arange(size))[0, 1]) < 0.05
