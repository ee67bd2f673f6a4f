"""With a document mask a window of several documents is computed as each of them alone, at any layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rubato.layout import Layout
from rubato.problems import SpecError
from tests.engine.forked import in_one_process, run_ranks
from tests.engine.jobs import tiny_spec, train_at, write_corpus
from workers.engine.models import whole_model
from workers.engine.parallel.documents import documents_of

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"kv_heads": 2},
    "qwen": {"family": "qwen", "kv_heads": 2, "qk_norm": True},
    "gpt2": {"family": "gpt2", "positions": 32},
}
SPLIT = {"llama": Layout(1, 2, 2), "qwen": Layout(2, 1, 2), "gpt2": Layout(1, 2, 2)}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Lines of a few bytes, so that a window holds several documents."""
    folder = tmp_path_factory.mktemp("corpus")
    path = folder / "lines.jsonl"
    path.write_text("".join(f'{{"text": "{line[:7]}"}}\n' for line in write_corpus(folder).read_text().splitlines()))
    return path


def test_documents_end_with_their_last_token(corpus: Path) -> None:
    number = documents_of(tiny_spec(corpus, data={"document_mask": True}).data)
    found = number(torch.tensor([[5, 6, 0, 7, 0, 0, 8]]))["documents_BS"]
    assert found.tolist() == [[0, 0, 0, 1, 1, 2, 3]]
    assert documents_of(tiny_spec(corpus).data)(torch.zeros(1, 4)) == {}


def test_rotary_models_see_one_document(corpus: Path) -> None:
    """Angles are relative: a document says the same wherever it stands in a window."""

    def differences() -> list[float]:
        torch.set_default_dtype(torch.float64)
        found = []
        for family in ("llama", "qwen"):
            spec = tiny_spec(corpus, model=FAMILIES[family], data={"document_mask": True})
            torch.manual_seed(3)
            model, number = whole_model(spec), documents_of(spec.data)
            together = torch.tensor([[1, 2, 3, 0, 4, 5, 6, 7, 8, 0, 9, 10, 11, 12, 13, 14]])
            alone = torch.tensor([[4, 5, 6, 7, 8, 0, *range(20, 30)]])
            with torch.no_grad():
                masked = model(together, **number(together))[0, 4:10]
                found.append(float((masked - model(alone)[0, :6]).abs().max()))
                found.append(float((masked - model(together)[0, 4:10]).abs().max()))
        return found

    for same, without_mask in zip(*[iter(in_one_process(differences))] * 2, strict=True):
        assert same < 1e-12
        assert without_mask > 1e-6


@pytest.mark.parametrize("families", [("gpt2",), pytest.param(tuple(FAMILIES), marks=pytest.mark.long)], ids=len)
def test_every_layout_masks_alike(families: tuple[str, ...], corpus: Path, tmp_path: Path) -> None:
    def curve(family: str, layout: Layout, *, mask: bool, rank: int = 0, store: Any = None) -> list[Any]:
        spec = tiny_spec(
            corpus,
            model=FAMILIES[family],
            data={"document_mask": mask},
            memory={"recompute": "full"} if family == "qwen" else {},
            parallelism={"tensor": layout.tensor, "pipeline": layout.pipeline},
            workers=layout.world_size,
        )
        name = f"{family}-{layout.world_size}-{mask}"
        return [
            [each["loss"], each["grad_norm"]] for each in train_at(layout, spec, tmp_path / name, rank, store, name)
        ]

    alone = Layout(1, 1, 1)
    expected = in_one_process(
        lambda: {family: [curve(family, alone, mask=mask) for mask in (True, False)] for family in families}
    )
    found = run_ranks(
        4,
        lambda rank, store: {
            family: curve(family, SPLIT[family], mask=True, rank=rank, store=store) for family in families
        },
    )[0]
    for family, (masked, plain) in expected.items():
        assert torch.allclose(torch.tensor(found[family]), torch.tensor(masked), rtol=1e-9, atol=0), family
        assert not torch.allclose(torch.tensor(plain), torch.tensor(masked), rtol=1e-4, atol=0), family


def test_a_mask_needs_to_know_where_documents_end(corpus: Path) -> None:
    with pytest.raises(SpecError, match="does not say where a document ends") as caught:
        tiny_spec(corpus, data={"document_mask": True, "tokenizer": "none", "vocab_size": 256})
    assert caught.value.problems[0].field == "data.document_mask"
