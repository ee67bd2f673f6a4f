"""Compares all workers: whose step took longest, who waited most for data, who holds most memory."""

from __future__ import annotations

from rubato.spec import JobSpec
from workers.engine.hooks.hook import Session
from workers.engine.mesh import ReplicaMesh
from workers.engine.watch.memory import memory_of

NAMES = ("step_s", "data_s", "memory_bytes", "memory_peak_bytes")


class Compare:
    """The least and the most of each over all workers, into the record of the step. Two small collectives."""

    at_end = False

    def __init__(self, spec: JobSpec, mesh: ReplicaMesh) -> None:
        self.every = spec.monitor.every
        self._mesh = mesh

    def __call__(self, session: Session) -> None:
        record = session.record
        memory = memory_of(self._mesh.device.torch_device)
        # Who holds the state without having taken the step has no times: they are out of the comparison.
        known = record is not None and not record.again
        times = [record.step_s, record.data_s or 0.0] if known and record is not None else None
        highest = [*(times or [float("-inf")] * 2), *memory]
        lowest = [*(times or [float("inf")] * 2), *memory]
        found = session.data.max(self._mesh.max([*highest, *(-value for value in lowest)]))
        if record is not None:
            most, least = found[: len(NAMES)], [-value for value in found[len(NAMES) :]]
            record.workers = {
                name: {"min": low, "max": high}
                for name, low, high in zip(NAMES, least, most, strict=True)
                if low <= high
            }
