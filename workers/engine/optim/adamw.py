"""AdamW over plain local tensors.

Each rank updates the shards it holds. The optimizer sees them as plain tensors, since AdamW is elementwise and its
result the same, while DTensor would dispatch every operation on every tensor in Python.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from rubato.spec import OptimizerSpec


def adamw(leaves: Iterable[Tensor], spec: OptimizerSpec) -> torch.optim.AdamW:
    """The optimizer of a spec with its moments in place, at step 0 (Loshchilov & Hutter, https://arxiv.org/abs/1711.05101).

    Weight decay is for matrices alone: norms have no scale to keep small.
    """
    held = list(leaves)
    groups = [
        {"params": [leaf for leaf in held if leaf.ndim > 1], "weight_decay": spec.weight_decay},
        {"params": [leaf for leaf in held if leaf.ndim <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(
        [group for group in groups if group["params"]], lr=spec.lr, betas=spec.betas, eps=spec.eps, fused=True
    )
    for leaf in held:
        # Made here and not by the first step, so that state can be received before any step was taken.
        optimizer.state[leaf] = {
            "step": torch.zeros((), dtype=torch.float32, device=leaf.device),
            "exp_avg": torch.zeros_like(leaf),
            "exp_avg_sq": torch.zeros_like(leaf),
        }
    return optimizer
