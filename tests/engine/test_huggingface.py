"""Models of each family come from Hugging Face folders and go back, at any layout, with nothing lost."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from rubato.cli import app
from rubato.layout import Layout
from rubato.pretrained.hub import write_tokenizer
from rubato.problems import RubatoError, SpecError
from rubato.spec import JobSpec
from tests.engine import families
from tests.engine.families import KINDS
from tests.engine.forked import in_one_process, run_ranks
from tests.engine.jobs import TINY, tiny_spec, train_at, write_corpus
from workers.engine.checkpoint.export import export
from workers.engine.checkpoint.pretrained import fill_pretrained
from workers.engine.data import Sampler, open_corpus
from workers.engine.models import whole_model
from workers.engine.run import RunDirectory

ZERO = {"qwen3": 3, "llama3": 1}
LAYOUTS = {kind: Layout(1, 2, 2) for kind in KINDS}
LAYOUTS |= {"llama2": Layout(1, 1, 4), "llama3": Layout(2, 1, 2), "qwen3": Layout(2, 1, 2)}
FEW_OR_ALL = pytest.mark.parametrize("kinds", [("gpt2", "qwen3"), pytest.param(KINDS, marks=pytest.mark.long)], ids=len)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder a family."""
    place = tmp_path_factory.mktemp("models")
    in_one_process(lambda: [families.save(kind, place / kind) for kind in KINDS])
    return place


def spec_of(folder: Path, corpus: Path, layout: Layout = Layout(1, 1, 1), **sections: Any) -> JobSpec:  # noqa: B008
    return tiny_spec(
        corpus,
        **{
            **sections,
            "model": {**dict.fromkeys(TINY), "from": str(folder)},
            "data": {"tokenizer": "bytes"},
            "parallelism": {"tensor": layout.tensor, "pipeline": layout.pipeline},
            "memory": {"zero": ZERO.get(folder.name, 0) if layout.data > 1 else 0},
            "workers": layout.world_size,
        },
    )


