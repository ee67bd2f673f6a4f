"""What time it is, in one place, so that tests can turn it."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime

Clock = Callable[[], datetime]


def utc_now() -> datetime:
    """Now, with its time zone."""
    return datetime.now(UTC)
