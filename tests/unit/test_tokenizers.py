"""Tokenizers by what a spec calls them: what they make of text, how large they are, and what they say of bad files."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest
import tokenizers

from rubato.corpus.train_tokenizer import train_tokenizer
from rubato.problems import RubatoError, SpecError
from rubato.spec import CorpusSpec, JobSpec
from rubato.tokenizers import open_tokenizer

TEXT = "one small step, one giant leap; ünïcode, too.\n" * 40


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder, learned from a text."""
    place = tmp_path_factory.mktemp("tokenizer")
    (place / "text.txt").write_text(TEXT)
    size = train_tokenizer(CorpusSpec(path=str(place / "text.txt")), 280, place / "learned")
    assert size == 280
    return place / "learned"


def test_a_learned_tokenizer_gives_back_any_text(folder: Path) -> None:
    tokenizer = open_tokenizer(str(folder))
    (ids,) = tokenizer.encode([TEXT.encode()])
    assert len(ids) < len(TEXT.encode()) / 2
    assert tokenizer.decode(ids.tolist()) == TEXT
    strange = "日本 🙂 \x00"
    assert tokenizer.decode(tokenizer.encode([strange.encode()])[0].tolist()) == strange
    assert tokenizer.decode([tokenizer.end]) == "<|endoftext|>"


def test_the_file_alone_is_the_same_tokenizer(folder: Path) -> None:
    whole, alone = open_tokenizer(str(folder)), open_tokenizer(str(folder / "tokenizer.json"))
    assert (whole.size, whole.end, whole.digest) == (alone.size, alone.end, alone.digest)


def test_the_vocabulary_follows_the_tokenizer(folder: Path, make_spec) -> None:
    spec: JobSpec = make_spec(data={"tokenizer": str(folder)})
    assert spec.data.vocab_size == 280
    assert make_spec().data.vocab_size == 256
    assert make_spec(data={"tokenizer": str(folder), "vocab_size": 320}).data.vocab_size == 320
    with pytest.raises(SpecError, match="vocab_size"):
        make_spec(data={"tokenizer": "none"})


def test_a_ranked_file_merges_by_rank(tmp_path: Path) -> None:
    ranks = [bytes([byte]) for byte in range(256)] + [b"on", b"one", b" s", b" sm"]
    path = tmp_path / "small.tiktoken"
    path.write_text("".join(f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(ranks)))
    tokenizer = open_tokenizer(str(path))
    (ids,) = tokenizer.encode([b"one small"])
    assert ids.tolist() == [257, 259, *b"all"]
    assert tokenizer.decode(ids.tolist()) == "one small"
    assert (tokenizer.end, tokenizer.size) == (260, 261)


def test_the_end_of_a_document_can_be_chosen(folder: Path, tmp_path: Path) -> None:
    tokenizer = open_tokenizer(str(folder), "a")
    assert tokenizer.decode([tokenizer.end]) == "a"
    with pytest.raises(RubatoError, match=r"did you mean '<\|endoftext\|>'") as caught:
        open_tokenizer(str(folder), "<|endoftxt|>")
    assert caught.value.problems[0].field == "data.end_of_document"
    plain = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "b": 1}, []))
    plain.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(RubatoError, match="does not say which token ends a document"):
        open_tokenizer(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "b"}}))
    assert open_tokenizer(str(tmp_path)).end == 1


@pytest.mark.parametrize(
    ("name", "content", "cause"),
    [
        ("tokenizer.json", "{}", "is no tokenizer"),
        ("a.tiktoken", "YQ== 0\nnot base64\n", "line 2 of"),
        ("a.tiktoken", "", "holds no tokens"),
        ("gone.json", None, "does not exist"),
    ],
)
def test_what_is_no_tokenizer_is_refused(name: str, content: str | None, cause: str, tmp_path: Path, make_spec) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(SpecError, match=cause) as caught:
        make_spec(data={"tokenizer": str(tmp_path / name)})
    assert caught.value.problems[0].field == "data.tokenizer"


def test_a_name_that_means_nothing_is_refused(make_spec) -> None:
    with pytest.raises(SpecError, match="'byte' is not known; use bytes"):
        make_spec(data={"tokenizer": "byte"})


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path, make_spec) -> None:
    with pytest.raises(SpecError, match=r"holds no tokenizer\.json"):
        make_spec(data={"tokenizer": str(tmp_path)})
