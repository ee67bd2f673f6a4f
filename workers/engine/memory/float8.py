"""Products of matrices in 8-bit floats, on devices that have units for them.

Each operand is scaled by its own largest value just before the product: e4m3 with more digits for activations and
weights, e5m2 with more range for gradients (Micikevicius et al. 2022, https://arxiv.org/abs/2209.05433).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rubato.problems import RubatoError
from workers.engine.device import Device

CAPABILITY = (8, 9)
"""Of the first GPUs that multiply float8 (Ada; Hopper is 9.0)."""
MULTIPLE = 16
"""What the sizes of an operand must be multiples of."""
SMALLEST = 1e-12
"""An operand whose values are all smaller is not scaled up any further: zeros have no scale."""


def use_float8(part: nn.Module, device: Device) -> None:
    """Makes the linear layers of the blocks of a part multiply in float8; the output head keeps its format.

    Raises:
        RubatoError: the device has no units for it.
    """
    if device.type != "cuda" or torch.cuda.get_device_capability(device.torch_device) < CAPABILITY:
        name = torch.cuda.get_device_name(device.torch_device) if device.type == "cuda" else "the CPU"
        raise RubatoError(
            f"train.precision float8 cannot run on {name}: it has no units that multiply float8",
            fix="use bf16, or GPUs of compute capability 8.9 (Ada), 9.0 (Hopper) or newer",
            code="precision_unsupported",
        )
    convert_linears(part.layers)  # type: ignore[arg-type]


def convert_linears(layers: nn.Module) -> None:
    """Makes every linear layer whose sizes allow it multiply in float8."""
    for module in layers.modules():
        if isinstance(module, nn.Linear) and module.in_features % MULTIPLE == module.out_features % MULTIPLE == 0:
            module.forward = partial(_linear, module)


def _linear(module: nn.Linear, hidden: Tensor) -> Tensor:
    product: Tensor = _Product.apply(hidden.flatten(0, -2), module.weight)
    product = product.unflatten(0, hidden.shape[:-1])
    return product if module.bias is None else product + module.bias.to(product.dtype)


class _Product(torch.autograd.Function):
    """hidden @ weight.T, and both its gradients; bf16 out of the products, the weight's gradient in its own format."""

    @staticmethod
    def forward(context: Any, hidden_ND: Tensor, weight_FD: Tensor) -> Tensor:
        hidden, weight = _quantize(hidden_ND, torch.float8_e4m3fn), _quantize(weight_FD, torch.float8_e4m3fn)
        context.save_for_backward(*hidden, *weight)
        context.dtypes = hidden_ND.dtype, weight_FD.dtype
        return _multiply(*hidden, weight[0].t(), weight[1])

    @staticmethod
    def backward(context: Any, gradient_NF: Tensor) -> tuple[Tensor, Tensor]:
        hidden, hidden_scale, weight, weight_scale = context.saved_tensors
        of_hidden, of_weight = context.dtypes
        gradient, scale = _quantize(gradient_NF, torch.float8_e5m2)
        # The right operand has to lie in memory by columns, the left one by rows.
        by_columns = weight.t().contiguous().t(), hidden.t().contiguous().t()
        return (
            _multiply(gradient, scale, by_columns[0], weight_scale).to(of_hidden),
            _multiply(gradient.t().contiguous(), scale, by_columns[1], hidden_scale).to(of_weight),
        )


def _quantize(tensor: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A tensor in a float8 format, and what its values are to be multiplied by."""
    largest = torch.finfo(dtype).max
    scale = tensor.detach().abs().amax().float().clamp(min=SMALLEST) / largest
    return (tensor.detach().float() / scale).clamp(-largest, largest).to(dtype), scale


def _multiply(left: Tensor, left_scale: Tensor, right: Tensor, right_scale: Tensor) -> Tensor:
    return torch._scaled_mm(left, right, scale_a=left_scale, scale_b=right_scale, out_dtype=torch.bfloat16)
