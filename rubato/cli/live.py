"""The live view of a job: one screen that is drawn anew from what is known."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from rubato.cli import text
from rubato.resources import Event, Job, Metric, WorkerView

_NEWEST_EVENTS = 8
_WORKER_STYLES = {"training": "green", "starting": "blue", "lost": "red"}


@dataclass
class Watched:
    """What is known of the job that is watched.

    Attributes:
        away: what is wrong while the control plane cannot be reached.
    """

    job: Job
    metrics: deque[Metric] = field(default_factory=lambda: deque(maxlen=2000))
    events: deque[Event] = field(default_factory=lambda: deque(maxlen=_NEWEST_EVENTS))
    away: str | None = None


def screen(watched: Watched, width: int) -> RenderableType:
    """The whole view, for a terminal of ``width`` columns."""
    job = watched.job
    newest = watched.metrics[-1] if watched.metrics else None
    rows = Table.grid(padding=(0, 2))
    rows.add_column(style="dim", no_wrap=True)
    rows.add_column()
    rows.add_row("step", _progress(job, newest))
    rows.add_row("loss", _loss(watched, max(10, min(60, width - 30))))
    rows.add_row("speed", _speed(job, newest))
    rows.add_row("layout", _layout(job))
    for replica, line in _replicas(job.workers.members):
        rows.add_row(replica, line)
    parts: list[RenderableType] = [_head(job), rows, Rule(style="dim")]
    parts += [_event(event) for event in watched.events]
    if watched.away:
        parts.append(Text(f"{watched.away}; trying again", style="yellow", no_wrap=True, overflow="ellipsis"))
    return Group(*parts)


def _head(job: Job) -> Text:
    head = Text(no_wrap=True, overflow="ellipsis")
    head.append(job.name, style="bold")
    head.append("  ")
    head.append(job.state, style=text.state_style(job.state))
    head.append(f"  {job.reason.message}  ")
    head.append(job.id, style="dim")
    return head


def _progress(job: Job, newest: Metric | None) -> RenderableType:
    step = max(job.progress.step, newest.step if newest else 0)
    steps = job.progress.steps
    line = Table.grid(padding=(0, 1))
    left = f"{step / steps:4.0%}  {text.duration(job.progress.eta_s)} left" if not job.state.terminal else ""
    line.add_row(f"{step}/{steps}", ProgressBar(total=steps, completed=step, width=36), left)
    return line


def _loss(watched: Watched, width: int) -> Text:
    losses = [metric.loss for metric in watched.metrics]
    line = Text(text.fixed(losses[-1] if losses else watched.job.progress.loss, 4), style="bold", no_wrap=True)
    line.append(f"  {text.sparkline(losses, width)}", style="cyan")
    return line


def _speed(job: Job, newest: Metric | None) -> str:
    if newest is None:
        return text.NOTHING
    return (
        f"{text.short(newest.tokens_per_s)} tokens/s, {newest.step_s:.2f} s a step, "
        f"MFU {text.percent(newest.mfu)}, goodput {text.percent(job.goodput.ratio)}"
    )


def _layout(job: Job) -> str:
    restarts = sum(job.restarts.model_dump().values())
    return (
        f"data × pipeline × tensor = {text.layout(job.layout)}, {text.workers(job)} workers "
        f"({job.workers.min} to {job.workers.max}), generation {job.generation}, restarts {restarts}"
    )


def _replicas(members: list[WorkerView]) -> Iterator[tuple[str, Text]]:
    """A line a replica, a square a worker."""
    placed = sorted(members, key=lambda worker: (worker.replica, worker.pipeline, worker.tensor))
    for replica, workers in groupby(placed, key=lambda worker: worker.replica):
        line = Text(no_wrap=True)
        states = []
        for worker in workers:
            line.append("■ ", style=_WORKER_STYLES[worker.state])
            states.append(worker.state)
        line.append(", ".join(dict.fromkeys(states)), style="dim")
        yield replica, line


def _event(event: Event) -> Text:
    line = Text(no_wrap=True, overflow="ellipsis")
    line.append(f"{text.clock(event.at)} ", style="dim")
    line.append(f"{event.kind}  ", style="cyan")
    line.append(event.message)
    return line
