"""How commands speak: results on stdout, everything else on stderr, both as JSON when asked for."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from pydantic import BaseModel
from rich.console import Console

from rubato.problems import RubatoError
from rubato.resources import Problem

_UNCUT = 500

DONE, JOB_FAILED, REFUSED, UNREACHABLE, INTERRUPTED = 0, 1, 2, 3, 130


def console() -> Console:
    """Where results go. Made anew each time, so that it follows a stdout that was replaced."""
    # A pipe has no width: nothing is cut off for whoever reads from it.
    width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else _UNCUT
    return Console(highlight=False, markup=False, emoji=False, width=width)


def note(text: str) -> None:
    """Tells the user something that is no result."""
    Console(stderr=True, highlight=False, markup=False, emoji=False, soft_wrap=True).print(text)


def print_json(value: BaseModel | Mapping[str, Any]) -> None:
    """One JSON document on one line."""
    text = value.model_dump_json() if isinstance(value, BaseModel) else json.dumps(value, ensure_ascii=False)
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def print_error(error: RubatoError, as_json: bool) -> None:
    """An error on stderr: what is wrong; each field at fault, with cause and fix; what to do."""
    if as_json:
        sys.stderr.write(as_problem(error).model_dump_json() + "\n")
        return
    listed = "; ".join(map(str, error.problems))
    what = error.detail.removesuffix(f": {listed}") if listed else error.detail
    lines = [f"error: {what}", *(f"  {problem}" for problem in error.problems), f"  fix: {error.fix}"]
    note("\n".join(lines))


def as_problem(error: RubatoError) -> Problem:
    """The error as the REST API would say it."""
    return Problem(
        title=error.code.replace("_", " "),
        status=error.status,
        code=error.code,
        detail=error.detail,
        fix=error.fix,
        errors=[asdict(problem) for problem in error.problems],
    )


def exit_code(error: RubatoError) -> int:
    """2 when the user can ask for something else, 3 when there is nobody to ask."""
    return UNREACHABLE if error.status >= 500 else REFUSED
