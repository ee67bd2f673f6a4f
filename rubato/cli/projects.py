"""projects: what projects may have and what they hold, and setting it."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table

from rubato.cli.options import Json, Url
from rubato.cli.output import console, print_json
from rubato.client import Client
from rubato.problems import RubatoError
from rubato.projects import ProjectRequest, ProjectView

_NO_LIMIT = -1


def projects(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="One project alone.", show_default=False)] = None,
    workers: Annotated[int | None, typer.Option(min=_NO_LIMIT, help="Most workers; -1: any number.")] = None,
    gpus: Annotated[int | None, typer.Option(min=_NO_LIMIT, help="Most GPUs; -1: any number.")] = None,
    running_jobs: Annotated[int | None, typer.Option(min=_NO_LIMIT, help="Most jobs at a time; -1: any.")] = None,
    weight: Annotated[
        float | None, typer.Option(min=1e-6, max=1e6, help="Its right to a share, beside others.")
    ] = None,
    url: Url = None,
    json: Json = False,
) -> None:
    """List projects with their quotas, or set the quotas of one."""
    changes = {"workers": workers, "gpus": gpus, "running_jobs": running_jobs, "weight": weight}
    chosen = {key: None if value == _NO_LIMIT else value for key, value in changes.items() if value is not None}
    if chosen and name is None:
        raise RubatoError(
            "quotas are those of one project", fix="name it: `rubato projects NAME`", code="wrong_usage", status=400
        )
    with Client(url) as client:
        if name is None:
            page = client.projects()
            found = page.items
        else:
            seen = client.project(name)
            if chosen:  # what is not given stays as it is
                seen = client.set_project(name, ProjectRequest.model_validate({**_quotas(seen), **chosen}))
            found = [seen]
    if json:
        print_json(page if name is None else found[0])
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("PROJECT", "WORKERS", "GPUS", "JOBS", "WEIGHT", "OF LATE"):
        table.add_column(column, no_wrap=True)
    for project in found:
        table.add_row(
            project.name,
            _of(project.held_workers, project.workers),
            _of(project.held_gpus, project.gpus),
            _of(project.held_jobs, project.running_jobs),
            f"{project.weight:g}",
            f"{project.usage:.1f}",
        )
    console().print(table)


def _quotas(project: ProjectView) -> dict[str, float | None]:
    return project.model_dump(include=set(ProjectRequest.model_fields))


def _of(held: float, most: int | None) -> str:
    return f"{held:g}" if most is None else f"{held:g} of {most}"
