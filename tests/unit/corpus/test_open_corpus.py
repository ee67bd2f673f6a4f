"""A corpus is the same for all, keeps what it holds out apart, and says clearly why it cannot be opened."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from rubato.corpus.open import Corpus, open_corpus
from rubato.problems import RubatoError
from rubato.spec import JobSpec


def lines(first: int, count: int) -> str:
    return "".join(f"line {number} of this text\n" for number in range(first, first + count))


def trained(corpus: Corpus) -> bytes:
    return bytes(corpus.sources[0].train.tokens)


def held_out(corpus: Corpus) -> bytes:
    return bytes(corpus.sources[0].held_out.tokens)


def documents(stream: bytes) -> list[bytes]:
    return stream.split(b"\0")[:-1]


def test_every_byte_of_every_file_is_in_one_of_the_streams(tmp_path: Path, make_spec) -> None:
    text = lines(0, 20_000)
    (tmp_path / "a.txt").write_text(text)
    (tmp_path / "b.txt").write_text("a file without a newline at its end")
    (tmp_path / "empty.txt").touch()
    spec = make_spec(data={"train": {"path": str(tmp_path / "*.txt")}, "validation": {"fraction": 0.2}})
    corpus = open_corpus(spec, tmp_path / "cache")
    kept, apart = documents(trained(corpus)), documents(held_out(corpus))
    assert sorted(b"".join(kept + apart)) == sorted((text + "a file without a newline at its end").encode())
    assert all(document.endswith(b"\n") for document in kept + apart if b"newline" not in document)
    assert corpus.documents == len(kept) + len(apart)
    assert 0.1 < len(held_out(corpus)) / (len(trained(corpus)) + len(held_out(corpus))) < 0.3


def test_what_is_held_out_follows_from_the_content_alone(tmp_path: Path, make_spec) -> None:
    folders = tmp_path / "one", tmp_path / "two"
    for folder in folders:
        folder.mkdir()
    for number in range(200):
        (folders[0] / f"{number}.txt").write_text(lines(number, 5))
        (folders[1] / f"{(number * 7) % 200}-other.txt").write_text(lines(number, 5))
        (folders[1] / f"{number}-copy.txt").write_text(lines(number, 5))
    corpora = [
        open_corpus(
            make_spec(data={"train": {"path": f"{folder}/*.txt"}, "validation": {"fraction": 0.1}}), folder / "cache"
        )
        for folder in folders
    ]
    apart = [set(documents(held_out(corpus))) for corpus in corpora]
    assert apart[0] == apart[1]
    assert 5 < len(apart[0]) < 40
    for corpus, out in zip(corpora, apart, strict=True):
        assert not out & set(documents(trained(corpus)))  # copies included


def test_a_small_corpus_of_one_file_still_holds_something_out(tmp_path: Path, make_spec) -> None:
    (tmp_path / "one.txt").write_text(lines(0, 2000))
    data = {"train": {"path": str(tmp_path / "one.txt")}, "validation": {"fraction": 0.001, "every": 5}}
    corpus = open_corpus(make_spec(data=data), tmp_path / "cache")
    assert len(documents(held_out(corpus))) == 1


def test_nothing_is_held_out_when_none_is_asked_for(tmp_path: Path, make_spec) -> None:
    (tmp_path / "one.txt").write_text(lines(0, 2000))
    data = {"train": {"path": str(tmp_path / "one.txt")}, "validation": {"fraction": 0.0}}
    assert len(held_out(open_corpus(make_spec(data=data), tmp_path / "cache"))) == 0


def test_a_run_keeps_its_corpus_when_the_files_change(tmp_path: Path, make_spec) -> None:
    text = tmp_path / "one.txt"
    text.write_text(lines(0, 2000))
    spec = make_spec(data={"train": {"path": str(text)}})
    before = open_corpus(spec, tmp_path / "cache")
    text.write_text("something else")
    after = open_corpus(spec, tmp_path / "cache")
    assert after.digest == before.digest
    assert trained(after) == trained(before)


def test_order_does_not_depend_on_where_the_corpus_lies(tmp_path: Path, make_spec) -> None:
    digests = set()
    for place in ("z/deep/er", "a"):
        folder = tmp_path / place
        (folder / "sub").mkdir(parents=True)
        for number in (3, 1, 2):
            (folder / "sub" / f"{number}.txt").write_text(lines(number, 50))
        spec = make_spec(data={"train": {"path": f"{folder}/**/*.txt"}})
        digests.add(open_corpus(spec, folder / "cache").digest)
    assert len(digests) == 1


def test_the_library_of_python_is_a_corpus(tmp_path: Path, make_spec) -> None:
    corpus = open_corpus(make_spec(), tmp_path)
    text = trained(corpus) + held_out(corpus)
    assert len(text) > 5_000_000
    assert b"class OrderedDict(dict)" in text
    assert 0.003 < len(held_out(corpus)) / len(text) < 0.06


def _digest(spec: JobSpec, cache: Path) -> str:
    return open_corpus(spec, cache).digest


def test_many_workers_may_open_it_at_once(tmp_path: Path, make_spec) -> None:
    (tmp_path / "one.txt").write_text(lines(0, 20_000))
    spec = make_spec(data={"train": {"path": str(tmp_path / "one.txt")}})
    cache = tmp_path / "cache"
    with ProcessPoolExecutor(4, multiprocessing.get_context("forkserver")) as pool:
        digests = {future.result() for future in [pool.submit(_digest, spec, cache) for _ in range(8)]}
    assert digests == {open_corpus(spec, cache).digest}
    assert len([path for path in cache.iterdir() if path.is_dir()]) == 1


def refusal(make_spec, cache: Path, **data: object) -> RubatoError:
    with pytest.raises(RubatoError) as caught:
        open_corpus(make_spec(data=data), cache)
    assert not cache.exists() or not [path for path in cache.iterdir() if path.is_dir()] or "short" in caught.value.code
    return caught.value


def test_a_missing_file_is_named(tmp_path: Path, make_spec) -> None:
    error = refusal(make_spec, tmp_path / "cache", train={"path": str(tmp_path / "gone.txt")})
    assert error.code == "corpus_missing"
    assert error.problems[0].field == "data.train.path"
    assert f"{tmp_path}/gone.txt does not exist" in str(error)


def test_a_glob_without_matches_is_named(tmp_path: Path, make_spec) -> None:
    error = refusal(make_spec, tmp_path / "cache", train={"path": f"{tmp_path}/**/*.text"})
    assert error.code == "corpus_missing"
    assert "no file matches" in str(error)


def test_a_folder_is_refused_with_the_glob_that_was_meant(tmp_path: Path, make_spec) -> None:
    error = refusal(make_spec, tmp_path / "cache", train={"path": str(tmp_path)})
    assert f"{tmp_path}/**/*.txt" in error.fix


def test_empty_files_are_no_corpus(tmp_path: Path, make_spec) -> None:
    (tmp_path / "a.txt").touch()
    (tmp_path / "b.txt").touch()
    error = refusal(make_spec, tmp_path / "cache", train={"path": f"{tmp_path}/*.txt"})
    assert error.code == "corpus_empty"
    assert "2 empty files" in str(error)


def test_an_unreadable_file_is_named(tmp_path: Path, make_spec) -> None:
    looping = tmp_path / "loop.txt"
    looping.symlink_to(looping)  # nobody can read it, root neither
    error = refusal(make_spec, tmp_path / "cache", train={"path": str(looping)})
    assert error.code == "corpus_unreadable"
    assert "loop.txt" in str(error)


def test_a_corpus_shorter_than_a_window_is_refused(tmp_path: Path, make_spec) -> None:
    (tmp_path / "a.txt").write_text("0123456789abcde")  # with the separator: 16 tokens, one window needs 17
    error = refusal(make_spec, tmp_path / "cache", train={"path": str(tmp_path / "a.txt")})
    assert error.code == "corpus_too_short"
    assert error.problems[0].field == "data.train.path"
    (tmp_path / "a.txt").write_text("0123456789abcdef")
    assert (
        len(trained(open_corpus(make_spec(data={"train": {"path": str(tmp_path / "a.txt")}}), tmp_path / "new"))) == 17
    )


def test_too_little_held_out_is_refused_when_it_is_wanted(tmp_path: Path, make_spec) -> None:
    (tmp_path / "a.txt").write_text("one document, which cannot be on both sides")
    data = {"train": {"path": str(tmp_path / "a.txt")}}
    error = refusal(make_spec, tmp_path / "cache", **data, validation={"every": 5})
    assert error.problems[0].field == "data.validation.fraction"
    open_corpus(make_spec(data=data), tmp_path / "cache")