def read(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def test_logits_are_those_of_transformers(folders: Path, corpus: Path) -> None:
    def worst() -> dict[str, float]:
        found = {}
        for kind in KINDS:
            spec = spec_of(folders / kind, corpus)
            model = whole_model(spec)
            fill_pretrained(spec.model, dict(model.named_parameters()))
            tokens_BS = torch.randint(0, 256, (3, 16), generator=torch.Generator().manual_seed(1))
            with torch.no_grad():
                found[kind] = float((model(tokens_BS) - families.logits(folders / kind, tokens_BS)).abs().max())
        return found

    for kind, difference in in_one_process(worst).items():
        assert difference < 1e-4, kind


@FEW_OR_ALL
def test_losses_and_gradients_are_those_of_transformers_at_any_layout(
    kinds: Sequence[str], folders: Path, corpus: Path, tmp_path: Path
) -> None:
    def theirs() -> dict[str, tuple[float, float]]:
        found = {}
        for kind in kinds:
            spec = spec_of(folders / kind, corpus)
            batch = Sampler(spec, open_corpus(spec, tmp_path / "corpus")).batch(0, range(8))
            found[kind] = families.loss_and_norm(folders / kind, *batch)
        return found

    def ours(rank: int, store: Any) -> dict[str, tuple[float, float]]:
        found = {}
        for kind in kinds:
            spec = spec_of(folders / kind, corpus, LAYOUTS[kind], train={"steps": 2})
            metrics = train_at(LAYOUTS[kind], spec, tmp_path / kind, rank, store, kind)
            found[kind] = (metrics[0]["loss"], metrics[0]["grad_norm"]) if metrics else (0.0, 0.0)
        return found

    expected = in_one_process(theirs)
    for kind, (loss, norm) in run_ranks(4, ours)[0].items():
        assert loss == pytest.approx(expected[kind][0], rel=1e-5), kind
        assert norm == pytest.approx(expected[kind][1], rel=1e-4), kind


def trained(kinds: Sequence[str], folders: Path, corpus: Path, runs: Path, steps: int, **optimizer: Any) -> None:
    """Runs at layouts of several workers, which save where they end."""
    constant = {"schedule": {"name": "constant", "warmup": 0}}
    specs = {
        kind: spec_of(folders / kind, corpus, LAYOUTS[kind], train={"steps": steps}, optimizer=constant | optimizer)
        for kind in kinds
    }
    for kind, spec in specs.items():
        RunDirectory.create(runs / kind).adopt(spec)

    def work(rank: int, store: Any) -> None:
        for kind, spec in specs.items():
            train_at(LAYOUTS[kind], spec, runs / kind, rank, store, kind, torch.float32)

    run_ranks(4, work, seconds=280)


@pytest.mark.long
def test_what_was_trained_is_exported_and_computes_the_same(folders: Path, corpus: Path, tmp_path: Path) -> None:
    trained(KINDS, folders, corpus, tmp_path, 20)

    def differences() -> dict[str, tuple[float, float]]:
        found = {}
        for kind in KINDS:
            out = tmp_path / f"{kind}-out"
            export(RunDirectory(tmp_path / kind), out, file_bytes=12_000)
            again = spec_of(out, corpus)  # what was written is read back as a model to begin with
            model = whole_model(again)
            fill_pretrained(again.model, dict(model.named_parameters()))
            tokens_BS = torch.randint(0, 256, (3, 16), generator=torch.Generator().manual_seed(1))
            theirs, before = families.logits(out, tokens_BS), families.logits(folders / kind, tokens_BS)
            with torch.no_grad():
                found[kind] = float((model(tokens_BS) - theirs).abs().max()), float((before - theirs).abs().max())
        return found

    for kind, (same, moved) in in_one_process(differences).items():
        assert same < 1e-4, kind
        assert moved > 1e-2, kind  # it was trained
        assert len([*(tmp_path / f"{kind}-out").glob("model-*.safetensors")]) > 1
        written, before = read(tmp_path / f"{kind}-out"), read(folders / kind)
        assert {name: tensor.shape for name, tensor in written.items()} == {
            name: tensor.shape for name, tensor in before.items()
        }


@FEW_OR_ALL
def test_in_and_out_again_changes_no_bit(kinds: Sequence[str], folders: Path, corpus: Path, tmp_path: Path) -> None:
    """A run of one step that does not move."""
    trained(kinds, folders, corpus, tmp_path, 1, lr=1e-30, weight_decay=0.0)
    for kind in kinds:
        export(RunDirectory(tmp_path / kind), tmp_path / f"{kind}-out")
        before, after = read(folders / kind), read(tmp_path / f"{kind}-out")
        assert before.keys() == after.keys(), kind
        for name, tensor in before.items():
            assert torch.equal(tensor, after[name]), f"{kind}: {name}"


@pytest.mark.long
def test_bf16_comes_back_as_it_was(corpus: Path, tmp_path: Path) -> None:
    in_one_process(lambda: families.save("qwen2", tmp_path / "qwen2", torch.bfloat16))
    trained(["qwen2"], tmp_path, corpus, tmp_path / "run", 1, lr=1e-30, weight_decay=0.0)
    export(RunDirectory(tmp_path / "run" / "qwen2"), tmp_path / "out")
    before, after = read(tmp_path / "qwen2"), read(tmp_path / "out")
    assert {tensor.dtype for tensor in after.values()} == {torch.bfloat16}
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())


