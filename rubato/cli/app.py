"""Wires the commands together and turns every error into its message and exit code."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import typer

from rubato import __version__
from rubato.cli import artifacts, calibrate, data, export, follow, jobs, local, plan, projects, watch
from rubato.cli.output import DONE, INTERRUPTED, REFUSED, exit_code, note, print_error
from rubato.problems import RubatoError

app = typer.Typer(
    name="rubato",
    help="Elastic training of large language models on Ray.",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

_COMMANDS: dict[str, dict[str, Callable[..., Any]]] = {
    "Local stack": {"up": local.up, "down": local.down, "status": local.status, "calibrate": calibrate.calibrate},
    "Jobs": {
        "plan": plan.plan,
        "submit": jobs.submit,
        "list": jobs.list_jobs,
        "show": jobs.show,
        "scale": jobs.scale,
        "cancel": jobs.cancel,
        "checkpoints": jobs.checkpoints,
        "projects": projects.projects,
        "export": export.export,
        "sample": export.sample,
    },
    "Watching": {
        "watch": watch.watch,
        "events": follow.events,
        "metrics": follow.metrics,
        "logs": follow.logs,
        "profile": artifacts.profile,
        "files": artifacts.files,
    },
}

for _panel, _commands in _COMMANDS.items():
    for _name, _command in _commands.items():
        app.command(_name, rich_help_panel=_panel)(_command)


app.add_typer(data.app, rich_help_panel="Data")


@app.callback(invoke_without_command=True)
def _rubato(version: bool = typer.Option(False, "--version", help="Print the version and end.")) -> None:
    if version:
        typer.echo(__version__)
        raise typer.Exit(DONE)


def main() -> None:
    """The entry point of the ``rubato`` command."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Runs one command line and returns its exit code."""
    as_json = "--json" in arguments
    try:
        code = app(list(arguments) or ["--help"], prog_name="rubato", standalone_mode=False)
    except RubatoError as error:
        print_error(error, as_json)
        return exit_code(error)
    except typer.TyperException as error:
        print_error(_usage(error), as_json)
        return REFUSED
    except (typer.Abort, KeyboardInterrupt):
        note("interrupted")
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of our output has had enough (`rubato list | head`); let the interpreter's last flush go nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return DONE
    return code if isinstance(code, int) else DONE


def _usage(error: typer.TyperException) -> RubatoError:
    context = getattr(error, "ctx", None)
    command = context.command_path if context else "rubato"
    return RubatoError(
        error.format_message().replace("Value error, ", ""),
        fix=f"see `{command} --help`",
        code="wrong_usage",
        status=400,
    )
