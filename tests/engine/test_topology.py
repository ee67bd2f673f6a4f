"""Links between nodes and sizes of buckets are measured once, by all together, and told by one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from rubato.layout import Layout
from tests.engine.forked import TIMEOUT, run_ranks, start_group
from tests.engine.jobs import tiny_spec, train_at, write_corpus
from workers.engine.comm.topology import _rounds
from workers.engine.comm.tuning import choose
from workers.engine.device import Device
from workers.engine.mesh import ReplicaMesh


def test_a_generation_tells_how_fast_links_between_nodes_are_and_how_large_buckets(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path)
    nodes = ["a", "b", "a", "c"]

    def body(rank: int, store: dist.Store) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        events: list[dict[str, Any]] = []
        plain = tiny_spec(corpus, workers=4)
        tuned = tiny_spec(corpus, workers=4, communication={"bucket_mb": "auto", "compression": "int8"})
        same = train_at(Layout(4, 1, 1), plain, tmp_path / "plain", rank, store, "plain")
        train_at(Layout(4, 1, 1), tuned, tmp_path / "run", rank, store, "run", events=events, nodes=nodes)
        return events, same

    by_rank = run_ranks(4, body)
    events = [event for event in by_rank[0][0] if event["kind"] in ("topology.measured", "buckets.tuned")]
    assert [event["kind"] for event in events] == ["topology.measured", "buckets.tuned"]
    assert not [event for found, _ in by_rank[1:] for event in found]
    links = events[0]["data"]["links"]
    assert sorted(link["nodes"] for link in links) == [("a", "b"), ("a", "c"), ("b", "c")]
    assert all(link["mb_s"] > 1 and 0 < link["latency_us"] < 1e6 for link in links)
    sizes = {float(size): seconds for size, seconds in events[1]["data"]["seconds"].items()}
    assert sorted(sizes) == [1, 4, 16, 64]
    assert events[1]["data"]["bucket_mb"] in sizes


@pytest.mark.parametrize("count", [2, 3, 4, 7, 16])
def test_every_pair_has_its_turn_and_nobody_two_at_once(count: int) -> None:
    rounds = [*_rounds(count)]
    assert all(len({end for pair in pairs for end in pair}) == 2 * len(pairs) for pairs in rounds)
    met = [pair for pairs in rounds for pair in pairs]
    assert sorted(met) == [(one, other) for one in range(count) for other in range(one + 1, count)]


def test_of_many_nodes_only_neighbours_are_measured() -> None:
    rounds = [*_rounds(40)]
    assert len(rounds) == 2
    assert sorted(pair for pairs in rounds for pair in pairs) == [(one, one + 1) for one in range(39)]


def test_the_smallest_bucket_that_is_nearly_as_fast_as_any() -> None:
    assert choose({1: 0.010, 4: 0.020, 16: 0.064, 64: 0.256}) == 16
    assert choose({1: 0.0042, 4: 0.016, 16: 0.064, 64: 0.300}) == 1


def test_tensor_partners_are_on_one_node() -> None:
    def body(rank: int, store: dist.Store) -> tuple[int, int, list[int]]:
        start_group(store, "replica", rank, 4)
        shape = tiny_shape()
        mesh = ReplicaMesh.of_default_group(shape, Device.of_rank(0, gpu=False), TIMEOUT, "abab"[rank])
        partners = dist.get_process_group_ranks(mesh.tensor.group)
        assert dist.get_rank(mesh.pipeline.group) == mesh.pipeline.index
        assert dist.get_rank(mesh.tensor.group) == mesh.tensor.index
        dist.barrier()
        return mesh.pipeline.index, mesh.tensor.index, partners

    def tiny_shape() -> Any:
        return tiny_spec(Path("x"), parallelism={"pipeline": 2, "tensor": 2}, workers=4).parallelism

    assert run_ranks(4, body) == [(0, 0, [0, 2]), (1, 0, [1, 3]), (0, 1, [0, 2]), (1, 1, [1, 3])]
