"""The base of every section of the spec, and the one way a check in it refuses a value."""

from __future__ import annotations

from collections.abc import Iterable

from pydantic import BaseModel, ConfigDict
from pydantic_core import PydanticCustomError

from rubato.problems import FieldProblem


class Section(BaseModel):
    """Frozen; unknown fields are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)


def refuse(problems: Iterable[FieldProblem]) -> PydanticCustomError:
    """The exception a validator raises; ``load.py`` unfolds it into one problem a field.

    Field names are relative to the section whose validator raises it.
    """
    found = [(problem.field, problem.cause, problem.fix) for problem in problems]
    return PydanticCustomError("refused", "{summary}", {"summary": "; ".join(map(str, found)), "problems": found})
