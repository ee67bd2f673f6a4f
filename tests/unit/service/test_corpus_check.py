"""The look for a corpus ends: at the first file, or when its time is over."""

from __future__ import annotations

from pathlib import Path

import pytest

from rubato.corpus import Place, find_sources, sources
from rubato.problems import SpecError
from rubato.spec import CorpusSpec
from service.jobs.corpus_check import check_corpus

ELSEWHERE = "http://ray.test:8265"


def tree(folder: Path) -> None:
    for number in range(50):
        (folder / f"d{number}").mkdir()
        (folder / f"d{number}" / "a.txt").write_text("text")


def test_the_search_stops_at_the_first_file(tmp_path: Path) -> None:
    tree(tmp_path)
    looks: list[None] = []
    next(sources(Place(CorpusSpec(path=f"{tmp_path}/**/*.txt")), lambda: looks.append(None)))
    assert len(looks) < 6


async def test_what_cannot_be_told_in_time_is_left_to_the_workers(tmp_path: Path) -> None:
    tree(tmp_path)
    corpus = CorpusSpec(path=f"{tmp_path}/**/none.txt")
    await check_corpus([Place(corpus)], ELSEWHERE, patience_s=0.0)
    with pytest.raises(SpecError, match="no file matches"):
        await check_corpus([Place(corpus)], ELSEWHERE, patience_s=60.0)


async def test_a_file_whose_name_looks_like_a_glob_is_a_file(tmp_path: Path) -> None:
    path = tmp_path / "a[1].txt"
    path.write_text("text")
    await check_corpus([Place(CorpusSpec(path=str(path)))], ELSEWHERE)
    assert [Path(source.location) for source in find_sources(Place(CorpusSpec(path=str(path))))] == [path]


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("*.txt", ["a.txt"]),
        ("**/*.txt", ["a.txt", "b/c.txt", "b/d/e.txt"]),
        ("**/**/*.txt", ["a.txt", "b/c.txt", "b/d/e.txt"]),
        ("b/**", ["c.txt", "d/e.txt"]),
        ("*/d/?.txt", ["b/d/e.txt"]),
        ("[ab]*", ["a.txt"]),
        (".*", [".hidden.txt"]),
    ],
)
def test_globs_find_what_a_shell_finds(tmp_path: Path, pattern: str, names: list[str]) -> None:
    for name in ("a.txt", "b/c.txt", "b/d/e.txt", ".hidden.txt", "b/.git/f.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("text")
    assert [source.name for source in find_sources(Place(CorpusSpec(path=f"{tmp_path}/{pattern}")))] == names
