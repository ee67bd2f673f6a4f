"""Options and arguments that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document, or JSON lines when following.")]
Url = Annotated[
    str | None,
    typer.Option(
        "--url",
        envvar="RUBATO_URL",
        help="Address of the control plane; by default that of the local stack.",
        show_default=False,
    ),
]
Home = Annotated[
    Path | None,
    typer.Option(
        "--home",
        envvar="RUBATO_HOME",
        help="Folder of the local stack; by default ~/.rubato.",
        show_default=False,
    ),
]
JobName = Annotated[str, typer.Argument(metavar="JOB", help="Id or name of a job.", show_default=False)]
