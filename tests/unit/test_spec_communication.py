"""What a spec may say about communication, and what is made of what it leaves out."""

from __future__ import annotations

from typing import Any

import pytest

from rubato.problems import SpecError
from rubato.spec import JobSpec, parse_spec
from rubato.spec.identity import curve_differences, curve_hash

SMALLEST: dict[str, Any] = {
    "name": "small",
    "model": {"preset": "tiny"},
    "data": {"train": {"builtin": "python-stdlib"}, "sequence_length": 16},
    "train": {"steps": 4, "global_batch": 8},
    "workers": 1,
}


def spec(**sections: Any) -> JobSpec:
    return parse_spec({**SMALLEST, **sections})


def problems(compression: Any) -> list[tuple[str, str, str]]:
    with pytest.raises(SpecError) as refused:
        spec(communication={"compression": compression})
    return [(problem.field, problem.cause, problem.fix) for problem in refused.value.problems]


def test_buckets_are_larger_on_gpus() -> None:
    assert spec().communication.bucket_mb == 25
    assert spec(workers={"min": 1, "gpus": 1}).communication.bucket_mb == 100
    assert spec(workers={"min": 1, "gpus": 1}, communication={"bucket_mb": 3}).communication.bucket_mb == 3
    assert spec(communication={"bucket_mb": "auto"}).communication.bucket_mb == "auto"


def test_a_scheme_gets_its_own_options() -> None:
    for name, options in {"int8": {"block": 256}, "topk": {"ratio": 0.05}, "powersgd": {"rank": 4}}.items():
        found = spec(communication={"compression": name})
        assert found.communication.compression.model_dump(exclude_none=True) == {
            "name": name,
            "between": "replicas",
            **options,
        }
        assert parse_spec(found.model_dump(mode="json")) == found
    assert spec(communication={"compression": {"name": "int8", "block": 64}}).communication.compression.block == 64


def test_what_cannot_be_meant_is_refused() -> None:
    assert problems({"name": "int8", "ratio": 0.1}) == [
        (
            "communication.compression.ratio",
            "ratio is an option of topk, not of int8",
            "leave it out, or use compression topk",
        )
    ]
    (((field, cause, _)),) = problems({"name": "topk", "ratio": 1.0})
    assert (field, "saves nothing" in cause) == ("communication.compression.ratio", True)
    (((field, cause, _)),) = problems({"between": "nodes"})
    assert (field, "nothing is compressed" in cause) == ("communication.compression.between", True)
    (((field, _, fix)),) = problems({"name": "int9"})
    assert (field, "int8" in fix) == ("communication.compression.name", True)


def test_what_needs_whole_parameters_is_refused_where_they_are_sharded() -> None:
    def fields(compression: Any) -> list[str]:
        with pytest.raises(SpecError) as refused:
            spec(memory={"zero": 2}, communication={"compression": compression})
        return [problem.field for problem in refused.value.problems]

    assert fields("topk") == fields("powersgd") == ["communication.compression"]
    assert fields({"name": "int8", "between": "nodes"}) == ["communication.compression.between"]
    assert spec(memory={"zero": 2}, communication={"compression": "int8"}).memory.zero == 2


def test_compression_is_part_of_the_curve() -> None:
    plain, small = spec(), spec(communication={"compression": "int8"})
    assert curve_hash(plain) == curve_hash(spec(communication={"bucket_mb": 1}))
    assert curve_hash(plain) != curve_hash(small)
    assert ("communication.compression.name", None, "int8") in curve_differences(plain, small)


def test_context_parallelism_is_refused_with_a_reason() -> None:
    with pytest.raises(SpecError) as refused:
        spec(parallelism={"context": 2}, workers=2)
    ((field, cause),) = [(problem.field, problem.cause) for problem in refused.value.problems]
    assert (field, "attention of GPUs alone" in cause) == ("parallelism.context", True)
