"""The base of every section of the spec, and the one way a check in it refuses a value."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field
from pydantic_core import PydanticCustomError

from rubato.problems import FieldProblem

LARGEST = 2**31 - 1
"""The largest count: what a database holds as an integer, and more than any run has of anything."""

PositiveInt = Annotated[int, Field(gt=0, le=LARGEST)]
NonNegativeInt = Annotated[int, Field(ge=0, le=LARGEST)]


class Section(BaseModel):
    """Frozen; unknown fields are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)


def refuse(problems: Iterable[FieldProblem]) -> PydanticCustomError:
    """The exception a validator raises; ``load.py`` unfolds it into one problem a field.

    Field names are relative to the section whose validator raises it.
    """
    found = [(problem.field, problem.cause, problem.fix) for problem in problems]
    return PydanticCustomError("refused", "{summary}", {"summary": "; ".join(map(str, found)), "problems": found})
