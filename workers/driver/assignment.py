"""What each worker of a replica is told when it starts: plain values that travel through Ray."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict

from rubato.spec import JobSpec
from workers.driver.rendezvous.server import Address
from workers.engine.run import RunDirectory


class Assignment(BaseModel):
    """Where a worker belongs and whom it reports to.

    Attributes:
        spec: the resolved spec, as its JSON.
        run_dir: the run directory, on storage that every node reaches.
        log_dir: where this attempt's logs go.
        epoch: the attempt's; only the newest one may write checkpoints.
        host, port, secret: the rendezvous, and what it asks to be let in.
    """

    model_config = ConfigDict(frozen=True)

    spec: dict[str, Any]
    run_dir: str
    log_dir: str
    epoch: int
    replica: str
    host: str
    port: int
    secret: str

    @classmethod
    def of(
        cls, run: RunDirectory, spec: JobSpec, epoch: int, replica: str, address: Address, secret: str
    ) -> Assignment:
        """That of the workers of a replica, in an attempt of an epoch whose rendezvous is at an address."""
        return cls(
            spec=spec.model_dump(mode="json"),
            run_dir=str(run.root),
            log_dir=str(run.logs / f"attempt-{epoch}"),
            epoch=epoch,
            replica=replica,
            host=address.host,
            port=address.port,
            secret=secret,
        )
