"""Records steps with the profiler: those the spec names, and those that are asked for while the job runs."""

from __future__ import annotations

import logging

from rubato.spec import JobSpec
from workers.engine.hooks.hook import Session, busy
from workers.engine.membership import Membership
from workers.engine.mesh import ReplicaMesh
from workers.engine.run import RunDirectory
from workers.engine.state import TrainingState
from workers.engine.watch.profiler import Recording

log = logging.getLogger(__name__)

SHOWN = 10


class Profile:
    """Each worker decides for itself: nobody else needs to know that it records."""

    every = 1
    at_end = False

    def __init__(
        self, spec: JobSpec, membership: Membership, mesh: ReplicaMesh, run: RunDirectory, state: TrainingState
    ) -> None:
        self._wanted = spec.profile
        self._steps = spec.train.steps
        self._membership = membership
        self._mesh = mesh
        self._folder = run.profile
        self._state = state
        self._recording: Recording | None = None
        self._first = self._last = 0

    def __call__(self, session: Session) -> None:
        step, data = self._state.done, session.generation.data
        rank = self._mesh.layout(data).rank(self._mesh.coordinates(session.generation.replica))
        if self._recording is not None:
            if step >= self._last:
                self._end(self._recording, rank)
            return
        asked = self._membership.profile_requested()
        if self._wanted.steps is not None and rank in self._wanted.ranks and step == self._wanted.steps[0] - 1:
            self._begin(*self._wanted.steps)
        elif asked is not None and step < self._steps:
            self._begin(step + 1, min(step + asked, self._steps))

    def _begin(self, first: int, last: int) -> None:
        self._first, self._last = first, last
        self._recording = Recording(self._mesh.device.torch_device)

    def _end(self, recording: Recording, rank: int) -> None:
        self._recording = None
        steps = f"steps-{self._first}-{self._last}"
        data = {"steps": [self._first, self._last], "rank": rank}
        try:
            with busy(self._membership, "profile"):
                files, costliest = recording.save(self._folder / steps, f"rank-{rank}")
        except OSError as error:
            log.exception("the profile was not saved")
            message = f"the profile of steps {self._first} to {self._last} on rank {rank} was not saved: {error}"
            event = {"kind": "profile.failed", "message": message, "data": data | {"cause": str(error)}}
        else:
            names = [str(path.relative_to(self._folder.parent)) for path in files]
            operations = [{"name": each.name, "calls": each.calls, "seconds": each.seconds} for each in costliest]
            message = f"steps {self._first} to {self._last} were recorded on rank {rank}: {', '.join(names)}"
            data |= {"files": names, "operations": operations[:SHOWN]}
            event = {"kind": "profile.saved", "message": message, "data": data}
        self._membership.report("event", event)
