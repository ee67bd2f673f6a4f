"""The hooks that look and tell, and change nothing."""

from __future__ import annotations

from rubato.spec import JobSpec
from workers.engine.data import Ahead
from workers.engine.hooks.compare import Compare
from workers.engine.hooks.hook import Hook
from workers.engine.hooks.profile import Profile
from workers.engine.hooks.report import Report
from workers.engine.hooks.samples import Samples
from workers.engine.hooks.validation import Validation
from workers.engine.membership import Membership
from workers.engine.mesh import ReplicaMesh
from workers.engine.parallel.compose import ModelShare
from workers.engine.run import RunDirectory
from workers.engine.state import TrainingState


def watching(
    spec: JobSpec,
    membership: Membership,
    mesh: ReplicaMesh,
    run: RunDirectory,
    sampler: Ahead,
    share: ModelShare,
    state: TrainingState,
    report: Report,
) -> list[Hook]:
    """In the order they are called: what adds to the record of a step comes before it is reported."""
    return [
        Validation(spec, membership, sampler, mesh, state),
        Compare(spec, mesh),
        report,
        Samples(spec, membership, mesh, share, state),
        Profile(spec, membership, mesh, run, state),
    ]
