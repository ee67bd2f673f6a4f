"""The commands that look at a corpus, tokenize it and learn a tokenizer from it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from rubato.cli import app
from rubato.cli.output import DONE, REFUSED
from tests.unit.corpus import corpora


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    corpora.jsonl(tmp_path / "a.jsonl")
    corpora.parquet(tmp_path / "b.parquet")
    content = {
        "name": "look",
        "model": {"preset": "tiny"},
        "data": {
            "train": [
                {"path": str(tmp_path / "a.jsonl"), "weight": 3, "bad_records": "skip"},
                {"path": str(tmp_path / "b.parquet")},
            ],
            "validation": {"fraction": 0.1},
            "sequence_length": 16,
        },
        "train": {"steps": 10, "global_batch": 4},
        "workers": 1,
    }
    path = tmp_path / "spec.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def shown(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict:
    assert app.run([*map(str, arguments), "--json"]) == DONE
    return json.loads(capsys.readouterr().out)


def test_inspect_shows_what_is_there(spec: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with (tmp_path / "a.jsonl").open("a") as file:
        file.write('{"text": "unfinished\n')
    view = shown(capsys, "data", "inspect", spec, "--processes", 1)
    first, second = view["sources"]
    assert view["documents"] == 2 * len(corpora.DOCUMENTS)
    assert view["tokens"] == first["tokens"] + second["tokens"] > view["held_out_tokens"] > 0
    assert (first["share"], second["share"]) == (0.75, 0.25)
    assert first["skipped_records"] == 1
    assert "line 301: is not JSON" in first["problems"][0]
    assert sum(each["documents"] for each in first["lengths"]) == first["documents"] - first["held_out_documents"]
    assert all(each["low"] <= 64 for each in first["lengths"])
    assert any(sample.startswith("document ") for sample in first["samples"])
    assert app.run(["data", "inspect", str(spec), "--processes", "1"]) == DONE
    text = capsys.readouterr().out
    assert "75.0% of the samples" in text
    assert "1 records were passed over" in text


def test_tokenize_prepares_for_runs(spec: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run(["data", "tokenize", str(spec), "--json"]) == REFUSED
    assert json.loads(capsys.readouterr().err)["errors"][0]["field"] == "data.cache"
    cache = f"data.cache={tmp_path / 'tokens'}"
    made = shown(capsys, "data", "tokenize", spec, "--set", cache, "--processes", 1)
    written = [(Path(each["path"]) / "train.tokens").stat() for each in made["sources"]]
    assert [each.st_size for each in written] == [each["tokens"] for each in made["sources"]]
    again = shown(capsys, "data", "tokenize", spec, "--set", cache, "--processes", 1)
    assert again == made
    after = [(Path(each["path"]) / "train.tokens").stat() for each in again["sources"]]
    assert [each.st_ino for each in written] == [each.st_ino for each in after]


def test_a_tokenizer_is_learned_and_can_be_used(spec: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    into = tmp_path / "learned"
    made = shown(capsys, "data", "train-tokenizer", spec, "--into", into, "--vocab-size", 280)
    assert made == {"path": str(into), "vocab_size": 280}
    view = shown(capsys, "data", "inspect", spec, "--set", f"data.tokenizer={into}", "--processes", 1)
    assert view["vocab_size"] == 280
    assert view["tokens"] < sum(len(text.encode()) for text in corpora.DOCUMENTS) * 2
