"""plan: what a job would come to before it runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rubato.cli import text
from rubato.cli import trace as tracing
from rubato.cli.options import Json, Url
from rubato.cli.output import console, note, print_json
from rubato.client import Client
from rubato.plans import MemoryView, Plan, PlannedLayout, PlannedSize, Prediction, Trace
from rubato.problems import RubatoError
from rubato.spec import as_given, parse_spec, read_spec

_GIB = 2**30
_BAR_WIDTH = 12
_TIGHT = 0.95


def plan(
    file: Annotated[Path, typer.Option("--file", "-f", help="The job spec, a YAML file.", show_default=False)],
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Override a field of the spec, such as train.steps=200."),
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(metavar="KIND:N", help="Plan for this cluster, such as h100:64; by default for the one there is."),
    ] = None,
    size: Annotated[
        list[int] | None, typer.Option(min=1, help="Number of workers to plan for; may be given several times.")
    ] = None,
    price: Annotated[float | None, typer.Option(min=0.0, help="Price of a worker for an hour.")] = None,
    trace: Annotated[
        bool, typer.Option("--trace", help="Also run a step of the largest size on tensors without content; no GPU.")
    ] = False,
    url: Url = None,
    json: Json = False,
) -> None:
    """Predict memory, speed and the best layout of a job, without starting anything."""
    spec = parse_spec(read_spec(file, overrides or ()))
    with Client(url) as client:
        found = client.plan(as_given(spec), cluster=cluster, sizes=size or None, price=price or None)
    traced = _traced(found) if trace else None
    if json:
        print_json(found if traced is None else {**found.model_dump(mode="json"), "trace": traced[2].model_dump()})
        return
    out = console()
    out.print(table(found))
    for line in remarks(found):
        out.print(line, soft_wrap=True)
    if traced is not None:
        workers, predicted, what = traced
        out.print(f"\ntraced at {workers} workers:")
        out.print(tracing.table(what))
        for line in tracing.remarks(what, predicted):
            out.print(line, soft_wrap=True)
    if found.planned:
        note("submit the spec as it is to have the job run so")


def _traced(found: Plan) -> tuple[int, Prediction, Trace]:
    """The largest size that fits, and its trace."""
    fitting = [size for size in found.sizes if size.chosen is not None]
    if not fitting:
        raise RubatoError(
            "there is nothing to trace: no size fits",
            fix="see `rubato plan` without --trace for why",
            code="nothing_fits",
            status=422,
        )
    size = fitting[-1]
    assert size.chosen is not None  # it was asked for
    return size.workers, size.chosen, tracing.trace(found.spec, size.chosen.layout.data)


def table(plan: Plan) -> Table:
    """A row a size: what is predicted, or why there is nothing to predict."""
    priced = any(size.chosen is not None and size.chosen.cost is not None for size in plan.sizes)
    made = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("WORKERS", "LAYOUT", "MICRO", "RECOMPUTE", "MEMORY", "", "TOKENS/S", "MFU", "STEP", "TIME"):
        made.add_column(column, no_wrap=True, justify="right" if column in ("TOKENS/S", "MFU", "STEP") else "left")
    if priced:
        made.add_column("COST", no_wrap=True, justify="right")
    for size in plan.sizes:
        made.add_row(*_cells(size, priced))
    return made


def _cells(size: PlannedSize, priced: bool) -> list[Any]:
    found = size.chosen
    if found is None:
        return [str(size.workers), Text(text.NOTHING), *[""] * (9 if priced else 8)]
    low, high = found.tokens_per_s_range
    cells: list[Any] = [
        str(size.workers),
        layout(found.layout),
        f"{found.layout.micro_batch}×{found.layout.accumulation}",
        found.layout.recompute,
        _bar(found.memory),
        _memory(found.memory),
        f"{text.short(low)}–{text.short(high)}",
        text.percent(found.mfu),
        f"{found.step_s:.3g}s",
        text.duration(found.finish_s),
    ]
    return [*cells, f"{found.cost:,.2f}"] if priced and found.cost is not None else cells


def layout(view: PlannedLayout) -> str:
    """data × pipeline × tensor, with what else is set."""
    said = f"{view.data}×{view.pipeline}×{view.tensor}"
    said += f" {view.schedule}/{view.virtual_stages}" if view.virtual_stages > 1 else ""
    return said + (f" zero {view.zero}" if view.zero else "")


def _bar(memory: MemoryView) -> ProgressBar | str:
    if memory.usable is None:
        return ""
    style = "yellow" if memory.needed > _TIGHT * memory.usable else "green"
    return ProgressBar(
        total=memory.usable, completed=memory.needed, width=_BAR_WIDTH, complete_style=style, finished_style="red"
    )


def _memory(memory: MemoryView) -> str:
    needed = f"{memory.needed / _GIB:.3g}"
    return f"{needed} GiB" if memory.usable is None else f"{needed} of {memory.usable / _GIB:.3g} GiB"


def remarks(plan: Plan) -> Iterator[str]:
    """What the table has no room for."""
    yield ""
    basis = "measured on it" if plan.calibrated else "of the catalogue; `rubato calibrate` measures this cluster's"
    yield f"for {plan.cluster}; constants {basis}"
    yield "layout: data × pipeline × tensor; micro: sequences of a micro-batch × micro-batches a step"
    for size in plan.sizes:
        if size.chosen is None:
            yield f"{size.workers} workers: {size.reason}"
        elif size.fastest is not None and size.fastest.tokens_per_s > 1.03 * size.chosen.tokens_per_s:
            gain = size.fastest.tokens_per_s / size.chosen.tokens_per_s - 1
            other = f"{layout(size.fastest.layout)}, micro-batch {size.fastest.layout.micro_batch}"
            yield f"{size.workers} workers: {gain:.0%} faster at {other}, which other sizes would not be"
    last = plan.sizes[-1]
    for miss in last.refused:
        yield f"{last.workers} workers at {layout(miss.layout)}, recompute {miss.layout.recompute}: {miss.reason}"
    yield from plan.not_covered
