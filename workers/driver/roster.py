"""Which replicas a number of workers means, and how each stands."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 30.0
STARTS_IN_VAIN = 3


def choose_replicas(count: int, wanted: Sequence[str], training: Collection[str]) -> list[str]:
    """The names of ``count`` replicas.

    Those that are wanted stay, who trains before who does not; what is missing gets the lowest free numbers.

    Args:
        count: how many there are to be.
        wanted: the names so far.
        training: those of them that are in the generation.
    """
    kept = sorted(wanted, key=lambda name: (name not in training, wanted.index(name)))[:count]
    kept.sort(key=list(wanted).index)
    numbers = (number for number in range(count + len(wanted)) if f"replica-{number}" not in kept)
    return kept + [f"replica-{next(numbers)}" for _ in range(count - len(kept))]


@dataclass
class Standing:
    """How a replica stands with the driver.

    Attributes:
        next_start: not to be started again before this time, in seconds.
        arrived: whether a worker has reached the rendezvous since it was last started.
        in_vain: starts in a row for which none did.
        pauses: starts in a row that were put off.
        waits: why it is not there; None: it is, or is on its way.
    """

    next_start: float = 0.0
    arrived: bool = False
    in_vain: int = 0
    pauses: int = 0
    waits: str | None = None

    def arriving(self) -> None:
        """A worker of it is here."""
        self.arrived, self.in_vain, self.pauses, self.waits = True, 0, 0, None

    def failed(self) -> bool:
        """Its workers are gone; whether that happened too often before any was here."""
        self.in_vain = 0 if self.arrived else self.in_vain + 1
        self.arrived = False
        return self.in_vain >= STARTS_IN_VAIN

    def put_off(self, now: float) -> float:
        """Waits longer before each further start; the seconds until the next."""
        self.pauses += 1
        pause = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(self.pauses - 1, 10))
        self.next_start = now + pause
        return pause
