"""What an attempt has to say: kept in the run directory for good, told from there to the control plane."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from pydantic import ValidationError

from rubato.resources import DriverEvent, Metric, SequencedMetric
from workers.driver.record import Line, RecordFile
from workers.engine.run import RunDirectory
from workers.engine.watch.board import Board

log = logging.getLogger(__name__)

EVENTS_A_CALL = 200
METRICS_A_CALL = 500


class Journal:
    """The record of a run, continued by each of its attempts. A line's number is its sequence number.

    Reporting never raises for the sake of storage: what cannot be written waits in memory, and is told once it is
    written.

    Args:
        run: whose record it is.
        fence: whether this attempt may still write.
        board: whether metrics and samples are also shown by TensorBoard.

    Attributes:
        rollbacks: how often this attempt went back because of a spike.

    Raises:
        OSError: the record cannot be read; when it is made only.
    """

    def __init__(self, run: RunDirectory, fence: Callable[[], bool] = lambda: True, *, board: bool = False) -> None:
        self._board = Board(run.tensorboard) if board else None
        self._step = 0
        self.rollbacks = 0
        self._events = RecordFile(run.events, fence)
        self._metrics = RecordFile(run.metrics, fence)
        self._lost = 0
        self.last_generation = max(
            _last_generation(self._events, b'"generation.formed"', lambda record: record["data"]["generation"]),
            _last_generation(self._metrics, b'"generation"', lambda record: record["generation"]),
        )

    def event(
        self,
        kind: str,
        message: str,
        data: Mapping[str, Any] | None = None,
        *,
        operation: str | None = None,
        phase: str | None = None,
        done: bool = False,
        failed: bool = False,
    ) -> None:
        """Records something that happened."""
        event = DriverEvent(
            seq=0,  # it has none before it is written
            at=datetime.now(UTC),
            kind=kind,
            message=message,
            data=dict(data or {}),
            operation=operation,
            phase=phase,
            done=done,
            failed=failed,
        )
        self._events.append(event.model_dump(mode="json", exclude={"seq"}))
        self.rollbacks += kind == "spike.rolled_back"
        if self._board is not None and not self.fenced:
            self._board.take("event", {"kind": kind, "data": event.data})

    def metric(self, record: Mapping[str, Any]) -> None:
        """Records what a step reported. Raises pydantic.ValidationError when it is no metric.

        ``again`` in the record: the generation before took the step, so it may have been told of already. Then it is
        passed over; a step that was really done again is not.
        """
        metric = Metric.model_validate({"at": datetime.now(UTC), **record})
        if record.get("again") and metric.step <= self._step:
            return
        self._step = metric.step
        self._metrics.append(metric.model_dump(mode="json"))
        if self._board is not None and not self.fenced:
            self._board.take("metric", record)

    def write(self) -> None:
        """Tries once more to write what could not be written."""
        written = [self._events.write(), self._metrics.write()]
        lost = self._events.lost + self._metrics.lost
        if all(written) and lost > self._lost:
            count, self._lost = lost - self._lost, lost
            message = f"the record lacks {count} entries: it could not be written for too long"
            self.event("record.incomplete", message, {"lost": count})

    def pending(self) -> tuple[list[DriverEvent], list[SequencedMetric]]:
        """The oldest records that are not acknowledged, as many as one call should carry."""
        self.write()
        events = [_event(line) for line in self._events.pending(EVENTS_A_CALL)]
        return events, _sequenced(self._metrics.pending(METRICS_A_CALL))

    @property
    def all_told(self) -> bool:
        """Whether everything is written and acknowledged."""
        return self._events.all_told and self._metrics.all_told

    @property
    def fenced(self) -> bool:
        """Whether a newer attempt was seen to have taken over the run; nothing was written since."""
        return self._events.fenced or self._metrics.fenced

    def acknowledged(self, events: int, metrics: int) -> None:
        """Passes over what the control plane has stored."""
        self._events.acknowledged(events)
        self._metrics.acknowledged(metrics)


def _event(line: Line) -> DriverEvent:
    """The event of a line; of one that is none, an event that says so: numbers have no gaps."""
    try:
        return DriverEvent.model_validate({**(line.record or {}), "seq": line.seq})
    except ValidationError:
        message = f"line {line.seq} of the events of this run cannot be read"
        data = {"line": line.seq}
        return DriverEvent(seq=line.seq, at=datetime.now(UTC), kind="record.unreadable", message=message, data=data)


def _sequenced(lines: list[Line]) -> list[SequencedMetric]:
    """The metrics of lines. In the place of one that is none stands its neighbour again: numbers have no gaps."""
    found = [_metric(line) for line in lines]
    known = next((metric for metric in found if metric is not None), None)
    told: list[SequencedMetric] = []
    for line, metric in zip(lines, found, strict=True):
        known = metric or known
        if known is not None:
            told.append(SequencedMetric(seq=line.seq, metric=known))
    return told


def _metric(line: Line) -> Metric | None:
    try:
        return Metric.model_validate(line.record or {})
    except ValidationError as error:
        log.warning("line %d of the metrics is none: %s", line.seq, error)
        return None


def _last_generation(file: RecordFile, mark: bytes, of: Callable[[dict[str, Any]], Any]) -> int:
    """In the last line with ``mark`` that can be read; generations ascend. 0: there is none."""
    for line in file.backwards():
        if mark in line:
            try:
                return int(of(json.loads(line)))
            except (ValueError, TypeError, KeyError):
                log.warning("a line of %s cannot be read: %r", file.path, line[:200])
    return 0
