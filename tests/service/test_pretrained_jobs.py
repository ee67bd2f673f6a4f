"""A job that begins with somebody's model, submitted through the API: what it resolves to, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from rubato.corpus.train_tokenizer import train_tokenizer
from rubato.spec import CorpusSpec, JobSpec
from tests.service.world import SPEC, Host

pytestmark = pytest.mark.parametrize("host", ["sqlite"], indirect=True)

CONFIG = {
    "model_type": "qwen3",
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 48,
    "vocab_size": 320,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    chats = tmp_path / "chats.jsonl"
    messages = [{"role": "user", "content": "and now?"}, {"role": "assistant", "content": "now we rest"}]
    chats.write_text((json.dumps({"messages": messages}) + "\n") * 50)
    train_tokenizer(CorpusSpec(path=str(chats), field="messages"), 290, tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text(json.dumps(CONFIG))
    save_file({"model.norm.weight": np.ones(32, np.float32)}, tmp_path / "model" / "model.safetensors")
    return tmp_path / "model"


def spec_of(folder: Path) -> dict:
    train = {"path": str(folder.parent / "chats.jsonl"), "field": "messages"}
    data = {"train": train, "answers_only": True, "packing": "padded", "sequence_length": 32}
    return {**SPEC, "model": {"from": str(folder)}, "data": data}


async def test_the_resolved_spec_has_the_sizes_of_the_model(host: Host, folder: Path) -> None:
    async with host.world() as world:
        job = await world.submit(spec_of(folder))
        model, data = job["spec"]["model"], job["spec"]["data"]
        assert (model["from"], model["family"], model["head_size"], model["qk_norm"]) == (str(folder), "qwen", 16, True)
        assert (data["tokenizer"], data["vocab_size"]) == (str(folder), 320)
        kept = json.loads((Path(job["run_dir"]) / "spec.json").read_bytes())
        (folder / "config.json").unlink()  # nobody needs it any more to know what the job is
        assert JobSpec.model_validate(kept).model.layers == 4
        again = await world.http.get(f"/v1/jobs/{job['id']}")
        assert again.json()["spec"]["model"] == model


async def test_a_model_that_is_not_whole_is_refused(host: Host, folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4])
    async with host.world() as world:
        reply = await world.http.post("/v1/jobs", json=spec_of(folder))
    assert reply.status_code == 422
    (problem,) = reply.json()["errors"]
    assert problem["field"] == "model.from"
    assert "cut short" in problem["cause"]


async def test_paths_that_mean_something_else_on_each_worker_are_refused(
    host: Host, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder.parent)
    spec = spec_of(folder) | {"model": {"from": "model"}}
    spec["data"] = {**spec["data"], "cache": "tokens"}
    async with host.world() as world:
        reply = await world.http.post("/v1/jobs", json=spec)
    assert reply.status_code == 422
    fields = {problem["field"]: problem["cause"] for problem in reply.json()["errors"]}
    assert fields.keys() == {"model.from", "data.tokenizer", "data.cache"}
    assert all("relative" in cause for cause in fields.values())
