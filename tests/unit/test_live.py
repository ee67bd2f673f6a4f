"""What the live view shows of a job, at any width of the terminal."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console
from scripted_plane import AT, event, job, metric

from rubato.cli import text
from rubato.cli.live import Watched, screen
from rubato.resources import Event, Job, Metric


def worker(replica: str, place: int, state: str = "training") -> dict[str, Any]:
    return {
        "replica": replica,
        "data": 0 if state == "training" else None,
        "pipeline": place // 2,
        "tensor": place % 2,
        "rank": place if state == "training" else None,
        "state": state,
        "pid": 100 + place,
    }


@pytest.fixture
def watched() -> Watched:
    members = [worker("replica-0", place) for place in range(4)]
    members += [worker("replica-1", place, "starting") for place in range(4)]
    workers = {"desired": 8, "observed": 4, "min": 4, "max": 8, "members": members}
    made = Watched(Job.model_validate(job(workers=workers, restarts={"hardware": 1})))
    made.metrics.extend(Metric.model_validate(metric(step)) for step in range(1, 6))
    made.events.extend(Event.model_validate(event(number, message=f"number {number}")) for number in range(1, 20))
    return made


def drawn(watched: Watched, width: int = 100) -> list[str]:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(screen(watched, width))
    written: str = console.file.getvalue()  # type: ignore[attr-defined]
    return written.splitlines()


def test_the_view_of_a_job(watched: Watched) -> None:
    lines = drawn(watched)
    whole = "\n".join(lines)
    assert "demo  RUNNING  training at 4 workers" in lines[0]
    assert "5/10" in whole  # the newest metric is newer than the job
    assert "50%  1m10s left" in whole
    assert "5.5000  █▆▅▃▁" in whole
    assert "900 tokens/s, 0.50 s a step" in whole
    assert "1×2×2, 4 of 8 workers (4 to 8), generation 1, restarts 1" in whole
    assert [line.split() for line in lines if "replica" in line] == [
        ["replica-0", "■", "■", "■", "■", "training"],
        ["replica-1", "■", "■", "■", "■", "starting"],
    ]
    assert lines[-1].endswith("generation.formed  number 19")
    assert sum("generation.formed" in line for line in lines) == 8


def test_a_control_plane_that_is_away_is_said(watched: Watched) -> None:
    watched.away = "cannot reach the control plane"
    assert drawn(watched)[-1] == "cannot reach the control plane; trying again"


def test_a_job_that_has_not_begun() -> None:
    queued = job(state="QUEUED", layout=None, progress={"steps": 10}, workers={**job()["workers"], "observed": 0})
    whole = "\n".join(drawn(Watched(Job.model_validate(queued))))
    assert "demo  QUEUED" in whole
    assert "0/10" in whole


@pytest.mark.parametrize("width", [20, 40, 80, 200])
def test_no_line_is_wider_than_the_terminal(watched: Watched, width: int) -> None:
    assert max(len(line) for line in drawn(watched, width)) <= width


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(None, "-"), (0, "0s"), (59.6, "1m00s"), (187, "3m07s"), (7500, "2h05m"), (273_600, "3d04h"), (-3, "0s")],
)
def test_durations(seconds: float | None, shown: str) -> None:
    assert text.duration(seconds) == shown


@pytest.mark.parametrize(
    ("number", "shown"), [(None, "-"), (0, "0"), (999, "999"), (12_345, "12.3k"), (5e9, "5G"), (2.5e12, "2.5T")]
)
def test_short_numbers(number: float | None, shown: str) -> None:
    assert text.short(number) == shown


def test_a_sparkline_keeps_its_width_and_its_ends() -> None:
    assert text.sparkline([], 10) == ""
    assert text.sparkline([1.0], 10) == "▁"
    assert text.sparkline([3.0, 3.0], 10) == "▁▁"
    assert text.sparkline(list(range(8)), 10) == "▁▂▃▄▅▆▇█"
    assert text.sparkline(list(range(1000, 0, -1)), 4) == "█▆▃▁"


def test_the_clock_is_local(monkeypatch: pytest.MonkeyPatch) -> None:
    at = Event.model_validate(event(1)).at
    assert at.isoformat() == AT
    assert text.clock(at) == at.astimezone().strftime("%H:%M:%S")
