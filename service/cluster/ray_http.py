"""Ray through the REST interface of its dashboard.

Ray's own JobSubmissionClient speaks the same interface, but without time limits: a dashboard that hangs would hold a
thread of the control plane for ever, and with it the shutdown.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, TypeVar

import httpx
from pydantic import BaseModel, Field, RootModel, ValidationError

from rubato.resources import NodeView
from service.cluster.ray import RayJob, RayJobState, RayRefused, RayUnreachable, Sight

Model = TypeVar("Model", bound=BaseModel)

_KIND = "accelerator_type:"  # how the name of a resource begins that stands for a kind of GPU


class _Version(BaseModel):
    ray_version: str
    session_name: str


class _Job(BaseModel):
    status: RayJobState
    message: str | None = None
    end_time: int | None = Field(None, ge=0, le=253_402_300_799_999)  # milliseconds, to the end of the year 9999


class _Node(BaseModel):
    node_id: str
    node_ip: str
    state: str
    resources_total: dict[str, float] = {}


class _Usage(RootModel[dict[str, dict[str, tuple[float, float]]]]):
    """By node and by resource: what is used, and what there is."""


class HttpRay:
    """The cluster behind a dashboard URL."""

    def __init__(self, url: str, timeout: float, transport: httpx.AsyncBaseTransport | None = None) -> None:
        self._url = url
        # The environment's proxies are for the internet; a cluster is never behind them.
        self._http = httpx.AsyncClient(base_url=url, timeout=timeout, trust_env=False, transport=transport)

    async def close(self) -> None:
        """Closes the connections."""
        await self._http.aclose()

    async def look(self) -> Sight:
        """See ``Ray.look``. Ray renews the share that is in use every few seconds."""
        answered, listed, usage = await asyncio.gather(
            self._get("/api/version"), self._get("/api/v0/nodes?detail=1&limit=10000"), self._usage()
        )
        version = self._parse(_Version, answered)
        rows = _dig(listed, "data", "result", "result")
        nodes = [self._parse(_Node, row) for row in (rows if isinstance(rows, list) else [])]
        return Sight(version.session_name, version.ray_version, [_view(node, usage) for node in nodes])

    async def submit(self, submission_id: str, entrypoint: str, environment: Mapping[str, str]) -> None:
        """See ``Ray.submit``."""
        body = {
            "entrypoint": entrypoint,
            "submission_id": submission_id,
            "runtime_env": {"env_vars": dict(environment)},
            "metadata": {"rubato_attempt": submission_id},
        }
        answer = await self._request("POST", "/api/jobs/", body)
        if 400 <= answer.status_code < 500:
            raise RayRefused(_last_line(answer.text))
        if answer.status_code != 200:
            # No agent on any node yet, a store that does not answer, or an id it has already: none says the job is bad.
            detail = _last_line(answer.text) or answer.reason_phrase
            raise RayUnreachable(f"{self._url} could not take {submission_id}: {answer.status_code}: {detail}")

    async def job(self, submission_id: str) -> RayJob | None:
        """See ``Ray.job``."""
        answer = await self._request("GET", f"/api/jobs/{submission_id}")
        if answer.status_code == 404:
            return None
        found = self._parse(_Job, self._json(answer))
        ended = None if found.end_time is None else datetime.fromtimestamp(found.end_time / 1000, UTC)
        return RayJob(found.status, found.message or "", ended)

    async def stop(self, submission_id: str) -> None:
        """See ``Ray.stop``."""
        answer = await self._request("POST", f"/api/jobs/{submission_id}/stop")
        if answer.status_code not in (200, 404):
            raise RayUnreachable(f"{self._url} could not stop {submission_id}: {_last_line(answer.text)}")

    async def _usage(self) -> dict[str, dict[str, float]]:
        """Resources in use by node; empty until Ray's monitor has reported for the first time."""
        status = _dig(await self._get("/api/cluster_status"), "data", "clusterStatus", "loadMetricsReport")
        by_node = _dig(status, "usageByNode")
        if not isinstance(by_node, dict):
            return {}
        parsed = self._parse(_Usage, by_node).root
        return {node: {name: used for name, (used, _) in resources.items()} for node, resources in parsed.items()}

    async def _get(self, path: str) -> Any:
        return self._json(await self._request("GET", path))

    async def _request(self, method: str, path: str, body: object = None) -> httpx.Response:
        try:
            return await self._http.request(method, path, json=body)
        except httpx.HTTPError as error:
            cause = str(error) or type(error).__name__
            raise RayUnreachable(f"the Ray dashboard at {self._url} does not answer: {cause}") from error

    def _json(self, answer: httpx.Response) -> Any:
        try:
            answer.raise_for_status()
            return answer.json()
        except httpx.HTTPStatusError as error:
            detail = _last_line(answer.text) or answer.reason_phrase
            raise RayUnreachable(f"{answer.request.url} answered {answer.status_code}: {detail}") from error
        except ValueError as error:
            raise RayUnreachable(f"{answer.request.url} did not answer with JSON; is it a Ray dashboard?") from error

    def _parse(self, model: type[Model], content: Any) -> Model:
        try:
            return model.model_validate(content)
        except ValidationError as error:
            raise RayUnreachable(f"{self._url} does not answer as Ray does: {error}") from error


def _view(node: _Node, usage: dict[str, dict[str, float]]) -> NodeView:
    alive = node.state == "ALIVE"
    cpus, gpus = (node.resources_total.get(kind, 0.0) if alive else 0.0 for kind in ("CPU", "GPU"))
    used = usage.get(node.node_id, {})
    kinds = (name.removeprefix(_KIND) for name in node.resources_total if name.startswith(_KIND))
    return NodeView(
        id=node.node_id,
        ip=node.node_ip,
        alive=alive,
        cpus=cpus,
        gpus=gpus,
        cpus_free=max(0.0, cpus - used.get("CPU", 0.0)),
        gpus_free=max(0.0, gpus - used.get("GPU", 0.0)),
        accelerator=next(kinds, None),
        memory_bytes=node.resources_total.get("memory"),
    )


def _dig(content: Any, *keys: str) -> Any:
    for key in keys:
        content = content.get(key) if isinstance(content, dict) else None
    return content


def _last_line(text: str) -> str:
    """The end of a traceback that Ray sends as an answer, where the cause is."""
    lines = [line for line in text.strip().splitlines() if line.strip(" .")]
    return lines[-1].strip() if lines else ""
