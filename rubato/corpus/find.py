"""Finds the files of a corpus, by one rule for the control plane that checks it and the workers that read it."""

from __future__ import annotations

import fnmatch
import io
import json
import os
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

from rubato.corpus import remote
from rubato.corpus.place import Place

_GLOB_CHARACTERS = frozenset("*?[")
_LONGEST, _MOST_WILD = 4096, 32
_STDLIB_SUFFIXES = frozenset({".py", ".txt", ".rst"})
# Tests are half of the library, installed packages are not part of it, and what is generated names the machine.
_STDLIB_LEFT_OUT = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})
_STDLIB_GENERATED = "_sysconfigdata"


@dataclass(frozen=True)
class Source:
    """A file of a corpus.

    Attributes:
        name: gives its place in the order and is the same wherever the corpus lies.
        location: its path, or its URL.
        size: bytes.
        stamp: another one for another content, as far as can be told without reading it.
    """

    name: str
    location: str
    size: int
    stamp: str

    def is_there(self) -> bool:
        """Whether it can be opened, as far as it is known to be missing. Raises OSError."""
        try:
            with self.open():
                return True
        except FileNotFoundError:
            return False

    def open(self) -> BinaryIO:
        """Its bytes, which can be read from any place. Raises OSError."""
        if remote.is_remote(self.location):
            return remote.open_file(self.location)
        return cast(BinaryIO, io.open(self.location, "rb"))  # noqa: UP020 (whoever asks closes it)


def find_sources(place: Place) -> list[Source]:
    """The files of a corpus that hold anything, in an order that does not depend on the machine.

    Raises:
        RubatoError: nothing is there, what is there is not a file, or all of it is empty.
    """
    by_name = {source.name: source for source in sources(place)}  # two ways through a glob may lead to one file
    return [by_name[name] for name in sorted(by_name)]


def sources(place: Place, look: Callable[[], None] = lambda: None) -> Iterator[Source]:
    """The files of a corpus that hold anything, in the order they are found.

    Args:
        look: called before each folder that is looked into; what it raises ends the search.

    Raises:
        RubatoError: as ``find_sources``, when the search is at its end.
    """
    found = holding = 0
    for source in _all(place, look):
        found += 1
        if source.size:
            holding += 1
            yield source
    if not holding:
        held = f"{found} empty files" if found else "no sources on this machine"
        where = place.spec.path or f"'{place.spec.builtin}'"
        raise place.problem("corpus_empty", f"{where} holds {held}", "give files that hold text")


def _all(place: Place, look: Callable[[], None]) -> Iterator[Source]:
    path = place.spec.path
    if path is None:
        return _stdlib()
    return _remote(place, path) if remote.is_remote(path) else _matching(place, corpus_path(place, path), look)


def corpus_path(place: Place, pattern: str) -> Path:
    """The path or glob of a corpus with its ``~`` resolved. Raises RubatoError for what can be none."""
    fix = "give the path of a text file, or a glob"
    if "\0" in pattern:
        raise place.problem("corpus_path", "no path holds a NUL character", fix)
    if len(pattern) > _LONGEST:
        raise place.problem("corpus_path", f"no path is longer than {_LONGEST} characters", fix)
    try:
        expanded = Path(pattern).expanduser()
    except RuntimeError as error:
        raise place.problem("corpus_path", f"{pattern}: this machine has no such user", fix) from error
    wild = sum(_is_wild(part) for part in expanded.parts)
    if wild > _MOST_WILD:
        raise place.problem("corpus_path", f"{wild} parts with wildcards are more than {_MOST_WILD}", fix)
    return expanded


def fixed_part(path: Path) -> Path:
    """The folder that what a path or glob means must lie below."""
    parts = list(path.parts[:-1])
    first = next((index for index, part in enumerate(parts) if _is_wild(part)), len(parts))
    return Path(*parts[:first])


def _matching(place: Place, expanded: Path, look: Callable[[], None]) -> Iterator[Source]:
    look()
    try:
        if expanded.is_file() or not any(_is_wild(part) for part in expanded.parts):
            yield _source(expanded, Path(expanded.name))
            return
    except FileNotFoundError as error:
        cause = f"{expanded.absolute()} does not exist"
        raise place.problem("corpus_missing", cause, "give the path of a text file, or a glob") from error
    except IsADirectoryError as error:
        yield from _dataset(place, expanded, error)
        return
    except OSError as error:
        raise place.unreadable(expanded, error) from error
    # Names are relative to the last folder without a wildcard, so a corpus that moves keeps its order.
    base = fixed_part(expanded)
    found = False
    for path in _expand(base, expanded.parts[len(base.parts) :], look):
        try:
            source = _source(path, path.relative_to(base))
        except IsADirectoryError:
            continue  # ** matches folders too
        except OSError as error:
            raise place.unreadable(path, error) from error
        found = True
        yield source
    if not found:
        cause = f"no file matches {expanded.absolute()}"
        raise place.problem("corpus_missing", cause, "correct the glob, or put the files there")


