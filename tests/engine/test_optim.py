"""How far an update goes: schedules, clipping, weight decay."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest

from rubato.layout import Layout
from rubato.spec import OptimizerSpec, TrainSpec
from tests.engine.forked import in_one_process, run_ranks
from tests.engine.jobs import tiny_spec, train_at, write_corpus
from workers.engine.optim import clip_factor, learning_rate
from workers.engine.optim.norms import group_of, layer_groups

STEPS = 100


def rates(**schedule: Any) -> list[float]:
    spec = OptimizerSpec(lr=2.0, schedule=schedule)
    return [learning_rate(spec, step, STEPS) for step in range(STEPS)]


@pytest.mark.parametrize("name", ["constant", "cosine", "linear", "wsd"])
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


def test_linear_falls_alike_from_lr_to_floor() -> None:
    found = rates(name="linear", warmup=4, floor=0.1)
    assert found[4] == pytest.approx(2.0)
    assert found[-1] == pytest.approx(0.2)
    falls = [before - after for before, after in itertools.pairwise(found[4:])]
    assert falls == pytest.approx([1.8 / 95] * 95)


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


@pytest.mark.parametrize("name", ["cosine", "linear", "wsd"])
def test_a_run_of_one_step_has_a_rate(name: str) -> None:
    spec = OptimizerSpec(lr=2.0, schedule={"name": name})
    assert 0 < learning_rate(spec, 0, 1) <= 2.0


def test_clipping_touches_only_what_is_too_long() -> None:
    assert clip_factor(0.5, 1.0) == 1.0
    assert clip_factor(4.0, 1.0) == pytest.approx(0.25)
    assert clip_factor(1e9, None) == 1.0
    assert clip_factor(0.0, 1.0) == 1.0


def test_norms_of_groups_count_what_others_hold_once() -> None:
    def compute() -> list[list[float]]:
        import torch

        from workers.engine.optim import GroupNorms

        names = ["tok_embeddings.weight", "layers.0.ffn.weight", "layers.1.norm.weight", "output.weight", "norm.weight"]
        gradients = [torch.full((2, 2), 3.0), torch.ones(5), torch.tensor([4.0]), torch.ones(7), torch.ones(1)]
        found = []
        for counted in ([True] * 5, [True, True, False, True, True], [False] * 5):
            norms = GroupNorms(names, counted, 2, torch.device("cpu"))
            assert norms.groups == ["embedding", "layer 0", "layer 1", "head"]
            found.append(norms.squares(gradients))
        return found

    every, without_one, none = in_one_process(compute)
    assert every == pytest.approx([36.0, 5.0, 16.0, 8.0])
    assert without_one == pytest.approx([36.0, 5.0, 0.0, 8.0])
    assert none == [0.0] * 4


def test_many_layers_are_stretches_that_hold_each_once() -> None:
    groups = layer_groups(30)
    assert len(groups) == 10
    assert groups[1] == "layers 0-2"
    assert groups[-2] == "layers 26-29"
    places = [group_of(f"layers.{layer}.attention.wq.weight", 30) for layer in range(30)]
    assert places == sorted(places)
    assert set(places) == set(range(1, 9))
    assert [group_of(name, 30) for name in ("positions.weight", "norm.bias", "output.weight")] == [0, 9, 9]


@pytest.mark.parametrize(
    ("no_decay", "spared"),
    [
        (["norms", "biases", "embeddings"], {"norm.weight", "norm.bias", "tok_embeddings.weight", "positions.weight"}),
        (["norms"], {"norm.weight"}),
        ([], set()),
    ],
)
def test_what_decays_is_the_specs_choice(no_decay: list[str], spared: set[str]) -> None:
    def compute() -> set[str]:
        import torch

        from workers.engine.optim import Optimizer

        names = ["tok_embeddings.weight", "positions.weight", "norm.weight", "norm.bias", "output.weight"]
        weights = {name: torch.ones((2, 2) if name[0] in "tpo" else 3) for name in names}
        optimizer = Optimizer(weights, list(weights.values()), OptimizerSpec(weight_decay=0.5, no_decay=no_decay))
        for weight in weights.values():
            weight.grad = torch.zeros_like(weight)
        optimizer.begin()
        optimizer.step(0.1, 0)
        return {name for name, weight in weights.items() if torch.all(weight == 1)}

    assert in_one_process(compute) == spared


def test_muon_is_that_of_torch_in_its_format() -> None:
    def compute() -> list[float]:
        import torch

        from workers.engine.optim import muon

        generator = torch.Generator().manual_seed(0)
        muon._format = lambda direction: torch.bfloat16  # as torch's always is
        away = []
        for shape in ((24, 8), (8, 24), (16, 16)):
            ours, theirs = (torch.nn.Parameter(torch.ones(shape)) for _ in range(2))
            reference = torch.optim.Muon([theirs], lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
            optimizer = muon.Muon([(ours, ours)], 0.02, 0.95, 0.1)
            optimizer.state[ours]["momentum_buffer"] = torch.zeros(shape)
            for _ in range(3):
                ours.grad = torch.randn(shape, generator=generator)
                theirs.grad = ours.grad.clone()
                optimizer.step()
                reference.step()
            away.append(float((ours - theirs).detach().abs().max() / (theirs - 1).detach().abs().max()))
        return away

    assert max(in_one_process(compute)) < 1e-2


def test_an_orthogonal_matrix_comes_out_of_any() -> None:
    def compute() -> list[list[float]]:
        import torch

        from workers.engine.optim.muon import orthogonal

        generator = torch.Generator().manual_seed(0)
        shapes = ((12, 4), (4, 12), (9, 9))
        matrices = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
        return [torch.linalg.svdvals(orthogonal(matrix, torch.float64)).tolist() for matrix in matrices]

    for values in in_one_process(compute):
        assert min(values) > 0.6
        assert max(values) < 1.25


MUON_LAYOUTS = [
    Layout(1, 2, 2),
    *(pytest.param(each, marks=pytest.mark.long) for each in (Layout(2, 1, 2), Layout(1, 1, 4))),
]


@pytest.mark.parametrize("layout", MUON_LAYOUTS, ids=str)
def test_muon_and_average_are_the_same_at_every_layout(layout: Layout, tmp_path: Path) -> None:
    """The curve, the held-out loss of the moving average, and both after a restart at another layout."""
    corpus = write_corpus(tmp_path)
    model = {"kv_heads": 2}  # fewer than ranks of the tensor axis of 4, so that some matrices are whole on each

    def curve(here: Layout, steps: int, folder: str, rank: int = 0, store: Any = None) -> list[tuple[float, ...]]:
        spec = tiny_spec(
            corpus,
            model=model,
            data={"validation": {"every": 1, "fraction": 0.2, "ema": True}},
            train={"steps": steps},
            optimizer={"name": "muon", "lr": 0.02, "ema": 0.9, "schedule": {"name": "constant", "warmup": 0}},
            parallelism={"tensor": here.tensor, "pipeline": here.pipeline},
            workers=here.world_size,
        )
        metrics = train_at(here, spec, tmp_path / folder, rank, store, f"{here}{steps}")
        return [(each["loss"], each["grad_norm"], each["validation_loss"]) for each in metrics]

    reference = in_one_process(lambda: curve(Layout(1, 1, 1), 5, "alone"))
    found = run_ranks(layout.world_size, lambda rank, store: curve(layout, 3, "many", rank, store))[0]
    found += in_one_process(lambda: curve(Layout(1, 1, 1), 5, "many"))
    assert [len(reference), len(found)] == [5, 5]
    assert found == [pytest.approx(step, rel=1e-9) for step in reference]
    assert reference[-1][0] < reference[0][0]


@pytest.mark.long
@pytest.mark.parametrize("zero", [1, 3])
def test_the_average_of_shards_is_that_of_the_whole(zero: int, tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path)

    def curve(here: Layout, zero: int, rank: int = 0, store: Any = None) -> list[tuple[float, ...]]:
        spec = tiny_spec(
            corpus,
            data={"validation": {"every": 1, "fraction": 0.2, "ema": True}},
            optimizer={"ema": 0.9},
            memory={"zero": zero},
            workers=here.world_size,
        )
        metrics = train_at(here, spec, tmp_path / str(here), rank, store)
        return [(each["loss"], each["grad_norm"], each["validation_loss"]) for each in metrics]

    reference = in_one_process(lambda: curve(Layout(1, 1, 1), 0))
    found = run_ranks(2, lambda rank, store: curve(Layout(2, 1, 1), zero, rank, store))[0]
    assert found == [pytest.approx(step, rel=1e-9) for step in reference]


def test_the_average_follows_the_weights_and_is_given_back() -> None:
    def compute() -> tuple[list[float], list[float], bool]:
        import torch

        from workers.engine.optim import LossScale
        from workers.engine.state import TrainingState

        weight = torch.nn.Parameter(torch.zeros(2, 2))
        state = TrainingState(
            {"w": weight}, OptimizerSpec(lr=1.0, ema=0.9), LossScale(TrainSpec(steps=9, global_batch=1))
        )
        state.begin()
        seen, averages, expected = 0.0, [], []
        for step in range(8):
            state.leaves[0].grad = torch.ones(2, 2)
            state.update(lr=0.5, tokens=1)
            kept = min(0.9, (1 + step) / (10 + step))
            seen = kept * seen + (1 - kept) * float(weight[0, 0])
            expected.append(seen)
            trained = weight.detach().clone()
            with state.averaged():
                averages.append(float(weight[0, 0]))
        return averages, expected, torch.equal(trained, weight)

    averages, expected, given_back = in_one_process(compute)
    assert averages == pytest.approx(expected, rel=1e-5)
    assert given_back


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
