"""Whatever shape a corpus has, its documents become the same tokens; what is wrong is told with its place."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from rubato.corpus import tokenize
from rubato.corpus.open import Corpus, open_corpus
from rubato.problems import RubatoError
from tests.unit.corpus import corpora
from tests.unit.corpus.corpora import DOCUMENTS, WRITERS

EXPECTED = "".join(text + "\0" for text in DOCUMENTS).encode()


def opened(make_spec, tmp_path: Path, path: Path, **source: object) -> Corpus:
    data = {"train": {"path": str(path), **source}, "validation": {"fraction": 0.0}}
    return open_corpus(make_spec(data=data), tmp_path / "cache")


@pytest.mark.parametrize("name", WRITERS)
def test_every_format_gives_the_same_tokens(name: str, make_spec, tmp_path: Path) -> None:
    file, write, source = WRITERS[name]
    stream = opened(make_spec, tmp_path, write(tmp_path / file), **source).sources[0].train
    assert bytes(stream.tokens) == EXPECTED
    if not name.startswith("flat"):  # these know no documents
        assert np.diff(stream.ends, prepend=0).tolist() == [len(text.encode()) + 1 for text in DOCUMENTS]


@pytest.mark.parametrize("name", ["jsonl", "parquet", "megatron-int32", "flat-uint16", "text"])
def test_many_parts_are_the_same_as_one(name: str, make_spec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In parts of a few hundred bytes, so that stretches begin and end within lines and row groups."""
    monkeypatch.setattr(tokenize, "_PART_BYTES", 777)
    written: list[int] = []
    write_part = tokenize.write_part
    monkeypatch.setattr(
        tokenize, "write_part", lambda *arguments: (written.append(arguments[3]), write_part(*arguments))
    )
    if name == "text":
        path, source = tmp_path / "a.txt", {}
        path.write_text("".join(DOCUMENTS))
        stream = opened(make_spec, tmp_path, path, **source).sources[0].train
        assert bytes(stream.tokens).replace(b"\0", b"") == "".join(DOCUMENTS).encode()
    else:
        file, write, source = WRITERS[name]
        stream = opened(make_spec, tmp_path, write(tmp_path / file), **source).sources[0].train
        assert bytes(stream.tokens) == EXPECTED
    assert len(written) > 3 or name == "flat-uint16"


def test_what_was_finished_is_not_tokenized_again(make_spec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenize, "_PART_BYTES", 4000)
    path = corpora.jsonl(tmp_path / "a.jsonl")
    write_part, written = tokenize.write_part, list[int]()

    def killed_after_two(*arguments) -> None:
        if len(written) == 2:
            raise KeyboardInterrupt
        write_part(*arguments)
        written.append(arguments[3])

    monkeypatch.setattr(tokenize, "write_part", killed_after_two)
    with pytest.raises(KeyboardInterrupt):
        opened(make_spec, tmp_path, path)
    assert written == [0, 1]
    monkeypatch.setattr(
        tokenize, "write_part", lambda *arguments: (written.append(arguments[3]), write_part(*arguments))
    )
    assert bytes(opened(make_spec, tmp_path, path).sources[0].train.tokens) == EXPECTED
    assert written == list(range(len(written)))
    assert [each.name for each in (tmp_path / "cache").glob(".*.parts")] == []


