"""Records steps with torch.profiler: a trace for Chrome or Perfetto, tables of what costs most, where memory went."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

log = logging.getLogger(__name__)

ROWS = 25
EVENTS = 100_000
"""Allocations that a snapshot of a GPU's memory goes back."""


@dataclass(frozen=True)
class Operation:
    """One of the costliest, over all its calls."""

    name: str
    calls: int
    seconds: float


class Recording:
    """Recording goes on from when it is made until `save`, both called by one thread.

    Args:
        device: of this worker.
    """

    def __init__(self, device: torch.device) -> None:
        self._gpu = device.type == "cuda"
        self._device = device
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._gpu else [])]
        self._profile = profile(activities=activities, profile_memory=True)
        if self._gpu:
            torch.cuda.memory._record_memory_history(max_entries=EVENTS, device=device)
        self._profile.start()

    def save(self, folder: Path, name: str) -> tuple[list[Path], list[Operation]]:
        """Ends the recording and writes it; the files, and the costliest operations.

        ``NAME.trace.json.gz`` is for chrome://tracing or ui.perfetto.dev. ``NAME.operations.txt`` and, where there is
        no GPU, ``NAME.memory.txt`` are tables. ``NAME.memory.pickle`` is for pytorch.org/memory_viz.

        Raises:
            OSError: it cannot be written.
        """
        if self._gpu:
            torch.cuda.synchronize(self._device)
        self._profile.stop()
        folder.mkdir(parents=True, exist_ok=True)
        trace, operations = folder / f"{name}.trace.json.gz", folder / f"{name}.operations.txt"
        averages = self._profile.key_averages()
        by = "self_device_time_total" if self._gpu else "self_cpu_time_total"
        table = averages.table(sort_by=by, row_limit=ROWS, max_name_column_width=60)
        operations.write_text(table, encoding="utf-8")
        self._profile.export_chrome_trace(str(trace))
        log.info("the costliest operations, all in %s:\n%s", folder, table)
        rows: list[Any] = sorted(averages, key=lambda row: getattr(row, by), reverse=True)
        costliest = [Operation(row.key, row.count, getattr(row, by) / 1e6) for row in rows[:ROWS]]
        return [trace, operations, self._save_memory(folder, name, averages)], costliest

    def _save_memory(self, folder: Path, name: str, averages: Any) -> Path:
        if self._gpu:
            path = folder / f"{name}.memory.pickle"
            try:
                torch.cuda.memory._dump_snapshot(str(path))
            finally:
                torch.cuda.memory._record_memory_history(enabled=None, device=self._device)
            return path
        path = folder / f"{name}.memory.txt"
        table = averages.table(sort_by="self_cpu_memory_usage", row_limit=ROWS, max_name_column_width=60)
        path.write_text(table, encoding="utf-8")
        return path
