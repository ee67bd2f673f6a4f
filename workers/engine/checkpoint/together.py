"""Saves what a crew holds together, whatever its members talk over."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan

from workers.engine.checkpoint.crew import Crew

Result = TypeVar("Result")


def save_together(state: dict[str, Any], folder: Path, crew: Crew) -> None:
    """Writes what each member of a crew holds; what several hold is written once.

    What ``torch.distributed.checkpoint.save`` does, for a crew that need not be one process group.

    Raises:
        OSError: a member cannot write, or has what cannot be written.
    """
    planner, writer, first = DefaultSavePlanner(), FileSystemWriter(folder), crew.rank == 0

    def plan() -> SavePlan:
        planner.set_up_planner(state, writer.storage_meta(), first)
        writer.set_up_storage_writer(first, rank=crew.rank)
        return writer.prepare_local_plan(planner.create_local_plan())

    def agree() -> tuple[list[SavePlan], Any]:
        agreed, metadata = planner.create_global_plan(plans)
        return writer.prepare_global_plan(agreed), metadata

    def write() -> Any:
        writes = writer.write_data(planner.finish_plan(agreed[crew.rank]), planner)
        writes.wait()
        return writes.value()

    plans = crew.each(lambda: _told(crew, plan))
    agreed, metadata = crew.once(lambda: _told(crew, agree))
    written = crew.each(lambda: _told(crew, write))
    crew.once(lambda: _told(crew, lambda: writer.finish(metadata, written)))


def _told(crew: Crew, work: Callable[[], Result]) -> Result:
    """What ``work`` comes to; what goes wrong with the state or the disk is an OSError, which all members hear."""
    try:
        return work()
    except (RuntimeError, TypeError, ValueError, AttributeError, pickle.PickleError) as error:
        raise OSError(f"rank {crew.rank}: {error}") from error
