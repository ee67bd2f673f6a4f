"""How Rubato says no: every refusal names the field, the cause and the fix."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class FieldProblem:
    """One thing that is wrong with an input: where it is, why it is wrong, what would be right."""

    field: str
    cause: str
    fix: str

    def __str__(self) -> str:
        return f"{self.field}: {self.cause}; {self.fix}"


class RubatoError(Exception):
    """An error a user can act on.

    Args:
        detail: what went wrong, a sentence.
        fix: what to do about it, a sentence.
        code: a stable machine-readable name, snake_case.
        status: the HTTP status this error has when it leaves through the REST API.
        problems: the fields at fault, when there are any.
    """

    def __init__(
        self,
        detail: str,
        *,
        fix: str,
        code: str,
        status: int = 400,
        problems: Iterable[FieldProblem] = (),
    ) -> None:
        self.detail = detail
        self.fix = fix
        self.code = code
        self.status = status
        self.problems = tuple(problems)
        super().__init__(f"{detail} ({fix})")

    def __reduce__(self) -> tuple[Callable[..., RubatoError], tuple[type[RubatoError], str, dict[str, Any]]]:
        # The default calls the class with ``args``, which is the message alone; workers send errors to one another.
        return _restored, (type(self), str(self), self.__dict__)


def _restored(kind: type[RubatoError], message: str, fields: dict[str, Any]) -> RubatoError:
    error = kind.__new__(kind, message)
    error.__dict__.update(fields)
    return error


class SpecError(RubatoError):
    """A spec that cannot be run as written; ``problems`` lists every field at fault."""

    def __init__(self, problems: Iterable[FieldProblem]) -> None:
        found = tuple(problems)
        super().__init__(
            "the spec was refused: " + "; ".join(str(problem) for problem in found),
            fix="correct the fields listed and submit again",
            code="spec_refused",
            status=422,
            problems=found,
        )


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name a typo most likely meant, or None when nothing is close."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return close[0] if close else None
