"""How far an update goes: schedules, clipping, weight decay."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest

from rubato.spec import OptimizerSpec, TrainSpec
from tests.engine.forked import in_one_process
from workers.engine.optim import clip_factor, learning_rate

STEPS = 100


def rates(**schedule: Any) -> list[float]:
    spec = OptimizerSpec(lr=2.0, schedule=schedule)
    return [learning_rate(spec, step, STEPS) for step in range(STEPS)]


@pytest.mark.parametrize("name", ["constant", "cosine", "wsd"])
def test_warm_up_is_linear_and_ends_at_lr(name: str) -> None:
    found = rates(name=name, warmup=4)
    assert found[:4] == [0.5, 1.0, 1.5, 2.0]
    assert found[4] == pytest.approx(2.0)


def test_constant_stays() -> None:
    assert set(rates(name="constant", warmup=0)) == {2.0}


def test_cosine_goes_from_lr_to_floor() -> None:
    found = rates(name="cosine", warmup=1, floor=0.1)
    assert found[1] == pytest.approx(2.0)
    assert found[50] == pytest.approx(2.0 * (0.1 + 0.9 * (1 + math.cos(math.pi * 49 / 98)) / 2))
    assert found[-1] == pytest.approx(0.2)
    assert found[1:] == sorted(found[1:], reverse=True)


def test_wsd_is_flat_until_its_decay_and_reaches_the_floor() -> None:
    found = rates(name="wsd", warmup=10, decay=0.2, floor=0.25)
    assert set(found[9:80]) == {2.0}
    assert found[80] < 2.0
    assert found[-1] == pytest.approx(0.5)
    falls = [before - after for before, after in itertools.pairwise(found[79:])]
    assert falls == pytest.approx([falls[0]] * 20)


def test_wsd_does_not_decay_while_it_warms_up() -> None:
    found = rates(name="wsd", warmup=90, decay=0.5)
    assert found[:90] == pytest.approx([2.0 * (step + 1) / 90 for step in range(90)])
    assert found[-1] == pytest.approx(0.2)


@pytest.mark.parametrize("name", ["cosine", "wsd"])
def test_a_run_of_one_step_has_a_rate(name: str) -> None:
    spec = OptimizerSpec(lr=2.0, schedule={"name": name})
    assert 0 < learning_rate(spec, 0, 1) <= 2.0


def test_clipping_touches_only_what_is_too_long() -> None:
    assert clip_factor(0.5, 1.0) == 1.0
    assert clip_factor(4.0, 1.0) == pytest.approx(0.25)
    assert clip_factor(1e9, None) == 1.0
    assert clip_factor(0.0, 1.0) == 1.0


def test_squared_norm_counts_what_others_hold_once() -> None:
    def compute() -> tuple[float, float]:
        import torch

        from workers.engine.optim import squared_norm

        gradients = [torch.full((2, 2), 3.0), torch.tensor([4.0])]
        return squared_norm(gradients, [True, True]), squared_norm(gradients, [True, False])

    assert in_one_process(compute) == pytest.approx((52.0, 36.0))


def test_update_is_that_of_adamw_and_spares_norms_the_decay(tmp_path: Path) -> None:
    def compute() -> list[tuple[list[float], list[float]]]:
        import torch

        from workers.engine.optim import LossScale
        from workers.engine.state import TrainingState

        spec = OptimizerSpec(lr=0.1, weight_decay=0.5)
        generator = torch.Generator().manual_seed(0)
        values = {"matrix": torch.randn(3, 2, generator=generator), "norm": torch.randn(3, generator=generator)}
        ours = {name: torch.nn.Parameter(value.clone()) for name, value in values.items()}
        theirs = {name: torch.nn.Parameter(value.clone()) for name, value in values.items()}
        reference = torch.optim.AdamW(
            [{"params": [theirs["matrix"]]}, {"params": [theirs["norm"]], "weight_decay": 0.0}],
            lr=0.1, betas=spec.betas, eps=spec.eps, weight_decay=0.5, foreach=False, fused=False,
        )  # fmt: skip
        state = TrainingState(ours, spec, LossScale(TrainSpec(steps=3, global_batch=1)))
        state.begin()
        for _ in range(3):
            for leaf, other in zip(state.leaves, theirs.values(), strict=True):
                leaf.grad = torch.randn(leaf.shape, generator=generator)
                other.grad = leaf.grad.clone()
            state.update(lr=0.1, tokens=7)
            reference.step()
        assert (state.step, state.tokens) == (3, 21)
        return [(ours[name].flatten().tolist(), theirs[name].flatten().tolist()) for name in values]

    for found, expected in in_one_process(compute):
        assert found == pytest.approx(expected, rel=1e-5)
