"""What a spec leaves to the planner: its parallelism, and then what of its memory section it does not say either."""

from __future__ import annotations

from typing import Any

from rubato.spec.job import JobSpec

PLANNED_MEMORY = ("recompute",)
"""Fields of the memory section that are chosen with the layout."""


def is_planned(spec: JobSpec) -> bool:
    """Whether the spec leaves its layout to the planner."""
    return "parallelism" not in spec.model_fields_set


def is_open(spec: JobSpec, field: str) -> bool:
    """Whether a planned spec leaves a field open, by its dotted name, such as ``memory.recompute``."""
    section, _, name = field.partition(".")
    if section not in spec.model_fields_set:
        return True
    return bool(name) and name not in getattr(spec, section).model_fields_set


def as_given(spec: JobSpec) -> dict[str, Any]:
    """The resolved spec without what it leaves to the planner: what to send to a control plane."""
    content = spec.model_dump(mode="json")
    if is_planned(spec):
        del content["parallelism"]
        for name in PLANNED_MEMORY:
            if is_open(spec, f"memory.{name}"):
                del content["memory"][name]
    return content
