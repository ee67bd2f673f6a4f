"""Corpora on other storage: over HTTP, and in S3 as moto's server plays it."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import fsspec
import pytest

from rubato.corpus.open import open_corpus
from rubato.problems import RubatoError
from tests.unit.corpus import corpora
from tests.unit.corpus.corpora import DOCUMENTS

EXPECTED = "".join(text + "\0" for text in DOCUMENTS).encode()


class _Silent(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def web(tmp_path: Path) -> Iterator[str]:
    (tmp_path / "web").mkdir()
    handler = functools.partial(_Silent, directory=str(tmp_path / "web"))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def s3() -> Iterator[dict[str, object]]:
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield {"endpoint_url": f"http://{host}:{port}", "key": "a-key", "secret": "a-secret"}
    server.stop()


def tokens(make_spec, cache: Path, path: str, **source: object) -> bytes:
    data = {"train": {"path": path, **source}, "validation": {"fraction": 0.0}}
    return bytes(open_corpus(make_spec(data=data), cache).sources[0].train.tokens)


def test_a_file_over_http(web: str, tmp_path: Path, make_spec) -> None:
    corpora.jsonl_gz(tmp_path / "web" / "a.jsonl.gz")
    corpora.parquet(tmp_path / "web" / "b.parquet")
    assert tokens(make_spec, tmp_path / "one", f"{web}/a.jsonl.gz") == EXPECTED
    assert tokens(make_spec, tmp_path / "two", f"{web}/b.parquet") == EXPECTED
    with pytest.raises(RubatoError, match="does not exist") as caught:
        tokens(make_spec, tmp_path / "three", f"{web}/gone.jsonl")
    assert caught.value.problems[0].field == "data.train.path"


def test_a_glob_in_s3(s3: dict[str, object], tmp_path: Path, make_spec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(fsspec.config.conf, "s3", s3)
    system = fsspec.filesystem("s3", skip_instance_cache=True)
    system.mkdir("texts")
    halves = DOCUMENTS[:150], DOCUMENTS[150:]
    for number, half in enumerate(halves):
        system.put(str(corpora.jsonl(tmp_path / "half.jsonl", half)), f"texts/deep/er/{number}.jsonl")
    assert tokens(make_spec, tmp_path / "one", "s3://texts/**/*.jsonl") == EXPECTED
    megatron = corpora.megatron(tmp_path / "a.bin")
    for name in (megatron.name, "a.idx"):
        system.put(str(tmp_path / name), f"texts/{name}")
    assert tokens(make_spec, tmp_path / "two", "s3://texts/*.bin") == EXPECTED
    with pytest.raises(RubatoError, match="no file matches s3://texts/"):
        tokens(make_spec, tmp_path / "three", "s3://texts/*.parquet")
    with pytest.raises(RubatoError, match="is a folder") as caught:
        tokens(make_spec, tmp_path / "three", "s3://texts/deep")
    assert "s3://texts/deep/**/*.jsonl" in caught.value.fix


def test_a_new_version_in_s3_is_another_corpus(
    s3: dict[str, object], tmp_path: Path, make_spec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(fsspec.config.conf, "s3", s3)
    system = fsspec.filesystem("s3", skip_instance_cache=True)
    system.mkdir("versions")
    cache = {"cache": str(tmp_path / "cache")}
    found = []
    for number, texts in enumerate((DOCUMENTS[:10], DOCUMENTS[10:20], DOCUMENTS[:10])):
        system.put(str(corpora.jsonl(tmp_path / "a.jsonl", texts)), "versions/a.jsonl")
        fsspec.filesystem("s3").invalidate_cache()
        spec = make_spec(data={"train": {"path": "s3://versions/a.jsonl"}, **cache})
        found.append(open_corpus(spec, tmp_path / f"run-{number}").digest)
    assert found[0] == found[2] != found[1]


def test_a_protocol_that_nothing_speaks_is_told(tmp_path: Path, make_spec) -> None:
    with pytest.raises(RubatoError, match="nothing here speaks nowhere://"):
        tokens(make_spec, tmp_path / "cache", "nowhere://a/b.txt")
