"""Layers on several devices of one process: the curve of one device, and activations that are handed over."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rubato.layout import Layout
from rubato.problems import RubatoError
from rubato.spec import parse_spec
from tests.engine.forked import in_one_process
from tests.engine.jobs import tiny_spec, train_at, write_corpus
from workers.engine.device import Device
from workers.engine.mesh import ReplicaMesh
from workers.engine.parallel.compose import ModelShare
from workers.engine.parallel.placement import Placement

ALONE = Layout(1, 1, 1)
TWO = {"min": 1, "max": 1, "cpus": 2}
BY_HAND = {"device_map": {"0": 1, "1-2": 0, "3": 1}}
CASES: dict[str, dict[str, Any]] = {
    "balanced": {"parallelism": {"device_map": "balanced"}},
    "by hand": {"parallelism": BY_HAND},
    "tied": {"parallelism": BY_HAND, "model": {"family": "gpt2", "positions": 32}},
    "chunked, recomputed": {"parallelism": BY_HAND, "memory": {"loss_chunks": 2, "recompute": {"every": 2}}},
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def test_the_curve_is_that_of_one_device(corpus: Path, tmp_path: Path) -> None:
    def curve(folder: str, **sections: Any) -> list[list[float]]:
        spec = tiny_spec(corpus, **{"data": {"validation": {"every": 1}}, **sections})
        metrics = train_at(ALONE, spec, tmp_path / folder)
        return [[metric[what] for what in ("loss", "grad_norm", "validation_loss")] for metric in metrics]

    def work() -> dict[str, tuple[Any, Any]]:
        return {
            name: (curve(name, **case, workers=TWO), curve(f"{name}, one", model=case.get("model", {})))
            for name, case in CASES.items()
        }

    for name, (found, expected) in in_one_process(work).items():
        assert len(expected) == 3
        for row, reference in zip(found, expected, strict=True):
            assert row == pytest.approx(reference, rel=1e-12), name


class Numbered(Device):
    """Places that write down what they receive."""

    received: list[tuple[int, tuple[int, ...]]] = []  # noqa: RUF012 (one process)

    def place(self, number: int) -> Device:
        place = Numbered(self.torch_device)
        object.__setattr__(place, "number", number)
        return place

    def receive(self, tensor: torch.Tensor) -> torch.Tensor:
        here = super().receive(tensor)
        assert here.data_ptr() != tensor.data_ptr()
        Numbered.received.append((self.number, tuple(tensor.shape)))  # type: ignore[attr-defined]
        return here


def test_only_what_changes_its_device_is_moved(corpus: Path) -> None:
    def moves(parallelism: dict[str, Any], **sections: Any) -> list[tuple[int, tuple[int, ...]]]:
        spec = tiny_spec(corpus, parallelism=parallelism, workers=TWO, **sections)
        mesh = ReplicaMesh.of_world(ALONE, 0, Numbered(torch.device("cpu")))
        share = ModelShare(spec, mesh)
        share.initialise(share.parameters)
        Numbered.received = []
        tokens_BS = torch.zeros(1, 16, dtype=torch.int64)
        share.runner(1).train(tokens_BS, tokens_BS)
        assert all(parameter.grad is not None for parameter in share.parameters.values())
        return Numbered.received

    def work() -> list[Any]:
        tied = {"family": "gpt2", "positions": 32}
        return [
            moves({"device_map": "balanced"}),
            moves(BY_HAND),
            moves({"device_map": {"0-1": 0, "2-3": 1}}, model=tied),
        ]

    hidden, angles = (1, 16, 16), (16, 2)
    balanced, by_hand, tied = in_one_process(work)
    # The head is as dear as several of these small layers.
    assert balanced == [(1, hidden), (1, angles), (1, angles)]
    # Layer 0 is with the embedding, 1 and 2 elsewhere, 3 back where the angles were made.
    assert by_hand == [(0, hidden), (0, angles), (0, angles), (0, angles), (0, angles), (1, hidden)]
    # The head is the embedding, so what comes out of the last layer goes back there.
    assert tied == [(1, hidden), (0, hidden)]


def test_devices_that_are_not_there_are_named(monkeypatch: pytest.MonkeyPatch, corpus: Path) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    spec = parse_spec(
        {
            **tiny_spec(corpus).model_dump(),
            "parallelism": {"device_map": "balanced"},
            "workers": {"min": 1, "max": 1, "gpus": 2},
        }
    )
    with pytest.raises(RubatoError, match="names device 1, this worker sees 1 GPUs"):
        Placement(spec, Device(torch.device("cuda", 0)))
