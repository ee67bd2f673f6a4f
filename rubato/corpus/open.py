"""Opens the corpus of a spec: tokens of all its sources, memory-mapped, the same for every worker of a run.

What a run has opened once it pins in its run directory, so every worker, on whatever host and after whatever restart,
reads the same samples even when the files they came from have changed since.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rubato.corpus.place import VALIDATION, Place, places
from rubato.corpus.tokenize import FORMAT, HASH_BITS, HASHES, INDEX, SPLITS, Progress, Recipe, entry
from rubato.durable import write_durably
from rubato.problems import FieldProblem, RubatoError
from rubato.spec import DataSpec, JobSpec, SourceSpec

log = logging.getLogger(__name__)

Tokens = NDArray[np.unsignedinteger[Any]]


@dataclass(frozen=True)
class Stream:
    """Documents one after the other.

    Attributes:
        tokens: of all documents, shape (n,).
        ends: where each document ends, shape (documents,), ascending; the last is n.
        answers: 1 for tokens that are to be learned, shape (n,); None: all are.
    """

    tokens: Tokens
    ends: NDArray[np.uint64]
    answers: NDArray[np.uint8] | None = None


@dataclass(frozen=True)
class TokenSource:
    """A source of a corpus: what is trained on, what is held out, and its share of a blend.

    Attributes:
        key: names its entry of the cache.
        bad: records that were passed over, with the first of them in ``examples``.
    """

    train: Stream
    held_out: Stream
    weight: Fraction = Fraction(1)
    key: str = ""
    digest: str = ""
    bad: int = 0
    examples: tuple[str, ...] = ()

    @property
    def documents(self) -> int:
        """Documents on both sides."""
        return len(self.train.ends) + len(self.held_out.ends)


@dataclass(frozen=True)
class Corpus:
    """All sources of a corpus.

    Attributes:
        folder: where what is worked out about it may be kept; None: nowhere.
        validation: a source that is held out as a whole; None: the held-out documents of the others are.
    """

    sources: tuple[TokenSource, ...]
    folder: Path | None = None
    validation: TokenSource | None = None

    @property
    def evaluated(self) -> tuple[TokenSource, ...]:
        """The sources whose held-out documents an evaluation reads."""
        return self.sources if self.validation is None else (self.validation,)

    @property
    def documents(self) -> int:
        """Documents of all sources."""
        return sum(source.documents for source in self.sources)

    @cached_property
    def digest(self) -> str:
        """SHA-256 over everything in it."""
        return hashlib.sha256("/".join(source.digest for source in self.all).encode()).hexdigest()

    @property
    def all(self) -> tuple[TokenSource, ...]:
        """What is trained on, and what is held out as a whole."""
        return self.sources if self.validation is None else (*self.sources, self.validation)


def open_corpus(
    spec: JobSpec, pins: Path, *, processes: int = 0, progress: Progress = lambda done, whole: None
) -> Corpus:
    """The corpus of a spec, tokenized by whoever comes first.

    A document is held out when the hash of its content says so: the same text is never on both sides, however often it
    occurs, in whatever source, and whatever else is added.

    Args:
        pins: folder of the run for what it has opened; without ``data.cache`` also for the tokens.
        processes, progress: of the tokenizing, see ``entry``.

    Raises:
        RubatoError: the corpus is missing, unreadable, empty, damaged, shorter than one window of
            ``data.sequence_length``, or another one than this run has begun with.
    """
    data = spec.data
    cache = Path(data.cache).expanduser() if data.cache else pins
    pin = pins / f"{_choice(data)}.json"
    corpus = _pinned(data, pin, cache)
    if corpus is None:
        try:
            cache.mkdir(parents=True, exist_ok=True)
            pins.mkdir(parents=True, exist_ok=True)
            with _alone(cache / f".{pin.stem}.lock"):
                corpus = _pinned(data, pin, cache) or _made(data, pin, cache, processes, progress)
        except OSError as error:
            raise _unwritten(cache, error) from error
    check_length(data, corpus)
    return corpus


def _made(data: DataSpec, pin: Path, cache: Path, processes: int, progress: Progress) -> Corpus:
    corpus = _opened(data, _entries(data, cache, processes, progress), cache, pin.parent)
    _pin(data, pin, corpus)
    return corpus


def _unwritten(cache: Path, error: OSError) -> RubatoError:
    cause, fix = f"{cache} cannot be written: {error.strerror or error}", "give a folder with room and write access"
    problem = FieldProblem("data.cache", cause, fix)
    return RubatoError(f"data.cache: {cause}", fix=fix, code="cache_unwritable", status=500, problems=[problem])


def _choice(data: DataSpec) -> str:
    fields = data.model_dump(mode="json", include={"tokenizer", "end_of_document", "vocab_size", "answers_only"})
    sources = [source.model_dump(exclude={"weight", "blend"}) for source in data.train.sources]
    held_out = data.validation.model_dump(mode="json", include={"fraction", "source"})
    text = json.dumps([FORMAT, fields, sources, held_out], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _pinned(data: DataSpec, pin: Path, cache: Path) -> Corpus | None:
    """What the run has opened before, where its tokens are at hand."""
    try:
        keys = [each["key"] for each in json.loads(pin.read_bytes())]
    except FileNotFoundError:
        return None
    if not all((cache / key / INDEX).is_file() for key in keys):
        return None
    return _opened(data, keys, cache, pin.parent)


def _pin(data: DataSpec, pin: Path, corpus: Corpus) -> None:
    """Says what this run reads; whoever is first says so for all."""
    said = json.dumps([{"key": source.key, "digest": source.digest} for source in corpus.all])
    handle, name = tempfile.mkstemp(prefix=f".{pin.name}.", dir=pin.parent)
    try:
        with os.fdopen(handle, "w") as file:
            file.write(said)
            os.fchmod(file.fileno(), 0o644)
        os.link(name, pin)
    except FileExistsError:
        if json.loads(pin.read_bytes()) != json.loads(said):
            cause = "is another corpus here than the one this run has begun with"
            raise Place(data.train).problem(
                "corpus_changed", cause, "put the files back, or begin a new run with what they are now"
            ) from None
    except OSError:  # no hard links here: then the lock alone has to do
        write_durably(pin, said)
    finally:
        Path(name).unlink()


def _entries(data: DataSpec, cache: Path, processes: int, progress: Progress) -> list[str]:
    """The entries of the sources; they are held apart by one threshold, so that no text is on both sides of a blend."""
    if data.validation.source is not None:
        return _entries_apart(data, data.validation.source, cache, processes, progress)
    threshold = int(data.validation.fraction * 2**HASH_BITS)
    found = [entry(Recipe.of(place, data, threshold), cache, processes, progress) for place in places(data.train)]
    counts = [json.loads((folder / INDEX).read_bytes()) for folder in found]
    if threshold and not any(each["held_out"] for each in counts) and sum(each["documents"] for each in counts) > 1:
        # A share of few documents may be none of them; then the first candidate is held out.
        threshold = min(each["lowest"] for each in counts) + 1
        found = [entry(Recipe.of(place, data, threshold), cache, processes, progress) for place in places(data.train)]
    return [folder.name for folder in found]


def _entries_apart(
    data: DataSpec, validation: SourceSpec, cache: Path, processes: int, progress: Progress
) -> list[str]:
    """The entries of the sources without the documents of the validation source, and the entry of that one, last."""
    all_of_it = replace(Recipe.of(Place(validation, VALIDATION), data, 2**HASH_BITS), hashes=True)
    held_out = entry(all_of_it, cache, processes, progress)
    found = [
        entry(replace(Recipe.of(place, data, 0), left_out=held_out / HASHES), cache, processes, progress)
        for place in places(data.train)
    ]
    return [folder.name for folder in (*found, held_out)]


def _opened(data: DataSpec, keys: list[str], cache: Path, pins: Path) -> Corpus:
    sources = []
    apart = data.validation.source
    for source, key in zip([*data.train.sources, *([apart] if apart else [])], keys, strict=True):
        index = json.loads((cache / key / INDEX).read_bytes())
        train, held_out = (
            Stream(
                _map(cache / key / f"{split}.tokens", index["type"]),
                _map(cache / key / f"{split}.ends", "<u8"),
                _map(cache / key / f"{split}.answers", "<u1") if data.answers_only else None,
            )
            for split in SPLITS
        )
        weight = Fraction(str(source.weight))
        sources.append(
            TokenSource(train, held_out, weight, key, index["digest"], index["bad"], tuple(index["examples"]))
        )
        if index["bad"]:
            log.warning("%d records were passed over, the first: %s", index["bad"], index["examples"][0])
    return Corpus(tuple(sources[: len(data.train.sources)]), pins, sources[-1] if apart else None)


def check_length(data: DataSpec, corpus: Corpus) -> None:
    """Refuses a corpus that fills no window. Raises RubatoError."""
    window = data.sequence_length + 1  # a target for each token
    for place, source in zip(places(data.train), corpus.sources, strict=True):
        count = len(source.train.tokens)
        if not count or (data.packing == "stream" and count < window):
            cause = f"{count} tokens to train on are fewer than a window of {window} (data.sequence_length + 1)"
            raise place.problem("corpus_too_short", cause, "add text, or use a shorter data.sequence_length")
    held_out = max(len(source.held_out.tokens) for source in corpus.evaluated)
    if data.validation.every and (not held_out or (data.packing == "stream" and held_out < window)):
        field = "data.validation.fraction" if corpus.validation is None else f"{VALIDATION}.path"
        share = f"{data.validation.fraction} of {corpus.documents} documents" if corpus.validation is None else "it"
        cause = f"{share}: {held_out} tokens are held out, fewer than a window of {window}"
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


def _map(path: Path, kind: str) -> NDArray[Any]:
    if not path.stat().st_size:
        return np.empty(0, kind)  # an empty file cannot be mapped
    return np.asarray(np.memmap(path, kind, mode="r"))  # the plain array is read from faster