def test_another_run_with_the_same_cache_does_not_tokenize(
    make_spec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = corpora.jsonl(tmp_path / "a.jsonl")
    data = {"train": {"path": str(path)}, "cache": str(tmp_path / "shared")}
    first = open_corpus(make_spec(data=data), tmp_path / "one")
    monkeypatch.setattr(tokenize, "write_part", lambda *arguments: pytest.fail("it was tokenized again"))
    moved = tmp_path / "elsewhere" / "a.jsonl"  # the same content at another place and time
    moved.parent.mkdir()
    moved.write_bytes(path.read_bytes())
    second = open_corpus(make_spec(data={**data, "train": {"path": str(moved)}}), tmp_path / "two")
    assert first.digest == second.digest


def test_a_run_does_not_go_on_with_another_corpus(make_spec, tmp_path: Path) -> None:
    """On a host that has no tokens yet, and where the files are others."""
    path = corpora.jsonl(tmp_path / "a.jsonl")
    spec = {"train": {"path": str(path)}, "cache": str(tmp_path / "host-one")}
    open_corpus(make_spec(data=spec), tmp_path / "run")
    corpora.jsonl(path, DOCUMENTS[1:])
    with pytest.raises(RubatoError, match="another corpus") as caught:
        open_corpus(make_spec(data={**spec, "cache": str(tmp_path / "host-two")}), tmp_path / "run")
    assert caught.value.code == "corpus_changed"


def refused(make_spec, tmp_path: Path, path: Path, **source: object) -> RubatoError:
    with pytest.raises(RubatoError) as caught:
        opened(make_spec, tmp_path, path, **source)
    assert caught.value.problems[0].field.startswith("data.")
    return caught.value


def test_a_broken_line_is_named_or_counted(make_spec, tmp_path: Path) -> None:
    path = corpora.jsonl(tmp_path / "a.jsonl")
    lines = path.read_text().splitlines()
    lines[6] = lines[6][:-3]
    lines[9] = '{"text": null}'
    lines[11] = '{"text": "\\ud800"}'
    path.write_text("\n".join(lines))
    error = refused(make_spec, tmp_path, path)
    assert "a.jsonl, line 7: is not JSON" in str(error)
    source = opened(make_spec, tmp_path, path, bad_records="skip").sources[0]
    assert source.documents == len(DOCUMENTS) - 3
    assert source.bad == 3
    assert [example.split(", ")[1].split(":")[0] for example in source.examples] == ["line 7", "line 10", "line 12"]


def test_a_wrong_field_gets_the_nearest(make_spec, tmp_path: Path) -> None:
    error = refused(make_spec, tmp_path, corpora.jsonl(tmp_path / "a.jsonl"), field="txt")
    assert "line 1: has no field 'txt'; its fields are 'id', 'text'" in str(error)
    assert error.fix == "did you mean field: text?"
    error = refused(make_spec, tmp_path, corpora.parquet(tmp_path / "a.parquet"), field="txt")
    assert "no column 'txt'; its columns are id, text" in str(error)
    assert error.problems[0].field == "data.train.field"


def test_nulls_in_a_table_are_named_or_counted(make_spec, tmp_path: Path) -> None:
    path = corpora.parquet(tmp_path / "a.parquet", [*DOCUMENTS[:100], None, *DOCUMENTS[100:]])
    assert "a.parquet, row 101: field 'text' is null" in str(refused(make_spec, tmp_path, path))
    assert opened(make_spec, tmp_path, path, bad_records="skip").sources[0].bad == 1


@pytest.mark.parametrize("name", ["jsonl.gz", "jsonl.zst", "parquet", "dataset"])
def test_what_is_cut_short_is_refused(name: str, make_spec, tmp_path: Path) -> None:
    file, write, source = WRITERS[name]
    path = write(tmp_path / file)
    damaged = path / "data-00001-of-00002.arrow" if path.is_dir() else path
    damaged.write_bytes(damaged.read_bytes()[:-700])
    error = refused(make_spec, tmp_path, path, **source)
    assert "damaged or cut short" in str(error)
    assert damaged.name in str(error)


def test_token_files_that_are_cut_short_are_refused(make_spec, tmp_path: Path) -> None:
    flat = corpora.flat(tmp_path / "flat.bin")
    flat.write_bytes(flat.read_bytes()[:-1])
    assert "no whole number of tokens of 2: it is cut short" in str(refused(make_spec, tmp_path, flat))
    headed = corpora.headed(tmp_path / "headed.bin")
    headed.write_bytes(headed.read_bytes()[:-2])
    assert "its header speaks of" in str(refused(make_spec, tmp_path, headed))
    indexed = corpora.megatron(tmp_path / "indexed.bin")
    indexed.write_bytes(indexed.read_bytes()[:-4])
    assert "indexed.idx speaks of" in str(refused(make_spec, tmp_path, indexed))


def test_an_index_that_is_none_or_of_another_version_is_refused(make_spec, tmp_path: Path) -> None:
    path = corpora.megatron(tmp_path / "a.bin", version=2)
    assert "has version 2, known is 1" in str(refused(make_spec, tmp_path, path))
    path.with_suffix(".idx").write_bytes(b"something else")
    assert "does not begin like an index" in str(refused(make_spec, tmp_path, path))
    path.with_suffix(".idx").unlink()
    assert "a.idx is missing" in str(refused(make_spec, tmp_path, path, format="megatron"))


def test_tokens_beyond_the_vocabulary_are_named(make_spec, tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    np.array([*range(200), 256, *range(100)], "<u2").tofile(path)
    error = refused(make_spec, tmp_path, path)
    assert "token 256 at place 201 is beyond the vocabulary of 256" in str(error)


def test_compressed_formats_of_columns_are_refused(make_spec, tmp_path: Path) -> None:
    path = tmp_path / "a.parquet.gz"
    path.write_bytes(gzip.compress(corpora.parquet(tmp_path / "b.parquet").read_bytes()))
    assert refused(make_spec, tmp_path, path).problems[0].field == "data.train.format"


def test_a_dataset_of_several_splits_asks_for_one(make_spec, tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    whole.mkdir()
    (whole / "dataset_dict.json").write_text(json.dumps({"splits": ["train"]}))
    corpora.dataset(whole / "train")
    error = refused(make_spec, tmp_path, whole)
    assert "with the splits train" in str(error)
    assert str(whole / "train") in error.fix
    assert bytes(opened(make_spec, tmp_path, whole / "train").sources[0].train.tokens) == EXPECTED


def test_chats_are_written_out(make_spec, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    chat = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "good day"}]
    path.write_text(json.dumps({"messages": chat}) + "\n")
    tokens = bytes(opened(make_spec, tmp_path, path, field="messages").sources[0].train.tokens)
    assert tokens == b"<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\ngood day<|im_end|>\n\0"
    path = tmp_path / "b.jsonl"
    path.write_text(json.dumps({"messages": [{"content": "hello"}]}) + "\n")
    assert "message 1 has no role" in str(refused(make_spec, tmp_path, path, field="messages"))


def test_a_blend_holds_the_same_text_out_everywhere(make_spec, tmp_path: Path) -> None:
    a, b = corpora.jsonl(tmp_path / "a.jsonl"), corpora.parquet(tmp_path / "b.parquet", DOCUMENTS[::2])
    train = [{"path": str(a), "weight": 3}, {"path": str(b)}]
    corpus = open_corpus(make_spec(data={"train": train, "validation": {"fraction": 0.1}}), tmp_path / "cache")
    trained, held_out = (
        {text for source in corpus.sources for text in bytes(getattr(source, split).tokens).split(b"\0")[:-1]}
        for split in ("train", "held_out")
    )
    assert not trained & held_out
    assert trained | held_out == {text.encode() for text in DOCUMENTS}
    assert 10 < len(held_out) < 60


def test_a_source_of_a_blend_is_named_by_its_place(make_spec, tmp_path: Path) -> None:
    train = [{"path": str(corpora.jsonl(tmp_path / "a.jsonl"))}, {"path": str(tmp_path / "gone.jsonl")}]
    with pytest.raises(RubatoError) as caught:
        open_corpus(make_spec(data={"train": train}), tmp_path / "cache")
    assert caught.value.problems[0].field == "data.train.blend.1.path"


def test_a_validation_source_is_held_out_of_everything(make_spec, tmp_path: Path) -> None:
    """Of a blend, and whatever else is in the training corpus; only texts that are the very same."""
    apart = corpora.jsonl(tmp_path / "apart.jsonl", [*DOCUMENTS[:40], "only here"])
    train = [
        {"path": str(corpora.jsonl(tmp_path / "a.jsonl"))},
        {"path": str(corpora.parquet(tmp_path / "b.parquet", DOCUMENTS[20:60]))},
    ]
    data = {"train": train, "validation": {"source": {"path": str(apart)}, "every": 5}}
    corpus = open_corpus(make_spec(data=data), tmp_path / "cache")
    texts = [bytes(source.train.tokens).decode().split("\0")[:-1] for source in corpus.sources]
    assert texts == [DOCUMENTS[40:], DOCUMENTS[40:60]]
    (evaluated,) = corpus.evaluated
    assert bytes(evaluated.held_out.tokens).decode().split("\0")[:-1] == [*DOCUMENTS[:40], "only here"]
    again = open_corpus(make_spec(data=data), tmp_path / "cache")
    assert again.digest == corpus.digest
    assert again.validation is not None
    data["validation"]["source"]["path"] = str(tmp_path / "gone.jsonl")
    with pytest.raises(RubatoError) as caught:
        open_corpus(make_spec(data=data), tmp_path / "cache")
    assert caught.value.problems[0].field == "data.validation.source.path"


def test_processes_share_the_parts(make_spec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenize, "_PART_BYTES", 3000)
    told: list[tuple[int, int]] = []
    path = corpora.jsonl(tmp_path / "a.jsonl")
    data = {"train": {"path": str(path)}, "validation": {"fraction": 0.0}}
    corpus = open_corpus(
        make_spec(data=data), tmp_path / "cache", processes=2, progress=lambda *each: told.append(each)
    )
    assert bytes(corpus.sources[0].train.tokens) == EXPECTED
    assert told[0] == (0, path.stat().st_size)
    assert told[-1] == (path.stat().st_size, path.stat().st_size)
    assert [done for done, _ in told] == sorted(done for done, _ in told)


def test_a_cache_that_cannot_be_written_is_told(make_spec, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    data = {"train": {"path": str(corpora.jsonl(tmp_path / "a.jsonl"))}, "cache": str(tmp_path / "file" / "tokens")}
    with pytest.raises(RubatoError, match="cannot be written") as caught:
        open_corpus(make_spec(data=data), tmp_path / "run")
    assert caught.value.problems[0].field == "data.cache"
