"""Plans as the API shows them."""

from __future__ import annotations

from math import isfinite

from rubato.plans import MemoryView, PlannedLayout, PlannedSize, Prediction, RefusedLayout
from service.planning.job_plan import JobPlanner, SizePlan
from service.planning.refusals import Refusal
from service.planning.search import Choice
from service.planning.shapes import Layout

_HOUR = 3600.0


def size_view(planner: JobPlanner, size: SizePlan, price: float | None, *, misses: bool) -> PlannedSize:
    """One row of a plan; with the layouts that nearly made it where ``misses``, which takes a look at every one."""
    fits = size.choice is not None and size.refusal is None
    best = planner.best(size.workers)
    return PlannedSize(
        workers=size.workers,
        chosen=prediction(planner, size.choice, size.limit, price) if size.choice and fits else None,
        reason=None if fits else size.refusal.reason if size.refusal else "not a whole number of replicas with work",
        fastest=None if best is None else prediction(planner, best, size.limit, price),
        refused=[refused_view(planner, miss) for miss in planner.misses(size.workers)] if misses else [],
    )


def prediction(planner: JobPlanner, choice: Choice, limit: float, price: float | None) -> Prediction:
    """What is predicted for a layout."""
    finish = choice.step.seconds * planner.spec.train.steps
    memory = choice.memory
    return Prediction(
        layout=layout_view(planner, choice.layout),
        memory=MemoryView(
            needed=memory.needed,
            usable=limit if isfinite(limit) else None,
            parameters=memory.parameters,
            gradients=memory.gradients,
            optimizer=memory.optimizer,
            activations=memory.activations,
            transient=memory.transient,
            context=memory.context,
        ),
        step_s=choice.step.seconds,
        tokens_per_s=choice.tokens_per_s,
        tokens_per_s_range=choice.tokens_per_s_range,
        mfu=choice.mfu,
        finish_s=finish,
        cost=None if price is None else finish / _HOUR * price * choice.workers,
    )


def refused_view(planner: JobPlanner, refusal: Refusal) -> RefusedLayout:
    """Why a layout was refused."""
    return RefusedLayout(layout=layout_view(planner, refusal.layout), reason=refusal.reason)


def layout_view(planner: JobPlanner, layout: Layout) -> PlannedLayout:
    """A layout in full."""
    return PlannedLayout(
        data=layout.data,
        pipeline=layout.pipeline,
        tensor=layout.tensor,
        zero=layout.zero,
        micro_batch=layout.micro_batch,
        accumulation=layout.micro_batches(planner.work.global_batch),
        schedule=layout.schedule,
        virtual_stages=layout.virtual_stages,
        recompute=layout.recompute,
    )
