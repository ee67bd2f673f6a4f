"""The catalogue of accelerators: what the planner knows of a device before anyone measures it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import fields
from functools import cache
from importlib.resources import files
from typing import Any

from rubato.problems import RubatoError, nearest
from service.planning.shapes import Accelerator


@cache
def catalogue() -> dict[str, Accelerator]:
    """The accelerators of ``accelerators.json`` beside this file, by name; sources are given there."""
    entries: dict[str, dict[str, Any]] = json.loads((files(__package__) / "accelerators.json").read_text("utf-8"))
    return {
        name: Accelerator(name=name, **{key: value for key, value in entry.items() if key != "sources"})
        for name, entry in entries.items()
    }


def accelerator(name: str) -> Accelerator:
    """The accelerator of a name such as ``h100-80gb``, or of its beginning where only one begins so.

    Raises:
        RubatoError: nothing in the catalogue is called so.
    """
    known = catalogue()
    if name in known:
        return known[name]
    begun = [entry for entry in known if entry.startswith(name)]
    if len(begun) == 1:
        return known[begun[0]]
    close = nearest(name, begun or known)
    fix = f"did you mean '{close}'? " if close else ""
    raise RubatoError(
        f"no accelerator is called '{name}'", fix=f"{fix}known: {', '.join(known)}", code="accelerator_unknown"
    )


def weakest(accelerators: Iterable[Accelerator]) -> Accelerator:
    """What a synchronous step over unlike devices can count on: of each rate and of the memory, the least.

    Raises:
        ValueError: there are none.
    """
    several = list(dict.fromkeys(accelerators))
    if not several:
        raise ValueError("no accelerators were given")
    if len(several) == 1:
        return several[0]
    numbers = {
        field.name: (max if field.name == "context_bytes" else min)(getattr(one, field.name) for one in several)
        for field in fields(Accelerator)
        if field.name != "name"
    }
    return Accelerator(name=" + ".join(one.name for one in several), **numbers)
