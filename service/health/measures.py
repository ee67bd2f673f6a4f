"""What Prometheus reads: requests as they are served, jobs as they stand."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rubato.states import JobState
from service.database.tables import JobRow
from service.health.schemas import Saturation

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_METHODS = frozenset({"GET", "HEAD", "OPTIONS", "POST", "PUT", "PATCH", "DELETE"})


_OF_STEP = {
    "grad_norm": ("rubato_job_gradient_norm", "Gradient norm of the newest step, before clipping"),
    "lr": ("rubato_job_learning_rate", "Learning rate of the newest step"),
    "step_s": ("rubato_job_step_seconds", "Time of the newest step"),
    "data_s": ("rubato_job_data_wait_seconds", "Time of the newest step spent waiting for samples"),
    "exposed_comm_s": ("rubato_job_exposed_communication_seconds", "Communication that computation did not hide"),
    "comm_bytes": ("rubato_job_communication_bytes", "Bytes a worker sent in the newest step"),
    "comm_bytes_saved": ("rubato_job_communication_bytes_saved", "Fewer bytes than without compression"),
    "flops_per_s": ("rubato_job_model_flops_per_second", "Model FLOP/s of all workers"),
    "mfu": ("rubato_job_mfu", "Share of the workers' peak FLOP/s that the model's arithmetic is"),
    "memory_bytes": ("rubato_job_memory_bytes", "Memory of the reporting worker"),
    "memory_peak_bytes": ("rubato_job_memory_peak_bytes", "Most memory the reporting worker has held"),
    "validation_loss": ("rubato_job_validation_loss", "Held-out loss of the newest step, where it was evaluated, nats"),
}


class Measures:
    """The metrics of one control plane."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        labels = ("method", "route", "status")
        self._requests = Counter("rubato_http_requests", "Requests served", labels, registry=self.registry)
        self._seconds = Histogram(
            "rubato_http_request_seconds",
            "Time to the first byte of the reply",
            ("method", "route"),
            registry=self.registry,
        )
        self._jobs = self._gauge("rubato_jobs", "Jobs by state", "state")
        self._step = self._gauge("rubato_job_step", "Optimizer steps done", "job", "name")
        self._loss = self._gauge("rubato_job_loss", "Loss of the newest step, nats", "job", "name")
        self._speed = self._gauge("rubato_job_tokens_per_second", "Speed of the newest step", "job", "name")
        self._of_step = {name: self._gauge(*described, "job", "name") for name, described in _OF_STEP.items()}
        self._wanted = self._gauge("rubato_job_workers_desired", "Workers wanted", "job", "name")
        self._held = self._gauge("rubato_drivers_waiting", "Drivers whose sync call is held")
        self._waiting = self._gauge("rubato_requests_waiting", "Calls and streams that wait for a change")
        self._round = self._gauge("rubato_supervisor_round_seconds", "Time of the supervisor's last round")
        self._reachable = self._gauge("rubato_ray_reachable", "Whether the Ray cluster answers")

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(name, text, labels, registry=self.registry)

    def served(self, method: str, route: str, status: int, seconds: float) -> None:
        """Counts a request."""
        self._requests.labels(method, route, str(status)).inc()
        self._seconds.labels(method, route).observe(seconds)

    def exposition(
        self,
        counts: Mapping[str, int],
        unfinished: Sequence[JobRow],
        newest: Mapping[str, Mapping[str, Any]],
        saturation: Saturation,
        reachable: bool,
    ) -> bytes:
        """All metrics as text, with jobs as they are now; those of a job that is over are gone.

        Args:
            counts: jobs by state.
            unfinished: the jobs that are not over.
            newest: what the newest step of each reported, by job.
            saturation: of this control plane.
            reachable: whether the Ray cluster is.
        """
        for state in JobState:
            self._jobs.labels(state).set(counts.get(state, 0))
        for gauge in (self._step, self._loss, self._speed, self._wanted, *self._of_step.values()):
            gauge.clear()
        for job in unfinished:
            self._step.labels(job.id, job.name).set(job.step)
            self._wanted.labels(job.id, job.name).set(job.wanted_workers)
            if job.loss is not None:
                self._loss.labels(job.id, job.name).set(job.loss)
            if job.tokens_per_s is not None and job.state == JobState.RUNNING:
                self._speed.labels(job.id, job.name).set(job.tokens_per_s)
            if job.state == JobState.RUNNING:
                for name, gauge in self._of_step.items():
                    if (value := newest.get(job.id, {}).get(name)) is not None:
                        gauge.labels(job.id, job.name).set(float(value))
        self._held.set(saturation.drivers_waiting)
        self._waiting.set(saturation.requests_waiting)
        self._round.set(saturation.round_seconds)
        self._reachable.set(reachable)
        return generate_latest(self.registry)


class CountRequests:
    """Tells the measures of every request, by its route and not by its path, or there would be no end of labels."""

    def __init__(self, app: ASGIApp, measures: Measures) -> None:
        self._app = app
        self._measures = measures

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes the request on and looks at the beginning of its reply."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.perf_counter()

        async def watched(message: Message) -> None:
            if message["type"] == "http.response.start":
                route = getattr(scope.get("route"), "path", "other")
                method = scope["method"] if scope["method"] in _METHODS else "other"
                self._measures.served(method, route, message["status"], time.perf_counter() - began)
            await send(message)

        await self._app(scope, receive, watched)
