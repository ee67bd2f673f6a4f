"""What the losses of workers add up to: a fault of a machine, of the user or of the program; how many are allowed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from workers.driver.rendezvous.members import Incarnation
from workers.driver.rendezvous.server import Link, Loss


@dataclass(frozen=True)
class Verdict:
    """Why an incarnation of a replica is gone.

    ``fault``: "hardware" is worth a restart, "user" and "program" would only come again. ``link`` is the worker it
    began with.
    """

    fault: Literal["hardware", "user", "program"]
    cause: str
    link: Link


@dataclass
class _Case:
    first: tuple[Link, Loss] | None = None
    program: tuple[Link, Loss] | None = None
    closed: bool = False


@dataclass
class Casualties:
    """Judges each incarnation once.

    When a worker dies, its mates fail too, in their next call to it, and say so. So of all the workers of an
    incarnation the one that went without a word tells what happened; only when all said something does it count what.
    """

    _cases: dict[Incarnation, _Case] = field(default_factory=dict)

    def lost(self, link: Link, loss: Loss, left: int) -> Verdict | None:
        """Takes in a loss; the verdict when this one decides.

        Args:
            link: the worker that is gone.
            loss: how it went.
            left: workers of its incarnation that are still there.
        """
        case = self._cases.setdefault(link.incarnation, _Case())
        if case.closed:
            return None
        case.first = case.first or (link, loss)
        if loss.fault == "program":
            case.program = case.program or (link, loss)
        if loss.fault == "unknown":
            return self._close(case, Verdict("hardware", loss.cause, link))
        if loss.fault == "user":
            return self._close(case, Verdict("user", loss.cause, link))
        if left > 0:
            return None
        if case.program:
            return self._close(case, Verdict("program", case.program[1].cause, case.program[0]))
        return self._close(case, Verdict("hardware", case.first[1].cause, case.first[0]))

    @staticmethod
    def _close(case: _Case, verdict: Verdict) -> Verdict:
        case.closed = True
        return verdict


@dataclass
class Budget:
    """How many restarts a job is allowed.

    Attributes:
        limit: of the job; -1 means any number.
        before: those that earlier attempts have spent.
        spent: those of this attempt.
    """

    limit: int
    before: int = 0
    spent: int = 0

    def spend(self) -> bool:
        """Takes one; whether it was there to take."""
        self.spent += 1
        return self.limit < 0 or self.before + self.spent <= self.limit
