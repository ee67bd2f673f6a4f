"""What a driver wrote to the run directory but did not tell: the directory is the record, the database a copy."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import structlog
from pydantic import ValidationError

from rubato.resources import DriverEvent, Metric, SequencedMetric

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class Untold:
    """Reports that were never acknowledged, in order."""

    events: list[DriverEvent] = field(default_factory=list)
    metrics: list[SequencedMetric] = field(default_factory=list)

    def find(self, kind: str) -> DriverEvent | None:
        """The last event of a kind."""
        return next((event for event in reversed(self.events) if event.kind == kind), None)


def read(run_dir: Path, events_acknowledged: int, metrics_acknowledged: int) -> Untold:
    """The lines after those that were acknowledged. The number of a line is its ``seq``, from 1.

    Raises:
        OSError: a file is there but cannot be read.
    """
    found = Untold()
    try:
        for seq, line in _lines(run_dir / "events.jsonl", events_acknowledged):
            found.events.append(DriverEvent.model_validate({**line, "seq": seq}))
        for seq, line in _lines(run_dir / "metrics.jsonl", metrics_acknowledged):
            found.metrics.append(SequencedMetric(seq=seq, metric=Metric.model_validate(line)))
    except ValidationError as error:
        # Later lines would arrive with a gap before them, so this is as far as the record can be told.
        log.warning("journal.unreadable", run_dir=str(run_dir), cause=str(error))
    return found


def _lines(path: Path, after: int) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return
    with file:
        for seq, text in islice(enumerate(file, 1), after, None):
            if not text.endswith(b"\n"):
                return  # the writer was killed in the middle of this line, so it says nothing
            try:
                line = json.loads(text)
                if not isinstance(line, dict):
                    raise TypeError(f"holds no JSON object but {type(line).__name__}")
            except (ValueError, TypeError, RecursionError) as error:  # no UTF-8, no JSON, or JSON of something else
                log.warning("journal.unreadable", path=str(path), line=seq, cause=str(error))
                return
            yield seq, line
