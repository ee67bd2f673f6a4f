"""How a worker learns which generation it belongs to. The engine needs only this; who decides is not its business.

Under torchrun or as one process there is one generation and it never changes (`StaticMembership`). Under Ray the
driver's rendezvous numbers the generations and this protocol is spoken over a socket.

The step is atomic over generations. A worker reduces its gradients, is *prepared*, commits together with all others,
and only then steps the optimizer. Of a broken generation some members may have stepped and some not, never more than
one apart: the next generation goes on from the highest step, prepared members one behind apply the gradients they
hold, and everybody else receives the state from a peer at that step.

Where replicas share one state out (ZeRO), a lost replica takes its shard with it: nobody rolls forward, all go back to
the newest checkpoint. Before a generation is left in agreement, its members save the state together, so the next one
goes on from that step, with other shards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch.distributed import HashStore, PrefixStore, Store


@dataclass(frozen=True)
class Standing:
    """What a worker says of itself when it is ready for a generation.

    Attributes:
        step: optimizer steps its state holds; None: it has no state of its own. It is a newcomer, or one of those
            that share one state out among replicas (ZeRO): a shard is no state, and its step goes no further alone.
        prepared: it also holds the reduced gradients of the step after, ready to apply.
        commit: what the last commit agreed on (gradient norm and the like). A member that was prepared one step
            behind never heard it, so those who did hand it over.
    """

    step: int | None
    prepared: bool = False
    commit: dict[str, float] | None = None


@dataclass(frozen=True)
class Generation:
    """A stretch of training with one set of replicas, from one member's point of view.

    Attributes:
        number: ascending over the whole life of a job.
        data: data-parallel degree, the number of replicas.
        replica: this member's place on the data axis, 0 <= replica < data.
        step: optimizer steps everybody holds once the generation has begun; None: nobody has state, all load the
            newest checkpoint, or begin at step 0.
        roll_forward: this member is one step behind and prepared: it applies its own gradients with ``commit``.
        source: the place on the data axis that broadcasts its state to this member's column; None: nobody in the
            job needs state. Columns broadcast together, so it is set for all members or for none.
        commit: the agreed values of the commit that led to ``step``.
        store: where the data group of this generation meets; unique to the generation.
        nodes: the node of each replica's worker at this member's place, by replica; (): all are on one.
    """

    number: int
    data: int
    replica: int
    step: int | None
    roll_forward: bool
    source: int | None
    commit: dict[str, float] | None
    store: Store
    nodes: tuple[str, ...] = ()


class Membership(Protocol):
    """A worker's line to whoever numbers the generations. Thread-safe where said; else called by the loop alone."""

    def join(self, standing: Standing) -> Generation | None:
        """Blocks until the next generation forms. None: the job is finished or this replica was let go."""
        ...

    def save_requested(self) -> bool:
        """Asked once `join` has returned None: whether this replica is to save its state before it ends.

        True for all members of one replica when the job itself stops before its last step.
        """
        ...

    def boundary_requested(self) -> bool:
        """Whether the set of replicas is about to change: agree with all to leave at the end of this step."""
        ...

    def profile_requested(self) -> int | None:
        """How many steps are to be recorded from now on, as somebody has asked; asked again, None."""
        ...

    def on_broken(self, callback: Callable[[], None] | None) -> None:
        """Calls ``callback`` from another thread when a member of the current generation is gone."""
        ...

    def failed(self, generation: Generation, cause: str) -> None:
        """Says that the data axis of this generation failed here; the others will be told."""
        ...

    def report(self, kind: str, record: dict[str, Any]) -> None:
        """Hands over what others should know: kind 'metric', 'event', 'step' or 'busy'. Never blocks, never fails.

        'busy' says that no step is taken for a while, and why: {"doing": "checkpoint"}; None: that is over.
        """
        ...

    def finish(self) -> None:
        """Says that all steps are done here, the last checkpoint included.

        The job is done once data replica 0, which saves, has finished whole; whoever is left is let go then.
        """
        ...


class StaticMembership:
    """One generation for the whole run: one process, or what torchrun has started.

    Args:
        data: data-parallel degree.
        replica: this worker's place on the data axis.
        store: where the data groups meet; not needed at ``data`` 1.
        nodes: of each replica's worker at this place; (): all are on one.
        on_report: receives what the worker reports, as (kind, record).
    """

    def __init__(
        self,
        data: int = 1,
        replica: int = 0,
        store: Store | None = None,
        on_report: Callable[[str, dict[str, Any]], None] = lambda kind, record: None,
        nodes: Sequence[str] = (),
    ) -> None:
        if data > 1 and store is None:
            raise ValueError(f"{data} replicas need a store to meet at")
        self._generation = Generation(
            number=1,
            data=data,
            replica=replica,
            step=None,
            roll_forward=False,
            source=None,
            commit=None,
            store=PrefixStore("g1", HashStore() if store is None else store),
            nodes=tuple(nodes),
        )
        self._on_report = on_report
        self._joined = False
        self._profile: int | None = None
        self._cause: str | None = None

    def join(self, standing: Standing) -> Generation | None:
        """The one generation; RuntimeError when it is asked for another, which only a failure brings about."""
        if self._joined:
            raise RuntimeError(f"this run lost a replica and cannot go on without it: {self._cause}")
        self._joined = True
        return self._generation

    def save_requested(self) -> bool:
        return False

    def boundary_requested(self) -> bool:
        return False

    def request_profile(self, steps: int) -> None:
        """Asks this worker to record steps. From any thread, or a signal handler."""
        self._profile = steps

    def profile_requested(self) -> int | None:
        steps, self._profile = self._profile, None
        return steps

    def on_broken(self, callback: Callable[[], None] | None) -> None:
        """Nobody watches the other replicas; the connections to them do."""

    def failed(self, generation: Generation, cause: str) -> None:
        self._cause = self._cause or cause

    def report(self, kind: str, record: dict[str, Any]) -> None:
        self._on_report(kind, record)

    def finish(self) -> None:
        """Nobody needs to hear it."""
