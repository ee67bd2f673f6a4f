"""TensorBoard files of a run, written by whoever keeps its record: one process at a time."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tensorboardX import SummaryWriter
from tensorboardX.proto.summary_pb2 import Summary

log = logging.getLogger(__name__)

SCALARS = {
    "loss": "train/loss",
    "validation_loss": "validation/loss",
    "grad_norm": "train/gradient norm",
    "lr": "train/learning rate",
    "tokens": "train/tokens",
    "tokens_per_s": "speed/tokens per second",
    "step_s": "speed/step seconds",
    "data_s": "speed/data wait seconds",
    "exposed_comm_s": "speed/exposed communication seconds",
    "flops_per_s": "speed/model FLOPs per second",
    "mfu": "speed/MFU",
    "memory_bytes": "memory/bytes",
    "memory_peak_bytes": "memory/peak bytes",
}
"""What a number of a metric is called on the board."""


class Board:
    """Adds the metrics and samples of a run to its board.

    A run that goes on from an earlier step, after a restart or a roll-back, opens a new file that hides what the old
    ones hold from that step on (TensorBoard's session start): so a step is never there twice.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writer: SummaryWriter | None = None
        self._last = 0

    def take(self, kind: str, record: Mapping[str, Any]) -> None:
        """Takes in what a worker reports, as far as it belongs on the board. Never fails for the sake of storage."""
        try:
            if kind == "metric":
                self.metric(record)
            elif kind == "event" and record["kind"] == "sample":
                data = record["data"]
                self.sample(data["step"], data["prompt"], data["text"])
        except OSError:
            log.exception("the TensorBoard files in %s lack something", self._folder)

    def metric(self, metric: Mapping[str, Any]) -> None:
        """Takes in a metric, as of ``rubato.resources.Metric``."""
        step = metric["step"]
        if self._writer is None or step <= self._last:
            self._open(step)
        assert self._writer is not None
        self._last = step
        values = {tag: metric[name] for name, tag in SCALARS.items() if metric.get(name) is not None}
        values |= {f"gradients/{group}": norm for group, norm in (metric.get("gradient_norms") or {}).items()}
        for name, spread in (metric.get("workers") or {}).items():
            values |= {f"workers/{name} {end}": spread[end] for end in ("min", "max")}
        # All in one event: an event each would cost a small step much of its time.
        summary = Summary(value=[Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()])
        self._writer.file_writer.add_summary(summary, step)

    def sample(self, step: int, prompt: str, text: str) -> None:
        """Takes in text that the model made."""
        if self._writer is None:
            self._open(step)
        assert self._writer is not None
        self._writer.add_text(f"samples/{prompt}", prompt + text, step)

    def close(self) -> None:
        """Writes what is left."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _open(self, step: int) -> None:
        self.close()
        number = sum(1 for _ in self._folder.glob("events.out.tfevents.*"))
        # Numbered, since two files that are begun within a second would else be one.
        self._writer = SummaryWriter(
            str(self._folder), purge_step=step if number else None, filename_suffix=f".{number:04d}", flush_secs=10
        )
