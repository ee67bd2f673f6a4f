"""The model families Rubato trains, by the name a spec calls them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ParallelStyle

from rubato.spec import JobSpec
from workers.engine.models import gpt2, llama, qwen


class PartFactory(Protocol):
    """Builds a stretch of a model: all of it, or what one pipeline stage holds."""

    def __call__(self, config: Any, layers: range | None = None, *, first: bool = True, last: bool = True) -> Any: ...


@dataclass(frozen=True)
class Family:
    """What the engine needs to know of a model family.

    Attributes:
        configure: the config of the model a spec asks for.
        part: builds the module for one device.
        tensor_plan: how a part is split over a tensor axis of so many ranks, by module name.
        initial_value: the first value of a parameter by (global name, global shape, config, generator).
    """

    configure: Callable[[JobSpec], Any]
    part: PartFactory
    tensor_plan: Callable[[Any, int], dict[str, ParallelStyle]]
    initial_value: Callable[[str, torch.Size, Any, torch.Generator], Tensor]


FAMILIES: dict[str, Family] = {
    "gpt2": Family(gpt2.GPT2Config.from_spec, gpt2.GPT2, gpt2.tensor_plan, gpt2.initial_value),
    "llama": Family(llama.LlamaConfig.from_spec, llama.Llama, llama.tensor_plan, llama.initial_value),
    "qwen": Family(qwen.QwenConfig.from_spec, qwen.Qwen, qwen.tensor_plan, llama.initial_value),
}


def whole_model(spec: JobSpec) -> nn.Module:
    """The model of a spec in one piece on the current default device, its weights left as they come."""
    family = FAMILIES[spec.model.family]
    model: nn.Module = family.part(family.configure(spec))
    return model
