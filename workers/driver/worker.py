"""What runs in each Ray worker: the engine, with a line to the rendezvous."""

from __future__ import annotations

import logging
import os
import secrets
import sys
import traceback
from pathlib import Path
from typing import Any, Literal

import ray
import ray.train
import ray.train.torch
import torch
import torch.distributed as dist

from rubato.problems import RubatoError
from rubato.spec import JobSpec, parse_spec
from workers.driver.assignment import Assignment
from workers.driver.rendezvous import protocol
from workers.driver.rendezvous.client import RendezvousLostError, RendezvousMembership
from workers.engine.checkpoint import FencedError
from workers.engine.device import Device
from workers.engine.mesh import ReplicaMesh
from workers.engine.run import RunDirectory
from workers.engine.train import train
from workers.engine.watch import log_to_stderr

log = logging.getLogger(__name__)

# What the messages of torch.distributed have in common when a peer is gone; it has no exception of its own for that.
_PEER_IS_GONE = ("gloo", "nccl", "connection", "socket", "broken pipe", "peer", "timed out", "timeout", "store")


def work(config: dict[str, Any]) -> None:
    """The train function of a replica. Returns when the job is done or the replica was let go.

    A worker that cannot go on ends its process: its mates notice at once, and Ray starts the replica anew.
    """
    assignment = Assignment.model_validate(config)
    context = ray.train.get_context()
    rank = context.get_world_rank()
    _log_to_file(Path(assignment.log_dir) / f"{assignment.replica}-rank-{rank}.log")
    log_to_stderr(f"{assignment.replica} rank {rank}")
    spec = parse_spec(assignment.spec)
    torch.set_num_threads(max(1, int(spec.workers.cpus)))
    device = Device(ray.train.torch.get_device())
    node = ray.get_runtime_context().get_node_id()
    mesh = ReplicaMesh.of_default_group(spec.parallelism, device, node=node)
    membership = RendezvousMembership(assignment.host, assignment.port, _hello(assignment, mesh))
    (released,) = mesh.max([float(membership.released)])  # all of the replica leave, or none
    if released:
        log.info("this replica is not wanted any more")
    elif not _train(spec, assignment, mesh, membership):
        membership.close(goodbye=False)
        return  # said to be the user's fault, so another start would be in vain
    membership.close()


def _train(spec: JobSpec, assignment: Assignment, mesh: ReplicaMesh, membership: RendezvousMembership) -> bool:
    """Whether training ended well; False when spec or data do not allow it."""
    run = RunDirectory(assignment.run_dir)
    try:
        result = train(spec, membership=membership, mesh=mesh, run=run, fence=lambda: run.holds(assignment.epoch))
    except Exception as error:
        log.exception("this worker cannot go on")
        fault, cause = blame(error)
        membership.crashed(fault, cause)
        if fault == "user":
            return False
        membership.close(goodbye=False)
        _exit()
    log.info("ended at step %s, %s", result.step, "finished" if result.finished else "let go")
    return True


def blame(error: Exception) -> tuple[Literal["user", "program", "replica"], str]:
    """Whose fault an error is, as far as it can be told, and the error in a line.

    The user's are those about spec and data. A replica cannot go on without a mate that is gone, nor where a newer
    attempt has taken over.
    """
    if isinstance(error, FencedError):
        return "replica", str(error)
    if isinstance(error, RubatoError):
        return "user" if error.status < 500 else "program", str(error)
    last = traceback.format_exception_only(error)[-1].strip()
    if isinstance(error, RendezvousLostError | dist.DistError):
        return "replica", last
    if isinstance(error, RuntimeError) and any(word in str(error).lower() for word in _PEER_IS_GONE):
        return "replica", last
    where = traceback.extract_tb(error.__traceback__)[-1]
    return "program", f"{last} (at {Path(where.filename).name}:{where.lineno}, in {where.name})"


def _hello(assignment: Assignment, mesh: ReplicaMesh) -> protocol.Hello:
    context = ray.get_runtime_context()
    return protocol.Hello(
        secret=assignment.secret,
        replica=assignment.replica,
        incarnation=_incarnation(mesh),
        pipeline=mesh.pipeline.index,
        tensor=mesh.tensor.index,
        pid=os.getpid(),
        node_ip=ray.util.get_node_ip_address(),
        node_id=context.get_node_id(),
    )


def _incarnation(mesh: ReplicaMesh) -> str:
    """A name that exactly the workers that started together share."""
    drawn = torch.tensor([secrets.randbits(62)], device=mesh.device.torch_device)
    if mesh.group is not None:
        dist.broadcast(drawn, src=0)
    return f"{int(drawn):016x}"


def _log_to_file(path: Path) -> None:
    """Sends all output of this process, that of native code too, to the worker's own log."""
    path.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    os.close(handle)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)


def _exit() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)
