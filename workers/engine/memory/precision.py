"""The number formats a step computes in. Reductions, the optimizer and what it updates stay in fp32."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from workers.engine.device import Device
from workers.engine.memory.float8 import use_float8


@dataclass(frozen=True)
class Precision:
    """A format that a spec can ask for.

    Attributes:
        autocast: what matrix products run in while parameters stay in fp32; None: in the format of the parameters.
        parameters: of the module; None: the default format. Where it is a narrow one the optimizer updates fp32 masters
            and the parameters are rounded copies of them (Micikevicius et al. 2018, https://arxiv.org/abs/1710.03740).
        apply: what else is to be done to a part on its device. Raises RubatoError where the device cannot do it.
    """

    autocast: torch.dtype | None = None
    parameters: torch.dtype | None = None
    apply: Callable[[nn.Module, Device], None] = lambda part, device: None

    @property
    def logits(self) -> torch.dtype:
        """What the last stage computes; the loss casts it to fp32."""
        return self.autocast or self.hidden

    @property
    def hidden(self) -> torch.dtype:
        """The residual stream."""
        return self.parameters or torch.get_default_dtype()


PRECISIONS: dict[str, Precision] = {
    "fp32": Precision(),
    "bf16": Precision(autocast=torch.bfloat16),
    "bf16_pure": Precision(parameters=torch.bfloat16),
    "fp16": Precision(autocast=torch.float16),
    "float8": Precision(autocast=torch.bfloat16, apply=use_float8),
}
"""By the name a spec calls them."""


def cast_parameters(part: nn.Module, precision: Precision) -> None:
    """Gives the parameters of a part, not yet on a device, the format they are computed with."""
    if precision.parameters is not None:
        part.to(precision.parameters)


def apply_precision(part: nn.Module, precision: Precision, device: Device) -> None:
    """Makes a part run in a format.

    The context is around the forward pass alone (and around the head, which may be called apart): a backward pass
    follows the formats of its forward pass, and the loss casts the logits back. Norms are taken out of it: their
    statistics are of fp32, and so is what they return where parameters are; attention takes its softmax in fp32 inside
    its kernel.
    """
    precision.apply(part, device)
    if precision.parameters is not None:
        for parameter in part.parameters():
            parameter.grad_dtype = torch.float32  # micro-batches add up without being rounded
    if precision.autocast is not None:
        for module in part.modules():
            if isinstance(module, nn.RMSNorm | nn.LayerNorm):
                module.forward = partial(_in_format_of_weight, module, module.forward, device.type)
        for name in ("forward", "head"):
            method = getattr(part, name)
            setattr(part, name, torch.autocast(device.type, dtype=precision.autocast)(method))


def _in_format_of_weight(
    norm: nn.RMSNorm | nn.LayerNorm, forward: Callable[[torch.Tensor], torch.Tensor], device: str, hidden: torch.Tensor
) -> torch.Tensor:
    with torch.autocast(device, enabled=False):
        return forward(hidden.to(norm.weight.dtype))
