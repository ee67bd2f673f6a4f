"""calibrate: measures this machine for the planner."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import UTC, datetime
from platform import node
from typing import Annotated, Any

import typer
from pydantic import ValidationError
from rich.table import Table

from rubato.calibrations import keep_calibration
from rubato.cli import text
from rubato.cli.options import Home, Json, Url
from rubato.cli.output import console, note, print_json
from rubato.client import Client
from rubato.client.calls import UNREACHABLE
from rubato.home import default_home
from rubato.plans import Calibration
from rubato.problems import RubatoError

MODULE = "workers.engine.calibration"


def calibrate(
    workers: Annotated[
        int | None, typer.Option(min=1, help="Processes: 1 or an even number; by default one a core or GPU.")
    ] = None,
    gpu: Annotated[bool, typer.Option("--gpu", help="Measure the GPUs of this machine instead of its cores.")] = False,
    home: Home = None,
    url: Url = None,
    json: Json = False,
) -> None:
    """Measure this machine, for plans that rest on it rather than on a catalogue."""
    note("measuring for about half a minute; what else runs here is measured with it")
    found = measure(workers, gpu=gpu)
    path = keep_calibration(home or default_home(), found)
    try:
        with Client(url) as client:
            client.calibrate(found)
        where = "the control plane plans with it"
    except RubatoError as error:
        if error.code != UNREACHABLE:
            raise
        where = "no control plane was reached: one with this home will find it"
    if json:
        print_json(found)
        return
    console().print(table(found))
    note(f"kept in {path}; {where}")


def measure(workers: int | None, *, gpu: bool) -> Calibration:
    """Runs the measurement in processes of its own: the command line loads no torch.

    Raises:
        RubatoError: it failed.
    """
    command = [sys.executable, "-m", MODULE]
    command += ["--workers", str(workers)] if workers is not None else []
    command += ["--gpu"] if gpu else []
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise _failed(_last_line(ended.stderr), 400 if ended.returncode == 2 else 500)
    try:
        content: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
        return Calibration.model_validate({**content, "measured_at": datetime.now(UTC), "host": node()})
    except (IndexError, ValueError, ValidationError) as error:
        raise _failed(f"its last line is no measurement: {error}", 500) from error


def _failed(cause: str, status: int) -> RubatoError:
    return RubatoError(
        f"the measurement failed: {cause}",
        fix=f"run `{sys.executable} -m {MODULE}` on a machine that has torch, and see what it says",
        code="calibration_failed",
        status=status,
    )


def _last_line(printed: str) -> str:
    lines = printed.strip().splitlines()
    return lines[-1] if lines else "it said nothing"


def table(found: Calibration) -> Table:
    """What was measured, in lines."""
    alone, together = found.alone, found.together
    made = Table.grid(padding=(0, 2))
    made.add_row("device", f"{alone.device} of {found.host}, {found.cores} there")
    made.add_row("products", f"{text.short(alone.single_flops)}FLOP/s in fp32, {text.short(alone.half_flops)} in bf16")
    made.add_row("attention", f"{text.short(alone.attention_flops)}FLOP/s")
    made.add_row("memory", f"{text.short(alone.copy_bytes)}B/s copied")
    made.add_row("overhead", f"{1e3 * alone.gap_s:.3g} ms a layer, {1e3 * alone.ends_s:.3g} ms a micro-batch")
    if together is not None:
        made.add_row("side by side", f"{together.workers} workers: products take {together.slowdown:.2f} times as long")
        made.add_row("links", f"{text.short(together.link_bytes)}B/s, {1e6 * together.latency_s:.3g} µs a hop")
    return made
