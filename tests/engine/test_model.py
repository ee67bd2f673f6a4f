"""The model itself, its variants, and what else must not depend on the layout."""

from __future__ import annotations

import math
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rubato.layout import Layout
from rubato.spec import JobSpec
from tests.engine.forked import RankError, in_one_process, run_ranks
from tests.engine.jobs import TINY, tiny_spec, train_at, write_corpus

ALONE, TENSOR, SPLIT = Layout(1, 1, 1), Layout(1, 1, 2), Layout(1, 2, 2)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def spec_at(layout: Layout, corpus: Path, **sections: Any) -> JobSpec:
    shape = {"tensor": layout.tensor, "pipeline": layout.pipeline, "micro_batch": 2}
    return tiny_spec(corpus, parallelism=shape, workers=layout.world_size, **sections)


def curve_at(
    layout: Layout, corpus: Path, run: Path, dtype: torch.dtype = torch.float64, **sections: Any
) -> list[dict[str, Any]]:
    spec = spec_at(layout, corpus, **sections)

    def body(rank: int, store: dist.Store) -> list[dict[str, Any]]:
        return train_at(layout, spec, run, rank, store, dtype=dtype)

    metrics: list[dict[str, Any]] = run_ranks(layout.world_size, body)[0]
    return metrics


def assert_same(found: list[dict[str, Any]], expected: list[dict[str, Any]], tolerance: float) -> None:
    assert [metric["step"] for metric in found] == [metric["step"] for metric in expected]
    for name in ("loss", "grad_norm", "validation_loss"):
        values = [[metric[name] or 0.0 for metric in metrics] for metrics in (found, expected)]
        assert values[0] == pytest.approx(values[1], rel=tolerance), name


def test_one_forward_pass_is_what_the_papers_say(corpus: Path) -> None:
    """Against the same layer written out once more, in complex numbers and without any of its helpers."""

    def compute() -> tuple[float, float]:
        from workers.engine.models.llama import Attention, LlamaConfig, frequencies, rotations

        torch.set_default_dtype(torch.float64)
        config = LlamaConfig.from_spec(tiny_spec(corpus, model={"kv_heads": 2}))
        generator = torch.Generator().manual_seed(1)
        attention, size = Attention(config), config.head_size
        for weight in attention.parameters():
            torch.nn.init.normal_(weight, std=0.3, generator=generator)
        hidden = torch.randn(2, 16, 16, generator=generator)
        angles = rotations(16, frequencies(size, config.rope_theta, None, hidden.device))
        found = attention(hidden, *angles)

        def heads(weight: torch.Tensor) -> torch.Tensor:
            return (hidden @ weight.T).view(2, 16, -1, size).transpose(1, 2)

        def turned(part: torch.Tensor) -> torch.Tensor:
            frequency = config.rope_theta ** (-torch.arange(size // 2) * 2 / size)
            turn = torch.polar(torch.ones(16, size // 2), torch.outer(torch.arange(16.0), frequency))
            pairs = torch.complex(part[..., : size // 2], part[..., size // 2 :]) * turn
            return torch.cat((pairs.real, pairs.imag), -1)

        query, key, value = (
            turned(heads(attention.wq.weight)),
            turned(heads(attention.wk.weight)),
            heads(attention.wv.weight),
        )
        key, value = key.repeat_interleave(2, 1), value.repeat_interleave(2, 1)
        scores = query @ key.transpose(2, 3) / math.sqrt(size)
        scores = scores.masked_fill(torch.ones(16, 16, dtype=torch.bool).triu(1), -math.inf)
        mixed = (scores.softmax(-1) @ value).transpose(1, 2).flatten(2)
        return float((found - mixed @ attention.wo.weight.T).abs().max()), float(found.abs().max())

    difference, size = in_one_process(compute)
    assert difference < 1e-12
    assert size > 0.1


@pytest.mark.parametrize("change", [{"kv_heads": 2}, {"tie_embeddings": True}], ids=["grouped", "tied"])
def test_variants_split_like_the_plain_model(change: dict[str, Any], corpus: Path, tmp_path: Path) -> None:
    layouts = [ALONE, TENSOR] if "tie_embeddings" in change else [ALONE, SPLIT]
    alone, split = [
        curve_at(layout, corpus, tmp_path / str(number), model={**TINY, **change})
        for number, layout in enumerate(layouts)
    ]
    assert_same(split, alone, 1e-9)


def test_bf16_splits_within_its_rounding(corpus: Path, tmp_path: Path) -> None:
    # Steps small enough that Adam, whose first ones are of one size whatever the gradient's, does not amplify rounding.
    small = {"optimizer": {"lr": 1e-3}}
    bf16 = {**small, "train": {"precision": "bf16"}}
    alone = curve_at(ALONE, corpus, tmp_path / "alone", torch.float32, **bf16)
    split = curve_at(SPLIT, corpus, tmp_path / "split", torch.float32, **bf16)
    exact = curve_at(ALONE, corpus, tmp_path / "exact", torch.float32, **small)
    assert_same(split, alone, 2e-2)
    assert_same(alone, exact, 2e-2)
    assert any(abs(rounded["loss"] / full["loss"] - 1) > 1e-6 for rounded, full in zip(alone, exact, strict=True))


def test_any_layout_goes_on_from_the_checkpoint_of_another(corpus: Path, tmp_path: Path) -> None:
    sections: dict[str, Any] = {
        "train": {"steps": 5},
        "checkpoint": {"every": 2},
        "data": {"validation": {"fraction": 0.2, "every": 2, "batches": 2}},
    }
    whole = curve_at(ALONE, corpus, tmp_path / "alone", **sections)
    assert [metric["validation_loss"] is None for metric in whole] == [True, False, True, False, False]
    run = tmp_path / "moved"
    first = curve_at(SPLIT, corpus, run, **sections)
    shutil.rmtree(run / "checkpoints" / "step-00000005")
    shutil.rmtree(run / "checkpoints" / "step-00000004")
    second = curve_at(Layout(2, 2, 1), corpus, run, **sections)
    assert_same(first, whole, 1e-9)
    assert_same(second, whole[2:], 1e-9)
    assert [metric["tokens"] for metric in second] == [metric["tokens"] for metric in whole[2:]]


def test_a_parameter_without_gradient_is_an_error(corpus: Path, tmp_path: Path) -> None:
    def body() -> None:
        from workers.engine.models.llama import Llama

        attach = Llama.__init__

        def with_a_spare(self: Llama, *arguments: Any, **options: Any) -> None:
            attach(self, *arguments, **options)
            self.spare = torch.nn.Parameter(torch.zeros(3))

        Llama.__init__ = with_a_spare  # type: ignore[method-assign]
        train_at(ALONE, spec_at(ALONE, corpus), tmp_path)

    with pytest.raises(RankError, match="parameter spare has no gradient"):
        in_one_process(body)


def test_the_loop_loads_neither_ray_nor_the_driver() -> None:
    code = "import sys, workers.engine.train; print({'ray', 'workers.driver'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
