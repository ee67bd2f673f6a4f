"""What a hook is, and what it is given."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from workers.engine.hooks.record import Record
from workers.engine.membership import Generation, Membership
from workers.engine.parallel.data import DataGroup
from workers.engine.parallel.pipeline import Runner


@dataclass
class Session:
    """A generation as this worker lives it.

    Attributes:
        samples: this replica's places in the global batch.
        rows: samples that the runner takes: those, or as many as any replica has where all compute together (ZeRO).
        runner: runs them.
        record: of the step that led here; None when none did (at the first step, or right after a checkpoint was
            loaded).
    """

    generation: Generation
    data: DataGroup
    samples: range
    rows: int
    runner: Runner
    record: Record | None


class Hook(Protocol):
    """Called by all workers after every ``every`` steps, and after the last where ``at_end``.

    Called again for the step a generation begins with, since of the one before some may not have come to it; so
    doing it twice must be harmless.
    """

    every: int
    at_end: bool

    def __call__(self, session: Session) -> None: ...


@contextmanager
def busy(membership: Membership, doing: str) -> Iterator[None]:
    """Says that this worker takes no steps for a while and why, so that nobody takes it for one that hangs."""
    membership.report("busy", {"doing": doing})
    try:
        yield
    finally:
        membership.report("busy", {"doing": None})


def due(hook: Hook, step: int, steps: int) -> bool:
    """Whether a hook is to be called after ``step`` of ``steps`` steps."""
    return step > 0 and ((hook.every > 0 and step % hook.every == 0) or (hook.at_end and step == steps))
