"""Ranks and replicas in an order that keeps those who talk most on one node."""

from __future__ import annotations

import random

import pytest

from rubato.placement import order_in_replica, order_replicas, speeds


def rows(order: list[int], nodes: str, tensor: int) -> list[str]:
    return ["".join(nodes[rank] for rank in order[start : start + tensor]) for start in range(0, len(order), tensor)]


@pytest.mark.parametrize(
    ("nodes", "tensor", "expected"),
    [
        ("aaaa", 2, ["aa", "aa"]),
        ("aabb", 2, ["aa", "bb"]),
        ("abab", 2, ["aa", "bb"]),  # as they come, both groups would be split
        ("aaabbb", 2, ["aa", "ab", "bb"]),  # one has to be
        ("aaabbbbb", 4, ["aaab", "bbbb"]),
        ("abcd", 1, ["a", "b", "c", "d"]),
    ],
)
def test_tensor_groups_are_inside_nodes_where_that_can_be(nodes: str, tensor: int, expected: list[str]) -> None:
    assert rows(order_in_replica(nodes, tensor), nodes, tensor) == expected


def test_ranks_ascend_on_both_axes_and_no_order_is_worse_than_as_they_came() -> None:
    chance = random.Random(4)
    for _ in range(300):
        tensor, pipeline = chance.choice([1, 2, 4]), chance.choice([1, 2, 3])
        nodes = "".join(chance.choice("abc") for _ in range(tensor * pipeline))
        order = order_in_replica(nodes, tensor)
        grid = [order[start : start + tensor] for start in range(0, len(order), tensor)]
        assert sorted(order) == list(range(len(nodes)))
        assert all(row == sorted(row) for row in grid)
        assert all(list(column) == sorted(column) for column in zip(*grid, strict=True))

        def split(order: list[int], nodes: str = nodes, tensor: int = tensor) -> int:
            return sum(len(set(row)) > 1 for row in rows(order, nodes, tensor))

        assert split(order) <= split(list(range(len(nodes))))


def test_replicas_of_a_node_are_neighbours_and_the_first_stays() -> None:
    assert order_replicas([]) == []
    assert order_replicas(["a", "a", "b"]) == [0, 1, 2]
    assert order_replicas(["b", "a", "b", "c", "a"]) == [0, 2, 1, 4, 3]


def test_nodes_with_a_fast_link_are_neighbours() -> None:
    links = [
        {"nodes": ["a", "b"], "mb_s": 100.0},
        {"nodes": ["a", "c"], "mb_s": 900.0},
        {"nodes": ["b", "c"], "mb_s": 200.0},
        {"nodes": ["c", "d"], "mb_s": 50.0},
    ]
    assert order_replicas(["a", "b", "c", "d"], speeds(links)) == [0, 2, 1, 3]
