"""The small files of a Hugging Face folder: configuration and tokenizer, as `transformers` reads them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from rubato.durable import write_durably
from rubato.pretrained.config import CONFIG
from rubato.problems import FieldProblem, RubatoError
from rubato.spec import JobSpec, ModelSpec
from rubato.tokenizers import BYTES, NONE, open_tokenizer

FORMATS = ("float32", "bfloat16", "float16")
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
)
_BYTE_TEXT_END = "Ā"  # how byte-level tokenizers write a zero byte


def hub_config(spec: JobSpec, dtype: str | None) -> dict[str, Any]:
    """The ``config.json`` of a job's model; that of the folder it began with, where it can still be read.

    Raises:
        RubatoError: Hugging Face has no model that computes the same, or no such format.
    """
    if dtype is not None and dtype not in FORMATS:
        raise RubatoError(f"'{dtype}' is no format of weights", fix=f"use {', '.join(FORMATS)}", code="export_format")
    before = Path(spec.model.source or "").expanduser() / CONFIG
    if spec.model.source is not None and before.is_file():
        config: dict[str, Any] = json.loads(before.read_bytes())
        found = dtype or config.get("dtype") or config.get("torch_dtype") or FORMATS[0]
    else:
        config = _gpt2(spec) if spec.model.family == "gpt2" else _rotary(spec)
        found = dtype or FORMATS[0]
    config.pop("torch_dtype", None)
    tokenizer = open_tokenizer(spec.data.tokenizer, spec.data.end_of_document, spec.data.vocab_size)
    ends = {"bos_token_id": None, "eos_token_id": None if spec.data.tokenizer == NONE else tokenizer.end}
    return {**ends, **config, "dtype": found, "vocab_size": spec.data.vocab_size}


def write_tokenizer(spec: JobSpec, folder: Path) -> None:
    """Puts the tokenizer of a job beside its model, and how text is to be generated. Raises OSError."""
    name = spec.data.tokenizer
    if name == NONE:
        return
    if name == BYTES:
        write_durably(folder / "tokenizer.json", _byte_tokenizer())
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": _BYTE_TEXT_END}
        write_durably(folder / "tokenizer_config.json", json.dumps(settings, indent=2))
    else:
        path = Path(name).expanduser()
        beside = path if path.is_dir() else path.parent
        for each in _TOKENIZER_FILES if path.is_dir() or path.name == _TOKENIZER_FILES[0] else (path.name,):
            if (beside / each).is_file():
                shutil.copyfile(beside / each, folder / each)
    generation = folder / "generation_config.json"
    if not generation.exists():
        end = open_tokenizer(name, spec.data.end_of_document, spec.data.vocab_size).end
        write_durably(generation, json.dumps({"eos_token_id": end, "pad_token_id": end}, indent=2))


def _byte_tokenizer() -> str:
    """Bytes as a tokenizer.json: byte-level BPE without a merge, each byte's id its value."""
    import tokenizers

    kept = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]  # GPT-2 writes these bytes as themselves
    others = [byte for byte in range(256) if byte not in kept]
    written = {byte: chr(byte) for byte in kept} | {byte: chr(256 + place) for place, byte in enumerate(others)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE({text: byte for byte, text in written.items()}, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    text: str = tokenizer.to_str()
    return text


def _rotary(spec: JobSpec) -> dict[str, Any]:
    model = spec.model
    kind, name = _kind(model)
    config: dict[str, Any] = {
        "architectures": [name],
        "model_type": kind,
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_size,
        "intermediate_size": model.ffn_size,
        "hidden_act": "silu",
        "rms_norm_eps": model.norm_eps,
        "rope_theta": model.rope_theta,
        "tie_word_embeddings": model.tie_embeddings,
        "max_position_embeddings": spec.data.sequence_length,
        "use_cache": True,
    }
    stretch = model.rope_scaling
    if stretch is not None:
        config["max_position_embeddings"] = int(stretch.factor * stretch.original_length)
        config["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": stretch.factor,
            "low_freq_factor": stretch.low_frequency_factor,
            "high_freq_factor": stretch.high_frequency_factor,
            "original_max_position_embeddings": stretch.original_length,
        }
    return config


def _kind(model: ModelSpec) -> tuple[str, str]:
    if model.qkv_bias and model.qk_norm:
        cause = "Hugging Face has no model with both biases of queries, keys and values and norms of queries and keys"
        raise RubatoError(
            f"model.qk_norm: {cause}",
            fix="export works for models with one of them, or none",
            code="export_model",
            problems=[FieldProblem("model.qk_norm", cause, "train with one of them")],
        )
    if model.qk_norm:
        return "qwen3", "Qwen3ForCausalLM"
    return ("qwen2", "Qwen2ForCausalLM") if model.qkv_bias else ("llama", "LlamaForCausalLM")


def _gpt2(spec: JobSpec) -> dict[str, Any]:
    model = spec.model
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "n_embd": model.hidden_size,
        "n_layer": model.layers,
        "n_head": model.heads,
        "n_inner": model.ffn_size,
        "n_positions": model.positions,
        "layer_norm_epsilon": model.norm_eps,
        "activation_function": "gelu_new",
        "tie_word_embeddings": model.tie_embeddings,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "resid_pdrop": 0.0,
    }
