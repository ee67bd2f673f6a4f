"""Kills a process of the job wherever it runs, at once: one that hangs does not die when Ray asks it to."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

log = logging.getLogger(__name__)


def kill_process(pid: int) -> None:
    """SIGKILL, unless it is gone already."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


class Executioner:
    """Kills processes on this node and on others. ``kill`` never blocks."""

    def __init__(self) -> None:
        self._here = ray.get_runtime_context().get_node_id()

    def kill(self, node_id: str, pid: int, cause: str) -> None:
        """Ends a process that is known to be alive, so that the pid is surely its own."""
        log.warning("killing process %d on node %s: %s", pid, node_id[:8], cause)
        if node_id == self._here:
            kill_process(pid)
        else:
            threading.Thread(target=self._kill_there, args=(node_id, pid), name=f"kill-{pid}", daemon=True).start()

    @staticmethod
    def _kill_there(node_id: str, pid: int) -> None:
        where = NodeAffinitySchedulingStrategy(node_id, soft=False)
        try:
            ray.get(ray.remote(kill_process).options(num_cpus=0, scheduling_strategy=where).remote(pid))
        except RayError:
            log.exception("process %d on node %s could not be killed", pid, node_id)
