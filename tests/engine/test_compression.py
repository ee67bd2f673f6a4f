"""Compressed sums: the same for all, nothing lost for good, and as many bytes as they say."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from rubato.layout import Layout
from rubato.spec import CompressionSpec
from tests.engine.forked import in_one_process, run_ranks
from tests.engine.jobs import tiny_spec, train_at, write_corpus
from workers.engine.comm.codecs import codec_of
from workers.engine.comm.compression import Encoded, LowRank, Scheme
from workers.engine.comm.reduction import Places
from workers.engine.device import BreakableGroup, Device, GlooGroup
from workers.engine.membership import Standing, StaticMembership
from workers.engine.mesh import ReplicaMesh
from workers.engine.parallel.data import DataAxisError, DataGroup

SHAPES = [torch.Size([24, 40]), torch.Size([40]), torch.Size([7, 5, 16])]
COUNT = sum(shape.numel() for shape in SHAPES)
CPU = Device.of_rank(0, gpu=False)
NAMES = ["bf16", "fp16", "int8", "topk", "powersgd"]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def scheme(name: str) -> Scheme:
    codec = codec_of(CompressionSpec.model_validate({"name": name}))
    return LowRank(2, 7, [SHAPES]) if codec is None else Encoded(codec)


def gradients(rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    # As gradients are: most are small, and some blocks are much smaller than others.
    return (torch.randn(COUNT, generator=generator) ** 3 * torch.logspace(-9, 0, COUNT)).double()


def test_sums_are_the_same_everywhere_and_what_is_missing_is_owed() -> None:
    size = 3

    def body(rank: int, store: dist.Store) -> dict[str, Any]:
        group = GlooGroup()
        group.form(dist.PrefixStore("group", store), rank, size, torch.distributed.default_pg_timeout)
        found: dict[str, Any] = {}
        for name in NAMES:
            bucket = gradients(rank)
            owed = scheme(name).sum(group, 0, bucket)
            found[name] = bucket.tolist(), None if owed is None else owed.tolist()
        overflowed = gradients(rank)
        overflowed[5] = torch.inf if rank == 1 else 0.0
        for name in NAMES:
            bucket = overflowed.clone()
            scheme(name).sum(group, 0, bucket)
            found[f"{name}-overflow"] = bool(bucket.isfinite().all())
        if store.add("end", 1) == size:
            store.set("all", "1")
        store.wait(["all"])
        group.close()
        return found

    by_rank = run_ranks(size, body)
    exact = in_one_process(lambda: sum(gradients(rank) for rank in range(size)).tolist())
    largest = max(map(abs, exact))
    for name in NAMES:
        assert by_rank[0][name][0] == by_rank[1][name][0] == by_rank[2][name][0], name
        assert not any(found[f"{name}-overflow"] for found in by_rank), name
        total, lossy = by_rank[0][name][0], name in ("int8", "topk", "powersgd")
        assert [found[name][1] is not None for found in by_rank] == [lossy] * size
        if lossy:
            assert total != pytest.approx(exact, rel=1e-6, abs=largest * 1e-6), name
            total = [value + sum(found[name][1][place] for found in by_rank) for place, value in enumerate(total)]
            assert total == pytest.approx(exact, rel=1e-6, abs=largest * 1e-6), name
        else:
            assert total == pytest.approx(exact, rel=0.02, abs=largest * 1e-3), name


@pytest.mark.parametrize(("name", "share"), [("bf16", 0.5), ("fp16", 0.51), ("int8", 0.27), ("topk", 0.11)])
def test_bytes_are_what_is_sent(name: str, share: float) -> None:
    def body() -> tuple[int, int]:
        codec = codec_of(CompressionSpec.model_validate({"name": name}))
        assert codec is not None
        count = 4 * 1024
        return Encoded(codec).bytes_sent(0, count, 4), 2 * 3 * codec.encode(torch.ones(1, count // 4)).numel()

    told, encoded = in_one_process(body)
    assert told == encoded
    assert told / (4 * 4 * 1024 * 2 * 3 / 4) <= share


def test_fp16_keeps_what_it_could_not_hold_by_itself() -> None:
    def body() -> tuple[list[float], list[float]]:
        codec = codec_of(CompressionSpec.model_validate({"name": "fp16"}))
        assert codec is not None
        tiny = torch.linspace(1e-12, 1e-9, 256)[None]
        return codec.decode(codec.encode(tiny), 256, torch.float32)[0].tolist(), tiny[0].tolist()

    found, given = in_one_process(body)
    assert found == pytest.approx(given, rel=1e-3)


def test_places_on_nodes() -> None:
    nodes = ("a", "b", "a", "c", "b")
    assert [Places.of(nodes, index) for index in range(5)] == [
        Places([0, 2], [0, 1, 3]),
        Places([1, 4], [0, 1, 3]),
        Places([0, 2], [0, 1, 3]),
        Places([3], [0, 1, 3]),
        Places([1, 4], [0, 1, 3]),
    ]


def curves(corpus: Path, folder: Path, size: int, cases: dict[str, tuple[dict[str, Any], Sequence[str]]]) -> Any:
    """The metrics of each case, by name."""

    def body(rank: int, store: dist.Store) -> dict[str, Any]:
        found = {}
        for name, (sections, nodes) in cases.items():
            spec = tiny_spec(corpus, workers=size, **sections)
            found[name] = train_at(Layout(size, 1, 1), spec, folder / name, rank, store, name, nodes=nodes)
        return found

    return run_ranks(size, body)[0]


def losses(metrics: list[dict[str, Any]]) -> list[float]:
    return [metric["loss"] for metric in metrics]


def compressed(**compression: Any) -> dict[str, Any]:
    return {
        "train": {"steps": 8},
        "communication": {"bucket_mb": 0.1, "compression": compression},
        "checkpoint": {"every": 4, "keep_last": 2},
    }


def test_work_beside_ends_with_the_axis() -> None:
    def body(rank: int, store: dist.Store) -> str:
        told: list[str] = []
        generation = StaticMembership(2, rank, store).join(Standing(None))
        assert generation is not None
        data = DataGroup(generation, ReplicaMesh.of_world(Layout(1, 1, 1), 0, CPU), told.append)
        data.form()
        started = threading.Event()

        def wait_for_the_other(group: BreakableGroup) -> None:
            started.set()
            group.all_reduce([torch.zeros(9)], dist.ReduceOp.SUM)

        if rank == 0:
            data.begin(wait_for_the_other)
            started.wait()
        data.abort()
        with pytest.raises(DataAxisError):
            data.sum([torch.zeros(1)])
        data.close()
        return told[0]

    assert run_ranks(2, body) == ["the group was aborted"] * 2


def test_a_mistake_beside_is_no_failure_of_the_axis() -> None:
    def body(rank: int, store: dist.Store) -> None:
        generation = StaticMembership(2, rank, store).join(Standing(None))
        assert generation is not None
        data = DataGroup(generation, ReplicaMesh.of_world(Layout(1, 1, 1), 0, CPU), lambda cause: None)
        data.form()
        data.begin(lambda group: torch.zeros(2).view(3).sum())
        with pytest.raises(RuntimeError, match="invalid for input of size"):
            data.sum([torch.zeros(1)])
        data.abort()
        data.close()

    run_ranks(2, body)


@pytest.mark.parametrize("name", ["int8", "powersgd"])
def test_a_checkpoint_holds_what_is_owed(name: str, corpus: Path, tmp_path: Path) -> None:
    case = {"run": (compressed(name=name), ())}
    whole = curves(corpus, tmp_path, 2, case)["run"]
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-00000008")
    again = curves(corpus, tmp_path, 2, case)["run"]
    assert [metric["step"] for metric in again] == [5, 6, 7, 8]
    assert losses(again) == pytest.approx(losses(whole)[4:], rel=1e-12)


def test_curves_and_bytes(corpus: Path, tmp_path: Path) -> None:
    plain = {"train": {"steps": 8}, "communication": {"bucket_mb": 0.1}}
    names = {name: (compressed(name=name), ()) for name in NAMES}
    found = curves(corpus, tmp_path, 2, {"none": (plain, ()), **names})
    sent = {name: metrics[-1]["comm_bytes"] for name, metrics in found.items()}
    assert {name: metrics[-1]["comm_bytes_saved"] for name, metrics in found.items()} == {
        name: sent["none"] - each for name, each in sent.items()
    }
    assert sent["int8"] < 0.27 * sent["none"] < 0.27 * 2.1 * sent["bf16"]
    exact = losses(found["none"])
    for name in NAMES:
        assert losses(found[name]) != exact
        # The last two are slow to begin with: what they leave out comes later.
        assert losses(found[name]) == pytest.approx(exact, rel=0.3 if name in ("topk", "powersgd") else 0.005), name
    assert all(metric["exposed_comm_s"] > 0 for metrics in found.values() for metric in metrics)


def test_sharded_sums_are_encoded_too(corpus: Path, tmp_path: Path) -> None:
    sharded = {"memory": {"zero": 2}, "train": {"steps": 8}}
    cases: dict[str, tuple[dict[str, Any], Sequence[str]]] = {"none": (sharded, ())}
    for name in ("bf16", "fp16", "int8"):
        cases[name] = (
            {**sharded, "communication": {"compression": {"name": name, "block": 64} if name == "int8" else name}},
            (),
        )
    found = curves(corpus, tmp_path, 3, cases)
    sent = {name: metrics[-1]["comm_bytes"] for name, metrics in found.items()}
    for name, metrics in found.items():
        assert metrics[-1]["comm_bytes_saved"] == sent["none"] - sent[name]
        assert losses(metrics) == pytest.approx(losses(found["none"]), rel=0.005), name
    assert all(losses(found[name]) != losses(found["none"]) for name in ("bf16", "fp16", "int8"))
    assert sent["int8"] < sent["bf16"] < sent["none"]


def test_only_between_nodes(corpus: Path, tmp_path: Path) -> None:
    cases = {
        "exact": ({"train": {"steps": 8}}, ()),
        "one": (compressed(name="int8", between="nodes"), ["a", "a", "a"]),
        "two": (compressed(name="int8", between="nodes"), ["a", "b", "a"]),
    }
    found = curves(corpus, tmp_path, 3, cases)
    assert losses(found["one"]) == pytest.approx(losses(found["exact"]), rel=1e-12)
    assert losses(found["two"]) != pytest.approx(losses(found["exact"]), rel=1e-12)
    assert losses(found["two"]) == pytest.approx(losses(found["exact"]), rel=0.005)
