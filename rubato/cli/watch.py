"""watch: a job as it trains, live on a terminal, as plain lines in a pipe, as JSON lines for a program."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable

from rich.live import Live

from rubato.cli import text
from rubato.cli.follow import goes_on, metric_line
from rubato.cli.live import Watched, screen
from rubato.cli.options import JobName, Json, Url
from rubato.cli.output import DONE, INTERRUPTED, JOB_FAILED, console, print_json
from rubato.client import AsyncClient
from rubato.client.calls import UNREACHABLE
from rubato.problems import RubatoError
from rubato.resources import Event, Job, Metric
from rubato.states import JobState

# Training goes on while the control plane is away, so watching may well go on too.
PATIENCE_S = 600.0
_REFRESH_S = 0.25
_LOOK_S = 1.0
_STEPS_SHOWN = 2000
_PLAIN_LINES = 20

News = Callable[[Event | Metric | Job], None]


def watch(job: JobName, url: Url = None, json: Json = False) -> int:
    """Watch a job until it is over. Ctrl+C ends the watching, never the job."""
    return watch_to_the_end(url, job, as_json=json)


def watch_to_the_end(url: str | None, job: str, *, as_json: bool) -> int:
    """Shows a job until it is over. Returns the exit code: 0 when it succeeded, 1 when not."""
    try:
        last = asyncio.run(_watch(url, job, as_json))
    except KeyboardInterrupt:
        goes_on(job)
        return INTERRUPTED
    if not as_json:
        _print_end(last)
    return DONE if last.state is JobState.SUCCEEDED else JOB_FAILED


async def _watch(url: str | None, name: str, as_json: bool) -> Job:
    async with AsyncClient(url) as client:
        watched = Watched(await client.job(name))
        if as_json:
            await _follow(client, watched, _print_json_line)
        elif sys.stdout.isatty():
            await _follow_on_screen(client, watched)
        else:
            await _follow(client, watched, _print_line(watched))
        return watched.job


async def _follow_on_screen(client: AsyncClient, watched: Watched) -> None:
    out = console()
    with Live(console=out, auto_refresh=False, transient=False) as live:

        async def redraw() -> None:
            while True:
                live.update(screen(watched, out.width), refresh=True)
                await asyncio.sleep(_REFRESH_S)

        drawing = asyncio.create_task(redraw())
        try:
            await _follow(client, watched, lambda news: None)
        finally:
            drawing.cancel()
        live.update(screen(watched, out.width), refresh=True)


async def _follow(client: AsyncClient, watched: Watched, tell: News) -> None:
    """Keeps ``watched`` up to date until the job is over, telling all news."""
    job = watched.job.id
    happened = asyncio.Event()

    def gone(error: RubatoError) -> None:
        watched.away = error.detail

    async def follow_events() -> None:
        async for event in client.follow_events(job, patience_s=PATIENCE_S, notice=gone):
            watched.events.append(event)
            happened.set()
            tell(event)

    async def follow_metrics() -> None:
        after = max(0, watched.job.progress.step - _STEPS_SHOWN)
        async for metric in client.follow_metrics(job, after=after, patience_s=PATIENCE_S, notice=gone):
            watched.metrics.append(metric)
            tell(metric)

    async def look() -> None:
        while not watched.job.state.terminal:
            try:
                async with asyncio.timeout(_LOOK_S):
                    await happened.wait()
            except TimeoutError:
                pass
            happened.clear()
            await _look(client, watched)

    tell(watched.job)
    try:
        async with asyncio.TaskGroup() as tasks:
            for coroutine in (follow_events(), follow_metrics(), look()):
                tasks.create_task(coroutine)
    except* RubatoError as group:
        raise _first(group) from None
    tell(watched.job)


def _first(group: BaseExceptionGroup[RubatoError]) -> RubatoError:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, RubatoError)
    return error


async def _look(client: AsyncClient, watched: Watched) -> None:
    try:
        watched.job = await client.job(watched.job.id)
        watched.away = None
    except RubatoError as error:
        if error.code != UNREACHABLE:
            raise
        watched.away = error.detail  # the followers know when to give up


def _print_json_line(news: Event | Metric | Job) -> None:
    print_json({type(news).__name__.lower(): news.model_dump(mode="json")})


def _print_line(watched: Watched) -> News:
    out = console()
    every = max(1, watched.job.progress.steps // _PLAIN_LINES)

    def tell(news: Event | Metric | Job) -> None:
        if isinstance(news, Event):
            out.print(f"{text.clock(news.at)} {news.kind}: {news.message}", soft_wrap=True)
        elif isinstance(news, Metric) and (news.step == 1 or news.step % every == 0):
            out.print(metric_line(news, watched.job.progress.steps), soft_wrap=True)

    return tell


def _print_end(job: Job) -> None:
    took = (job.finished_at - job.created_at).total_seconds() if job.finished_at else None
    console().print(
        f"{job.name} {job.state} at step {job.progress.step} of {job.progress.steps} after {text.duration(took)}, "
        f"loss {text.fixed(job.progress.loss, 4)}: {job.reason.message}",
        soft_wrap=True,
    )
