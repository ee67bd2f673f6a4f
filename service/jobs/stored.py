"""Reads the spec in a row: one that cannot be read is an error about that row alone."""

from __future__ import annotations

from rubato.problems import RubatoError
from rubato.spec import JobSpec, stored_spec
from service.database.tables import JobRow

# What a value of another shape than any control plane wrote raises when it is used.
NONSENSE = (AttributeError, TypeError, ValueError, LookupError, ArithmeticError)


class UnreadableJobError(RubatoError):
    """What was stored of a job is not what any control plane writes."""

    def __init__(self, job_id: str, error: Exception) -> None:
        super().__init__(
            f"what is stored of job {job_id} cannot be read: {error!r}",
            fix="look at the row of the job in the database; its spec.json in the run directory has the spec",
            code="job_unreadable",
            status=409,
        )


def spec_of(job: JobRow) -> JobSpec:
    """The spec of a job, with what the control plane needs of it in place.

    Raises:
        UnreadableJobError: it is not there, or not of a kind that anything can be done with.
    """
    try:
        spec = stored_spec(job.spec)
        _ = (spec.workers.min + spec.workers.max, spec.workers.cpus + spec.workers.gpus, spec.sizes)
        _ = spec.train.steps + spec.faults.hardware
    except NONSENSE as error:
        raise UnreadableJobError(job.id, error) from error
    return spec
