"""submit, list, show, scale, cancel and checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from rubato.cli import text
from rubato.cli.options import JobName, Json, Url
from rubato.cli.output import DONE, JOB_FAILED, console, note, print_json
from rubato.cli.watch import watch_to_the_end
from rubato.client import Client, new_idempotency_key
from rubato.corpus import is_remote
from rubato.problems import RubatoError
from rubato.resources import Job, Operation, OperationState
from rubato.spec import JobSpec, SourceSpec, parse_spec, read_spec
from rubato.states import JobState
from rubato.tokenizers import BYTES, NONE


def submit(
    file: Annotated[Path, typer.Option("--file", "-f", help="The job spec, a YAML file.", show_default=False)],
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Override a field of the spec, such as train.steps=200."),
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Watch the job until it is over.")] = False,
    key: Annotated[
        str | None,
        typer.Option("--idempotency-key", help="Submissions with one key are one job; by default each is its own."),
    ] = None,
    url: Url = None,
    json: Json = False,
) -> int:
    """Hand a job in."""
    spec = _with_absolute_paths(parse_spec(read_spec(file, overrides or ())))
    key = key or new_idempotency_key()
    with Client(url) as client:
        try:
            job = client.submit(spec, idempotency_key=key)
        except RubatoError as error:
            if error.status >= 500:
                note(f"whether the job was taken is not known; --idempotency-key {key} makes another try safe")
            raise
    if json:
        print_json(job)
    else:
        console().print(f"{job.name} is {job.state}: {job.reason.message} ({job.id})", soft_wrap=True)
    if watch:
        return watch_to_the_end(url, job.id, as_json=json)
    if not json:
        note(f"watch it with `rubato watch {job.name}`")
    return DONE


def _with_absolute_paths(spec: JobSpec) -> JobSpec:
    """Relative paths are meant from here; where the job will run, here is somewhere else."""
    train, validation, tokenizer = spec.data.train, spec.data.validation, spec.data.tokenizer
    moved = {
        "train": train.model_copy(
            update={"path": _absolute(train.path), "blend": tuple(_moved(source) for source in train.blend)}
        ),
        "validation": validation.model_copy(
            update={"source": _moved(validation.source) if validation.source else None}
        ),
        "tokenizer": tokenizer if tokenizer in (BYTES, NONE) else _absolute(tokenizer),
        "cache": _absolute(spec.data.cache),
    }
    model = spec.model.model_copy(update={"source": _absolute(spec.model.source)})
    return spec.model_copy(update={"model": model, "data": spec.data.model_copy(update=moved)})


def _moved(source: SourceSpec) -> SourceSpec:
    return source.model_copy(update={"path": _absolute(source.path)})


def _absolute(path: str | None) -> str | None:
    return path if path is None or is_remote(path) else str(Path.cwd() / Path(path).expanduser())


def list_jobs(
    state: Annotated[JobState | None, typer.Option(case_sensitive=False, help="Only jobs in this state.")] = None,
    project: Annotated[str | None, typer.Option(help="Only jobs of this project.")] = None,
    name: Annotated[str | None, typer.Option(help="Only jobs of this name.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=500, help="At most so many.")] = 50,
    cursor: Annotated[str | None, typer.Option(help="Go on from here: the 'next' of an earlier list.")] = None,
    url: Url = None,
    json: Json = False,
) -> None:
    """List jobs, newest first."""
    with Client(url) as client:
        page = client.jobs(state=state, project=project, name=name, cursor=cursor, limit=limit)
    if json:
        print_json(page)
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("NAME", "STATE", "STEP", "LOSS", "TOK/S", "WORKERS", "LAYOUT", "AGE", "ID"):
        table.add_column(column, no_wrap=True)
    for job in page.items:
        table.add_row(
            job.name,
            Text(job.state, style=text.state_style(job.state)),
            f"{job.progress.step}/{job.progress.steps}",
            text.fixed(job.progress.loss, 4),
            text.short(job.progress.tokens_per_s),
            text.workers(job),
            text.layout(job.layout),
            text.age(job.created_at),
            job.id,
        )
    console().print(table)
    if page.next:
        note(f"there are more: --cursor {page.next}")


def show(job: JobName, url: Url = None, json: Json = False) -> None:
    """Show a job."""
    with Client(url) as client:
        seen = client.job(job)
    if json:
        print_json(seen)
        return
    table = Table.grid(padding=(0, 2))
    for field, value in _fields(seen):
        table.add_row(field, value)
    console().print(table)


def _fields(job: Job) -> list[tuple[str, str]]:
    progress, restarts, goodput = job.progress, job.restarts.model_dump(), job.goodput
    counted = ", ".join(f"{kind} {count}" for kind, count in restarts.items() if count) or "none"
    members = ", ".join(f"{worker.replica}/{worker.rank}: {worker.state}" for worker in job.workers.members)
    return [
        ("job", f"{job.name} ({job.id}), project {job.project}, priority {job.priority}"),
        ("state", f"{job.state}: {job.reason.message} ({job.reason.actor}, {text.age(job.reason.at)} ago)"),
        ("step", f"{progress.step} of {progress.steps}, {text.short(progress.tokens)} tokens"),
        ("loss", text.fixed(progress.loss, 4)),
        ("speed", f"{text.short(progress.tokens_per_s)} tokens/s, MFU {text.percent(progress.mfu)}{_predicted(job)}"),
        ("left", text.duration(progress.eta_s)),
        ("workers", f"{text.workers(job)} (min {job.workers.min}, max {job.workers.max}{_pinned(job)}) {members}"),
        ("layout", f"{text.layout(job.layout)} (data × pipeline × tensor), generation {job.generation}"),
        ("attempts", f"{job.attempts}, restarts: {counted}"),
        ("goodput", f"{text.percent(goodput.ratio)}, {text.duration(goodput.training_s)} of training"),
        ("created", f"{text.age(job.created_at)} ago"),
        ("run", job.run_dir),
    ]


def _pinned(job: Job) -> str:
    low, high = job.workers.queue_min, job.workers.queue_max
    if (low, high) in ((None, None), (job.workers.min, job.workers.max)):
        return ""
    return f", kept at {low}" if low == high else f", shared from {low} to {high}"


def _predicted(job: Job) -> str:
    predicted = job.progress.predicted_tokens_per_s
    return "" if predicted is None else f"; {text.short(predicted)} tokens/s were predicted"


def scale(
    job: JobName,
    workers: Annotated[
        int | None, typer.Argument(metavar="[N]", help="Workers it should have, and keep.", show_default=False)
    ] = None,
    low: Annotated[int | None, typer.Option("--min", help="Let the queue choose, no fewer than this.")] = None,
    high: Annotated[int | None, typer.Option("--max", help="Let the queue choose, no more than this.")] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until it has them.")] = False,
    url: Url = None,
    json: Json = False,
) -> int:
    """Give a running job more or fewer workers, or let the queue choose how many."""
    ranged = low is not None or high is not None
    if (workers is None) != ranged:
        raise RubatoError(
            "a job is given a number of workers, or --min and --max",
            fix="see `rubato scale --help`",
            code="wrong_usage",
            status=400,
        )
    with Client(url) as client:
        operation = client.scale(job, workers, low=low, high=high)
        if wait:
            operation = client.wait_for_operation(operation.id)
    begun = f"{job} goes to {workers} workers" if workers is not None else f"the queue chooses the size of {job}"
    return report_operation(operation, json, begun)


def cancel(
    job: JobName,
    force: Annotated[bool, typer.Option("--force", help="At once, without a last checkpoint.")] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until it has ended.")] = False,
    url: Url = None,
    json: Json = False,
) -> int:
    """End a job, after a last checkpoint."""
    with Client(url) as client:
        operation = client.cancel(job, force=force)
        if wait:
            operation = client.wait_for_operation(operation.id)
    return report_operation(operation, json, f"{job} is being cancelled")


def report_operation(operation: Operation, as_json: bool, begun: str) -> int:
    """Prints how far an operation has come; the exit code."""
    if as_json:
        print_json(operation)
    elif operation.state in (OperationState.DONE, OperationState.FAILED):
        for phase in operation.phases:
            console().print(f"{phase.name:12} {text.duration(phase.seconds)}")
        console().print(f"{operation.kind} {operation.state}" + (f": {operation.message}" if operation.message else ""))
    else:
        console().print(f"{begun} (operation {operation.id})", soft_wrap=True)
    return JOB_FAILED if operation.state is OperationState.FAILED else DONE


def checkpoints(job: JobName, url: Url = None, json: Json = False) -> None:
    """List the checkpoints of a job."""
    with Client(url) as client:
        page = client.checkpoints(job)
    if json:
        print_json(page)
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("STEP", "AT", "SIZE", "LAYOUT", "LOSS", "VERIFIED", "PATH"):
        table.add_column(column, no_wrap=True)
    for checkpoint in page.items:
        table.add_row(
            str(checkpoint.step),
            text.clock(checkpoint.at),
            f"{text.short(checkpoint.bytes)}B",
            text.layout(checkpoint.layout),
            text.fixed(checkpoint.loss, 4),
            "yes" if checkpoint.verified else "no",
            checkpoint.path,
        )
    console().print(table)
