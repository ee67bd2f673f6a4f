"""What the policy of the rendezvous wants done: plain values, carried out by the server."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class FormOrder:
    """A worker joins generation ``number``; the fields are those of the engine's ``Generation``."""

    key: int
    number: int
    data: int
    replica: int
    step: int | None
    roll_forward: bool
    source: int | None
    commit: dict[str, float] | None
    nodes: tuple[str, ...]


@dataclass(frozen=True)
class BoundaryOrder:
    """A worker is asked to leave the generation at the end of a step."""

    key: int
    number: int


@dataclass(frozen=True)
class BrokenOrder:
    """A worker hears that a member of its generation is gone."""

    key: int
    number: int


@dataclass(frozen=True)
class ReleaseOrder:
    """A worker may end, after saving when ``save``."""

    key: int
    save: bool


@dataclass(frozen=True)
class EvictOrder:
    """A worker is to be killed: it holds up or endangers the others."""

    key: int
    cause: str


@dataclass(frozen=True)
class Formed:
    """A generation was formed.

    Attributes:
        replicas: their names in the order of the data axis.
        keys: the workers in the order of their world ranks.
        step: steps everybody holds when it begins; None: all load the newest checkpoint.
        source: the replica that gives its state to those without; None: nobody needs any.
        healed: replicas that receive state.
    """

    number: int
    replicas: tuple[str, ...]
    keys: tuple[int, ...]
    step: int | None
    source: str | None
    healed: tuple[str, ...]


@dataclass(frozen=True)
class Ended:
    """A generation ended before the next was formed. ``cause`` is None when it was asked to."""

    number: int
    cause: str | None


@dataclass(frozen=True)
class Done:
    """All steps are done and saved."""


@dataclass(frozen=True)
class Stopped:
    """The job was asked to stop, and nobody with state is left that has not had the chance to save it.

    ``saved_by``: the replica that did; None: nobody, or all together before they left the generation (ZeRO).
    """

    saved_by: str | None


Order = FormOrder | BoundaryOrder | BrokenOrder | ReleaseOrder | EvictOrder | Formed | Ended | Done | Stopped
