"""Model sizes by name: the published ones with their sources, and small ones to try things with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Preset:
    """Sizes of a model.

    Attributes:
        sizes: fields of the spec's model section.
        source: where they were published; None: made for Rubato.
        vocab_size: tokens of the published model. A job has as many as its own tokenizer.
    """

    sizes: Mapping[str, Any]
    source: str | None = None
    vocab_size: int | None = None


def _small(hidden: int, layers: int, heads: int, ffn: int, **more: Any) -> Preset:
    return Preset({"hidden_size": hidden, "layers": layers, "heads": heads, "ffn_size": ffn, **more})


_GPT2_PAPER = "Radford et al. 2019, table 2; hparams.json of github.com/openai/gpt-2"
_GPT3_PAPER = "Brown et al. 2020, table 2.1 (arXiv:2005.14165)"


def _gpt(source: str, hidden: int, layers: int, heads: int, positions: int) -> Preset:
    sizes = {"hidden_size": hidden, "layers": layers, "heads": heads, "positions": positions}
    return Preset(sizes, source, vocab_size=50257)


_GPT2 = {
    "tiny": _small(64, 4, 4, 256),
    "1m": _small(128, 4, 4, 512),
    "8m": _small(256, 8, 8, 1024),
    "124m": _gpt(_GPT2_PAPER, 768, 12, 12, 1024),
    "355m": _gpt(_GPT2_PAPER, 1024, 24, 16, 1024),
    "774m": _gpt(_GPT2_PAPER, 1280, 36, 20, 1024),
    "1.5b": _gpt(_GPT2_PAPER, 1600, 48, 25, 1024),
    # GPT-3 has every second layer attend to a band of positions; here all attend to all, with the same parameters.
    "3-2.7b": _gpt(_GPT3_PAPER, 2560, 32, 32, 2048),
    "3-6.7b": _gpt(_GPT3_PAPER, 4096, 32, 32, 2048),
    "3-175b": _gpt(_GPT3_PAPER, 12288, 96, 96, 2048),
}


def _llama(
    source: str, vocab: int, hidden: int, layers: int, heads: int, kv_heads: int, ffn: int, **more: Any
) -> Preset:
    sizes = {"hidden_size": hidden, "layers": layers, "heads": heads, "kv_heads": kv_heads, "ffn_size": ffn, **more}
    return Preset(sizes, source, vocab)


def _llama_stretch(factor: float) -> dict[str, Any]:
    stretch = {"factor": factor, "low_frequency_factor": 1.0, "high_frequency_factor": 4.0, "original_length": 8192}
    return {"rope_theta": 500_000.0, "rope_scaling": stretch}


_LLAMA2 = "Touvron et al. 2023 (arXiv:2307.09288); config.json of huggingface.co/meta-llama/Llama-2-*-hf"
_LLAMA3 = "Grattafiori et al. 2024, table 3 (arXiv:2407.21783); config.json of huggingface.co/meta-llama/"
_ROPE3 = {"rope_theta": 500_000.0}

_LLAMA = {
    "tiny": _small(64, 4, 4, 192),
    "1m": _small(128, 4, 4, 352),
    "8m": _small(256, 8, 8, 1024),
    "125m": _small(768, 12, 12, 2048),
    "2-7b": _llama(_LLAMA2, 32_000, 4096, 32, 32, 32, 11008),
    "2-13b": _llama(_LLAMA2, 32_000, 5120, 40, 40, 40, 13824),
    "2-70b": _llama(_LLAMA2, 32_000, 8192, 80, 64, 8, 28672),
    "3-8b": _llama(_LLAMA3 + "Meta-Llama-3-8B", 128_256, 4096, 32, 32, 8, 14336, **_ROPE3),
    "3-70b": _llama(_LLAMA3 + "Meta-Llama-3-70B", 128_256, 8192, 80, 64, 8, 28672, **_ROPE3),
    "3.1-8b": _llama(_LLAMA3 + "Llama-3.1-8B", 128_256, 4096, 32, 32, 8, 14336, **_llama_stretch(8.0)),
    "3.1-70b": _llama(_LLAMA3 + "Llama-3.1-70B", 128_256, 8192, 80, 64, 8, 28672, **_llama_stretch(8.0)),
    "3.1-405b": _llama(_LLAMA3 + "Llama-3.1-405B", 128_256, 16384, 126, 128, 8, 53248, **_llama_stretch(8.0)),
    "3.2-1b": _llama(
        _LLAMA3 + "Llama-3.2-1B", 128_256, 2048, 16, 32, 8, 8192, tie_embeddings=True, **_llama_stretch(32.0)
    ),
    "3.2-3b": _llama(
        _LLAMA3 + "Llama-3.2-3B", 128_256, 3072, 28, 24, 8, 8192, tie_embeddings=True, **_llama_stretch(32.0)
    ),
}
# A size alone means the newest version that has it.
_LLAMA |= {
    "1b": _LLAMA["3.2-1b"],
    "3b": _LLAMA["3.2-3b"],
    "7b": _LLAMA["2-7b"],
    "8b": _LLAMA["3.1-8b"],
    "13b": _LLAMA["2-13b"],
    "70b": _LLAMA["3.1-70b"],
    "405b": _LLAMA["3.1-405b"],
}

_QWEN25_PAPER = "Qwen Team 2024 (arXiv:2412.15115); config.json of huggingface.co/Qwen/Qwen2.5-*"
_QWEN3_PAPER = "Qwen Team 2025, table 1 (arXiv:2505.09388); config.json of huggingface.co/Qwen/Qwen3-*"


def _qwen25(hidden: int, layers: int, heads: int, kv_heads: int, ffn: int, *, tied: bool, eps: float) -> Preset:
    sizes = {
        "hidden_size": hidden,
        "layers": layers,
        "heads": heads,
        "kv_heads": kv_heads,
        "ffn_size": ffn,
        "norm_eps": eps,
        "tie_embeddings": tied,
        "qkv_bias": True,
        "qk_norm": False,
    }
    return Preset(sizes, _QWEN25_PAPER, vocab_size=151_936 if tied else 152_064)


def _qwen3(hidden: int, layers: int, heads: int, ffn: int, *, tied: bool) -> Preset:
    sizes = {
        "hidden_size": hidden,
        "layers": layers,
        "heads": heads,
        "kv_heads": 8,
        "head_size": 128,
        "ffn_size": ffn,
        "norm_eps": 1e-6,
        "tie_embeddings": tied,
        "qkv_bias": False,
        "qk_norm": True,
    }
    return Preset(sizes, _QWEN3_PAPER, vocab_size=151_936)


_QWEN = {
    "tiny": _small(64, 4, 4, 192, kv_heads=2, qk_norm=True),
    "1m": _small(128, 4, 4, 384, kv_heads=2, qk_norm=True),
    "8m": _small(256, 8, 8, 1024, kv_heads=4, qk_norm=True),
    "2.5-0.5b": _qwen25(896, 24, 14, 2, 4864, tied=True, eps=1e-6),
    "2.5-1.5b": _qwen25(1536, 28, 12, 2, 8960, tied=True, eps=1e-6),
    "2.5-3b": _qwen25(2048, 36, 16, 2, 11008, tied=True, eps=1e-6),
    "2.5-7b": _qwen25(3584, 28, 28, 4, 18944, tied=False, eps=1e-6),
    "2.5-14b": _qwen25(5120, 48, 40, 8, 13824, tied=False, eps=1e-5),
    "2.5-32b": _qwen25(5120, 64, 40, 8, 27648, tied=False, eps=1e-5),
    "2.5-72b": _qwen25(8192, 80, 64, 8, 29568, tied=False, eps=1e-5),
    "3-0.6b": _qwen3(1024, 28, 16, 3072, tied=True),
    "3-1.7b": _qwen3(2048, 28, 16, 6144, tied=True),
    "3-4b": _qwen3(2560, 36, 32, 9728, tied=True),
    "3-8b": _qwen3(4096, 36, 32, 12288, tied=False),
    "3-14b": _qwen3(5120, 40, 40, 17408, tied=False),
    "3-32b": _qwen3(5120, 64, 64, 25600, tied=False),
}

PRESETS: Mapping[str, Mapping[str, Preset]] = {"gpt2": _GPT2, "llama": _LLAMA, "qwen": _QWEN}
"""Presets by family and name."""
