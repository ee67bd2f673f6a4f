"""What an attempt has to say: kept in the run directory for good, and in memory until the control plane has it."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rubato.resources import DriverEvent, Metric, SequencedMetric
from workers.engine.run import RunDirectory

EVENTS_A_CALL = 200
METRICS_A_CALL = 500


class Journal:
    """The record of a run, continued by each of its attempts. A line's number is its sequence number.

    Raises:
        OSError: the record cannot be read or written.
    """

    def __init__(self, run: RunDirectory) -> None:
        self._run = run
        self._events: deque[DriverEvent] = deque()
        self._metrics: deque[SequencedMetric] = deque()
        self.last_generation = 0
        events, metrics = _lines(run.events), _lines(run.metrics)
        self._event_seq, self._metric_seq = len(events), len(metrics)
        for seq, record in enumerate(events, 1):
            self._events.append(DriverEvent.model_validate({"seq": seq, **record}))
            if record["kind"] == "generation.formed":
                self.last_generation = max(self.last_generation, record["data"]["generation"])
        for seq, record in enumerate(metrics, 1):
            metric = Metric.model_validate(record)
            self._metrics.append(SequencedMetric(seq=seq, metric=metric))
            self.last_generation = max(self.last_generation, metric.generation)

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
        self._event_seq += 1
        event = DriverEvent(
            seq=self._event_seq,
            at=datetime.now(UTC),
            kind=kind,
            message=message,
            data=dict(data or {}),
            operation=operation,
            phase=phase,
            done=done,
            failed=failed,
        )
        self._run.append(self._run.events, event.model_dump(mode="json", exclude={"seq"}))
        self._events.append(event)

    def metric(self, record: Mapping[str, Any]) -> Metric:
        """Records what a step reported. Raises pydantic.ValidationError when it is no metric."""
        metric = Metric.model_validate({"at": datetime.now(UTC), **record})
        self._metric_seq += 1
        self._run.append(self._run.metrics, metric.model_dump(mode="json"))
        self._metrics.append(SequencedMetric(seq=self._metric_seq, metric=metric))
        return metric

    def pending(self) -> tuple[list[DriverEvent], list[SequencedMetric]]:
        """The oldest records that are not acknowledged, as many as one call should carry."""
        events = [self._events[place] for place in range(min(len(self._events), EVENTS_A_CALL))]
        metrics = [self._metrics[place] for place in range(min(len(self._metrics), METRICS_A_CALL))]
        return events, metrics

    @property
    def all_told(self) -> bool:
        """Whether everything is acknowledged."""
        return not self._events and not self._metrics

    def acknowledged(self, events: int, metrics: int) -> None:
        """Forgets what the control plane has stored."""
        while self._events and self._events[0].seq <= events:
            self._events.popleft()
        while self._metrics and self._metrics[0].seq <= metrics:
            self._metrics.popleft()


def _lines(path: Path) -> list[dict[str, Any]]:
    """The records of a file. A last line that was cut off when its writer died is removed."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return []
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        with path.open("r+b") as file:
            file.truncate(whole)
    return [json.loads(line) for line in content[:whole].splitlines()]