def _dataset(place: Place, folder: Path, error: IsADirectoryError) -> Iterator[Source]:
    """The parts of a dataset that `datasets` has saved in a folder."""
    fix = f"name the files in it, such as {folder / '**' / '*.txt'}"
    cause = f"{folder.absolute()} is a folder"
    try:
        if (folder / "dataset_dict.json").is_file():
            splits = sorted(each.name for each in folder.iterdir() if (each / "state.json").is_file())
            cause += f" of a dataset with the splits {', '.join(splits) or 'none'}"
            fix = f"name one of them, such as {folder / (splits[0] if splits else 'train')}"
        elif (folder / "state.json").is_file():
            parts = json.loads((folder / "state.json").read_bytes()).get("_data_files", [])
            for part in parts:
                yield _source(folder / part["filename"], Path(part["filename"]))
            return
    except FileNotFoundError as missing:
        raise place.problem(
            "corpus_missing", f"{missing.filename} is missing from the dataset", "save the dataset again"
        ) from missing
    except (ValueError, TypeError, KeyError) as broken:
        raise place.problem(
            "corpus_broken", f"{folder / 'state.json'} is not that of a dataset", "save the dataset again"
        ) from broken
    except OSError as unseen:
        raise place.unreadable(folder, unseen) from unseen
    raise place.problem("corpus_missing", cause, fix) from error


def _remote(place: Place, url: str) -> Iterator[Source]:
    found = False
    try:
        for name, location, size, stamp in remote.listing(url):
            found = True
            yield Source(name, location, size, stamp)
    except FileNotFoundError as error:
        raise place.problem("corpus_missing", f"{url} does not exist", "correct the URL, or put it there") from error
    except IsADirectoryError as error:
        fix = f"name the files in it, such as {url.rstrip('/')}/**/*.jsonl"
        raise place.problem("corpus_missing", f"{url} is a folder", fix) from error
    except NotImplementedError as error:
        raise place.problem("corpus_path", f"{url} cannot be listed", "name one file without wildcards") from error
    except OSError as error:
        raise place.unreadable(url, error) from error
    if not found:
        raise place.problem("corpus_missing", f"no file matches {url}", "correct the glob, or put the files there")


def _expand(folder: Path, parts: Sequence[str], look: Callable[[], None]) -> Iterator[Path]:
    """What a shell finds: wildcards pass over hidden names, and ``**`` is any number of folders, also none.

    Not glob's own, which can look through a whole file system without coming back to whoever asked.
    """
    part, rest = parts[0], parts[1:]
    if not _is_wild(part):
        path = folder / part
        if os.path.lexists(path):
            yield from _expand(path, rest, look) if rest else [path]
        return
    look()
    try:
        with os.scandir(folder) as listing:
            entries = sorted(listing, key=lambda entry: entry.name)
    except OSError:
        return  # no folder, or none of ours; if nothing else matches that is what is told
    if part == "**":
        while rest and rest[0] == "**":
            rest = rest[1:]
        if rest:
            yield from _expand(folder, rest, look)
        for entry in entries:
            if entry.name.startswith("."):
                continue
            if entry.is_dir():
                yield from _expand(folder / entry.name, ("**", *rest), look)
            elif not rest:
                yield folder / entry.name
        return
    for entry in entries:
        if fnmatch.fnmatchcase(entry.name, part) and (part.startswith(".") or not entry.name.startswith(".")):
            path = folder / entry.name
            if not rest:
                yield path
            elif entry.is_dir():
                yield from _expand(path, rest, look)


def _is_wild(part: str) -> bool:
    return not _GLOB_CHARACTERS.isdisjoint(part)


def _stdlib() -> Iterator[Source]:
    root = Path(sysconfig.get_path("stdlib"))
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in _STDLIB_LEFT_OUT]
        for path in (Path(folder, name) for name in names):
            if path.suffix in _STDLIB_SUFFIXES and not path.name.startswith(_STDLIB_GENERATED):
                yield _source(path, path.relative_to(root))


def _source(path: Path, name: Path) -> Source:
    if path.is_dir():
        raise IsADirectoryError(path)
    state = path.stat()
    return Source(name.as_posix(), str(path), state.st_size, f"{state.st_size}-{state.st_mtime_ns}")
