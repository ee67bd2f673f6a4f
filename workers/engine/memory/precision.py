"""The number formats a step computes in. Parameters, gradients, reductions and the optimizer stay in fp32."""

from __future__ import annotations

import torch
from torch import nn

from workers.engine.device import Device


def apply_precision(part: nn.Module, precision: str, device: Device) -> None:
    """Makes the forward pass of a part run in ``precision``: "fp32", or "bf16" by autocast.

    The context is around the forward pass alone: a backward pass follows the formats of its forward pass, and the
    loss casts the logits back.
    """
    if precision == "bf16":
        part.forward = torch.autocast(device.type, dtype=torch.bfloat16)(part.forward)
