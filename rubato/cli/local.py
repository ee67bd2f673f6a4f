"""up, down and status: the stack on this machine."""

from __future__ import annotations

import signal
import sys
from types import FrameType
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from rubato import stack
from rubato.cli import text
from rubato.cli.options import Home, Json
from rubato.cli.output import DONE, UNREACHABLE, console, note, print_json
from rubato.client import Client
from rubato.home import default_home
from rubato.problems import RubatoError
from rubato.resources import Cluster
from rubato.stack import StackView


def up(
    cpus: Annotated[
        int | None, typer.Option(min=1, help="Logical CPUs of the Ray cluster; by default those of this machine.")
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(min=0, max=65535, help="Port of the control plane and web page; default 8700, 0: any free one."),
    ] = None,
    home: Home = None,
    json: Json = False,
) -> None:
    """Start a Ray cluster and a control plane on this machine."""
    signal.signal(signal.SIGTERM, _exit)  # so that being ended half-way leaves nothing behind, as Ctrl+C does
    view = stack.up(home or default_home(), cpus=cpus, port=port, tell=note)
    _print(view, None, json)


def down(home: Home = None, json: Json = False) -> None:
    """End them, with everything that runs on them. Jobs stay in the record."""
    view = stack.down(home or default_home(), tell=note)
    _print(view, None, json)


def status(home: Home = None, json: Json = False) -> int:
    """Say what runs on this machine. Exit code 3: nothing, or not all of it."""
    view = stack.status(home or default_home())
    cluster = _cluster(view)
    _print(view, cluster, json)
    return DONE if view.state == "up" and cluster else UNREACHABLE


def _exit(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)


def _cluster(view: StackView) -> Cluster | None:
    if view.control_plane.pid is None:
        return None
    try:
        with Client(view.urls["api"]) as client:
            return client.cluster()
    except RubatoError as error:
        note(f"the control plane does not answer: {error.detail}")
        return None


def _print(view: StackView, cluster: Cluster | None, as_json: bool) -> None:
    if as_json:
        document = view.model_dump(mode="json")
        print_json({**document, "cluster": cluster.model_dump(mode="json") if cluster else None})
        return
    out = console()
    _head(out, view)
    if view.state == "down":
        return
    table = Table.grid(padding=(0, 2))
    table.add_row(
        "control plane", view.control_plane.state, f"pid {view.control_plane.pid}", str(view.control_plane.log)
    )
    table.add_row("ray", view.ray.state, f"pid {view.ray.pid}", str(view.ray.log))
    out.print(table)
    if cluster:
        free = f"{cluster.cpus_free:g} of {cluster.cpus:g} CPUs free, {cluster.gpus_free:g} of {cluster.gpus:g} GPUs"
        out.print(f"cluster {cluster.state}: {cluster.detail}; {free}", soft_wrap=True)


def _head(out: Console, view: StackView) -> None:
    if view.state == "down" or view.started_at is None:
        out.print(f"down: no stack runs under {view.home}", soft_wrap=True)
        return
    out.print(f"{view.state}: {view.cpus} CPUs, for {text.age(view.started_at)}, under {view.home}", soft_wrap=True)
    out.print(f"web page and API  {view.urls['api']}", soft_wrap=True)
    out.print(f"Ray dashboard     {view.urls['dashboard']}", soft_wrap=True)
