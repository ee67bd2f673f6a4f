"""A calibration measures with the engine itself, alone and with a mate, and the planner can use what it finds."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
import torch.distributed as dist

from rubato.plans import Calibration
from service.planning.calibration import measured_by
from tests.engine.forked import run_ranks
from workers.engine.calibration import probes, ranks


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small and seldom: that it measures is what is asked here, not how well."""
    monkeypatch.setattr(probes, "SHORT_S", 0.01)
    monkeypatch.setattr(probes, "TOGETHER", 2)
    monkeypatch.setattr(probes, "PRODUCTS", {"cpu": ((64, 64, 64),)})
    monkeypatch.setattr(probes, "SEQUENCE", {"cpu": 32})
    monkeypatch.setattr(probes, "HIDDEN", {"cpu": 32})


def measured(size: int) -> tuple[Calibration, list[dict[str, Any] | None]]:
    def rank_of(rank: int, store: dist.Store) -> dict[str, Any] | None:
        return ranks.measure(rank, size, store, gpu=False)

    found = run_ranks(size, rank_of)
    return Calibration(measured_at=datetime.now(UTC), host="here", cores=2, **found[0]), found


def test_two_workers_measure_themselves_and_what_lies_between_them() -> None:
    calibration, found = measured(2)
    assert found[1] is None
    assert calibration.together is not None
    assert calibration.together.workers == 2
    assert calibration.together.shared_gap_s > calibration.alone.gap_s > 0
    name, one = measured_by(calibration)
    assert name == "cpu-core"
    assert one.accelerator.single_flops == calibration.alone.single_flops
    assert 1 <= one.cores <= 2


def test_one_worker_measures_itself() -> None:
    calibration, _ = measured(1)
    assert calibration.together is None
    assert calibration.alone.device == "cpu"
