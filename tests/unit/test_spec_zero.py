"""What a spec may ask of ZeRO, and how the rest is refused."""

from __future__ import annotations

from typing import Any

import pytest

from rubato.layout import Layout
from rubato.problems import SpecError
from rubato.resources import LayoutView
from rubato.spec import JobSpec, parse_spec


def spec_of(memory: dict[str, Any], **sections: Any) -> JobSpec:
    content: dict[str, Any] = {
        "name": "zero",
        "model": {"preset": "1m"},
        "data": {"train": {"path": "text.txt"}},
        "train": {"steps": 1, "global_batch": 16},
        "workers": 8,
        "memory": memory,
    }
    return parse_spec(content | sections)


def refusal(memory: dict[str, Any], **sections: Any) -> dict[str, str]:
    """The fix of each field at fault."""
    with pytest.raises(SpecError) as refused:
        spec_of(memory, **sections)
    return {problem.field: problem.fix for problem in refused.value.problems}


@pytest.mark.parametrize("zero", range(4))
def test_the_layout_shows_the_stage(zero: int) -> None:
    assert LayoutView.of(Layout(8, 1, 1), spec_of({"zero": zero})).zero == zero


@pytest.mark.parametrize("zero", [-1, 4])
def test_there_are_three_stages(zero: int) -> None:
    assert list(refusal({"zero": zero})) == ["memory.zero"]


@pytest.mark.parametrize("schedule", ["interleaved_zero_bubble", "zbv", "dualpipev"])
def test_schedules_that_split_the_backward_pass_run_with_zero_1_alone(schedule: str) -> None:
    parallelism = {"pipeline": 2, "schedule": schedule}
    assert spec_of({"zero": 1}, parallelism=parallelism).memory.zero == 1
    for zero in (2, 3):
        assert "zero 1" in refusal({"zero": zero}, parallelism=parallelism)["memory.zero"]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved"])
def test_the_others_run_with_every_stage(schedule: str) -> None:
    for zero in range(4):
        assert spec_of({"zero": zero}, parallelism={"pipeline": 2, "schedule": schedule}).memory.zero == zero


def test_what_is_not_sharded_is_not_sharded_over_a_few_either() -> None:
    assert "zero 1, 2 or 3" in refusal({"shard_over": 2})["memory.shard_over"]
    assert spec_of({"zero": 1, "shard_over": 2}).memory.shard_over == 2


@pytest.mark.parametrize(
    ("field", "sections"),
    [
        ("communication.compression", {"communication": {"compression": "topk"}}),
        ("communication.bucket_mb", {"communication": {"bucket_mb": "auto"}}),
        ("optimizer.name", {"optimizer": {"name": "muon"}}),
    ],
)
def test_what_does_not_go_with_shards_is_refused(field: str, sections: dict[str, Any]) -> None:
    assert spec_of({"zero": 0}, **sections)
    assert "zero 0" in refusal({"zero": 1}, **sections)[field]
