"""The generation the policy watches over, and how long it waits for what."""

from __future__ import annotations

from dataclasses import dataclass, field

from workers.driver.rendezvous.members import Group


@dataclass(frozen=True)
class Patience:
    """How long the policy waits, in seconds.

    Attributes:
        batch: for other newcomers that have arrived, before those who are ready are let in: each entry costs a pause.
        assemble: for all wanted replicas, when there is no state that could go on at once.
        leave: for workers to leave a generation that has ended, before those that do not are evicted.
    """

    batch: float = 1.0
    assemble: float = 10.0
    leave: float = 300.0


@dataclass(eq=False)
class Current:
    """The generation that trains, or that trained last and is being left.

    Attributes:
        groups: its replicas in the order of the data axis.
        keys: its workers.
        first_keys: those of data replica 0, which saves: when they have finished, all is done.
        finished: workers that have done all steps.
        asked: a boundary was asked for.
        broken: why it cannot go on; None: it can.
        ending_since: when its workers were told to leave, in seconds; None: they were not.
    """

    number: int
    groups: tuple[Group, ...]
    keys: frozenset[int]
    first_keys: frozenset[int]
    finished: set[int] = field(default_factory=set)
    asked: bool = False
    broken: str | None = None
    ending_since: float | None = None

    @property
    def ending(self) -> bool:
        """Whether its workers are to leave it."""
        return self.ending_since is not None
