"""What the driver shows of its workers: who they are, where they sit, and how each does."""

from __future__ import annotations

from collections.abc import Iterable

from rubato.layout import Layout
from rubato.resources import LayoutView, WorkerView
from rubato.spec import JobSpec
from workers.driver.rendezvous.members import Incarnation
from workers.driver.rendezvous.orders import Formed
from workers.driver.rendezvous.server import Link


class View:
    """The newest generation, the workers that were lost since, and those that got ready."""

    def __init__(self, spec: JobSpec) -> None:
        self._spec = spec
        self._formed: Formed | None = None
        self._ranks: dict[int, int] = {}
        self._ready: set[int] = set()
        self._lost: dict[tuple[str, int], WorkerView] = {}

    @property
    def formed(self) -> Formed | None:
        """The newest generation."""
        return self._formed

    @property
    def layout(self) -> LayoutView | None:
        """Of the newest generation."""
        if self._formed is None:
            return None
        shape = self._spec.parallelism
        return LayoutView.of(Layout(len(self._formed.replicas), shape.pipeline, shape.tensor), self._spec)

    def rank(self, link: Link) -> int | None:
        """The world rank of a worker in the newest generation; None: it is not in it."""
        return self._ranks.get(link.key)

    def generation_formed(self, formed: Formed) -> None:
        """A new generation replaces the one before."""
        self._formed = formed
        self._ranks = {key: rank for rank, key in enumerate(formed.keys)}

    def arrived(self, link: Link) -> None:
        """A worker takes the place of one that was lost."""
        self._lost.pop((link.hello.replica, link.place), None)

    def ready(self, link: Link, links: Iterable[Link]) -> Incarnation | None:
        """A worker is ready for the first time; its incarnation, when that makes it whole."""
        if link.key in self._ready:
            return None
        self._ready.add(link.key)
        mates = [mate for mate in links if mate.incarnation == link.incarnation]
        whole = len(mates) == self._spec.parallelism.replica_size and all(mate.key in self._ready for mate in mates)
        return link.incarnation if whole else None

    def departed(self, link: Link) -> None:
        """A worker has ended as it was told to."""
        self._ready.discard(link.key)

    def lost(self, link: Link) -> None:
        """A worker is gone; it is shown until another takes its place."""
        self._ready.discard(link.key)
        self._lost[link.hello.replica, link.place] = self._describe(link, state="lost")

    def keep_lost(self, wanted: Iterable[str]) -> None:
        """Forgets what was lost of replicas that nobody wants any more."""
        names = set(wanted)
        self._lost = {place: worker for place, worker in self._lost.items() if place[0] in names}

    def members(self, links: Iterable[Link]) -> list[WorkerView]:
        """All workers, by rank, those without one last."""
        present = [
            self._describe(link, state="training" if link.key in self._ranks else "starting")
            for link in links
            if link.open
        ]
        everybody = [*present, *self._lost.values()]
        return sorted(everybody, key=lambda worker: (worker.rank is None, worker.rank, worker.replica, worker.pid))

    def _describe(self, link: Link, state: str) -> WorkerView:
        rank = self._ranks.get(link.key)
        hello = link.hello
        return WorkerView.model_validate(
            {
                "replica": hello.replica,
                "data": None if rank is None else rank // self._spec.parallelism.replica_size,
                "pipeline": hello.pipeline,
                "tensor": hello.tensor,
                "rank": rank,
                "state": state,
                "pid": hello.pid,
                "node_ip": hello.node_ip,
                "node_id": hello.node_id,
            }
        )
