"""Tokenizes a source of a corpus once: in parts, of which each that is finished stays, into one entry of a cache.

An entry is a folder named after everything its tokens depend on: the content of the files, how they are read, the
tokenizer, and what is held out. So whoever asks for the same gets it at once, and an entry never changes.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rubato.corpus.find import Source, find_sources
from rubato.corpus.formats import is_part_of_another, reader_for
from rubato.corpus.identity import Identities
from rubato.corpus.place import Place
from rubato.corpus.records import Answers, BadRecords, Document, Reader, Stretch
from rubato.corpus.token_files import beyond_vocabulary
from rubato.durable import sync_folder, write_durably
from rubato.spec import DataSpec
from rubato.tokenizers import Tokenizer, open_tokenizer, tokenizer_problem

FORMAT = 2
SPLITS = ("train", "held_out")
INDEX, HASHES = "index.json", "hashes"
HASH_BITS = 64
"""Of the hash of a document that decides whether it is held out."""

_LARGEST_DOCUMENT, _SMALLEST_PIECE = 64 * 1024, 4 * 1024
_PIECES = 64  # a corpus of one file is cut into about as many, so that some can be held out
_PART_BYTES = 64 << 20
_BATCH_BYTES, _BATCH_DOCUMENTS = 1 << 20, 4096

Progress = Callable[[int, int], None]
"""Hears of bytes that are done, and of all that there are."""


class Item(NamedTuple):
    """A stretch of a file, to be read."""

    source: Source
    stretch: Stretch


@dataclass(frozen=True)
class Recipe:
    """What the tokens of a source depend on beside its files. Can be sent to another process.

    Attributes:
        threshold: documents whose hash is below it are held out.
        answers: whether it is kept which tokens are answers.
        hashes: whether the hashes of documents are kept.
        left_out: a file of such hashes, ascending; documents with one of them are passed over.
        largest: bytes of a document of plain text.
    """

    place: Place
    tokenizer: str
    end: str | None
    vocab_size: int
    threshold: int
    answers: bool = False
    hashes: bool = False
    left_out: Path | None = None
    largest: int = _LARGEST_DOCUMENT

    @classmethod
    def of(cls, place: Place, data: DataSpec, threshold: int) -> Recipe:
        """The recipe for a source of a spec."""
        return cls(place, data.tokenizer, data.end_of_document, data.vocab_size, threshold, data.answers_only)

    def in_left_out(self) -> Callable[[int], bool]:
        """Whether a document with this hash is passed over."""
        if self.left_out is None:
            return lambda place: False
        hashes = np.fromfile(self.left_out, "<u8")

        def found(place: int) -> bool:
            at = int(np.searchsorted(hashes, np.uint64(place)))
            return at < len(hashes) and int(hashes[at]) == place

        return found

    @property
    def extras(self) -> list[str]:
        """What is kept beside tokens and ends."""
        return [*(["answers"] if self.answers else []), *(["hashes"] if self.hashes else [])]

    def reader(self, source: Source, tokenizer: Tokenizer) -> Reader:
        """What reads a file. Raises RubatoError when nothing does."""
        return reader_for(self.place, source, tokenizer, self.vocab_size, self.largest, answers=self.answers)

    def open_tokenizer(self) -> Tokenizer:
        """The tokenizer. Raises RubatoError when it is none, or when it has more tokens than the model."""
        tokenizer = open_tokenizer(self.tokenizer, self.end, self.vocab_size)
        if tokenizer.size > self.vocab_size:
            cause = f"{self.tokenizer} has {tokenizer.size} tokens, the model is for {self.vocab_size}"
            raise tokenizer_problem(cause, "use the model's own tokenizer, or a larger data.vocab_size")
        return tokenizer


@dataclass
class Count:
    """What a part, or all of an entry, came to. ``lowest`` is the smallest hash of a document."""

    documents: int = 0
    held_out: int = 0
    tokens: int = 0
    lowest: int = 2**HASH_BITS
    bad: int = 0
    left_out: int = 0

    def add(self, other: Count) -> None:
        """Adds what another came to."""
        self.documents += other.documents
        self.held_out += other.held_out
        self.tokens += other.tokens
        self.lowest = min(self.lowest, other.lowest)
        self.bad += other.bad
        self.left_out += other.left_out


def token_type(vocab_size: int) -> np.dtype[Any]:
    """The narrowest type that holds every token."""
    return np.dtype("<u1" if vocab_size <= 2**8 else "<u2" if vocab_size <= 2**16 else "<u4")


def entry(recipe: Recipe, cache: Path, processes: int = 0, progress: Progress = lambda done, whole: None) -> Path:
    """The folder with the tokens of a source, made when it is not there.

    Args:
        processes: how many tokenize beside one another; 0: this one, with the threads of its library.

    Raises:
        RubatoError: the source cannot be used.
    """
    files = [source for source in find_sources(recipe.place) if not is_part_of_another(recipe.place, source)]
    tokenizer = recipe.open_tokenizer()
    folder = cache / _key(recipe, tokenizer, files, cache)
    if not (folder / INDEX).is_file():
        parts = cache / f".{folder.name}.parts"
        parts.mkdir(parents=True, exist_ok=True)
        items = planned(recipe, files, tokenizer)
        _write_parts(recipe, items, parts, processes, progress)
        _merge(recipe, len(items), parts, folder)
        shutil.rmtree(parts, ignore_errors=True)
    return folder


def _key(recipe: Recipe, tokenizer: Tokenizer, files: Sequence[Source], cache: Path) -> str:
    spec = recipe.place.spec
    settings = [spec.builtin is not None, spec.format, spec.field, spec.token_type, spec.bad_records]
    known = [
        FORMAT,
        settings,
        tokenizer.digest,
        tokenizer.template,
        recipe.vocab_size,
        recipe.threshold,
        recipe.answers,
        recipe.hashes,
        recipe.left_out.parent.name if recipe.left_out else None,
    ]
    digests = Identities(cache).of(recipe.place, files)
    content = [(source.name, digest) for source, digest in zip(files, digests, strict=True)]
    return hashlib.sha256(json.dumps([known, content]).encode()).hexdigest()[:32]


def planned(recipe: Recipe, files: Sequence[Source], tokenizer: Tokenizer) -> list[list[Item]]:
    """The parts of a source, each of about 64 MB."""
    parts: list[list[Item]] = []
    room = 0
    for source in files:
        reader = recipe.reader(source, tokenizer)
        try:
            stretches = reader.stretches(source, _PART_BYTES)
        except OSError as error:
            raise recipe.place.unreadable(source.location, error) from error
        for stretch in stretches:
            if room < stretch.bytes or not parts:
                parts.append([])
                room = _PART_BYTES
            parts[-1].append(Item(source, stretch))
            room -= stretch.bytes
    return parts


def _write_parts(recipe: Recipe, parts: list[list[Item]], folder: Path, processes: int, progress: Progress) -> None:
    sizes = [sum(item.stretch.bytes for item in part) for part in parts]
    largest = max(_SMALLEST_PIECE, min(_LARGEST_DOCUMENT, sum(sizes) // _PIECES))
    recipe = Recipe(**{**recipe.__dict__, "largest": largest})
    left = [number for number in range(len(parts)) if not _counted(folder, number).is_file()]
    done = sum(sizes) - sum(sizes[number] for number in left)
    progress(done, sum(sizes))
    if processes < 2 or len(left) < 2:
        for number in left:
            begun = done

            def within(read: int, begun: int = begun) -> None:
                progress(begun + read, sum(sizes))

            write_part(recipe, parts[number], folder, number, within)
            done += sizes[number]
            progress(done, sum(sizes))
        return
    # Not forked: whoever asks may have threads.
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        futures: dict[Future[None], int] = {
            pool.submit(write_part, recipe, parts[number], folder, number): number for number in left
        }
        try:
            for future in as_completed(futures):
                future.result()
                done += sizes[futures[future]]
                progress(done, sum(sizes))
        finally:
            pool.shutdown(cancel_futures=True)


def write_part(
    recipe: Recipe, items: list[Item], folder: Path, number: int, progress: Callable[[int], None] = lambda read: None
) -> None:
    """Tokenizes a part into files of its own; the count, written last, says that they are complete.

    Raises:
        RubatoError: it cannot be read, or holds what the spec does not let pass.
    """
    tokenizer, left_out = recipe.open_tokenizer(), recipe.in_left_out()
    kind, count, bad = token_type(recipe.vocab_size), Count(), BadRecords(recipe.place)
    with tempfile.TemporaryDirectory(prefix=f".{number}-", dir=folder) as scratch:
        out = {split: _Out(Path(scratch), split, kind, recipe.extras) for split in SPLITS}
        read = 0
        for batch in _batches(recipe, items, tokenizer, bad):
            for document, (tokens, answers) in zip(batch, _tokens(recipe, batch, tokenizer), strict=True):
                content = _content(document)
                place = int.from_bytes(hashlib.blake2b(content, digest_size=HASH_BITS // 8).digest())
                read += len(content)
                if left_out(place):
                    count.left_out += 1
                    continue
                held_out = place < recipe.threshold
                out["held_out" if held_out else "train"].add(tokens, answers, place)
                count.add(Count(1, held_out, len(tokens), place))
            progress(read)
        count.bad = bad.count
        for split in SPLITS:
            out[split].close()
            for suffix in out[split].suffixes:
                (Path(scratch) / f"{split}.{suffix}").rename(folder / f"{number}.{split}.{suffix}")
    write_durably(_counted(folder, number), json.dumps({**asdict(count), "examples": bad.examples}))


class _Out:
    """The tokens of one split, the length of each document, and what else is to be kept."""

    def __init__(self, folder: Path, split: str, kind: np.dtype[Any], extras: Sequence[str]) -> None:
        self._kind = kind
        self.suffixes = ["tokens", "lengths", *extras]
        self._files = {suffix: (folder / f"{split}.{suffix}").open("wb") for suffix in self.suffixes}

    def add(self, tokens: Any, answers: Any, place: int) -> None:
        self._files["tokens"].write(np.ascontiguousarray(tokens, self._kind).data)
        self._files["lengths"].write(len(tokens).to_bytes(8, "little"))
        if "answers" in self._files:
            self._files["answers"].write(answers.data)
        if "hashes" in self._files:
            self._files["hashes"].write(place.to_bytes(HASH_BITS // 8, "little"))

    def close(self) -> None:
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
            file.close()


def _batches(recipe: Recipe, items: list[Item], tokenizer: Tokenizer, bad: BadRecords) -> Iterator[list[Document]]:
    """Documents in lists that are worth a call of the tokenizer; all of a list are text, or all are tokens."""
    batch: list[Document] = []
    room = _BATCH_BYTES
    for document in _documents(recipe, items, tokenizer, bad):
        batch.append(document)
        room -= len(_content(document))
        if room <= 0 or len(batch) == _BATCH_DOCUMENTS:
            yield batch
            batch, room = [], _BATCH_BYTES
    if batch:
        yield batch


def _documents(recipe: Recipe, items: list[Item], tokenizer: Tokenizer, bad: BadRecords) -> Iterator[Document]:
    for source, stretch in items:
        reader: Reader = recipe.reader(source, tokenizer)
        try:
            yield from reader.documents(source, stretch, bad)
        except OSError as error:
            raise recipe.place.unreadable(source.location, error) from error


def _content(document: Document) -> bytes:
    """The bytes by whose hash a document is held out, or not."""
    if isinstance(document, Answers):
        return document.text
    return document if isinstance(document, bytes) else document.tobytes()


def _parts(document: Document) -> tuple[tuple[bytes, bool], ...]:
    """The texts of a document that are tokenized on their own; none where it is tokens."""
    if isinstance(document, Answers):
        return document.parts
    return ((document, False),) if isinstance(document, bytes) else ()


def _tokens(recipe: Recipe, batch: list[Document], tokenizer: Tokenizer) -> Iterator[tuple[Any, Any]]:
    """The tokens of each document, and which of them are answers; those of a text end with the token for that."""
    encoded = iter(tokenizer.encode([text for document in batch for text, _ in _parts(document)]))
    for document in batch:
        if not _parts(document):
            yield document, None
            continue
        pieces = [(next(encoded), answer) for _, answer in _parts(document)]
        tokens = np.append(np.concatenate([each for each, _ in pieces]), np.uint32(tokenizer.end))
        answers = np.concatenate([np.full(len(each), answer, np.uint8) for each, answer in [*pieces, ([0], False)]])
        if int(tokens.max()) >= recipe.vocab_size:
            raise beyond_vocabulary(recipe.place, f"token {int(tokens.max())}", recipe.vocab_size)
        yield tokens, answers


def _counted(folder: Path, number: int) -> Path:
    return folder / f"{number}.json"


def _merge(recipe: Recipe, parts: int, folder: Path, final: Path) -> None:
    """Makes one entry of the parts, and gives it its name when all of it is on disk."""
    count, examples = Count(), []
    for number in range(parts):
        found = json.loads(_counted(folder, number).read_bytes())
        examples += found.pop("examples")
        count.add(Count(**found))
    building = Path(tempfile.mkdtemp(prefix=f".{final.name}.", dir=final.parent))
    try:
        digest = hashlib.sha256()
        for split in SPLITS:
            digest.update(_join(folder, parts, f"{split}.tokens", building))
            for extra in recipe.extras:
                digest.update(_join(folder, parts, f"{split}.{extra}", building))
            digest.update(_join_ends(folder, parts, split, building))
        if recipe.hashes:
            hashes = np.concatenate([np.fromfile(building / f"{split}.hashes", "<u8") for split in SPLITS])
            np.unique(hashes).tofile(building / HASHES)
        index = {**asdict(count), "examples": examples[:8], "digest": digest.hexdigest()}
        index |= {"format": FORMAT, "type": token_type(recipe.vocab_size).str, "vocab_size": recipe.vocab_size}
        write_durably(building / INDEX, json.dumps(index))
        building.chmod(0o755)  # mkdtemp's own would shut out workers that run as another user
        try:
            building.rename(final)
            sync_folder(final.parent)
        except OSError:
            if not (final / INDEX).is_file():
                raise
    finally:
        shutil.rmtree(building, ignore_errors=True)  # gone already when it was renamed


def _join(folder: Path, parts: int, name: str, into: Path) -> bytes:
    digest = hashlib.sha256()
    with (into / name).open("wb") as joined:
        for number in range(parts):
            with (folder / f"{number}.{name}").open("rb") as part:
                while block := part.read(1 << 20):
                    digest.update(block)
                    joined.write(block)
        joined.flush()
        os.fsync(joined.fileno())
    return digest.digest()


def _join_ends(folder: Path, parts: int, split: str, into: Path) -> bytes:
    """Lengths of documents become the places where they end."""
    digest, before = hashlib.sha256(), 0
    with (into / f"{split}.ends").open("wb") as joined:
        for number in range(parts):
            lengths = np.fromfile(folder / f"{number}.{split}.lengths", "<u8")
            if len(lengths):
                ends = np.cumsum(lengths, dtype=np.uint64) + np.uint64(before)
                before = int(ends[-1])
                digest.update(ends.data)
                joined.write(ends.data)
        joined.flush()
        os.fsync(joined.fileno())
    return digest.digest()
