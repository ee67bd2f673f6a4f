"""Ends what Ray Train leaves behind: runs of a driver that ends before them, helpers of drivers that were killed.

Each run has a controller and a detached helper, which removes the run's placement group when the controller is gone.
It does, but then it stays, with its 200 MB, until somebody ends it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import ray
from ray.util.state import list_actors, list_jobs
from ray.util.state.exception import RayStateApiException

from workers.driver.executioner import Executioner

log = logging.getLogger(__name__)

NAMESPACE = "rubato-"
"""The Ray namespace of an attempt begins with this."""

TIMEOUT_S = 5
HELPERS_START_S = 20.0

CONTROLLER = "TrainController"
HELPER = "PlacementGroupCleaner"


def sweep() -> None:
    """Ends the helpers of attempts that are over."""
    try:
        jobs = list_jobs(timeout=TIMEOUT_S)
    except (RayStateApiException, ConnectionError) as error:
        _cannot_see(error)
        return
    running = {job.job_id for job in jobs if job.status in ("RUNNING", "PENDING")}
    _end(HELPER, lambda job: job not in running)


def end_own_runs() -> None:
    """Ends the runs of this driver, whose workers go with their controllers, and their helpers."""
    here = ray.get_runtime_context().get_job_id()
    _end(CONTROLLER, lambda job: job == here)
    end_by = time.monotonic() + HELPERS_START_S
    # The helper of a run that has only just begun may be yet to start, and it does so without its controller, too.
    while _end(HELPER, lambda job: job == here) and time.monotonic() < end_by:
        time.sleep(0.2)  # Ray tells nobody when an actor starts


def _end(kind: str, chosen: Callable[[str], bool]) -> bool:
    """Ends those that run; whether there are any that are yet to start."""
    executioner = Executioner()
    try:
        actors = list_actors(
            filters=[("class_name", "=", kind), ("state", "!=", "DEAD")], detail=True, timeout=TIMEOUT_S
        )
    except (RayStateApiException, ConnectionError) as error:
        _cannot_see(error)
        return False
    ours = [actor for actor in actors if (actor.ray_namespace or "").startswith(NAMESPACE) and chosen(actor.job_id)]
    for actor in ours:
        if actor.state == "ALIVE" and actor.node_id and actor.pid:
            executioner.kill(actor.node_id, actor.pid, f"{kind} of a run that is over")
    return any(actor.state != "ALIVE" for actor in ours)


def _cannot_see(error: Exception) -> None:
    """No reason to stop: what is left is swept by the next attempt on this cluster."""
    log.warning("cannot see what is left behind: %s", error)
