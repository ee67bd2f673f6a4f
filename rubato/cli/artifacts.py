"""profile and files: what a run has made for people to look at."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from rubato.cli import text
from rubato.cli.jobs import report_operation
from rubato.cli.options import JobName, Json, Url
from rubato.cli.output import console, note, print_json
from rubato.client import Client


def profile(
    job: JobName,
    steps: Annotated[int, typer.Option(min=1, max=100, help="How many steps to record.")] = 3,
    rank: Annotated[
        list[int] | None, typer.Option(min=0, help="A world rank to record; more than once for more.")
    ] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until they are recorded.")] = False,
    url: Url = None,
    json: Json = False,
) -> int:
    """Record the next steps of a running job with the profiler."""
    with Client(url) as client:
        operation = client.profile(job, steps=steps, ranks=rank or [0])
        if wait:
            operation = client.wait_for_operation(operation.id)
    return report_operation(operation, json, f"{job} records {steps} steps; `rubato files {job}` will list them")


def files(
    job: JobName,
    path: Annotated[str | None, typer.Argument(help="Fetch this file instead of listing.", show_default=False)] = None,
    to: Annotated[Path | None, typer.Option("--to", help="Where to put it; by default here, under its name.")] = None,
    url: Url = None,
    json: Json = False,
) -> None:
    """List the traces, tables and boards of a job, or fetch one."""
    with Client(url) as client:
        if path is not None:
            target = to or Path(Path(path).name)
            target.write_bytes(client.file(job, path))
            note(f"{path} is at {target}")
            return
        page = client.files(job)
    if json:
        print_json(page)
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("AT", "SIZE", "PATH"):
        table.add_column(column, no_wrap=True)
    for file in page.items:
        table.add_row(text.clock(file.modified_at), f"{text.short(file.bytes)}B", file.path)
    console().print(table)
