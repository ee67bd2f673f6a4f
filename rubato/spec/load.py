"""From a file, a string or a dict to a checked spec; every error names field, cause and fix."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from rubato.problems import FieldProblem, SpecError, nearest
from rubato.spec.job import JobSpec


def load_spec(path: str | Path, overrides: Iterable[str] = ()) -> JobSpec:
    """The checked spec in a YAML (or JSON) file.

    Args:
        path: the file.
        overrides: ``key.sub=value`` strings, applied on top of the file; values are YAML.

    Raises:
        SpecError: the file cannot be read, is not YAML, or holds a spec that cannot run.
    """
    return parse_spec(read_spec(path, overrides))


def read_spec(path: str | Path, overrides: Iterable[str] = ()) -> dict[str, Any]:
    """The unchecked content of a spec file with overrides applied. Raises SpecError when there is none."""
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise SpecError(
            [FieldProblem(str(path), f"cannot be read: {error.strerror}", "give a readable YAML file")]
        ) from error
    except UnicodeDecodeError as error:
        raise SpecError(
            [FieldProblem(str(path), f"is not text: {error.reason}", "give a YAML file in UTF-8")]
        ) from error
    except yaml.YAMLError as error:
        where = getattr(error, "problem_mark", None)
        line = f"line {where.line + 1}: " if where else ""
        cause = f"{line}{getattr(error, 'problem', None) or 'is not YAML'}"
        raise SpecError([FieldProblem(str(path), cause, "correct the YAML")]) from error
    if not isinstance(content, dict):
        raise SpecError(
            [FieldProblem(str(path), "holds no mapping of fields", "begin with name:, model:, data:, train:, workers:")]
        )
    for override in overrides:
        _apply(content, override)
    return content


def _apply(content: dict[str, Any], override: str) -> None:
    key, separator, value = override.partition("=")
    if not separator or not key:
        raise SpecError([FieldProblem(override, "is not an override", "write key.sub=value, such as train.steps=200")])
    *parents, last = key.split(".")
    at = content
    for parent in parents:
        below = at.setdefault(parent, {})
        if not isinstance(below, dict):
            raise SpecError([FieldProblem(key, f"'{parent}' holds a value, not a section", f"set {parent} itself")])
        at = below
    try:
        at[last] = yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise SpecError(
            [FieldProblem(key, f"{value!r} is not YAML", "write a value as in the spec file, text in quotes")]
        ) from error


def parse_spec(content: Mapping[str, Any]) -> JobSpec:
    """The checked, resolved spec. Raises SpecError listing every field at fault."""
    try:
        return JobSpec.model_validate(content)
    except ValidationError as error:
        raise SpecError(field_problems(error, JobSpec)) from error


def field_problems(error: ValidationError, model: type[BaseModel]) -> list[FieldProblem]:
    """What pydantic found wrong with an input for ``model``, said in Rubato's way."""
    return explain(error.errors(), model)


def explain(errors: Iterable[ErrorDetails], model: type[BaseModel] | None) -> list[FieldProblem]:
    """The same for errors that have left their exception; without a model unknown names get no suggestion."""
    return [problem for details in errors for problem in _problems(details, model)]


def _problems(details: ErrorDetails, model: type[BaseModel] | None) -> Iterable[FieldProblem]:
    location, context = details["loc"], details.get("ctx", {})
    field = ".".join(str(part) for part in location) or "spec"
    kind, got = details["type"], details["input"]
    if kind == "refused":
        prefix = "".join(f"{part}." for part in location)
        return [FieldProblem(prefix + name, cause, fix) for name, cause, fix in context["problems"]]
    if kind == "extra_forbidden":
        known = sorted(_fields_at(model, location[:-1]))
        close = nearest(str(location[-1]), known)
        fix = f"did you mean '{close}'?" if close else f"known fields: {', '.join(known) or 'none'}"
        return [FieldProblem(field, "unknown field", fix)]
    if kind == "default_factory_not_called":
        return []  # the field that it is worked out from is at fault, and is listed
    if kind == "missing":
        return [FieldProblem(field, "is missing", f"add {field}")]
    if kind == "literal_error":
        expected = str(context["expected"])
        choices = [choice.strip("'") for choice in expected.replace(" or ", ", ").split(", ")]
        close = nearest(str(got), choices)
        return [
            FieldProblem(field, f"{got!r} is not known", f"did you mean '{close}'?" if close else f"use {expected}")
        ]
    message = details["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
    if kind == "string_pattern_mismatch":
        message = "lower-case letters, digits and hyphens, 1 to 63 of them, without a hyphen at either end"
    return [FieldProblem(field, f"{got!r} will not do", f"give {message}")]


def _fields_at(model: type[BaseModel] | None, location: tuple[int | str, ...]) -> set[str]:
    at = model
    for part in location:
        if isinstance(part, int):
            continue  # the place in a list, all of which are of one kind
        field = _field(at, str(part)) if at else None
        at = _section_of(field.annotation) if field else None
    return {field.alias or name for name, field in at.model_fields.items()} if at else set()


def _field(model: type[BaseModel], name: str) -> FieldInfo | None:
    return next((field for key, field in model.model_fields.items() if name == (field.alias or key)), None)


def _section_of(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if typing.get_origin(annotation) in (typing.Union, types.UnionType, typing.Annotated, tuple):
        return next(filter(None, map(_section_of, typing.get_args(annotation))), None)
    return None
