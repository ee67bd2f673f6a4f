"""Keyset cursors: where a page ended, opaque to whoever holds it."""

from __future__ import annotations

import base64
import binascii

from rubato.problems import FieldProblem, RubatoError

LARGEST = 2**63 - 1  # what a database holds as a number


def encode(position: int) -> str:
    """The cursor of a position."""
    return base64.urlsafe_b64encode(f"n{position}".encode()).decode().rstrip("=")


def number(text: str) -> int | None:
    """A position out of its digits; None for what is none. Python itself refuses to read thousands of digits."""
    if not text.isdecimal() or len(text) > len(str(LARGEST)) or int(text) > LARGEST:
        return None
    return int(text)


def decode(cursor: str) -> int:
    """The position of a cursor. Raises RubatoError for one that this service never gave."""
    try:
        text = base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)).decode()
    except (binascii.Error, ValueError):
        text = ""
    position = number(text[1:]) if text.startswith("n") else None
    if position is None:
        problem = FieldProblem("cursor", f"'{cursor[:80]}' is no cursor", "give the `next` of the page before")
        raise RubatoError(str(problem), fix=problem.fix, code="request_refused", status=422, problems=[problem])
    return position
