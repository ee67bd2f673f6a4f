"""What a rank holds at its peak is what the arithmetic says, within a tenth."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.engine_memory import BOUND, CASES, measured, predicted, spec_of


@pytest.mark.long
@pytest.mark.parametrize(("name", "ranks", "memory", "micro_batch"), CASES, ids=[case[0] for case in CASES])
def test_the_peak_is_predicted(name: str, ranks: int, memory: dict[str, Any], micro_batch: int, tmp_path: Path) -> None:
    spec = spec_of(ranks, memory, micro_batch)
    assert predicted(ranks, spec) == pytest.approx(max(measured(ranks, spec, tmp_path)), rel=BOUND)
