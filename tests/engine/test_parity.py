"""Whatever the layout, the losses and gradient norms are those of one process."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from rubato.layout import Layout
from tests.engine.forked import in_one_process, run_ranks
from tests.engine.jobs import tiny_spec, train_at, write_corpus
from workers.engine.data import Sampler
from workers.engine.parallel.tensor import NOT_COUNTED

LAYOUTS = [
    Layout(data, pipeline, tensor)
    for data, pipeline, tensor in product((1, 2, 4), repeat=3)
    if data * pipeline * tensor <= 8
]


# The others differ from the tiny Llama of the rest in what they do not have in common with it.
STRETCH = {"factor": 8.0, "original_length": 8}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-stretched-grouped": {"kv_heads": 2, "rope_theta": 100.0, "rope_scaling": STRETCH},
    "gpt2": {"family": "gpt2", "positions": 32, "tie_embeddings": False},
    "gpt2-tied": {"family": "gpt2", "positions": 32},
    "qwen2": {"family": "qwen", "kv_heads": 2, "tie_embeddings": True},
    "qwen3": {"family": "qwen", "kv_heads": 2, "qk_norm": True, "head_size": 8},
}


class Case(NamedTuple):
    """A layout, what else of the spec differs from the reference, and which model it is."""

    layout: Layout
    parallelism: dict[str, Any] = {}  # noqa: RUF012 (a tuple shares nothing it could change)
    model: str = "llama"

    def __str__(self) -> str:
        parts = [self.model, f"{self.layout.data}x{self.layout.pipeline}x{self.layout.tensor}"]
        return "-".join([*parts, *(f"{name}={value}" for name, value in self.parallelism.items())])


# Layouts and schedules by the number of ranks: all of one number run in one set of processes.
CASES = [Case(layout) for layout in LAYOUTS]
CASES += [
    Case(Layout(3, 1, 1)),  # three replicas share eight samples unevenly
    Case(Layout(3, 2, 1)),
    Case(Layout(1, 1, 1), {"micro_batch": 4}),
    Case(Layout(2, 2, 1), {"micro_batch": 2}),
    Case(Layout(1, 2, 2), {"micro_batch": 2, "schedule": "gpipe"}),
    Case(Layout(2, 2, 1), {"schedule": "gpipe"}),
    Case(Layout(1, 2, 1), {"schedule": "interleaved"}),
    Case(Layout(2, 2, 2), {"schedule": "interleaved"}),
]
CASES += [
    Case(Layout(1, 1, 4), model="llama-stretched-grouped"),  # two ranks have the same key/value head
    Case(Layout(2, 1, 2), model="llama-stretched-grouped"),
    Case(Layout(1, 2, 2), model="gpt2"),
    Case(Layout(2, 2, 2), model="gpt2-tied"),  # two stages have one matrix
    Case(Layout(1, 2, 1), {"schedule": "interleaved"}, model="gpt2-tied"),
    Case(Layout(2, 1, 2), model="qwen2"),
    Case(Layout(1, 1, 4), model="qwen2"),
    Case(Layout(1, 1, 4), model="qwen3"),
    Case(Layout(2, 2, 2), model="qwen3"),
]
SIZES = sorted({case.layout.world_size for case in CASES})


class Patchy(Sampler):
    """Some targets do not count, more of them in some samples than in others, so replicas weigh differently."""

    def batch(self, step: int, samples: range) -> tuple[Tensor, Tensor]:
        tokens_BS, targets_BS = super().batch(step, samples)
        for row, sample in enumerate(samples):
            targets_BS[row, : sample + step] = NOT_COUNTED
        return tokens_BS, targets_BS


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def curve(case: Case, corpus: Path, folder: Path, rank: int, store: Any) -> list[tuple[float, float]]:
    import workers.engine.train

    workers.engine.train.Sampler = Patchy  # type: ignore[misc]
    shape = {"tensor": case.layout.tensor, "pipeline": case.layout.pipeline, **case.parallelism}
    spec = tiny_spec(corpus, model=MODELS[case.model], parallelism=shape, workers=case.layout.world_size)
    metrics = train_at(case.layout, spec, folder / str(case), rank, store, str(case))
    return [(metric["loss"], metric["grad_norm"]) for metric in metrics]


@pytest.fixture(scope="module")
def references(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[tuple[float, float]]]:
    folder = tmp_path_factory.mktemp("reference")
    alone = Layout(1, 1, 1)
    return in_one_process(lambda: {model: curve(Case(alone, model=model), corpus, folder, 0, None) for model in MODELS})


@pytest.mark.parametrize("size", SIZES)
def test_same_curve_at_every_layout(size: int, corpus: Path, references: Any, tmp_path: Path) -> None:
    cases = [case for case in CASES if case.layout.world_size == size]
    by_rank = run_ranks(size, lambda rank, store: [curve(case, corpus, tmp_path, rank, store) for case in cases])
    for case, found in zip(cases, by_rank[0], strict=True):
        reference = torch.tensor(references[case.model])
        assert len(reference) == 3
        assert torch.allclose(torch.tensor(found), reference, rtol=1e-9, atol=0), str(case)


def test_the_models_are_not_one_model(references: Any) -> None:
    assert len({losses[0] for losses in references.values()}) == len(MODELS)


def test_a_checkpoint_of_two_tied_copies_is_one_matrix_elsewhere(corpus: Path, tmp_path: Path) -> None:
    """Saved where the embedding is on both stages, loaded where it is one parameter, and the other way."""

    def steps(rank: int, store: Any) -> list[float]:
        losses = []
        for layout, last in ((Layout(1, 2, 2), 1), (Layout(2, 1, 2), 2), (Layout(1, 4, 1), 3)):
            spec = tiny_spec(
                corpus,
                model=MODELS["gpt2-tied"],
                train={"steps": last},
                optimizer={"schedule": {"name": "constant", "warmup": 0}},
                parallelism={"tensor": layout.tensor, "pipeline": layout.pipeline},
                workers=layout.world_size,
            )
            losses += [each["loss"] for each in train_at(layout, spec, tmp_path / "moved", rank, store, str(layout))]
        return losses

    def straight() -> list[float]:
        spec = tiny_spec(corpus, model=MODELS["gpt2-tied"], optimizer={"schedule": {"name": "constant", "warmup": 0}})
        return [each["loss"] for each in train_at(Layout(1, 1, 1), spec, tmp_path / "straight")]

    moved, reference = run_ranks(4, steps)[0], in_one_process(straight)
    assert len(reference) == 3
    assert torch.allclose(torch.tensor(moved), torch.tensor(reference), rtol=1e-9, atol=0)
