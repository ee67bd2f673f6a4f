"""Runs in Ray's controller of a replica: tells the driver why workers failed, even those that never got to speak."""

from __future__ import annotations

import logging
import socket
from typing import Any

from ray.train import UserCallback

from workers.driver.assignment import Assignment
from workers.driver.rendezvous import protocol

log = logging.getLogger(__name__)

CONNECT_S = 5.0


class TellTrouble(UserCallback):
    """Sends the errors of a replica's workers to the rendezvous."""

    def __init__(self, assignment: Assignment) -> None:
        self._assignment = assignment

    def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
        """Called once for each failure of the replica, before Ray decides whether to start it anew."""
        to = self._assignment
        causes = [f"rank {rank}: {_last_line(error)}" for rank, error in sorted(worker_exceptions.items())]
        message = protocol.Trouble(secret=to.secret, replica=to.replica, cause="; ".join(causes))
        try:
            with socket.create_connection((to.host, to.port), timeout=CONNECT_S) as connection:
                connection.sendall(message.line())
        except OSError:
            log.exception("cannot tell the driver that workers of %s failed", to.replica)


def _last_line(error: Exception) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[-1].strip()
