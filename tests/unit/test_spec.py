"""The spec: what is accepted, what it resolves to, and that every refusal names field, cause and fix."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from rubato.problems import FieldProblem, SpecError
from rubato.spec import JobSpec, load_spec, parse_spec, stored_spec


def content(**changes: Any) -> dict[str, Any]:
    """A spec that is accepted, with changes given as section__field."""
    spec: dict[str, Any] = {
        "name": "demo",
        "model": {"family": "llama", "preset": "tiny"},
        "data": {"train": {"builtin": "python-stdlib"}, "sequence_length": 64},
        "train": {"steps": 10, "global_batch": 8},
        "parallelism": {"tensor": 2, "pipeline": 2},
        "workers": {"min": 4, "max": 8},
    }
    for path, value in changes.items():
        *parents, last = path.split("__")
        at = spec
        for parent in parents:
            at = at.setdefault(parent, {})
        at[last] = value
    return spec


def problems(**changes: Any) -> list[FieldProblem]:
    with pytest.raises(SpecError) as refused:
        parse_spec(content(**changes))
    assert refused.value.status == 422
    assert all(problem.field and problem.cause and problem.fix for problem in refused.value.problems)
    return list(refused.value.problems)


def test_a_preset_a_default_and_an_explicit_value_meet_in_one_resolved_spec() -> None:
    spec = parse_spec(content(model__ffn_size=256))
    assert (spec.model.hidden_size, spec.model.ffn_size, spec.optimizer.lr) == (64, 256, 3e-4)
    assert spec.sizes == [4, 8]
    assert JobSpec.model_validate_json(spec.model_dump_json()) == spec


@pytest.mark.parametrize(
    ("model", "resolved"),
    [
        (
            {"family": "gpt2", "preset": "124m"},
            {"ffn_size": 3072, "positions": 1024, "qkv_bias": True, "rope_theta": None},
        ),
        ({"family": "gpt2", "preset": "124m"}, {"tie_embeddings": True, "kv_heads": 12, "head_size": 64}),
        ({"preset": "70b"}, {"kv_heads": 8, "head_size": 128, "qkv_bias": False, "tie_embeddings": False}),
        ({"family": "qwen", "preset": "3-32b"}, {"head_size": 128, "qkv_bias": False, "norm_eps": 1e-6}),
        ({"family": "qwen", "preset": "2.5-0.5b"}, {"head_size": 64, "qkv_bias": True, "rope_theta": 1e6}),
        ({"family": "qwen", "preset": "tiny", "rope_theta": None}, {"rope_theta": 1e6, "qkv_bias": False}),
    ],
)
def test_a_family_fills_in_what_is_its_own(model: dict[str, Any], resolved: dict[str, Any]) -> None:
    spec = parse_spec(content(model=model, parallelism={}))
    assert {name: getattr(spec.model, name) for name in resolved} == resolved
    assert JobSpec.model_validate_json(spec.model_dump_json()) == spec


def test_what_cannot_be_worked_out_is_not_said_to_be_missing() -> None:
    assert [problem.field for problem in problems(model={"hidden_size": 64, "layers": 4, "ffn_size": 192})] == [
        "model.heads"
    ]


def test_key_value_heads_may_be_fewer_than_tensor_ranks() -> None:
    model = {"preset": "tiny", "kv_heads": 1}
    assert parse_spec(content(model=model, parallelism={"tensor": 4}, workers=4)).model.kv_heads == 1


def test_a_plain_number_of_workers_means_exactly_that_many() -> None:
    workers = parse_spec(content(workers=4)).workers
    assert (workers.min, workers.max) == (4, 4)


@pytest.mark.parametrize(
    ("changes", "field", "cause", "fix"),
    [
        ({"trian": {}}, "trian", "unknown field", "did you mean 'train'?"),
        ({"train__stpes": 3}, "train.stpes", "unknown field", "did you mean 'steps'?"),
        ({"model__preset": "8mm"}, "model.preset", "no preset is called '8mm'", "did you mean '8m'?"),
        ({"model__preset": "3-0.6b"}, "model.preset", "no preset is called '3-0.6b'", "use family: qwen"),
        ({"model__family": "lama"}, "model.family", "'lama' is not known", "did you mean 'llama'?"),
        ({"model__rope_thta": 1e4}, "model.rope_thta", "unknown field", "did you mean 'rope_theta'?"),
        ({"model__positions": 64}, "model.positions", "llama turns queries and keys", "leave positions out"),
        ({"model__qkv_bias": True}, "model.qkv_bias", "qwen has them", "leave qkv_bias out"),
        ({"model__head_size": 32}, "model.head_size", "32 is not 64 / 4; qwen's may differ", "leave head_size out"),
        ({"model__family": "gpt2", "model__qkv_bias": False}, "model.qkv_bias", "in every linear layer", "leave"),
        (
            {"model__family": "gpt2", "model__rope_theta": 1e4},
            "model.rope_theta",
            "a vector for each position",
            "leave",
        ),
        ({"model__family": "gpt2", "model__kv_heads": 2}, "model.kv_heads", "no grouped queries", "use 4 (heads)"),
        ({"model__family": "gpt2", "model__positions": 32}, "data.sequence_length", "32 positions", "of 64"),
        ({"model__family": "gpt2", "model__positions": 65}, "parallelism.tensor", "model.positions (65)", "tensor 1"),
        ({"model__family": "qwen", "model__head_size": 9}, "model.head_size", "rotated in pairs", "even"),
        ({"model__family": "qwen", "model__rope_scaling": {"factor": 2}}, "model.rope_scaling", "YaRN", "leave"),
        ({"model__rope_scaling": {"factor": 0.5}}, "model.rope_scaling.factor", "0.5 will not do", "greater than"),
        (
            {"model__rope_scaling": {"factor": 2, "low_frequency_factor": 4}},
            "model.rope_scaling.high_frequency_factor",
            "4 is not above low_frequency_factor 4",
            "choose a larger one",
        ),
        (
            {"model__heads": 12, "model__hidden_size": 96, "model__kv_heads": 3, "model__ffn_size": 192},
            "parallelism.tensor",
            "3 key/value heads can neither be split nor be repeated evenly over 2 ranks",
            "use tensor 1",
        ),
        ({"train__precision": "bf-16"}, "train.precision", "'bf-16' is not known", "did you mean 'bf16'?"),
        ({"train__steps": 0}, "train.steps", "0 will not do", "greater than 0"),
        ({"name": "Demo Job"}, "name", "'Demo Job' will not do", "lower-case letters"),
        ({"data__train": {}}, "data.train.path", "neither was given", "exactly one"),
        ({"data__train__path": "a.txt"}, "data.train.path", "both were given", "exactly one"),
        ({"parallelism__tensor": 3}, "parallelism.tensor", "3 does not divide model.heads (4)", "use tensor 2"),
        ({"parallelism__tensor": 8}, "parallelism.tensor", "8 does not divide model.heads (4)", "use tensor 4"),
        ({"parallelism__pipeline": 5}, "parallelism.pipeline", "5 stages need at least 5 layers", "at most 4 stages"),
        ({"parallelism__micro_batch": 3}, "parallelism.micro_batch", "3 does not divide", "use micro_batch 2"),
        ({"workers": 5}, "workers", "5 workers cannot be laid out at tensor 2 x pipeline 2", "use 4 or 8 workers"),
        ({"workers": {"min": 8, "max": 4}}, "workers.min", "min 8 is above max 4", "at most max"),
        ({"model__heads": 6}, "model.heads", "6 heads do not divide hidden_size 64", "divisor"),
        ({"optimizer__schedule__warmup": 11}, "optimizer.schedule.warmup", "more than train.steps", "at most 10"),
        ({"parallelism__virtual_stages": 2}, "parallelism.virtual_stages", "one stage a rank", "interleaved"),
        (
            {"parallelism__schedule": "zbv", "parallelism__virtual_stages": 3},
            "parallelism.virtual_stages",
            "schedule zbv runs 2 stages a rank, not 3",
            "use virtual_stages 2",
        ),
        (
            {"parallelism": {"pipeline": 1, "schedule": "dualpipev"}, "workers": 1},
            "parallelism.schedule",
            "dualpipev is for several ranks",
            "use 1f1b",
        ),
        (
            {"parallelism": {"pipeline": 2, "schedule": "dualpipev"}, "workers": 8, "train__global_batch": 12},
            "parallelism.schedule",
            "cannot run 3 micro-batches a replica (it needs at least 4)",
            "use train.global_batch 16, or 6 workers",
        ),
        (
            {"parallelism": {"pipeline": 2, "schedule": "interleaved"}, "workers": 2, "train__global_batch": 5},
            "parallelism.schedule",
            "cannot run 5 micro-batches",
            "use train.global_batch 6",
        ),
        ({"parallelism__stages": [1, 1, 2]}, "parallelism.stages", "3 stages are placed", "give 2 numbers"),
        ({"parallelism__stages": [1, 2]}, "parallelism.stages", "3 layers are placed, the model has 4", "[2, 2]"),
        (
            {"parallelism__schedule": "zbv", "memory__recompute": "selective"},
            "memory.recompute",
            "is given out once, and zbv goes through each layer twice",
            "use recompute: full",
        ),
        (
            {"parallelism__schedule": "zbv", "train__precision": "bf16_pure"},
            "train.precision",
            "with its gradients of weights apart",
            "use bf16",
        ),
        (
            {"memory__recompute": {"budget": 0.5}},
            "memory.recompute.budget",
            "partitioner of torch.compile",
            "use train.compile: true, or recompute: {every: 2}",
        ),
        (
            {"memory__recompute": {"budget": 0.5, "mode": "full"}, "train__compile": True},
            "memory.recompute.budget",
            "mode full says what is kept",
            "a mode or a budget",
        ),
        (
            {"parallelism__schedule": "zbv", "parallelism__tensor": 1, "train__compile": True},
            "train.compile",
            "a compiled layer computes them at once",
            "use compile: false, or schedule interleaved",
        ),
        ({"train__compile": True}, "train.compile", "collectives of a tensor axis", "parallelism.tensor 1"),
        (
            {"memory__zero": 3, "parallelism__tensor": 1, "train__compile": True},
            "train.compile",
            "takes away the memory",
            "memory.zero 2",
        ),
        ({"parallelism__schedule": "zbv", "memory__loss_chunks": 2}, "memory.loss_chunks", "does not take", "1f1b"),
        ({"memory__loss_chunks": 3}, "memory.loss_chunks", "3 does not divide the 32 positions", "loss_chunks 2"),
        ({"parallelism__device_map": "balanced"}, "parallelism.device_map", "splits them over workers", "tensor 1"),
        (
            {"parallelism": {"device_map": "balanced"}, "workers": 2},
            "parallelism.device_map",
            "no process group",
            "a pipeline over several workers",
        ),
        (
            {"parallelism": {"device_map": "balanced"}, "workers": 1},
            "parallelism.device_map",
            "4 layers are to be balanced over 1 of the worker's cpus",
            "use workers.cpus from 2 to 4",
        ),
        (
            {"parallelism": {"device_map": {"0-1": 0, "1-3": 1}}, "workers": {"min": 1, "gpus": 2}},
            "parallelism.device_map",
            "layer 1 is placed more than once",
            "name each layer once",
        ),
        (
            {"parallelism": {"device_map": {"0-2": 0}}, "workers": {"min": 1, "gpus": 2}},
            "parallelism.device_map",
            "layer 3 is not placed",
            "name each layer once",
        ),
        (
            {"parallelism": {"device_map": {"0-3": 2}}, "workers": {"min": 1, "gpus": 2}},
            "parallelism.device_map",
            "on device 2, the worker has 2 gpus",
            "up to 1, or workers.gpus 3",
        ),
        (
            {"parallelism": {"device_map": {"0-999999999": 0}}, "workers": {"min": 1, "gpus": 2}},
            "parallelism.device_map",
            "no layer 999999999",
            "name each layer once",
        ),
        (
            {"parallelism": {"device_map": {"first": 0}}, "workers": {"min": 1, "gpus": 2}},
            "parallelism.device_map",
            "first names no layers",
            "such as 4 or 0-3",
        ),
        ({"memory__recompute": {"budget": 0.9}}, "memory.recompute.budget", "torch.compile", "recompute: none"),
        (
            {"memory__recompute": {"mode": "none", "every": 2}},
            "memory.recompute.every",
            "mode none",
            "full or selective",
        ),
        ({"train__precision": "float8"}, "train.precision", "workers.gpus is 0", "use bf16"),
        (
            {"train__precision": "float8", "workers": {"min": 4, "gpus": 1}},
            "train.precision",
            "of which tensor ranks would each know their own",
            "parallelism.tensor 1",
        ),
        ({"train__loss_scale": {"start": 1000}}, "train.loss_scale.start", "is not a power of 2", "use 512"),
    ],
)
def test_a_refusal_names_field_cause_and_fix(changes: dict[str, Any], field: str, cause: str, fix: str) -> None:
    found = [problem for problem in problems(**changes) if problem.field == field and cause in problem.cause]
    assert found, problems(**changes)
    assert fix in found[0].fix


def test_a_missing_section_is_named() -> None:
    without = content()
    del without["workers"]
    with pytest.raises(SpecError) as refused:
        parse_spec(without)
    assert [str(problem) for problem in refused.value.problems] == ["workers: is missing; add workers"]


def test_all_fields_at_fault_are_listed_at_once() -> None:
    fields = {problem.field for problem in problems(train__steps=-1, train__global_batch="many", project="No Good")}
    assert fields == {"train.steps", "train.global_batch", "project"}


def test_overrides_are_applied_on_top_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "spec.yaml"
    file.write_text(json.dumps(content()))
    spec = load_spec(file, ["train.steps=33", "optimizer.schedule.name=wsd", "workers=4"])
    assert (spec.train.steps, spec.optimizer.schedule.name, spec.workers.max) == (33, "wsd", 4)


@pytest.mark.parametrize(
    ("override", "field", "cause"),
    [
        ("train.steps", "train.steps", "is not an override"),
        ("name.first=x", "name.first", "'name' holds a value"),
        ("train.steps=[", "train.steps", "is not YAML"),
    ],
)
def test_an_override_that_cannot_be_applied(tmp_path: Path, override: str, field: str, cause: str) -> None:
    file = tmp_path / "spec.yaml"
    file.write_text(json.dumps(content()))
    with pytest.raises(SpecError) as refused:
        load_spec(file, [override])
    (problem,) = refused.value.problems
    assert problem.field == field
    assert cause in problem.cause


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (None, "cannot be read"),
        ("name: [demo", "line 1"),
        ("- 1\n- 2\n", "holds no mapping"),
        (b"\xff\xfe\x00", "is not text"),
    ],
)
def test_a_file_that_holds_no_spec(tmp_path: Path, text: str | bytes | None, cause: str) -> None:
    file = tmp_path / "spec.yaml"
    if text is not None:
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(SpecError) as refused:
        load_spec(file)
    (problem,) = refused.value.problems
    assert problem.field == str(file)
    assert cause in problem.cause


@pytest.mark.parametrize(
    ("short", "long"),
    [
        ("full", {"mode": "full", "every": 1, "budget": None}),
        ("selective", {"mode": "selective", "every": 1, "budget": None}),
        ({"every": 3}, {"mode": "full", "every": 3, "budget": None}),
        ({"mode": "selective", "every": 2}, {"mode": "selective", "every": 2, "budget": None}),
    ],
)
def test_recomputation_is_written_short_and_resolved_in_full(short: Any, long: dict[str, Any]) -> None:
    assert parse_spec(content(memory__recompute=short)).memory.recompute.model_dump() == long


def test_stages_are_balanced_by_cost_unless_they_are_placed() -> None:
    assert parse_spec(content(model__layers=5)).stage_layers == (3, 2)
    assert parse_spec(content(model__layers=5, parallelism__stages=[1, 4])).stage_layers == (1, 4)
    # A token of the head costs 8 x 256 multiply-adds, of a layer 8 x 120: somewhat more than two layers.
    small = {"preset": "tiny", "layers": 9, "ffn_size": 8, "hidden_size": 8}
    assert parse_spec(content(model=small)).stage_layers == (6, 3)


def test_a_schedule_brings_the_stages_it_needs() -> None:
    for name in ("interleaved", "interleaved_zero_bubble", "zbv", "dualpipev"):
        assert parse_spec(content(parallelism__schedule=name)).parallelism.virtual_stages == 2


@pytest.mark.parametrize(
    "changes",
    [
        {"parallelism__micro_batch": 2**31 - 1},
        {"train__global_batch": 2**31 - 1, "parallelism__micro_batch": 2**31 - 2},
        {"parallelism__tensor": 2**31 - 1, "workers": 8},
        {"train__global_batch": 2**31 - 1, "workers": 7},
        {"data__sequence_length": 2**31 - 1},
    ],
)
def test_a_refusal_costs_no_more_for_large_numbers(changes: dict[str, Any]) -> None:
    steps = 0

    def count(*_: object) -> Any:
        nonlocal steps
        steps += 1
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        problems(**changes)
    finally:
        sys.settrace(before)
    assert steps < 3_000_000  # by far fewer than the numbers are large


@pytest.mark.parametrize(
    "field", ["train__steps", "train__global_batch", "parallelism__micro_batch", "model__layers", "checkpoint__every"]
)
def test_counts_have_an_upper_end(field: str) -> None:
    assert problems(**{field: 2**31})[0].field == field.replace("__", ".")


def test_a_stored_spec_is_what_was_stored() -> None:
    scaling = {"factor": 8.0, "original_length": 8192}
    for model in (
        {"preset": "tiny"},
        {"preset": "tiny", "rope_scaling": scaling},
        {"family": "qwen", "preset": "tiny"},
    ):
        spec = parse_spec(content(model=model))
        stored = stored_spec(spec.model_dump(mode="json"))
        assert stored == spec
        assert stored.model_dump_json() == spec.model_dump_json()
    today = {**spec.model_dump(mode="json"), "priority": 4000, "later": {"field": 1}}
    assert stored_spec(today).priority == 4000
