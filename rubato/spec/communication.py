"""The section of the spec on what travels over the data axis: in which pieces, and in how many bytes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal, Self

from pydantic import Field, PositiveFloat, model_validator

from rubato.problems import FieldProblem
from rubato.spec.section import PositiveInt, Section, refuse

CPU_BUCKET_MB, GPU_BUCKET_MB = 25.0, 100.0

# What a scheme can be told, and what it is told where nothing is said.
_OPTIONS: dict[str, dict[str, Any]] = {
    "int8": {"block": 256},
    "topk": {"ratio": 0.05},
    "powersgd": {"rank": 4},
}

LARGEST_RATIO = 0.5


class CompressionSpec(Section):
    """Fewer bytes for the sums of gradients. Written short: one word."""

    name: Literal["none", "bf16", "fp16", "int8", "topk", "powersgd"] = Field(
        "none",
        description="bf16, fp16: half of the bytes; int8: blocks of 8-bit numbers with a scale each, a quarter; topk: "
        "the largest values alone; powersgd: matrices by factors of low rank. What the last three leave out of a step "
        "is added to the next (error feedback), int8 under memory.zero aside",
    )
    block: Annotated[int, Field(ge=8, le=2**16)] | None = Field(
        None, description="int8: values that share a scale; 256 where it is not said"
    )
    ratio: Annotated[float, Field(gt=0.0)] | None = Field(
        None, description="topk: share of the values that is sent; 0.05 where it is not said"
    )
    rank: PositiveInt | None = Field(None, description="powersgd: of the factors; 4 where it is not said")
    between: Literal["replicas", "nodes"] = Field(
        "replicas",
        description="who sends compressed sums to whom: all replicas, or one replica of each node to those of others, "
        "while sums inside a node stay exact",
    )

    @model_validator(mode="before")
    @classmethod
    def _short_form(cls, given: Any) -> Any:
        if isinstance(given, str):
            given = {"name": given}
        options = _OPTIONS.get(str(given.get("name"))) if isinstance(given, dict) else None
        return given if options is None else {**options, **{k: v for k, v in given.items() if v is not None}}

    @model_validator(mode="after")
    def _check(self) -> Self:
        if problems := [*self._problems()]:
            raise refuse(problems)
        return self

    def _problems(self) -> Iterator[FieldProblem]:
        for name, options in _OPTIONS.items():
            for option in options:
                if getattr(self, option) is not None and name != self.name:
                    cause = f"{option} is an option of {name}, not of {self.name}"
                    yield FieldProblem(option, cause, f"leave it out, or use compression {name}")
        if self.ratio is not None and self.ratio >= LARGEST_RATIO:
            yield FieldProblem(
                "ratio",
                f"a value is sent with its place, 8 bytes for 4, so a ratio of {self.ratio:g} saves nothing",
                f"use a ratio below {LARGEST_RATIO:g}, such as 0.05, or compression int8 or none",
            )
        if self.between == "nodes" and self.name == "none":
            cause = "nothing is compressed, so it does not matter between whom"
            yield FieldProblem("between", cause, "leave it out, or use compression int8")

    @property
    def lossy(self) -> bool:
        """Whether what it leaves out of a step is owed to the next."""
        return self.name in _OPTIONS


class CommunicationSpec(Section):
    bucket_mb: PositiveFloat | Literal["auto"] = Field(
        CPU_BUCKET_MB,
        description="MB of gradients reduced in one call over the data axis; auto: measured when the first replicas "
        "meet. Where it is not said: 25, with GPUs 100",
    )
    compression: CompressionSpec = CompressionSpec()


def with_large_buckets(given: dict[str, Any]) -> dict[str, Any]:
    """A spec's content with buckets for GPUs, where it has GPUs and does not say how large buckets are."""
    workers, communication = given.get("workers"), given.get("communication", {})
    if isinstance(workers, dict) and workers.get("gpus") and isinstance(communication, dict):
        return {**given, "communication": {"bucket_mb": GPU_BUCKET_MB, **communication}}
    return given
