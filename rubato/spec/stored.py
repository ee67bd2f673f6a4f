"""Reads a spec that was checked when it was stored, without judging it anew by checks that came later."""

from __future__ import annotations

import typing
from collections.abc import Mapping
from typing import Any

from rubato.spec.job import JobSpec
from rubato.spec.section import Section


def stored_spec(content: Mapping[str, Any]) -> JobSpec:
    """The spec in a row or a reply. A field that is not in it has its default, one that is not known is passed over.

    What a check of today would refuse is taken as it is: a job that runs goes on, and its history stays readable.
    """
    return typing.cast(JobSpec, _construct(JobSpec, content))


def _construct(model: type[Section], content: Mapping[str, Any]) -> Section:
    values: dict[str, Any] = {}
    for name, field in model.model_fields.items():
        said = field.alias or name
        if said not in content:
            continue
        value: Any = content[said]
        kind: Any = field.annotation
        section = next(filter(_is_section, (kind, *typing.get_args(kind))), None)  # itself, or one that may be null
        if section is not None and isinstance(value, Mapping):
            value = _construct(section, value)
        elif section is not None and isinstance(value, list):
            value = tuple(_construct(section, each) for each in value)
        elif typing.get_origin(kind) is tuple and isinstance(value, list):
            value = tuple(value)  # JSON knows lists only
        values[name] = value
    return model.model_construct(**values)


def _is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Section)
