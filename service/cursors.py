"""Keyset cursors: where a page ended, opaque to whoever holds it."""

from __future__ import annotations

import base64
import binascii

from rubato.problems import FieldProblem, RubatoError

LARGEST = 2**63 - 1  # what a database holds as a number


def encode(position: int) -> str:
    """The cursor of a position."""
    return base64.urlsafe_b64encode(f"n{position}".encode()).decode().rstrip("=")


def decode(cursor: str) -> int:
    """The position of a cursor. Raises RubatoError for one that this service never gave."""
    try:
        text = base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)).decode()
    except (binascii.Error, ValueError):
        text = ""
    if not text.startswith("n") or not text[1:].isdecimal() or int(text[1:]) > LARGEST:
        problem = FieldProblem("cursor", f"'{cursor}' is no cursor", "give the `next` of the page before, or nothing")
        raise RubatoError(str(problem), fix=problem.fix, code="request_refused", status=422, problems=[problem])
    return int(text[1:])
