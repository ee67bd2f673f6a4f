"""The generation the policy watches over, and how long it waits for what."""

from __future__ import annotations

from dataclasses import dataclass, field

from workers.driver.rendezvous.members import Group, Member, Phase


@dataclass(frozen=True)
class Patience:
    """How long the policy waits, in seconds.

    Attributes:
        batch: for other newcomers that have arrived, before those who are ready are let in: each entry costs a pause.
        assemble: for all wanted replicas, when there is no state that could go on at once.
        leave: for workers to leave a generation, after the last sign that one of them gets on. Then the generation is
            broken, so that those leave who only wait for others; who still does not is evicted.
        busy: the same, while one of them saves, loads or validates, which may take long.
    """

    batch: float = 1.0
    assemble: float = 10.0
    leave: float = 300.0
    busy: float = 3600.0


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

    def staying(self) -> list[Member]:
        """Workers that are still in it and could be in another."""
        members = [member for group in self.groups if group.usable for member in group.by_place()]
        return [member for member in members if member.phase is Phase.TRAINING]

    def leave_by(self, patience: Patience) -> float | None:
        """When patience with those who stay is at an end; None: they were not told to leave, or all have left.

        They wait for one another, so as long as one gets on, none of them hangs.
        """
        staying = self.staying()
        if self.ending_since is None or not staying:
            return None
        ends = [each.progressed + (patience.busy if each.busy else patience.leave) for each in staying]
        return max(self.ending_since + patience.leave, *ends)
