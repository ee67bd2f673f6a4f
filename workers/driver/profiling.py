"""Has running workers record steps with the profiler, and tells when all of them have."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from rubato.resources import ProfileOrder
from workers.driver.journal import Journal
from workers.driver.rendezvous import protocol
from workers.driver.rendezvous.server import Link


class Profiling:
    """One order at a time, under the operation that asked for it."""

    def __init__(self, journal: Journal, rank: Callable[[Link], int | None]) -> None:
        self._journal = journal
        self._rank = rank
        self._operation: str | None = None
        self._recording: set[int] = set()
        self._saved: list[str] = []
        self._failed: list[str] = []

    def order(self, wanted: ProfileOrder | None, links: Iterable[Link]) -> None:
        """Passes an order on to the workers of the ranks it names; one that was passed on is passed over."""
        if wanted is None or wanted.operation == self._operation:
            return
        self._operation, self._saved, self._failed = wanted.operation, [], []
        chosen = [link for link in links if self._rank(link) in wanted.ranks]
        self._recording = {link.key for link in chosen}
        ranks = ", ".join(str(self._rank(link)) for link in chosen)
        data = {"steps": wanted.steps, "ranks": wanted.ranks}
        if not chosen:
            self._failed = [f"no worker has one of the ranks {wanted.ranks} now"]
            self._end()
            return
        message = f"{wanted.steps} steps are recorded on rank {ranks}"
        self._journal.event("profile.started", message, data, operation=wanted.operation, phase="recording")
        for link in chosen:
            link.send(protocol.Profile(steps=wanted.steps))

    def heard(self, link: Link, record: Mapping[str, Any]) -> None:
        """Takes in an event of a worker."""
        if record["kind"] in ("profile.saved", "profile.failed") and link.key in self._recording:
            if record["kind"] == "profile.saved":
                self._saved += record["data"]["files"]
            else:
                self._failed.append(record["message"])
            self._recording.discard(link.key)
            if not self._recording:
                self._end()

    def look(self, links: Iterable[Link]) -> None:
        """Does not wait for workers that are gone."""
        gone = self._recording - {link.key for link in links}
        if gone:
            self._recording -= gone
            self._failed.append("a worker was gone before it had recorded its steps")
            if not self._recording:
                self._end()

    def _end(self) -> None:
        message = "; ".join([*self._failed, *([f"saved {', '.join(self._saved)}"] if self._saved else [])])
        self._journal.event(
            "profile.ended",
            message,
            {"files": self._saved},
            operation=self._operation,
            done=True,
            failed=not self._saved,
        )
