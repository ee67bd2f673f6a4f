"""The model section of the spec: a preset, or sizes, or a preset with some sizes changed."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from rubato.problems import FieldProblem, nearest
from rubato.spec.section import Section, refuse

LLAMA_PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {"hidden_size": 64, "layers": 4, "heads": 4, "kv_heads": 4, "ffn_size": 192},
    "1m": {"hidden_size": 128, "layers": 4, "heads": 4, "kv_heads": 4, "ffn_size": 352},
    "8m": {"hidden_size": 256, "layers": 8, "heads": 8, "kv_heads": 8, "ffn_size": 1024},
    "125m": {"hidden_size": 768, "layers": 12, "heads": 12, "kv_heads": 12, "ffn_size": 2048},
    # Llama 3.2 1B, Llama 2 7B, Llama 3 8B and 70B: the sizes of their published config.json.
    "1b": {
        "hidden_size": 2048,
        "layers": 16,
        "heads": 32,
        "kv_heads": 8,
        "ffn_size": 8192,
        "rope_theta": 500_000.0,
        "tie_embeddings": True,
    },
    "7b": {"hidden_size": 4096, "layers": 32, "heads": 32, "kv_heads": 32, "ffn_size": 11008},
    "8b": {"hidden_size": 4096, "layers": 32, "heads": 32, "kv_heads": 8, "ffn_size": 14336, "rope_theta": 500_000.0},
    "70b": {"hidden_size": 8192, "layers": 80, "heads": 64, "kv_heads": 8, "ffn_size": 28672, "rope_theta": 500_000.0},
}


class ModelSpec(Section):
    """Sizes of a decoder. Those not given come from ``preset``; ``vocab_size`` comes from the tokenizer."""

    family: Literal["llama"] = "llama"
    preset: str | None = None
    hidden_size: PositiveInt = Field(description="width of the residual stream")
    layers: PositiveInt
    heads: PositiveInt
    kv_heads: PositiveInt = Field(description="key/value heads; fewer than heads is grouped-query attention")
    ffn_size: PositiveInt
    rope_theta: PositiveFloat = 10_000.0
    norm_eps: PositiveFloat = 1e-5
    tie_embeddings: bool = False

    @model_validator(mode="before")
    @classmethod
    def _fill_from_preset(cls, given: Any) -> Any:
        if not isinstance(given, dict) or given.get("preset") is None:
            return given
        name = str(given["preset"])
        if name not in LLAMA_PRESETS:
            close = nearest(name, LLAMA_PRESETS)
            meant = f"did you mean '{close}'? " if close else ""
            raise refuse(
                [
                    FieldProblem(
                        "preset", f"no preset is called '{name}'", f"{meant}known presets: {', '.join(LLAMA_PRESETS)}"
                    )
                ]
            )
        return {**LLAMA_PRESETS[name], **given}

    @model_validator(mode="after")
    def _check_sizes(self) -> Self:
        problems = []
        if self.hidden_size % self.heads:
            problems.append(
                FieldProblem(
                    "heads", f"{self.heads} heads do not divide hidden_size {self.hidden_size}", "choose a divisor"
                )
            )
        elif (self.hidden_size // self.heads) % 2:
            problems.append(
                FieldProblem(
                    "heads",
                    f"a head of {self.hidden_size // self.heads} dims cannot be rotated in pairs",
                    "choose heads so that hidden_size / heads is even",
                )
            )
        if self.heads % self.kv_heads:
            problems.append(
                FieldProblem(
                    "kv_heads", f"{self.kv_heads} does not divide heads {self.heads}", "choose a divisor of heads"
                )
            )
        if problems:
            raise refuse(problems)
        return self
