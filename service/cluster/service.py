"""The newest sight of the cluster, and what it says of when nothing could be seen."""

from __future__ import annotations

import asyncio

import structlog

from rubato.resources import Cluster
from service.cluster.ray import Ray, RayUnreachable, Sight
from service.settings import Settings

log = structlog.get_logger(__name__)


class ClusterService:
    """Looks at the cluster, for the supervisor and for users."""

    def __init__(self, settings: Settings, ray: Ray) -> None:
        self._settings = settings
        self._ray = ray
        self._sight: Sight | None = None
        self._detail = "not looked at yet"
        self._looking: asyncio.Task[Sight | None] | None = None

    @property
    def sight(self) -> Sight | None:
        """What was seen last; None when the last look saw nothing."""
        return self._sight

    @property
    def detail(self) -> str:
        """The last look in words."""
        return self._detail

    async def look(self) -> Sight | None:
        """Looks now. None when Ray does not answer, and then ``detail`` says why.

        Whoever asks while somebody looks gets the same answer, so that a cluster that hangs is not asked ever more.
        """
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look())
        return await asyncio.shield(self._looking)

    async def _look(self) -> Sight | None:
        try:
            sight = await self._ray.look()
        except RayUnreachable as error:
            if self._sight is not None:
                log.warning("cluster.unreachable", cause=str(error))
            self._sight, self._detail = None, str(error)
            return None
        if self._sight is None or self._sight.session != sight.session:
            log.info("cluster.reachable", session=sight.session, nodes=len(sight.nodes))
        alive = sum(node.alive for node in sight.nodes)
        self._sight, self._detail = sight, f"{alive} of {len(sight.nodes)} nodes alive"
        return sight

    async def view(self) -> Cluster:
        """The cluster as the API shows it, as it is now."""
        sight = await self.look()
        nodes = [] if sight is None else list(sight.nodes)
        return Cluster(
            state="unreachable" if sight is None else "reachable",
            detail=self._detail,
            ray_version=None if sight is None else sight.version,
            dashboard_url=self._settings.ray_dashboard,
            nodes=nodes,
            cpus=sum(node.cpus for node in nodes),
            cpus_free=sum(node.cpus_free for node in nodes),
            gpus=sum(node.gpus for node in nodes),
            gpus_free=sum(node.gpus_free for node in nodes),
        )
