"""The ranks that save or load together: one does what must be done once, all hear how it went."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch.distributed as dist

from rubato.problems import RubatoError
from workers.engine.mesh import ReplicaMesh
from workers.engine.parallel.data import DataGroup

Result = TypeVar("Result")


class Crew:
    """The members of a process group, or this process alone. All members make the same calls in the same order."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.size = 1 if group is None else dist.get_world_size(group)

    def once(self, work: Callable[[], Result]) -> Result:
        """Runs ``work`` on the first member; its result, or its OSError or RubatoError, reaches all."""
        if self.group is None:
            return work()
        outcome: list[Any] = [_attempt(work) if self.rank == 0 else None]
        dist.broadcast_object_list(outcome, group=self.group, group_src=0)
        result, error = outcome[0]
        if error is not None:
            raise error
        return cast(Result, result)

    def each(self, work: Callable[[], Result]) -> list[Result]:
        """Runs ``work`` on every member; all results by rank reach all, or the first error does."""
        if self.group is None:
            return [work()]
        outcomes: list[Any] = [None] * self.size
        dist.all_gather_object(outcomes, _attempt(work), group=self.group)
        for _, error in outcomes:
            if error is not None:
                raise error
        return [result for result, _ in outcomes]


class JobCrew(Crew):
    """The workers of all replicas of a generation, by world rank.

    Every call can raise DataAxisError, too, for all members or for those of the replica that lost the others.
    """

    def __init__(self, data: DataGroup, mesh: ReplicaMesh) -> None:
        self.group = mesh.group
        self._data = data
        self._mates = Crew(mesh.group)
        self.rank = data.index * self._mates.size + self._mates.rank
        self.size = data.size * self._mates.size

    def once(self, work: Callable[[], Result]) -> Result:
        results = self._all(_attempt(work) if self.rank == 0 else None)
        result, error = results[0]
        if error is not None:
            raise error
        return cast(Result, result)

    def each(self, work: Callable[[], Result]) -> list[Result]:
        outcomes = self._all(_attempt(work))
        for _, error in outcomes:
            if error is not None:
                raise error
        return [result for result, _ in outcomes]

    def _all(self, value: Any) -> list[Any]:
        """What every member gives, by rank."""
        columns = self._mates.each(lambda: self._data.gather_objects(value))
        return [column[replica] for replica in range(self._data.size) for column in columns]


def _attempt(work: Callable[[], Result]) -> tuple[Result | None, Exception | None]:
    try:
        return work(), None
    except (OSError, RubatoError) as error:
        return None, error
