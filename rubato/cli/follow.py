"""events, metrics and logs, once or followed to the end of the job."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Annotated, TypeVar

import typer
from pydantic import BaseModel

from rubato.cli import text
from rubato.cli.options import JobName, Json, Url
from rubato.cli.output import DONE, INTERRUPTED, console, note, print_json
from rubato.client import Client, LogQuery
from rubato.problems import RubatoError
from rubato.resources import Event, LogSource, Metric

Follow = Annotated[bool, typer.Option("--follow", "-f", help="Go on as it happens, until the job is over.")]
Item = TypeVar("Item", bound=BaseModel)


def events(
    job: JobName,
    follow: Follow = False,
    after: Annotated[int, typer.Option(min=0, help="Only events after the one with this id.")] = 0,
    url: Url = None,
    json: Json = False,
) -> int:
    """Print the timeline of a job."""
    with Client(url) as client:
        found = client.follow_events(job, after=after, notice=gone) if follow else client.events(job, after=after)
        return _print(found, _event_line, job, follow, json)


def metrics(
    job: JobName,
    follow: Follow = False,
    after: Annotated[int, typer.Option(min=0, help="Only steps after this one.")] = 0,
    url: Url = None,
    json: Json = False,
) -> int:
    """Print loss, speed and the like of every step of a job."""
    with Client(url) as client:
        steps = client.job(job).progress.steps
        found = client.follow_metrics(job, after=after, notice=gone) if follow else client.metrics(job, after=after)
        return _print(found, lambda metric: metric_line(metric, steps), job, follow, json)


def gone(error: RubatoError) -> None:
    """Says that the control plane is away while something is followed."""
    note(f"{error.detail}; trying again")


def goes_on(job: str) -> None:
    """Says that Ctrl+C ended the command, not the job."""
    note(f"{job} goes on: `rubato watch {job}` watches it, `rubato cancel {job}` ends it")


def metric_line(metric: Metric, steps: int) -> str:
    """A step on one line."""
    validation = f", validation {metric.validation_loss:.4f}" if metric.validation_loss is not None else ""
    return (
        f"{text.clock(metric.at)} step {metric.step}/{steps}: loss {metric.loss:.4f}{validation}, "
        f"{text.short(metric.tokens_per_s)} tokens/s, {metric.step_s:.2f} s, data {metric.data}, "
        f"generation {metric.generation}"
    )


def _event_line(event: Event) -> str:
    return f"{text.clock(event.at)} {event.actor:8} {event.kind}: {event.message}"


def _print(found: Iterable[Item], line: Callable[[Item], str], job: str, following: bool, as_json: bool) -> int:
    """Items as lines: JSON lines while following, one JSON document otherwise."""
    if as_json and not following:
        print_json({"items": [item.model_dump(mode="json") for item in found]})
        return DONE
    out = console()
    try:
        for item in found:
            if as_json:
                print_json(item)
            else:
                out.print(line(item), soft_wrap=True)
    except KeyboardInterrupt:
        goes_on(job)
        return INTERRUPTED
    return DONE


def logs(
    job: JobName,
    rank: Annotated[int | None, typer.Option(min=0, help="The log of the worker of this world rank.")] = None,
    driver: Annotated[bool, typer.Option("--driver", help="The log of the driver; the default.")] = False,
    source: Annotated[str | None, typer.Option(help="A log by the name that --sources lists.")] = None,
    attempt: Annotated[int | None, typer.Option(min=1, help="Of this attempt; by default the newest.")] = None,
    tail: Annotated[int, typer.Option(min=0, max=100_000, help="So many lines from the end.")] = 1000,
    sources: Annotated[bool, typer.Option("--sources", help="List which logs there are.")] = False,
    follow: Follow = False,
    url: Url = None,
    json: Json = False,
) -> int:
    """Print a log of a job."""
    if sum([rank is not None, driver, source is not None, sources]) > 1:
        raise typer.BadParameter("--rank, --driver, --source and --sources exclude each other; give one of them")
    query = LogQuery(rank, "driver" if driver else source, attempt, tail)
    with Client(url) as client:
        if sources:
            return _print(client.log_sources(job).items, _source_line, job, False, json)
        lines = client.follow_logs(job, query, notice=gone) if follow else _lines(client.logs(job, query))
        return _print((LogLine(line=line) for line in lines), lambda line: line.line, job, follow, json)


class LogLine(BaseModel):
    """A line of a log, as JSON shows it."""

    line: str


def _lines(content: str) -> Iterator[str]:
    return iter(content.removesuffix("\n").split("\n") if content else ())


def _source_line(log: LogSource) -> str:
    return f"{log.source}  attempt {log.attempt}, {text.short(log.bytes)}B, written {text.age(log.modified_at)} ago"
