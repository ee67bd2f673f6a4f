"""The replicas of a job: one stock TorchTrainer each, whose fit() runs in a thread of its own."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import ray
from ray.exceptions import RayError
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

from rubato.spec import JobSpec
from workers.driver import forkserver
from workers.driver.assignment import Assignment
from workers.driver.trouble import TellTrouble
from workers.driver.worker import work

log = logging.getLogger(__name__)

MATE_TIMEOUT_S = 1800
PLACEMENT_TIMEOUT_S = 60.0

# Read by Ray Train in this process, which hands them on to its controllers and workers. What the user has set stays.
ENVIRONMENT = {
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": f"{PLACEMENT_TIMEOUT_S:g}",
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",  # a process a replica; that workers are gone is seen anyway
}


def prepare_environment() -> None:
    """Sets what Ray Train is to be run with, before anything of it runs."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)


@dataclass(frozen=True)
class Ending:
    """How the run of a replica ended.

    ``kind``: "returned" (let go, or done), "unplaced" (its workers found no room in time) or "failed".
    """

    replica: str
    kind: Literal["returned", "unplaced", "failed"]
    cause: str


class Replicas:
    """Starts replicas and hears how they end. They are stopped by the rendezvous: their workers are let go.

    Args:
        spec: what they train.
        attempt: names of their runs begin with it, so that no run is taken for an earlier one.
        storage: where Ray keeps its own notes about the runs.

    Attributes:
        ended: called from a thread of the replica when its run has ended.
    """

    def __init__(self, spec: JobSpec, attempt: str, storage: Path) -> None:
        self._spec = spec
        self._attempt = attempt
        self._storage = storage
        self.ended: Callable[[Ending], None] = lambda ending: None
        self._threads: dict[str, threading.Thread] = {}
        self._runs = 0

    def alive(self, name: str) -> bool:
        """Whether a run of the replica goes on, or is yet to report its end."""
        return name in self._threads

    @property
    def running(self) -> bool:
        """Whether any replica is alive."""
        return bool(self._threads)

    @property
    def resources(self) -> dict[str, float]:
        """What one worker needs."""
        workers = self._spec.workers
        needs = {"CPU": workers.cpus, "GPU": float(workers.gpus)}
        return {kind: amount for kind, amount in needs.items() if amount > 0}

    def start(self, assignment: Assignment) -> None:
        """Begins a run of the replica the assignment names."""
        name = assignment.replica
        if name in self._threads:
            raise ValueError(f"{name} runs already")
        self._runs += 1
        run_name = f"{self._attempt}-{name}-{self._runs}"
        thread = threading.Thread(target=self._fit, args=(assignment, run_name), name=f"fit-{name}", daemon=True)
        self._threads[name] = thread
        thread.start()

    def forget(self, name: str) -> None:
        """Takes note that the run has ended: the replica can be started again."""
        del self._threads[name]

    @property
    def needs(self) -> dict[str, float]:
        """What the workers of one replica need together."""
        return {kind: amount * self._spec.parallelism.replica_size for kind, amount in self.resources.items()}

    def shortage(self, available: Mapping[str, float]) -> str | None:
        """Why a replica cannot be placed with what is available; None when it may be."""
        size = self._spec.parallelism.replica_size
        missing = [
            f"{size} workers need {amount:g} {kind}, {max(0.0, available.get(kind, 0.0)):g} are free"
            for kind, amount in self.needs.items()
            if available.get(kind, 0.0) < amount
        ]
        return "; ".join(missing) or None

    def without_one(self, available: Mapping[str, float]) -> dict[str, float]:
        """What is left when one more replica is placed."""
        return {kind: amount - self.needs.get(kind, 0.0) for kind, amount in available.items()}

    def _trainer(self, assignment: Assignment, run_name: str) -> TorchTrainer:
        spec = self._spec
        environment: dict[str, Any] = {"env_vars": {"OMP_NUM_THREADS": str(max(1, int(spec.workers.cpus)))}}
        if forkserver.switched_on():
            environment["py_executable"] = forkserver.py_executable(self._attempt)
        return TorchTrainer(
            work,
            train_loop_config=assignment.model_dump(),
            torch_config=TorchConfig(backend="nccl" if spec.workers.gpus else "gloo", timeout_s=MATE_TIMEOUT_S),
            scaling_config=ScalingConfig(
                num_workers=spec.parallelism.replica_size,
                use_gpu=spec.workers.gpus > 0,
                resources_per_worker=self.resources,
                placement_strategy="PACK",  # tensor and pipeline partners talk most
            ),
            run_config=RunConfig(
                name=run_name,
                storage_path=str(self._storage),
                # A run whose workers cannot be placed or started ends, so that the driver can say why and try again.
                failure_config=FailureConfig(max_failures=spec.faults.hardware, controller_failure_limit=0),
                worker_runtime_env=environment,
                callbacks=[TellTrouble(assignment)],
            ),
        )

    def _fit(self, assignment: Assignment, run_name: str) -> None:
        name = assignment.replica
        try:
            self._trainer(assignment, run_name).fit()
        except Exception as error:  # whatever it is: a run that ended unheard would be waited for for ever
            log.warning("the run of %s ended: %s", name, error, exc_info=not isinstance(error, RayError))
            # Ray's own class for it is private, so it is known by its name.
            inner = getattr(error, "controller_failure", None)
            if "Timeout" in type(inner).__name__:
                shortage = self.shortage(ray.available_resources())
                self.ended(Ending(name, "unplaced", shortage or "no nodes with room for its workers were free in time"))
            else:
                self.ended(Ending(name, "failed", str(inner or error).strip().splitlines()[-1]))
        else:
            self.ended(Ending(name, "returned", "its workers ended as they were told to"))
