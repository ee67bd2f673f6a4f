"""The ``config.json`` of a Hugging Face folder as sizes of a spec's model section, or why it cannot be one."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rubato.problems import FieldProblem, RubatoError

FIELD = "model.from"
CONFIG = "config.json"
TYPES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen", "qwen3": "qwen", "gpt2": "gpt2"}
"""Families by what a config calls its model."""

_GELU_TANH = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast")


@dataclass(frozen=True)
class Pretrained:
    """A model in a folder.

    Attributes:
        sizes: fields of the model section, with its family.
        vocab_size: rows of its embedding.
        longest: positions that its attention reaches over, where it is limited; None: all.
        dtype: of its weights, as torch calls it.
    """

    sizes: Mapping[str, Any]
    vocab_size: int
    longest: int | None
    dtype: str


class _UnlikeError(Exception):
    """A model that is not built like any family here."""


def read_pretrained(folder: str) -> Pretrained:
    """The model in a folder.

    Raises:
        RubatoError: there is none, or it is of a kind that no family here computes.
    """
    path = Path(folder).expanduser()
    try:
        config = json.loads((path / CONFIG).read_bytes())
    except OSError as error:
        cause = f"{path / CONFIG} cannot be read: {error.strerror}"
        raise pretrained_problem(cause, "give a folder that save_pretrained has written") from error
    except ValueError as error:
        raise pretrained_problem(f"{path / CONFIG} is not JSON", "copy the folder again") from error
    kind = config.get("model_type") if isinstance(config, dict) else None
    if kind not in TYPES:
        raise pretrained_problem(f"{path} holds a model of type {kind!r}", f"known are {', '.join(TYPES)}")
    try:
        return _gpt2(config) if kind == "gpt2" else _rotary(config, kind)
    except _UnlikeError as error:
        raise pretrained_problem(f"the model in {path} {error}", "use another model") from error
    except (KeyError, TypeError, ValueError) as error:
        raise pretrained_problem(f"{path / CONFIG} lacks sizes: {error}", "copy the folder again") from error


def pretrained_problem(cause: str, fix: str) -> RubatoError:
    """The refusal of a model that was to be taken over."""
    return RubatoError(
        f"{FIELD}: {cause}", fix=fix, code="pretrained", status=422, problems=[FieldProblem(FIELD, cause, fix)]
    )


def _rotary(config: dict[str, Any], kind: str) -> Pretrained:
    for difference in _differences(config, kind):
        raise _UnlikeError(difference)
    hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
    head_size = int(config.get("head_dim") or hidden // heads)
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    sizes: dict[str, Any] = {
        "family": TYPES[kind],
        "hidden_size": hidden,
        "layers": int(config["num_hidden_layers"]),
        "heads": heads,
        "kv_heads": int(config.get("num_key_value_heads") or heads),
        "ffn_size": int(config["intermediate_size"]),
        "norm_eps": float(config.get("rms_norm_eps", 1e-6)),
        "tie_embeddings": bool(config.get("tie_word_embeddings", False)),
        "rope_theta": float(rope.get("rope_theta") or config.get("rope_theta", 10_000.0)),
    }
    if kind in ("qwen2", "qwen3"):
        sizes |= {"qkv_bias": kind == "qwen2", "qk_norm": kind == "qwen3", "head_size": head_size}
    elif head_size * heads != hidden:
        # Llama with heads of another size is what Qwen is without its biases and norms.
        sizes |= {"family": "qwen", "qkv_bias": False, "qk_norm": False, "head_size": head_size}
    rope_type = rope.get("rope_type") or rope.get("type") or "default"
    if rope_type == "llama3" and sizes["family"] == "llama":
        sizes["rope_scaling"] = {
            "factor": float(rope["factor"]),
            "low_frequency_factor": float(rope["low_freq_factor"]),
            "high_frequency_factor": float(rope["high_freq_factor"]),
            "original_length": int(rope["original_max_position_embeddings"]),
        }
    elif rope_type != "default":
        raise _UnlikeError(f"stretches its rotary angles in the way of {rope_type!r}; known is llama3, for llama")
    return Pretrained(sizes, int(config["vocab_size"]), _window(config, kind), _dtype(config))


def _differences(config: dict[str, Any], kind: str) -> Iterator[str]:
    """In what a model differs from what its family computes here."""
    if config.get("hidden_act", "silu") != "silu":
        yield f"has the activation {config['hidden_act']!r}; known is silu"
    if config.get("attention_bias") and kind != "qwen2":
        yield "has biases in all of its attention"
    if config.get("mlp_bias"):
        yield "has biases in its feed-forward layers"
    if config.get("partial_rotary_factor", 1.0) != 1.0:
        yield "turns only a part of each head"


def _window(config: dict[str, Any], kind: str) -> int | None:
    """Positions of sliding-window attention: within them it is attention to all."""
    window = config.get("sliding_window")
    if window is None or (kind != "mistral" and not config.get("use_sliding_window", False)):
        return None
    return int(window)


def _gpt2(config: dict[str, Any]) -> Pretrained:
    if config.get("activation_function", "gelu_new") not in _GELU_TANH:
        raise _UnlikeError(f"has the activation {config['activation_function']!r}; known is GELU in its tanh form")
    if not config.get("scale_attn_weights", True) or config.get("scale_attn_by_inverse_layer_idx", False):
        raise _UnlikeError("scales its attention in another way")
    if config.get("add_cross_attention", False):
        raise _UnlikeError("has cross-attention")
    hidden = int(config["n_embd"])
    sizes = {
        "family": "gpt2",
        "hidden_size": hidden,
        "layers": int(config["n_layer"]),
        "heads": int(config["n_head"]),
        "ffn_size": int(config.get("n_inner") or 4 * hidden),
        "norm_eps": float(config.get("layer_norm_epsilon", 1e-5)),
        "tie_embeddings": bool(config.get("tie_word_embeddings", True)),
        "positions": int(config["n_positions"]),
    }
    return Pretrained(sizes, int(config["vocab_size"]), None, _dtype(config))


def _dtype(config: dict[str, Any]) -> str:
    return str(config.get("dtype") or config.get("torch_dtype") or "float32")
