"""Keeps the wanted replicas running on Ray: starts what is missing, says why it waits, gives up on what fails."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

import ray

from workers.driver.assignment import Assignment
from workers.driver.journal import Journal
from workers.driver.replicas import Ending, Replicas
from workers.driver.roster import Standing, choose_replicas


class Crew:
    """The replicas of an attempt, wanted and actual.

    Args:
        replicas: runs them.
        assign: what the workers of a replica are told, by its name.
        journal: where it is told.
        changed: called when something is different.
        fail: called with a code and a message when the attempt cannot go on.
    """

    def __init__(
        self,
        replicas: Replicas,
        assign: Callable[[str], Assignment],
        journal: Journal,
        changed: Callable[[], None],
        fail: Callable[[str, str], None],
    ) -> None:
        self._replicas = replicas
        self._assign = assign
        self._journal = journal
        self._changed = changed
        self._fail = fail
        self._loop = asyncio.get_running_loop()
        self._standings: dict[str, Standing] = {}
        self._joined: set[str] = set()
        self._over = False
        self.wanted: list[str] = []
        replicas.ended = self._run_ended

    @property
    def joined(self) -> bool:
        """Whether replicas run whose workers have reached the rendezvous."""
        return bool(self._joined)

    @property
    def running(self) -> bool:
        """Whether runs of replicas go on, wanted or not."""
        return self._replicas.running

    def want(self, count: int, training: tuple[str, ...]) -> None:
        """So many replicas are wanted; those in ``training`` stay before others."""
        before, self.wanted = self.wanted, choose_replicas(count, self.wanted, training)
        for name in set(before) - set(self.wanted):
            self._standing(name).waits = None
        for name in self.wanted:
            self._standing(name).next_start = 0.0

    def let_go(self) -> None:
        """Nothing is started any more."""
        self._over = True

    def waits(self) -> list[str]:
        """Of each wanted replica that is not there: why not."""
        return [f"{name} waits: {self._standing(name).waits}" for name in self.wanted if self._standing(name).waits]

    async def start_missing(self) -> None:
        """Starts the wanted replicas that do not run, unless they were put off."""
        due = [name for name in self.wanted if not self._replicas.alive(name) and self._is_due(name)]
        if not due:
            return
        available = await asyncio.to_thread(ray.available_resources)
        for name in due:
            if name not in self.wanted or self._over:  # while it was asked
                continue
            if not self._standing(name).waits:  # else this has been told, and nothing has changed
                self._journal.event("replica.starting", f"{name} starts", {"replica": name})
            self._standing(name).arrived = False
            self._wait_for_room(name, self._replicas.shortage(available))
            self._replicas.start(self._assign(name))
            available = self._replicas.without_one(available)
        self._changed()

    def _is_due(self, name: str) -> bool:
        return self._loop.time() >= self._standing(name).next_start

    def arrived(self, name: str) -> None:
        """A worker of the replica has reached the rendezvous."""
        self._joined.add(name)
        self._standing(name).arriving()

    def in_trouble(self, name: str, cause: str) -> None:
        """Workers of the replica failed, says Ray, which starts them anew. Of those that had arrived, this is known."""
        if name not in self.wanted or self._over:
            return
        if not self._standing(name).arrived:
            data = {"replica": name, "cause": cause}
            self._journal.event("replica.restarting", f"workers of {name} failed while they started: {cause}", data)
        self._count_failure(name, cause)

    def _run_ended(self, ending: Ending) -> None:
        """Called from the thread of a replica."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: the driver ends, and all that belongs to it
            self._loop.call_soon_threadsafe(self._hear_ending, ending)

    def _hear_ending(self, ending: Ending) -> None:
        name = ending.replica
        self._replicas.forget(name)
        self._joined.discard(name)
        if ending.kind != "returned" and name in self.wanted and not self._over:
            standing = self._standing(name)
            pause = standing.put_off(self._loop.time())
            if ending.kind == "unplaced":
                self._wait_for_room(name, ending.cause)
            else:
                standing.waits = None
                data = {"replica": name, "cause": ending.cause, "in_s": pause}
                self._journal.event("replica.restarting", f"the run of {name} failed: {ending.cause}", data)
                self._count_failure(name, ending.cause)
        self._changed()

    def _count_failure(self, name: str, cause: str) -> None:
        standing = self._standing(name)
        if standing.failed():
            times = f"{name} failed {standing.in_vain} times before any of its workers was ready to train"
            self._fail("replica_cannot_start", f"{times}: {cause}")

    def _wait_for_room(self, name: str, shortage: str | None) -> None:
        standing = self._standing(name)
        if shortage and not standing.waits:
            message = f"{name} waits for room in the cluster: {shortage}"
            self._journal.event("replica.waiting", message, {"replica": name, "cause": shortage})
        standing.waits = shortage or standing.waits

    def _standing(self, name: str) -> Standing:
        return self._standings.setdefault(name, Standing())