def test_what_is_missing_or_cut_short_is_told_before_anything_starts(
    folders: Path, corpus: Path, tmp_path: Path
) -> None:
    in_one_process(lambda: families.save("llama2", tmp_path / "model"))
    shard = max((tmp_path / "model").glob("model-*.safetensors"))
    content = shard.read_bytes()
    shard.write_bytes(content[:-10])
    with pytest.raises(SpecError, match="it is cut short") as caught:
        spec_of(tmp_path / "model", corpus)
    assert caught.value.problems[0].field == "model.from"
    shard.unlink()
    with pytest.raises(SpecError, match=f"{shard.name} cannot be read"):
        spec_of(tmp_path / "model", corpus)
    with pytest.raises(SpecError, match=r"config\.json cannot be read"):
        spec_of(tmp_path / "gone", corpus)


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        ({"model_type": "bloom"}, "a model of type 'bloom'"),
        ({"hidden_act": "gelu"}, "activation 'gelu'"),
        ({"attention_bias": True}, "biases in all of its attention"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "'yarn'"),
        ({"sliding_window": 8, "model_type": "mistral"}, "a window of 8 positions"),
        ({"vocab_size": 200}, "has 256 tokens, the model in"),
    ],
)
def test_a_model_that_cannot_be_computed_is_refused(
    change: dict[str, Any], cause: str, folders: Path, corpus: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for path in (folders / "llama2").iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    config = json.loads((folder / "config.json").read_bytes())
    (folder / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(SpecError, match=cause):
        spec_of(folder, corpus)


def test_sizes_beside_a_folder_are_refused(folders: Path, corpus: Path) -> None:
    model = {**dict.fromkeys(TINY), "from": str(folders / "gpt2"), "layers": 2}
    with pytest.raises(SpecError, match="has its own") as caught:
        tiny_spec(corpus, model=model, data={"tokenizer": "bytes"})
    assert "model.layers" in {problem.field for problem in caught.value.problems}


def test_a_resolved_spec_does_not_need_the_folder(folders: Path, corpus: Path, tmp_path: Path) -> None:
    spec = spec_of(folders / "qwen3", corpus)
    content = json.loads(spec.model_dump_json().replace(str(folders), str(tmp_path / "gone")))
    assert content["model"]["from"].endswith("/gone/qwen3")
    assert JobSpec.model_validate(content).model.head_size == 8


def test_an_export_without_a_checkpoint_or_over_another_is_refused(corpus: Path, tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "run")
    run.adopt(tiny_spec(corpus))
    with pytest.raises(RubatoError, match="there is no checkpoint"):
        export(run, tmp_path / "out")


@pytest.mark.long
def test_the_command_line_exports_a_job(corpus: Path, folders: Path, tmp_path: Path, capsys, monkeypatch) -> None:
    trained(["qwen3"], folders, corpus, tmp_path, 1)

    class Plane:
        """A control plane that knows one job."""

        def __init__(self, url: str | None = None) -> None:
            pass

        def __enter__(self) -> Plane:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def job(self, name: str) -> Any:
            return SimpleNamespace(run_dir=str(tmp_path / name))

    monkeypatch.setattr("rubato.cli.export.Client", Plane)
    command = ["export", "qwen3", "--into", str(tmp_path / "out"), "--step", "1", "--dtype", "bfloat16", "--json"]
    assert app.run(command) == 0
    written = json.loads(capsys.readouterr().out)
    assert (written["step"], written["dtype"], written["path"]) == (1, "bfloat16", str(tmp_path / "out"))
    assert {tensor.dtype for tensor in read(tmp_path / "out").values()} == {torch.bfloat16}
    assert app.run(command) == 2  # it is there already
    assert app.run(["export", "elsewhere", "--into", str(tmp_path / "new")]) == 2
    assert "cannot be seen from this machine" in capsys.readouterr().err


def test_the_byte_tokenizer_is_one_of_transformers(corpus: Path, tmp_path: Path) -> None:
    spec = tiny_spec(corpus)

    def there_and_back() -> list[object]:
        write_tokenizer(spec, tmp_path)
        tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
        text = "bytes, ünïcode\n\n 日本 🙂"
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        return [ids == list(text.encode()), tokenizer.decode(ids) == text, tokenizer.eos_token_id]

    assert in_one_process(there_and_back) == [True, True, 0]
