"""What a job could run on: workers of one kind in nodes of one size, named by hand or as the cluster was seen."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import inf

from rubato.problems import FieldProblem, RubatoError
from rubato.resources import NodeView
from rubato.spec import WorkersSpec
from service.planning.accelerators import accelerator, catalogue, weakest
from service.planning.constants import Constants, fitted
from service.planning.shapes import Accelerator, Cluster

CPU = "cpu-core"
CLUSTER_FORM = "write ACCELERATOR:COUNT, such as h100:64"


@dataclass(frozen=True)
class Measured:
    """What was measured of a kind of worker: it stands in for the catalogue's entry and the shared constants.

    ``cores``: of a node, by what its workers computed all at once against one alone.
    """

    accelerator: Accelerator
    constants: Constants
    cores: float = inf


@dataclass(frozen=True)
class Fleet:
    """Equal workers in equal nodes.

    Attributes:
        accelerator: of one worker; of one core where workers compute on CPUs.
        workers: how many there is room for.
        node_size: how many a node has room for.
        constants: that its predictions rest on.
        calibrated: whether those were measured on this cluster.
        source: what it is, in words.
        cpus: that a worker asks for; None: workers have a GPU each.
        cores: that a node computes with, though it may offer more CPUs than that.
        node_memory: bytes that the workers of a node share; None: each has that of its accelerator.
    """

    accelerator: Accelerator
    workers: int
    node_size: int
    constants: Constants
    calibrated: bool
    source: str
    cpus: float | None = None
    cores: float = inf
    node_memory: float | None = None

    def cluster(self, workers: int) -> Cluster:
        """The cluster that so many workers see: on CPUs, those of a node share its cores and its memory."""
        one = self.accelerator
        if self.cpus is None:
            return Cluster(one, workers, self.node_size, one.network_bytes)
        beside = min(workers, self.node_size)
        share = min(self.cpus, self.cores / beside)
        mates = min(1.0, self.cores / beside)
        one = replace(
            one,
            memory_bytes=inf if self.node_memory is None else self.node_memory / beside,
            peak_flops=one.peak_flops * share,
            matmul_flops=one.matmul_flops * share,
            single_flops=one.single_flops * share,
            vector_flops=one.vector_flops * share,
            memory_bandwidth=one.memory_bandwidth * share,
            link_bytes=one.link_bytes * mates,  # it is the cores that copy
        )
        return Cluster(one, workers, self.node_size, one.network_bytes, self.cores, self.cpus)

    def constants_for(self, workers: int) -> Constants:
        """What overheads come to where so many workers share the cores of their nodes."""
        if self.cpus is None:
            return self.constants
        share = min(1.0, self.cores / min(workers, self.node_size))
        shared = ("layer_gap_s", "tensor_gap_s", "handover_s", "ends_s", "hop_latency_s")
        return replace(self.constants, **{name: getattr(self.constants, name) / share for name in shared})


def named_fleet(text: str, workers: WorkersSpec, measured: Mapping[str, Measured] | None = None) -> Fleet:
    """The fleet of a text such as ``h100:64``; ``cpu:8`` is eight workers of so many CPUs as the spec asks for.

    Raises:
        RubatoError: it is not written so, or names no accelerator of the catalogue.
    """
    name, separator, count = text.strip().lower().partition(":")
    if not separator or not count.isdecimal() or not 0 < int(count) <= 1_000_000:
        raise _cluster_problem(f"'{text}' is no cluster", CLUSTER_FORM)
    try:
        known = accelerator(name)
    except RubatoError as error:
        raise _cluster_problem(error.detail, error.fix) from error
    found = (measured or {}).get(known.name)
    one = found.accelerator if found else known
    constants = found.constants if found else fitted()
    if known.name == CPU:
        size = int(count)
        cores = found.cores if found else inf
        return Fleet(one, size, size, constants, found is not None, f"{count} workers on CPUs", workers.cpus, cores)
    return Fleet(one, int(count), known.node_size, constants, found is not None, f"{count} x {known.name}")


def live_fleet(
    nodes: Iterable[NodeView], workers: WorkersSpec, measured: Mapping[str, Measured] | None = None
) -> Fleet | None:
    """The fleet that the living nodes of a cluster are for such workers; None where none has what they ask for.

    Unlike nodes count by the weakest: a step waits for the slowest worker.

    Raises:
        RubatoError: the nodes have accelerators that the catalogue does not know.
    """
    alive = [node for node in nodes if node.alive]
    if workers.gpus:
        return _gpu_fleet([node for node in alive if node.gpus >= 1], measured or {})
    able = [node for node in alive if node.cpus >= workers.cpus]
    if not able:
        return None
    found = (measured or {}).get(CPU)
    rooms = [int(node.cpus // workers.cpus) for node in able]
    memories = [node.memory_bytes for node in able if node.memory_bytes]
    return Fleet(
        accelerator=found.accelerator if found else catalogue()[CPU],
        workers=sum(rooms),
        node_size=max(rooms),
        constants=found.constants if found else fitted(),
        calibrated=found is not None,
        source=f"the live cluster: {len(able)} nodes with room for {sum(rooms)} workers on CPUs",
        cpus=workers.cpus,
        cores=found.cores if found else min(node.cpus for node in able),
        node_memory=min(memories) if len(memories) == len(able) else None,
    )


def unseen_fleet(workers: WorkersSpec, measured: Mapping[str, Measured] | None = None) -> Fleet | None:
    """What can be assumed of a cluster that cannot be seen: CPUs of any memory; of GPUs nothing."""
    if workers.gpus:
        return None
    found = (measured or {}).get(CPU)
    return Fleet(
        accelerator=found.accelerator if found else catalogue()[CPU],
        workers=workers.max,
        node_size=workers.max,
        constants=found.constants if found else fitted(),
        calibrated=found is not None,
        source="CPUs, while the cluster cannot be seen",
        cpus=workers.cpus,
        cores=found.cores if found else inf,
    )


def _gpu_fleet(nodes: list[NodeView], measured: Mapping[str, Measured]) -> Fleet | None:
    if not nodes:
        return None
    kinds = [kind_of(node.accelerator) for node in nodes]
    entries = [measured[kind].accelerator if kind in measured else catalogue()[kind] for kind in kinds]
    calibrated = all(kind in measured for kind in kinds)
    gpus = [int(node.gpus) for node in nodes]
    names = ", ".join(dict.fromkeys(kinds))
    return Fleet(
        accelerator=weakest(entries),
        workers=sum(gpus),
        node_size=max(gpus),
        constants=measured[kinds[0]].constants if calibrated else fitted(),
        calibrated=calibrated,
        source=f"the live cluster: {sum(gpus)} x {names} in {len(nodes)} nodes",
    )


def kind_of(name: str | None) -> str:
    """The catalogue's name for what Ray or a driver calls an accelerator, the smallest of several sizes.

    Raises:
        RubatoError: the catalogue has none of that name.
    """
    text = (name or "").lower().replace(" ", "-").removeprefix("nvidia-").removeprefix("amd-instinct-")
    text = text.removesuffix("-oam").removesuffix("-hbm3").replace("geforce-", "").replace("rtx-", "rtx")
    text = re.sub(r"-(sxm\d?|pcie)", "", text)
    text = f"{text}b" if text.endswith("g") else text
    fitting = [entry for entry in catalogue().values() if entry.name == text or entry.name.startswith(f"{text}-")]
    if not text or not fitting:
        called = f"'{name}'" if name else "of a kind that Ray does not name"
        raise RubatoError(
            f"the cluster's GPUs are {called}, which the catalogue of accelerators does not hold",
            fix="run `rubato calibrate`, name a cluster such as h100:64, or give parallelism",
            code="accelerator_unknown",
            status=422,
        )
    return min(fitting, key=lambda entry: entry.memory_bytes).name


def _cluster_problem(cause: str, fix: str) -> RubatoError:
    return RubatoError(
        f"cluster: {cause}", fix=fix, code="cluster_unknown", status=422, problems=[FieldProblem("cluster", cause, fix)]
    )
