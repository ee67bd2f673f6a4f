"""Who is at the rendezvous: workers, the incarnations of replicas they belong to, and what they stand ready with."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple


class Phase(Enum):
    """Where a worker is in its life at the rendezvous."""

    STARTING = auto()
    READY = auto()
    TRAINING = auto()
    FINISHED = auto()
    RELEASED = auto()


class Incarnation(NamedTuple):
    """The workers of a replica that started together. A replica that restarts is the same name, drawn anew."""

    replica: str
    token: str


class State(NamedTuple):
    """What a worker says it holds when it is ready (engine: ``Standing``)."""

    step: int | None = None
    prepared: bool = False
    commit: dict[str, float] | None = None


@dataclass(eq=False)
class Member:
    """A worker at the rendezvous. ``key`` names its connection, ``place`` its position in the replica.

    Attributes:
        progressed: when it last got on with something, in seconds: it took a step, or what it is busy with began.
        busy: what keeps it from stepping, as saving does; None: nothing that it knows of.
    """

    key: int
    incarnation: Incarnation
    place: int
    node: str = ""
    phase: Phase = Phase.STARTING
    state: State = field(default_factory=State)
    progressed: float = -math.inf
    busy: str | None = None


@dataclass(eq=False)
class Group:
    """An incarnation of a replica, as far as its workers have arrived.

    Attributes:
        broken: a worker was lost, so none of the others can train any more.
        released: it was told to end, so it is never chosen again.
    """

    incarnation: Incarnation
    size: int
    members: dict[int, Member] = field(default_factory=dict)
    broken: bool = False
    released: bool = False

    @property
    def name(self) -> str:
        """The replica it is an incarnation of."""
        return self.incarnation.replica

    @property
    def usable(self) -> bool:
        """Whether it may be part of a generation, now or later."""
        return not self.broken and not self.released

    @property
    def ready(self) -> bool:
        """Whether all its workers are here and wait for a generation."""
        return self.usable and len(self.members) == self.size and self.all_in(Phase.READY)

    @property
    def consistent(self) -> bool:
        """Whether its workers hold the same step; they vote before they leave a generation, so they should."""
        return len({(member.state.step, member.state.prepared) for member in self.members.values()}) <= 1

    @property
    def state(self) -> State:
        """What its workers hold, of a ready and consistent one."""
        return next(iter(self.members.values())).state

    def all_in(self, phase: Phase) -> bool:
        """Whether every worker that arrived is in a phase."""
        return all(member.phase is phase for member in self.members.values())

    def any_in(self, phase: Phase) -> bool:
        """Whether some worker is in a phase."""
        return any(member.phase is phase for member in self.members.values())

    def by_place(self) -> list[Member]:
        """Its workers in the order of their places."""
        return sorted(self.members.values(), key=lambda member: member.place)


class Start(NamedTuple):
    """Where a generation can go on from.

    Attributes:
        step: the highest step a replica holds; None: nobody has state.
        commit: what led to it, for those one step behind.
        capable: replicas that can be at ``step`` without receiving state, those that are there already first.
    """

    step: int | None
    commit: dict[str, float] | None
    capable: list[Group]


def where_to_start(ready: Iterable[Group]) -> Start:
    """The highest step that ready, consistent replicas hold, and who of them can be there."""
    holders = {group: group.state.step for group in ready if group.state.step is not None}
    if not holders:
        return Start(None, None, [])
    step = max(holders.values())
    there = [group for group, held in holders.items() if held == step]
    commit = next((group.state.commit for group in there if group.state.commit is not None), None)
    behind = [group for group, held in holders.items() if held == step - 1 and group.state.prepared]
    return Start(step, commit, there + (behind if commit is not None else []))
