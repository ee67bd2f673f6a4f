"""Pipeline schedules: what the arithmetic allows is what torch runs, and each gives the curve of one process."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import schedules

from rubato.layout import Layout, runs_in_schedule
from rubato.pipelines import SCHEDULES, stages_of
from rubato.spec import ParallelismSpec
from tests.engine.forked import in_one_process, run_ranks
from tests.engine.jobs import tiny_spec, train_at, write_corpus
from workers.engine.parallel.pipeline import schedule_class

SEVERAL_STAGES = [name for name, rules in SCHEDULES.items() if rules.stages[0] > 1]
SPLIT = ["interleaved_zero_bubble", "zbv", "dualpipev"]
MODEL = {"layers": 5}
TIED = {**MODEL, "tie_embeddings": True}
CASES = {
    2: [(Layout(1, 2, 1), {"schedule": name}) for name in SPLIT]
    + [(Layout(1, 2, 1), {"schedule": "zbv", "stages": [2, 1, 1, 1]})],
    4: [(layout, {"schedule": name}) for layout in (Layout(2, 2, 1), Layout(1, 2, 2)) for name in SPLIT]
    + [(Layout(1, 4, 1), {"schedule": "1f1b", "stages": [1, 2, 1, 1]})],
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def curve(
    layout: Layout, shape: dict[str, Any], model: dict[str, Any], corpus: Path, folder: Path, rank: int, store: Any
) -> list[list[float]]:
    name = f"{layout}-{shape}".replace("/", "")
    spec = tiny_spec(
        corpus,
        model=model,
        data={"validation": {"every": 1}},
        parallelism={"tensor": layout.tensor, "pipeline": layout.pipeline, **shape},
        workers=layout.world_size,
    )
    metrics = train_at(layout, spec, folder / name, rank, store, name)
    return [[metric[what] for what in ("loss", "grad_norm", "validation_loss")] for metric in metrics]


@pytest.mark.parametrize(("size", "model"), [(2, MODEL), (4, MODEL), (2, TIED)], ids=["2", "4", "2-tied"])
def test_same_curve_and_evaluation_with_every_schedule(
    size: int, model: dict[str, Any], corpus: Path, tmp_path: Path
) -> None:
    cases = CASES[size]
    reference = in_one_process(lambda: curve(Layout(1, 1, 1), {}, model, corpus, tmp_path, 0, None))
    by_rank = run_ranks(
        size, lambda rank, store: [curve(*case, model, corpus, tmp_path, rank, store) for case in cases]
    )
    assert len(reference) == 3
    for case, found in zip(cases, by_rank[0], strict=True):
        assert torch.allclose(torch.tensor(found), torch.tensor(reference), rtol=1e-9, atol=0), str(case)


def runs_in_torch(name: str, pipeline: int, virtual_stages: int, count: int) -> bool:
    """Whether torch makes the schedule, and whether nobody in it waits for ever."""
    held = stages_of(name, pipeline, virtual_stages, rank=0)
    stages = [
        SimpleNamespace(
            num_stages=pipeline * virtual_stages,
            group_size=pipeline,
            group_rank=0,
            stage_index=stage,
            is_first=stage == 0,
            is_last=stage == pipeline * virtual_stages - 1,
            submod=nn.Identity(),
        )
        for stage in held
    ]
    try:
        made = schedule_class(name)(stages, count, loss_fn=lambda output, target: output, scale_grads=False)
    except ValueError:
        return False
    not_simulated = {schedules.UNSHARD, schedules.RESHARD, schedules.REDUCE_GRAD}
    made.pipeline_order_with_comms = {
        rank: [
            part
            for action in order
            for part in action.sub_actions or [action]
            if part.computation_type not in not_simulated
        ]
        for rank, order in made.pipeline_order_with_comms.items()
    }
    made._simulate()  # raises when nobody can go on
    return True


@pytest.mark.parametrize("name", SEVERAL_STAGES)
@pytest.mark.parametrize("pipeline", [2, 3, 4])
def test_the_rules_are_those_of_torch(name: str, pipeline: int) -> None:
    for virtual_stages in (2, 3) if SCHEDULES[name].stages[1] is None else (2,):
        shape = ParallelismSpec(schedule=name, pipeline=pipeline, virtual_stages=virtual_stages)
        counts = range(1, 4 * pipeline + 2)
        allowed = [count for count in counts if runs_in_schedule(shape, count)]
        assert allowed == [count for count in counts if runs_in_torch(name, pipeline, virtual_stages, count)]
