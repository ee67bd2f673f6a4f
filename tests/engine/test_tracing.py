"""A trace on tensors without content finds the memory that is predicted, and what ranks send one another."""

from __future__ import annotations

from typing import Any

import pytest

from rubato.arithmetic import parameters_of_rank
from rubato.spec import JobSpec, parse_spec
from service.planning.accelerators import catalogue
from service.planning.constants import fitted
from service.planning.engine_memory import memory_model
from service.planning.from_spec import layout_of, runtime_of, work_of
from tests.engine.forked import in_one_process
from workers.engine.tracing import StageTrace, trace_stage

DATA = 4


def spec_of(shape: dict[str, Any], memory: dict[str, Any]) -> JobSpec:
    workers = DATA * shape.get("tensor", 1) * shape.get("pipeline", 1)
    return parse_spec(
        {
            "name": "traced",
            "model": {"hidden_size": 512, "layers": 4, "heads": 8, "kv_heads": 8, "ffn_size": 2048},
            "data": {"train": {"builtin": "python-stdlib"}, "sequence_length": 512, "vocab_size": 2048},
            "train": {"steps": 1, "global_batch": 4 * DATA, "precision": "bf16", "compile": False},
            "memory": memory,
            "parallelism": shape,
            "workers": {"min": workers, "max": workers, "gpus": 1},
        }
    )


def traced(spec: JobSpec, stage: int) -> StageTrace:
    return in_one_process(lambda: trace_stage(spec, stage, DATA))


@pytest.mark.parametrize(
    ("shape", "memory", "stage"),
    [
        ({}, {"recompute": "none"}, 0),
        ({}, {"recompute": "full", "zero": 3}, 0),
        ({"pipeline": 2}, {"recompute": "none"}, 0),
        ({"tensor": 2, "pipeline": 2}, {"recompute": "full"}, 1),
    ],
)
def test_the_peak_is_what_was_predicted(shape: dict[str, Any], memory: dict[str, Any], stage: int) -> None:
    spec = spec_of(shape, memory)
    layout = layout_of(spec, spec.workers.min)
    assert layout is not None
    predicted = memory_model(work_of(spec), catalogue()["h100-80gb"], runtime_of(spec), fitted()).of_rank(layout, stage)
    found = traced(spec, stage)
    assert found.peak_bytes == pytest.approx(predicted.allocated, rel=0.15)
    held = parameters_of_rank(work_of(spec).model, layout, stage, layout.layers_on(work_of(spec).model, stage))
    sent = {each.kind: each for each in found.collectives}
    if layout.zero:
        gathered = sent["all_gather, data axis"].bytes
        assert gathered >= 2 * 4 * 4 * work_of(spec).model.layer_parameters  # every layer, for either pass
    else:
        assert sent["all_reduce, data axis"].bytes == pytest.approx(4 * held, rel=0.01)
        assert found.resident_bytes == pytest.approx(16 * held, rel=0.01)
    assert ("send" in sent) == (layout.pipeline > 1)
    assert ("reduce_scatter" in sent) == (layout.tensor > 1)
