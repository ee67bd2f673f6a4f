"""When steps of a job cannot be recorded."""

from __future__ import annotations

from collections.abc import Sequence

from rubato.problems import FieldProblem, RubatoError
from rubato.resources import ProfileRequest
from rubato.states import JobState
from service.database.tables import JobRow, OperationRow
from service.jobs.view import members

_TRAINS = frozenset({JobState.RUNNING, JobState.RESIZING, JobState.RECOVERING})


def profile_refusal(job: JobRow, request: ProfileRequest, unfinished: Sequence[OperationRow]) -> RubatoError | None:
    """Why steps cannot be recorded now; None: they can."""
    if JobState(job.state) not in _TRAINS:
        return RubatoError(
            f"job {job.id} is {job.state} and takes no steps to record",
            fix="wait until it is RUNNING, or set profile.steps in its spec",
            code="job_does_not_train",
            status=409,
        )
    recording = next((operation.id for operation in unfinished if operation.kind == "profile"), None)
    if recording is not None:
        return RubatoError(
            f"job {job.id} records steps already, for operation {recording}",
            fix=f"wait until GET /v1/operations/{recording} says that it is over",
            code="profile_under_way",
            status=409,
        )
    ranks = {member.rank for member in members(job) if member.rank is not None}
    unknown = sorted(set(request.ranks) - ranks)
    if unknown:
        fix = f"use ranks of 0 to {max(ranks)}" if ranks else "wait until workers train"
        problem = FieldProblem("ranks", f"no worker has rank {', '.join(map(str, unknown))} now", fix)
        return RubatoError(str(problem), fix=fix, code="rank_not_found", status=422, problems=[problem])
    return None
