"""TensorBoard files of a run, written by whoever keeps its record: one process at a time."""

from __future__ import annotations

import logging
import os
import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.proto.summary_pb2 import Summary
from tensorboardX.record_writer import masked_crc32c
from tensorboardX.summary import text as text_summary

from rubato.durable import append_whole

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
    "comm_bytes": "speed/bytes sent",
    "comm_bytes_saved": "speed/bytes that compression saved",
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

    tensorboardX makes the messages, and this writes them: its own writer hands them to a thread that dies of a full
    disk, and whoever adds to its queue then waits for ever.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._handle: int | None = None
        self._last = 0
        self._trouble: str | None = None

    def take(self, kind: str, record: Mapping[str, Any]) -> None:
        """Takes in what a worker reports, as far as it belongs on the board. What cannot be written is left out."""
        try:
            if kind == "metric":
                self._metric(record)
            elif kind == "event" and record["kind"] == "sample":
                self._sample(record["data"])
        except OSError as error:
            self.close()
            self._say(f"cannot be written, and will lack something: {error}")
        else:
            self._say(None)

    def close(self) -> None:
        """Closes the file; what was taken in is in it."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def _metric(self, metric: Mapping[str, Any]) -> None:
        step = metric["step"]
        handle = self._open(step) if self._handle is None or step <= self._last else self._handle
        self._last = step
        values = {tag: metric[name] for name, tag in SCALARS.items() if metric.get(name) is not None}
        values |= {f"gradients/{group}": norm for group, norm in (metric.get("gradient_norms") or {}).items()}
        for name, spread in (metric.get("workers") or {}).items():
            values |= {f"workers/{name} {end}": spread[end] for end in ("min", "max")}
        # All in one event: an event each would cost a small step much of its time.
        summary = Summary(value=[Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()])
        _write(handle, Event(wall_time=time.time(), step=step, summary=summary))

    def _sample(self, data: Mapping[str, Any]) -> None:
        handle = self._open(data["step"]) if self._handle is None else self._handle
        summary = text_summary(f"samples/{data['prompt']}", data["prompt"] + data["text"])
        _write(handle, Event(wall_time=time.time(), step=data["step"], summary=summary))

    def _open(self, step: int) -> int:
        self.close()
        self._folder.mkdir(parents=True, exist_ok=True)
        number, now = sum(1 for _ in self._folder.glob("events.out.tfevents.*")), time.time()
        # Numbered, since two files that are begun within a second would else be one.
        name = f"events.out.tfevents.{int(now)}.{socket.gethostname()}.{number:04d}"
        self._handle = handle = os.open(self._folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o644)
        _write(handle, Event(wall_time=now, file_version="brain.Event:2"))
        if number:
            _write(handle, Event(wall_time=now, step=step, session_log=SessionLog(status=SessionLog.START)))
        return handle

    def _say(self, trouble: str | None) -> None:
        if trouble != self._trouble:
            level = logging.WARNING if trouble else logging.INFO
            log.log(level, "the TensorBoard files in %s %s", self._folder, trouble or "can be written again")
        self._trouble = trouble


def _write(handle: int, event: Event) -> None:
    """Adds an event as a TFRecord, whole or not at all: its length and the checksum of that, it and its checksum."""
    content = event.SerializeToString()
    length = struct.pack("<Q", len(content))
    record = length + struct.pack("<I", masked_crc32c(length)) + content + struct.pack("<I", masked_crc32c(content))
    append_whole(handle, record)
