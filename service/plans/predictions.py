"""What was predicted of a job that runs, beside what is measured of it."""

from __future__ import annotations

from dataclasses import dataclass

from rubato.resources import LayoutView
from rubato.spec import JobSpec
from service.planning.fleet import Fleet
from service.planning.from_spec import layout_of, runtime_of, work_of
from service.planning.throughput import TimeModel

DIFFERS = 1.5
"""How many times as fast or as slow as predicted a job has to be for an event to say so."""

SETTLED_STEPS = 20
"""Steps of a generation before its speed counts: the first of them compile, allocate and warm caches."""


@dataclass(frozen=True)
class Expected:
    """Tokens a second of all workers, and whether that rests on measurements of this cluster."""

    tokens_per_s: float
    calibrated: bool

    def remark(self, measured: float) -> str | None:
        """What to say of a measured speed; None where it is about as predicted."""
        if self.tokens_per_s / DIFFERS <= measured <= self.tokens_per_s * DIFFERS:
            return None
        basis = (
            "by what `rubato calibrate` measured of this cluster"
            if self.calibrated
            else "by the catalogue: `rubato calibrate` measures this cluster"
        )
        return f"trains at {measured:,.0f} tokens/s where {self.tokens_per_s:,.0f} were predicted {basis}"


def expected(spec: JobSpec, layout: LayoutView, fleet: Fleet) -> Expected | None:
    """The prediction for a job at the layout it has; None where its spec has no such layout."""
    workers = layout.data * layout.pipeline * layout.tensor
    asked = layout_of(spec, workers)
    if asked is None or spec.train.global_batch // spec.parallelism.micro_batch < asked.data:
        return None
    model = TimeModel(work_of(spec), fleet.cluster(workers), runtime_of(spec), fleet.constants_for(workers))
    return Expected(model.tokens_per_s(asked), fleet.calibrated)
