"""Finds the files of a corpus and reads them document by document."""

from __future__ import annotations

import glob
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rubato.problems import FieldProblem, RubatoError
from rubato.spec import CorpusSpec

_GLOB_CHARACTERS = frozenset("*?[")
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
    found = _stdlib() if spec.path is None else _matching(spec, spec.path)
    sources = sorted((source for source in found if source.size), key=lambda source: source.name)
    if not sources:
        held = f"{len(found)} empty files" if found else "no sources on this machine"
        where = spec.path or f"'{spec.builtin}'"
        raise corpus_problem(spec, "corpus_empty", f"{where} holds {held}", "give files that hold text")
    return sources


def _matching(spec: CorpusSpec, pattern: str) -> list[Source]:
    expanded = Path(pattern).expanduser()
    if expanded.is_file() or not _GLOB_CHARACTERS.intersection(pattern):
        try:
            return [_source(expanded, Path(expanded.name))]
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
    parts = expanded.parts
    first = next(index for index, part in enumerate(parts) if _GLOB_CHARACTERS.intersection(part))
    base, wild = Path(*parts[:first]), str(Path(*parts[first:]))
    found = []
    for name in glob.iglob(wild, root_dir=base, recursive=True):  # noqa: PTH207 (Path.glob also takes hidden files)
        try:
            found.append(_source(base / name, Path(name)))
        except IsADirectoryError:
            continue  # ** matches folders too
        except OSError as error:
            raise unreadable(spec, base / name, error) from error
    if not found:
        cause = f"no file matches {expanded.absolute()}"
        raise corpus_problem(spec, "corpus_missing", cause, "correct the glob, or put the files there")
    return found


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


def documents(source: Source, largest: int) -> Iterator[bytes]:
    """The documents of a file: the file itself, or pieces of at most ``largest`` bytes that end with a line."""
    with source.path.open("rb") as file:
        rest = b""
        while block := file.read(largest - len(rest)):
            block = rest + block
            end = len(block) if len(block) < largest else block.rfind(b"\n") + 1 or len(block)
            yield block[:end]
            rest = block[end:]
        if rest:
            yield rest
