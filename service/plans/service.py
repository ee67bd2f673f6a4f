"""Plans jobs for whoever asks, and for those that are submitted."""

from __future__ import annotations

import asyncio

import structlog

from rubato.calibrations import calibration_file, keep_calibration, read_calibrations
from rubato.plans import Calibration, Plan, PlanRequest
from rubato.problems import FieldProblem, RubatoError, SpecError
from rubato.resources import LayoutView
from rubato.spec import JobSpec, WorkersSpec, is_planned, parse_spec
from service.cluster.service import ClusterService
from service.planning.calibration import measured_by
from service.planning.fleet import Fleet, Measured, live_fleet, named_fleet, unseen_fleet
from service.planning.from_spec import layout_of, with_layout
from service.planning.job_plan import JobPlanner, resolve, spread
from service.plans.predictions import Expected, expected
from service.plans.view import size_view
from service.settings import Settings

log = structlog.get_logger(__name__)

SHOWN_SIZES = 8


class PlanService:
    """Plans, with what was measured of the cluster where something was."""

    def __init__(self, settings: Settings, cluster: ClusterService) -> None:
        self._home = settings.home
        self._cluster = cluster
        self._known: dict[str, Measured] = {}
        self._read_at = 0

    def calibrations(self) -> dict[str, Calibration]:
        """What was measured, by device. Raises RubatoError (503) when its file cannot be used."""
        return read_calibrations(self._home)

    def calibrate(self, measured: Calibration) -> None:
        """Plans with a measurement from now on.

        Raises:
            RubatoError: the planner does not know such a device (422), or it cannot be stored (503).
        """
        measured_by(measured)
        keep_calibration(self._home, measured)
        log.info("cluster.calibrated", device=measured.alone.device, host=measured.host)

    async def _measured(self) -> dict[str, Measured]:
        return await asyncio.to_thread(self._newest)

    async def plan(self, request: PlanRequest) -> Plan:
        """What a spec would come to.

        Raises:
            SpecError: the spec cannot run, or nothing of it fits.
            RubatoError: the cluster is unknown (422), or cannot be seen (503).
        """
        spec = parse_spec(request.spec)
        if request.cluster is not None:
            fleet: Fleet | None = named_fleet(request.cluster, spec.workers, await self._measured())
        else:
            fleet = await self._live(spec.workers)
        if fleet is None:
            raise _no_fleet(spec.workers, self._cluster.detail)
        return await asyncio.to_thread(_plan, spec, fleet, request)

    async def prepare(self, spec: JobSpec) -> JobSpec:
        """The spec as it is to be stored: with a layout where it leaves that open, refused where it cannot fit.

        A layout that was given is looked at only where the cluster can be seen.

        Raises:
            SpecError: nothing fits, or the layout that was given does not.
        """
        try:
            fleet = await self._live(spec.workers)
        except RubatoError as error:
            fleet = None
            if is_planned(spec):
                raise _cannot_plan(error.detail) from error
        if is_planned(spec):
            fleet = fleet or unseen_fleet(spec.workers, await self._measured())
            if fleet is None:
                raise _cannot_plan(f"the cluster shows no GPUs to plan for ({self._cluster.detail})")
            return await asyncio.to_thread(resolve, spec, fleet)
        if fleet is not None:
            await asyncio.to_thread(JobPlanner(spec, fleet).check)
        return spec

    def expect(self, spec: JobSpec, layout: LayoutView) -> Expected | None:
        """What is predicted for a job at the layout it has; None where the cluster is not known well enough."""
        sight = self._cluster.sight
        if sight is None:
            return None
        try:
            fleet = live_fleet(sight.nodes, spec.workers, self._newest())
        except RubatoError:
            return None  # such a job runs without a prediction; whoever asks for a plan is told why
        return None if fleet is None else expected(spec, layout, fleet)

    def _newest(self) -> dict[str, Measured]:
        """What was measured, read again when its file has changed."""
        path = calibration_file(self._home)
        changed = path.stat().st_mtime_ns if path.exists() else 0
        if changed != self._read_at:
            self._known = dict(map(measured_by, self.calibrations().values()))
            self._read_at = changed
        return self._known

    async def _live(self, workers: WorkersSpec) -> Fleet | None:
        sight = self._cluster.sight or await self._cluster.look()
        return None if sight is None else live_fleet(sight.nodes, workers, await self._measured())


def _plan(spec: JobSpec, fleet: Fleet, request: PlanRequest) -> Plan:
    planner = JobPlanner(spec, fleet)
    planned = is_planned(spec)
    if planned:
        replica = planner.choose()
        resolved = with_layout(spec, replica)
    else:
        resolved = spec
        own = layout_of(spec, spec.parallelism.replica_size)
        assert own is not None  # one replica is a whole number of them
        replica = own
    possible = [size for size in resolved.sizes if size <= fleet.workers or request.cluster is None]
    if not possible and request.sizes is None:
        cause = f"the job runs at {resolved.sizes[0]} workers or more, the cluster named has {fleet.workers}"
        raise SpecError([FieldProblem("workers", cause, f"plan for a cluster of {resolved.sizes[0]} or more")])
    sizes = request.sizes or _shown(possible)
    return Plan(
        cluster=fleet.source,
        calibrated=fleet.calibrated,
        planned=planned,
        spec=resolved.model_dump(mode="json"),
        sizes=[
            size_view(planner, planner.at(size, replica), request.price, misses=size == max(sizes))
            for size in sorted(set(sizes))
        ],
        not_covered=not_covered(spec),
    )


def _shown(possible: list[int]) -> list[int]:
    wanted = spread(range(possible[0], possible[-1] + 1), SHOWN_SIZES)
    return sorted({min(possible, key=lambda size: abs(size - near)) for near in wanted})


def not_covered(spec: JobSpec) -> list[str]:
    """What of a spec the models do not describe, in sentences."""
    said = []
    if spec.train.precision == "float8":
        said.append("float8 is predicted as bf16: its faster products are not modelled")
    if spec.memory.recompute.mode == "selective" or spec.memory.recompute.every > 1:
        said.append("recomputation of parts is predicted as none: it needs less memory than said, and takes longer")
    if spec.parallelism.schedule in ("interleaved_zero_bubble", "zbv", "dualpipev"):
        said.append(f"{spec.parallelism.schedule} is predicted as interleaved: it fills more of the bubble")
    return said


def _no_fleet(workers: WorkersSpec, detail: str) -> RubatoError:
    kind = "a GPU" if workers.gpus else f"{workers.cpus:g} CPUs"
    fix = "name a cluster, such as h100:64, or start one"
    cause = f"no node has {kind} for a worker ({detail})"
    return RubatoError(
        f"cluster: {cause}", fix=fix, code="cluster_unknown", status=422, problems=[FieldProblem("cluster", cause, fix)]
    )


def _cannot_plan(cause: str) -> SpecError:
    fix = "give parallelism, or submit when the cluster can be seen"
    return SpecError([FieldProblem("parallelism", f"was left out and cannot be planned: {cause}", fix)])
