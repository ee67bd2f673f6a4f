"""Numbers, times and curves as a reader likes them."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import pairwise

from rubato.resources import Job, LayoutView
from rubato.states import JobState

NOTHING = "-"
_BARS = "▁▂▃▄▅▆▇█"
_COLORS = {
    JobState.RUNNING: "green",
    JobState.SUCCEEDED: "bold green",
    JobState.FAILED: "bold red",
    JobState.CANCELLED: "bold yellow",
    JobState.CANCELLING: "yellow",
    JobState.RECOVERING: "magenta",
    JobState.RESIZING: "cyan",
}


def state_style(state: JobState) -> str:
    return _COLORS.get(state, "blue")


def short(number: float | None) -> str:
    """A number in three or so digits: 12.3k."""
    if number is None:
        return NOTHING
    for size, suffix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= size:
            return f"{number / size:.3g}{suffix}"
    return f"{number:.3g}"


def fixed(number: float | None, digits: int) -> str:
    return NOTHING if number is None else f"{number:.{digits}f}"


def percent(share: float | None) -> str:
    return NOTHING if share is None else f"{share:.1%}"


def duration(seconds: float | None) -> str:
    """42s, 3m07s, 2h05m, 3d04h."""
    if seconds is None:
        return NOTHING
    whole = max(0, round(seconds))
    for size, unit, below, below_unit in ((86400, "d", 3600, "h"), (3600, "h", 60, "m"), (60, "m", 1, "s")):
        if whole >= size:
            return f"{whole // size}{unit}{whole % size // below:02d}{below_unit}"
    return f"{whole}s"


def age(since: datetime) -> str:
    return duration((datetime.now(UTC) - since).total_seconds())


def clock(at: datetime) -> str:
    """The local time of day."""
    return at.astimezone().strftime("%H:%M:%S")


def layout(view: LayoutView | None) -> str:
    """data × pipeline × tensor."""
    return NOTHING if view is None else f"{view.data}×{view.pipeline}×{view.tensor}"


def workers(job: Job) -> str:
    """How many there are, and how many there should be when that differs."""
    seen, wanted = job.workers.observed, job.workers.desired
    return str(seen) if seen == wanted else f"{seen} of {wanted}"


def sparkline(values: Sequence[float], width: int) -> str:
    """The values as a curve of ``width`` characters or fewer; neighbours are averaged when there are more."""
    if not values or width < 1:
        return ""
    count = min(width, len(values))
    edges = [len(values) * index // count for index in range(count + 1)]
    means = [sum(values[low:high]) / (high - low) for low, high in pairwise(edges)]
    low, high = min(means), max(means)
    span = high - low
    return "".join(_BARS[round((mean - low) / span * (len(_BARS) - 1)) if span > 0 else 0] for mean in means)
