"""plan --trace: a planned layout run on tensors without content, beside what was predicted of it."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from rich.table import Table

from rubato.cli import text
from rubato.plans import Prediction, Trace
from rubato.problems import RubatoError

MODULE = "workers.engine.tracing"
_GIB = 2**30


def trace(spec: Mapping[str, Any], data: int) -> Trace:
    """Traces a resolved spec at so many replicas, in a process of its own: the command line loads no torch.

    Raises:
        RubatoError: it failed.
    """
    with tempfile.TemporaryDirectory(prefix="rubato-trace-") as folder:
        file = Path(folder, "spec.json")
        file.write_text(json.dumps(spec), encoding="utf-8")
        command = [sys.executable, "-m", MODULE, str(file), "--data", str(data)]
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        if ended.returncode == 0:
            return Trace.model_validate_json(ended.stdout.splitlines()[-1])
        cause = next(reversed(ended.stderr.strip().splitlines()), "it said nothing")
    except (IndexError, ValidationError) as error:
        cause = f"its last line is no trace: {error}"
    raise RubatoError(
        f"the trace failed: {cause}",
        fix=f"see that `{sys.executable} -m {MODULE} --help` works here: it needs the workers' packages and torch",
        code="trace_failed",
        status=500,
    )


def table(found: Trace) -> Table:
    """A row a stage."""
    made = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("STAGE", "TRACED", "OF IT STAYS", "COLLECTIVES"):
        made.add_column(column)
    for stage in found.stages:
        sent = [f"{each.calls} {each.kind} ({text.short(each.bytes)}B)" for each in stage.collectives]
        peak, resident = (f"{amount / _GIB:.3g} GiB" for amount in (stage.peak_bytes, stage.resident_bytes))
        made.add_row(str(stage.stage), peak, resident, ", ".join(sent) or text.NOTHING)
    return made


def remarks(found: Trace, predicted: Prediction) -> Iterator[str]:
    """The trace beside the prediction."""
    most = max(stage.peak_bytes for stage in found.stages)
    allocated = predicted.memory.allocated
    yield (
        f"the largest stage holds {most / _GIB:.3g} GiB, {allocated / _GIB:.3g} GiB were predicted "
        f"({allocated / most - 1:+.1%}); collectives are of {found.stages[0].micro_batches} micro-batches"
    )
