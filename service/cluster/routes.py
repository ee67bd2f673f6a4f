"""GET /v1/cluster."""

from __future__ import annotations

from fastapi import APIRouter

from rubato.resources import Cluster
from service.dependencies import ClusterDep

router = APIRouter(prefix="/v1/cluster", tags=["cluster"])


@router.get("", summary="The Ray cluster: nodes, and what is free")
async def get_cluster(cluster: ClusterDep) -> Cluster:
    """What can be seen of the cluster now. `unreachable` says nothing about jobs: they may well go on."""
    return await cluster.view()
