"""Ends the helpers that Ray Train leaves behind when a driver is killed, or ends before its replicas have.

Each run has a detached actor that removes the run's placement group when the run's controller is gone. It does, but
then it stays, with its 200 MB, until somebody ends it.
"""

from __future__ import annotations

import logging

import ray
from ray.util.state import list_actors, list_jobs
from ray.util.state.exception import RayStateApiException

from workers.driver.executioner import Executioner

log = logging.getLogger(__name__)

NAMESPACE = "rubato-"
"""The Ray namespace of an attempt begins with this."""

TIMEOUT_S = 5


def sweep(*, own: bool) -> int:
    """Ends the helpers of attempts that are over; with ``own`` also those of this one. The number that were ended.

    Errors are told in the log: what is left is swept by the next attempt on this cluster.
    """
    here = ray.get_runtime_context().get_job_id()
    executioner = Executioner()
    try:
        running = {job.job_id for job in list_jobs(timeout=TIMEOUT_S) if job.status in ("RUNNING", "PENDING")}
        helpers = list_actors(
            filters=[("class_name", "=", "PlacementGroupCleaner"), ("state", "=", "ALIVE")],
            detail=True,
            timeout=TIMEOUT_S,
        )
    except (RayStateApiException, ConnectionError) as error:
        log.warning("cannot see what earlier attempts have left behind: %s", error)
        return 0
    ended = 0
    for helper in helpers:
        over = helper.job_id not in running or (own and helper.job_id == here)
        if over and (helper.ray_namespace or "").startswith(NAMESPACE):
            executioner.kill(helper.node_id, helper.pid, "it was left behind by a run that is over")
            ended += 1
    return ended
