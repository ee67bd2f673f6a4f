"""Turns a corpus into two memory-mapped streams of tokens: one to train on, one held out.

The streams are written once into the run directory and stay as they are, so every worker of a run, on whatever host
and after whatever restart, reads the same samples, even when the files they came from have changed since.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rubato.corpus import Source, corpus_problem, find_sources, unreadable
from rubato.durable import sync_folder, write_durably
from rubato.problems import FieldProblem, RubatoError
from rubato.spec import DataSpec, JobSpec
from workers.engine.data.sources import documents

log = logging.getLogger(__name__)

_FORMAT = 1
_SEPARATOR = b"\0"  # ends a document; no text holds it
_LARGEST_DOCUMENT, _SMALLEST_PIECE = 64 * 1024, 4 * 1024
_PIECES = 64  # a corpus of one file is cut into about as many, so that some can be held out
_HASH_BYTES = 8

Tokens = NDArray[np.uint8]


@dataclass(frozen=True)
class Corpus:
    """Tokens of all documents, one after the other, each ended by a zero byte.

    Attributes:
        train: tokens to train on, shape (n,).
        held_out: tokens of the documents never trained on, shape (m,); m may be 0.
        documents: number of documents in both.
        digest: SHA-256 over both streams.
    """

    train: Tokens
    held_out: Tokens
    documents: int
    digest: str


def open_corpus(spec: JobSpec, cache: Path) -> Corpus:
    """The corpus of a spec, written below ``cache`` by whichever worker comes first.

    A document is a file, or a piece of a large file. It is held out when the hash of its content says so: the same
    text is never on both sides, however often it occurs and whatever else is added.

    Raises:
        RubatoError: the corpus is missing, unreadable, empty, or shorter than one window of ``data.sequence_length``.
    """
    data = spec.data
    choice = json.dumps([_FORMAT, data.train.model_dump(), data.validation.fraction], sort_keys=True)
    folder = cache / hashlib.sha256(choice.encode()).hexdigest()[:16]
    if not folder.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with _alone(cache / ".lock"):
            if not folder.exists():
                _build(data, folder)
    index = json.loads((folder / "index.json").read_bytes())
    corpus = Corpus(_map(folder / "train.bin"), _map(folder / "held_out.bin"), index["documents"], index["digest"])
    _check_length(data, corpus)
    return corpus


def _check_length(data: DataSpec, corpus: Corpus) -> None:
    window = data.sequence_length + 1  # a target for each token
    if len(corpus.train) < window:
        cause = f"{len(corpus.train)} tokens to train on are fewer than a window of {window} (data.sequence_length + 1)"
        raise corpus_problem(data.train, "corpus_too_short", cause, "add text, or use a shorter data.sequence_length")
    if data.validation.every and len(corpus.held_out) < window:
        field = "data.validation.fraction"
        cause = (
            f"{data.validation.fraction} of {corpus.documents} documents are {len(corpus.held_out)} tokens, fewer than "
            f"a window of {window}"
        )
        fix = "hold out a larger fraction, add text, or set data.validation.every to 0"
        problem = FieldProblem(field, cause, fix)
        raise RubatoError(f"{field}: {cause}", fix=fix, code="held_out_too_short", status=422, problems=[problem])


@contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """Holds others of the same run back while one builds. The kernel lets go when the holder dies."""
    with lock.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            # Some shared file systems have no locks. Building twice costs time only: the rename decides who was first.
            log.info("%s cannot be locked (%s); the corpus may be built more than once", lock, error.strerror)
        yield


def _build(data: DataSpec, folder: Path) -> None:
    sources = find_sources(data.train)
    building = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        threshold = int(data.validation.fraction * 2 ** (8 * _HASH_BYTES))
        count, held_out, lowest = _write(data, sources, threshold, building)
        if threshold and not held_out and count > 1:
            # A share of few documents may be none of them; then the first candidate is held out.
            _write(data, sources, lowest + 1, building)
        digest = hashlib.sha256()
        for name in ("train.bin", "held_out.bin"):
            with (building / name).open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
        index = {"documents": count, "digest": digest.hexdigest(), "sources": len(sources)}
        write_durably(building / "index.json", json.dumps(index))
        building.chmod(0o755)  # mkdtemp's own would shut out workers that run as another user
        try:
            building.rename(folder)
            sync_folder(folder.parent)
        except OSError:
            if not folder.exists():
                raise
    finally:
        shutil.rmtree(building, ignore_errors=True)  # gone already when it was renamed


def _write(data: DataSpec, sources: list[Source], threshold: int, into: Path) -> tuple[int, int, int]:
    """Writes both streams; the number of documents, of held-out ones, and the lowest hash of a document."""
    total = sum(source.size for source in sources)
    largest = max(_SMALLEST_PIECE, min(_LARGEST_DOCUMENT, total // _PIECES))
    count, held_out, lowest = 0, 0, 2 ** (8 * _HASH_BYTES)
    with (into / "train.bin").open("wb") as train_file, (into / "held_out.bin").open("wb") as held_out_file:
        for source in sources:
            try:
                for document in documents(source, largest):
                    place = int.from_bytes(hashlib.blake2b(document, digest_size=_HASH_BYTES).digest())
                    out = held_out_file if place < threshold else train_file
                    out.write(document)
                    out.write(_SEPARATOR)
                    count, held_out, lowest = count + 1, held_out + (place < threshold), min(lowest, place)
            except OSError as error:
                raise unreadable(data.train, source.path, error) from error
        for file in (train_file, held_out_file):
            file.flush()
            os.fsync(file.fileno())
    return count, held_out, lowest


def _map(path: Path) -> Tokens:
    if not path.stat().st_size:
        return np.empty(0, np.uint8)  # an empty file cannot be mapped
    return np.memmap(path, np.uint8, mode="r")
