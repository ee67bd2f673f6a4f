"""data inspect, data tokenize and data train-tokenizer: a corpus before a job reads it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table

from rubato.cli import text
from rubato.cli.options import Json
from rubato.cli.output import console, print_json
from rubato.corpus import tokenize as tokenizing
from rubato.corpus.inspect import CorpusView, SourceView, inspect
from rubato.corpus.open import Corpus, open_corpus
from rubato.corpus.train_tokenizer import train_tokenizer
from rubato.problems import FieldProblem, SpecError
from rubato.spec import JobSpec, load_spec
from rubato.tokenizers import open_tokenizer

app = typer.Typer(name="data", help="Look at a corpus, tokenize it, learn a tokenizer from it.", no_args_is_help=True)

Spec = Annotated[Path, typer.Argument(metavar="SPEC", help="The job spec, a YAML file.", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a field of the spec, such as data.sequence_length=512."),
]
Processes = Annotated[
    int | None, typer.Option("--processes", min=1, help="Processes that tokenize; by default one a core.")
]


@app.command("inspect")
def inspect_corpus(spec: Spec, overrides: Overrides = None, processes: Processes = None, json: Json = False) -> None:
    """Show documents, tokens, lengths, samples, and what is wrong."""
    job = load_spec(spec, overrides or ())
    with tempfile.TemporaryDirectory(prefix="rubato-") as folder:
        corpus = _open(job, Path(folder), processes)
        tokenizer = open_tokenizer(job.data.tokenizer, job.data.end_of_document, job.data.vocab_size)
        view = inspect(job, corpus, tokenizer)
    if json:
        print_json(view)
    else:
        _show(view)


@app.command("tokenize")
def tokenize(spec: Spec, overrides: Overrides = None, processes: Processes = None, json: Json = False) -> None:
    """Tokenize a corpus into data.cache, ahead of the jobs that read it. What is there already is left as it is."""
    job = load_spec(spec, overrides or ())
    if job.data.cache is None:
        cause = "is left out, so each run keeps its tokens in its own directory"
        raise SpecError([FieldProblem("data.cache", cause, "name a folder that all workers reach")])
    with tempfile.TemporaryDirectory(prefix="rubato-") as folder:
        corpus = _open(job, Path(folder), processes)
    cache = Path(job.data.cache).expanduser()
    found: list[dict[str, Any]] = [
        {"path": str(cache / source.key), "documents": source.documents, "tokens": len(source.train.tokens)}
        for source in corpus.sources
    ]
    if json:
        print_json({"digest": corpus.digest, "sources": found})
        return
    for each in found:
        console().print(f"{text.short(each['tokens'])} tokens in {each['path']}", soft_wrap=True)


@app.command("train-tokenizer")
def learn_tokenizer(
    spec: Spec,
    into: Annotated[Path, typer.Option("--into", "-o", help="Folder to write.", show_default=False)],
    vocab_size: Annotated[int, typer.Option(min=257, help="Tokens it should have.")] = 32_000,
    most_mb: Annotated[int | None, typer.Option("--most-mb", min=1, help="Learn from so many MB of text.")] = None,
    overrides: Overrides = None,
    json: Json = False,
) -> None:
    """Learn a byte-level BPE tokenizer from the corpus of a spec."""
    job = load_spec(spec, overrides or ())
    size = train_tokenizer(job.data.train, vocab_size, into, most_mb * 1_000_000 if most_mb else None)
    if json:
        print_json({"path": str(into), "vocab_size": size})
    else:
        console().print(f"{size} tokens in {into}; use it with data.tokenizer: {into}", soft_wrap=True)


def _open(job: JobSpec, pins: Path, processes: int | None) -> Corpus:
    with _progress() as progress:
        return open_corpus(job, pins, processes=processes or os.cpu_count() or 1, progress=progress)


@contextmanager
def _progress() -> Iterator[tokenizing.Progress]:
    columns = (TextColumn("tokenizing"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("tokenizing", total=None)

        def tell(done: int, whole: int) -> None:
            bar.update(task, completed=done, total=whole)

        yield tell


def _show(view: CorpusView) -> None:
    out = console()
    out.print(
        f"{view.documents} documents, {text.short(view.tokens)} tokens to train on, "
        f"{text.short(view.held_out_tokens)} held out, vocabulary {view.vocab_size}"
    )
    for source in view.sources:
        _show_source(source)


def _show_source(source: SourceView) -> None:
    out = console()
    out.print(f"\n{source.source}", soft_wrap=True)
    out.print(
        f"  {source.documents} documents, {source.held_out_documents} of them held out; {text.percent(source.share)} "
        f"of the samples, which is {source.epochs:.2f} epochs"
    )
    table = Table.grid(padding=(0, 2))
    most = max((each.documents for each in source.lengths), default=1)
    for each in source.lengths:
        table.add_row(
            "", f"{each.low}-{each.high - 1} tokens", str(each.documents), "█" * (40 * each.documents // most)
        )
    out.print(table)
    for sample in source.samples:
        out.print(f"  {sample!r}", soft_wrap=True)
    for problem in source.problems:
        out.print(f"  wrong: {problem}", soft_wrap=True)
    if source.skipped_records:
        out.print(f"  {source.skipped_records} records were passed over")
