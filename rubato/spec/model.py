"""The model section of the spec: a preset, or sizes, or a preset with some sizes changed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, Self

from pydantic import ConfigDict, Field, PositiveFloat, model_validator

from rubato.pretrained import find_tensors, read_pretrained
from rubato.problems import FieldProblem, RubatoError, nearest
from rubato.spec.presets import PRESETS
from rubato.spec.section import PositiveInt, Section, refuse

Family = Literal["gpt2", "llama", "qwen"]

DEFAULTS: dict[str, dict[str, Any]] = {
    "gpt2": {"tie_embeddings": True, "positions": 1024},
    "llama": {"rope_theta": 10_000.0},
    "qwen": {"rope_theta": 1_000_000.0, "norm_eps": 1e-6},
}
"""What a family takes where neither the spec nor a preset says it."""

_ROTARY = "turns queries and keys by their position and learns none"
_LEARNED = "learns a vector for each position and turns nothing"

FIXED: dict[str, dict[str, tuple[Any, str]]] = {
    "gpt2": {
        "rope_theta": (None, _LEARNED),
        "rope_scaling": (None, _LEARNED),
        "qkv_bias": (True, "has a bias in every linear layer"),
        "qk_norm": (False, "has no norm of queries and keys; qwen has"),
    },
    "llama": {
        "positions": (None, _ROTARY),
        "qkv_bias": (False, "has no biases; qwen has them"),
        "qk_norm": (False, "has no norm of queries and keys; qwen has"),
    },
    "qwen": {
        "positions": (None, _ROTARY),
        "rope_scaling": (None, "is not stretched in Llama's way (its own is YaRN, which is not built)"),
    },
}
"""Fields in which a family has no choice: the value, and why it has no other."""


class RopeScalingSpec(Section):
    """Rotary angles stretched for sequences longer than a model was made for, as Llama 3.1 does it.

    Wavelengths above ``original_length / low_frequency_factor`` positions become ``factor`` times as long, those below
    ``original_length / high_frequency_factor`` stay, those between change smoothly.
    """

    factor: float = Field(ge=1.0, description="how many times longer the long wavelengths become")
    low_frequency_factor: PositiveFloat = 1.0
    high_frequency_factor: PositiveFloat = 4.0
    original_length: PositiveInt = Field(8192, description="positions the model was made for")

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        low, high = self.low_frequency_factor, self.high_frequency_factor
        if low >= high:
            raise refuse(
                [
                    FieldProblem(
                        "high_frequency_factor",
                        f"{high:g} is not above low_frequency_factor {low:g}",
                        "choose a larger one, such as 4 with a low_frequency_factor of 1",
                    )
                ]
            )
        return self


class ModelSpec(Section):
    """Sizes of a decoder, those not given from ``preset``, then from the family. The vocabulary is the tokenizer's.

    With ``from`` they are those of the model in that folder, and so are its first weights.
    """

    model_config = ConfigDict(validate_by_name=False, validate_by_alias=True, serialize_by_alias=True)

    source: str | None = Field(
        None, alias="from", description="a Hugging Face folder (Llama, Mistral, Qwen2, Qwen3, GPT-2) to begin with"
    )
    family: Family = "llama"
    preset: str | None = None
    hidden_size: PositiveInt = Field(description="width of the residual stream")
    layers: PositiveInt
    heads: PositiveInt
    kv_heads: PositiveInt = Field(
        default_factory=lambda known: known["heads"],
        description="key/value heads; fewer than heads is grouped-query attention",
    )
    head_size: PositiveInt = Field(
        default_factory=lambda known: max(1, known["hidden_size"] // known["heads"]),
        description="dims a head; hidden_size / heads when left out",
    )
    ffn_size: PositiveInt = Field(description="width of the feed-forward layer; gpt2: 4 x hidden_size when left out")
    norm_eps: PositiveFloat = 1e-5
    tie_embeddings: bool = Field(False, description="one matrix for the embedding and the head; gpt2: true")
    positions: PositiveInt | None = Field(None, description="gpt2: the longest sequence it has positions for")
    rope_theta: PositiveFloat | None = Field(None, description="llama, qwen: base of the rotary wavelengths")
    rope_scaling: RopeScalingSpec | None = Field(None, description="llama: rotary angles stretched")
    qk_norm: bool = Field(False, description="qwen: queries and keys are normalised, as in Qwen3")
    qkv_bias: bool = Field(False, description="qwen: projections to queries, keys and values have biases, as in Qwen2")

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        if isinstance(given.get("from"), str) and any(given.get(name) is None for name in _RESOLVED):
            given = _pretrained(given)
        if given.get("family", "llama") not in DEFAULTS:
            return given
        family = given.get("family", "llama")
        preset = _preset(family, str(given["preset"])) if given.get("preset") is not None else {}
        said = {name: value for name, value in given.items() if value is not None}
        filled = {**DEFAULTS[family], **{name: value for name, (value, _) in FIXED[family].items()}, **preset, **said}
        if family == "gpt2" and isinstance(filled.get("hidden_size"), int):
            filled.setdefault("ffn_size", 4 * filled["hidden_size"])
        if family == "qwen":
            filled.setdefault("qkv_bias", not filled.get("qk_norm", False))
        return filled

    @model_validator(mode="after")
    def _check(self) -> Self:
        problems = [*self._family_problems(), *self._size_problems()]
        if problems:
            raise refuse(problems)
        return self

    def _family_problems(self) -> Iterator[FieldProblem]:
        for field, (value, reason) in FIXED[self.family].items():
            if getattr(self, field) != value:
                yield FieldProblem(field, f"{self.family} {reason}", f"leave {field} out")
        if self.family == "gpt2" and self.kv_heads != self.heads:
            yield FieldProblem(
                "kv_heads", "gpt2 has no grouped queries", f"use {self.heads} (heads), or another family"
            )
        if (
            self.family != "qwen"
            and self.hidden_size % self.heads == 0
            and self.head_size * self.heads != self.hidden_size
        ):
            yield FieldProblem(
                "head_size",
                f"the heads of {self.family} share out the hidden size, {self.head_size} is not "
                f"{self.hidden_size} / {self.heads}; qwen's may differ",
                "leave head_size out",
            )

    def _size_problems(self) -> Iterator[FieldProblem]:
        explicit = self.family == "qwen" and "head_size" in self.model_fields_set
        if self.hidden_size % self.heads and not explicit:
            yield FieldProblem(
                "heads", f"{self.heads} heads do not divide hidden_size {self.hidden_size}", "choose a divisor"
            )
        elif self.head_size % 2 and self.rope_theta is not None:
            yield FieldProblem(
                "head_size" if explicit else "heads",
                f"a head of {self.head_size} dims cannot be rotated in pairs",
                "choose an even head_size" if explicit else "choose heads so that hidden_size / heads is even",
            )
        if self.heads % self.kv_heads:
            yield FieldProblem(
                "kv_heads", f"{self.kv_heads} does not divide heads {self.heads}", "choose a divisor of heads"
            )


_RESOLVED = ("hidden_size", "layers", "heads", "ffn_size")
"""Sizes that a spec with ``from`` has once its folder was read. Whoever gets it then need not see the folder."""


def _pretrained(given: dict[str, Any]) -> dict[str, Any]:
    """The sizes of the model in a folder, of which a spec may say none itself."""
    mine = sorted(name for name, value in given.items() if name != "from" and value is not None)
    if mine:
        cause = f"the model in {given['from']} has its own"
        raise refuse([FieldProblem(name, cause, f"leave {name} out") for name in mine])
    try:
        sizes = read_pretrained(given["from"]).sizes
        find_tensors(given["from"])
    except RubatoError as error:
        raise refuse(
            [FieldProblem(each.field.removeprefix("model."), each.cause, each.fix) for each in error.problems]
        ) from error
    return {"from": given["from"], **sizes}


def _preset(family: str, name: str) -> dict[str, Any]:
    known = PRESETS[family]
    if name in known:
        return dict(known[name].sizes)
    elsewhere = " or ".join(other for other, presets in PRESETS.items() if name in presets)
    close = nearest(name, known)
    mistyped = f"did you mean '{close}'? " if close else ""
    meant = f"use family: {elsewhere}; " if elsewhere else mistyped
    raise refuse(
        [
            FieldProblem(
                "preset", f"no preset is called '{name}'", f"{meant}known presets of {family}: {', '.join(known)}"
            )
        ]
    )
