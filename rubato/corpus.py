"""Finds the files of a corpus, by one rule for the control plane that checks it and the workers that read it."""

from __future__ import annotations

import fnmatch
import os
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rubato.problems import FieldProblem, RubatoError
from rubato.spec import CorpusSpec

_GLOB_CHARACTERS = frozenset("*?[")
_LONGEST, _MOST_WILD = 4096, 32
_STDLIB_SUFFIXES = frozenset({".py", ".txt", ".rst"})
# Tests are half of the library, installed packages are not part of it, and what is generated names the machine.
_STDLIB_LEFT_OUT = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})
_STDLIB_GENERATED = "_sysconfigdata"


@dataclass(frozen=True)
class Source:
    """A file of a corpus. ``name`` gives its place in the order and is the same wherever the corpus lies."""

    name: str
    path: Path
    size: int


def corpus_problem(spec: CorpusSpec, code: str, cause: str, fix: str) -> RubatoError:
    """The refusal of a corpus, naming the field that chose it."""
    field = "data.train.path" if spec.builtin is None else "data.train.builtin"
    problem = FieldProblem(field, cause, fix)
    return RubatoError(f"{field}: {cause}", fix=fix, code=code, status=422, problems=[problem])


def find_sources(spec: CorpusSpec) -> list[Source]:
    """The files of a corpus that hold anything, in an order that does not depend on the machine.

    Raises:
        RubatoError: nothing is there, what is there is not a file, or all of it is empty.
    """
    by_name = {source.name: source for source in sources(spec)}  # two ways through a glob may lead to one file
    return [by_name[name] for name in sorted(by_name)]


def sources(spec: CorpusSpec, look: Callable[[], None] = lambda: None) -> Iterator[Source]:
    """The files of a corpus that hold anything, in the order they are found.

    Args:
        look: called before each folder that is looked into; what it raises ends the search.

    Raises:
        RubatoError: as ``find_sources``, when the search is at its end.
    """
    found = holding = 0
    for source in _stdlib() if spec.path is None else _matching(spec, corpus_path(spec, spec.path), look):
        found += 1
        if source.size:
            holding += 1
            yield source
    if not holding:
        held = f"{found} empty files" if found else "no sources on this machine"
        where = spec.path or f"'{spec.builtin}'"
        raise corpus_problem(spec, "corpus_empty", f"{where} holds {held}", "give files that hold text")


def corpus_path(spec: CorpusSpec, pattern: str) -> Path:
    """The path or glob of a corpus with its ``~`` resolved. Raises RubatoError for what can be none."""
    fix = "give the path of a text file, or a glob"
    if "\0" in pattern:
        raise corpus_problem(spec, "corpus_path", "no path holds a NUL character", fix)
    if len(pattern) > _LONGEST:
        raise corpus_problem(spec, "corpus_path", f"no path is longer than {_LONGEST} characters", fix)
    try:
        expanded = Path(pattern).expanduser()
    except RuntimeError as error:
        raise corpus_problem(spec, "corpus_path", f"{pattern}: this machine has no such user", fix) from error
    wild = sum(_is_wild(part) for part in expanded.parts)
    if wild > _MOST_WILD:
        raise corpus_problem(spec, "corpus_path", f"{wild} parts with wildcards are more than {_MOST_WILD}", fix)
    return expanded


def fixed_part(path: Path) -> Path:
    """The folder that what a path or glob means must lie below."""
    parts = list(path.parts[:-1])
    first = next((index for index, part in enumerate(parts) if _is_wild(part)), len(parts))
    return Path(*parts[:first])


def _matching(spec: CorpusSpec, expanded: Path, look: Callable[[], None]) -> Iterator[Source]:
    look()
    try:
        if expanded.is_file() or not any(_is_wild(part) for part in expanded.parts):
            yield _source(expanded, Path(expanded.name))
            return
    except FileNotFoundError as error:
        cause = f"{expanded.absolute()} does not exist"
        raise corpus_problem(spec, "corpus_missing", cause, "give the path of a text file, or a glob") from error
    except IsADirectoryError as error:
        cause = f"{expanded.absolute()} is a folder"
        fix = f"name the files in it, such as {expanded / '**' / '*.txt'}"
        raise corpus_problem(spec, "corpus_missing", cause, fix) from error
    except OSError as error:
        raise unreadable(spec, expanded, error) from error
    # Names are relative to the last folder without a wildcard, so a corpus that moves keeps its order.
    base = fixed_part(expanded)
    found = False
    for path in _expand(base, expanded.parts[len(base.parts) :], look):
        try:
            source = _source(path, path.relative_to(base))
        except IsADirectoryError:
            continue  # ** matches folders too
        except OSError as error:
            raise unreadable(spec, path, error) from error
        found = True
        yield source
    if not found:
        cause = f"no file matches {expanded.absolute()}"
        raise corpus_problem(spec, "corpus_missing", cause, "correct the glob, or put the files there")


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


def _stdlib() -> list[Source]:
    root = Path(sysconfig.get_path("stdlib"))
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in _STDLIB_LEFT_OUT]
        found += [
            _source(path, path.relative_to(root))
            for path in (Path(folder, name) for name in names)
            if path.suffix in _STDLIB_SUFFIXES and not path.name.startswith(_STDLIB_GENERATED)
        ]
    return found


def _source(path: Path, name: Path) -> Source:
    if path.is_dir():
        raise IsADirectoryError(path)
    return Source(name.as_posix(), path, path.stat().st_size)


def unreadable(spec: CorpusSpec, path: Path, error: OSError) -> RubatoError:
    """The refusal of a corpus of which a file cannot be read."""
    cause = f"{path.absolute()} cannot be read: {error.strerror or error}"
    return corpus_problem(spec, "corpus_unreadable", cause, "make it readable for the user the workers run as")
