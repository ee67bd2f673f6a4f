"""Wakes whoever waits for a change of a job: at once inside this process, soon after when another one made it."""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Sequence

import structlog
from sqlalchemy.exc import SQLAlchemyError

log = structlog.get_logger(__name__)

Revisions = Callable[[Sequence[str]], Awaitable[dict[str, int]]]


class Wakeups:
    """Waiters by job id. A waiter that was woken looks again; it may find that nothing of interest happened."""

    def __init__(self, revisions: Revisions, poll: float) -> None:
        """``revisions`` reads the revision of jobs from the database; it is asked every ``poll`` seconds for all
        jobs that somebody waits for, in one query."""
        self._revisions = revisions
        self._poll = poll
        self._waiters: defaultdict[str, set[asyncio.Event]] = defaultdict(set)
        self._seen: dict[str, int] = {}
        self._closing = asyncio.Event()
        self.supervisor = asyncio.Event()

    @property
    def waiting(self) -> int:
        """How many requests wait."""
        return sum(len(events) for events in self._waiters.values())

    @property
    def closed(self) -> bool:
        """Whether the service shuts down, so that nobody should wait any longer."""
        return self._closing.is_set()

    def close(self) -> None:
        """Ends all waits, now and from now on."""
        self._closing.set()
        self.supervisor.set()
        for events in self._waiters.values():
            for event in events:
                event.set()

    def notify(self, job_id: str) -> None:
        """A job has changed."""
        for event in self._waiters.get(job_id, ()):
            event.set()

    @contextlib.contextmanager
    def watch(self, job_id: str) -> Iterator[Waiter]:
        """Changes from the beginning of the block on are not missed."""
        waiter = Waiter(self)
        self._waiters[job_id].add(waiter.event)
        try:
            yield waiter
        finally:
            self._waiters[job_id].discard(waiter.event)
            if not self._waiters[job_id]:
                del self._waiters[job_id]
                self._seen.pop(job_id, None)

    async def run(self) -> None:
        """Looks for changes that another control plane made, until ``close``."""
        while not self.closed:
            await wait(self._closing, self._poll)
            watched = list(self._waiters)
            if not watched:
                continue
            try:
                found = await self._revisions(watched)
            except SQLAlchemyError as error:
                log.warning("revisions.unreadable", cause=str(error))
                continue
            for job_id, revision in found.items():
                # The first look has nothing to compare with: wake, since the change may be older than it.
                if self._seen.get(job_id) != revision and job_id in self._waiters:
                    self._seen[job_id] = revision
                    self.notify(job_id)


class Waiter:
    """One request that waits."""

    def __init__(self, wakeups: Wakeups) -> None:
        self._wakeups = wakeups
        self.event = asyncio.Event()

    async def wait(self, seconds: float) -> bool:
        """Until the job changes (True), or for so many seconds, or until the service shuts down (False)."""
        if self._wakeups.closed:
            return False
        changed = await wait(self.event, seconds)
        self.event.clear()
        return changed and not self._wakeups.closed


async def wait(event: asyncio.Event, seconds: float) -> bool:
    """Whether an event is set within some seconds."""
    try:
        async with asyncio.timeout(max(seconds, 0.0)):
            await event.wait()
    except TimeoutError:
        return event.is_set()
    return True
