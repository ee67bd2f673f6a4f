"""Activations that are computed again in the backward pass instead of being kept."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from rubato.spec import RecomputeSpec

_aten = torch.ops.aten
_DEAR_TO_COMPUTE = {
    _aten.mm.default,
    _aten.addmm.default,
    _aten.bmm.default,
    _aten.linear.default,
    _aten._scaled_mm.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    _aten._scaled_dot_product_attention_math.default,
}
"""Products of matrices and attention: their results are kept by mode selective, and so is all communication."""


def apply_recompute(layers: nn.ModuleDict, spec: RecomputeSpec) -> None:
    """Makes layers drop their activations after the forward pass (Chen et al. 2016, https://arxiv.org/abs/1604.06174).

    Args:
        layers: of a part of the model, by their number in the whole model, which ``spec.every`` counts: the same layers
            are recomputed in every layout.
        spec: which, and what of them is kept.
    """
    if spec.mode == "none":
        return
    context: dict[str, Callable[[], Any]] = {}
    if spec.mode == "selective":
        context["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
    for number, layer in layers.items():
        if int(number) % spec.every == 0:
            # The method, not a wrapping module, which would change the names of the parameters.
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False, **context)


def _policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    if operation in _DEAR_TO_COMPUTE or operation.namespace == "_c10d_functional":
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE
