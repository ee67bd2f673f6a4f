"""Tiny random models of each family, made and computed by `transformers`. Functions here run in forks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

_SMALL = {
    "vocab_size": 256,
    "hidden_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
_ROPE3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8,
}
_CONFIGS: dict[str, tuple[type, dict[str, Any]]] = {
    "llama2": (transformers.LlamaConfig, {**_SMALL, "num_key_value_heads": 4}),
    "llama3": (transformers.LlamaConfig, {**_SMALL, "rope_parameters": _ROPE3, "tie_word_embeddings": True}),
    "mistral": (transformers.MistralConfig, {**_SMALL, "sliding_window": 32}),
    "mistral-wide": (transformers.MistralConfig, {**_SMALL, "head_dim": 6, "sliding_window": None}),
    "qwen2": (transformers.Qwen2Config, {**_SMALL, "tie_word_embeddings": True}),
    "qwen3": (transformers.Qwen3Config, {**_SMALL, "head_dim": 8}),
    "gpt2": (transformers.GPT2Config, {"vocab_size": 256, "n_embd": 16, "n_layer": 4, "n_head": 4, "n_positions": 32}),
}
KINDS = tuple(_CONFIGS)


def save(kind: str, folder: Path, dtype: torch.dtype = torch.float32, file_size: str = "10KB") -> None:
    """A model whose every parameter is random, in files of their own."""
    config_of, sizes = _CONFIGS[kind]
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(config_of(**sizes))
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn_like(parameter) * 0.1
            parameter.copy_(noise if parameter.ndim > 1 else parameter + noise)
    model.to(dtype).save_pretrained(folder, max_shard_size=file_size)


def logits(folder: Path, tokens_BS: Tensor) -> Tensor:
    """What transformers makes of tokens, in fp32."""
    return loaded(folder)(tokens_BS).logits


def loss_and_norm(folder: Path, tokens_BS: Tensor, targets_BS: Tensor) -> tuple[float, float]:
    """The mean loss of a batch, and the norm of its gradients."""
    model = loaded(folder)
    loss = torch.nn.functional.cross_entropy(model(tokens_BS).logits.flatten(0, 1), targets_BS.flatten())
    loss.backward()
    return float(loss), float(torch.nn.utils.get_total_norm([each.grad for each in model.parameters()]))


def loaded(folder: Path) -> Any:
    """The model of a folder, in fp32."""
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
