"""Muon: momentum whose matrix is made orthogonal before it is applied.

Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/; scaled so that learning rate and weight decay are those
of AdamW: Liu et al. 2025, https://arxiv.org/abs/2502.16982.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5
EPSILON = 1e-7


class Muon(torch.optim.Optimizer):
    """Muon over matrices of which this rank may hold a shard.

    Momentum is elementwise and stays in shards. What is made orthogonal is the whole matrix, so ranks of the tensor
    axis exchange it, each computes the same, and takes its own part: a matrix is updated alike at every layout.

    Args:
        matrices: the local tensors that are updated, each with what it is a part of: a DTensor where it is split, which
            gives mesh and placements.
        lr, momentum, weight_decay: as of torch.optim.Muon with ``adjust_lr_fn="match_rms_adamw"``.
    """

    def __init__(
        self, matrices: Sequence[tuple[Tensor, Tensor]], lr: float, momentum: float, weight_decay: float
    ) -> None:
        numbers = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        super().__init__([leaf for leaf, _ in matrices], numbers)
        self._wholes = [whole for _, whole in matrices]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One step, with Nesterov's momentum."""
        (group,) = self.param_groups
        lr, momentum = group["lr"], group["momentum"]
        leaves: list[Tensor] = group["params"]
        buffers = [self.state[leaf]["momentum_buffer"] for leaf in leaves]
        gradients = [leaf.grad for leaf in leaves]
        torch._foreach_lerp_(buffers, gradients, 1 - momentum)
        ahead = torch._foreach_lerp(gradients, buffers, momentum)
        torch._foreach_mul_(leaves, 1 - lr * group["weight_decay"])
        for leaf, whole, direction in zip(leaves, self._wholes, ahead, strict=True):
            leaf.add_(_update(direction, whole), alpha=-lr * 0.2 * max(whole.shape) ** 0.5)


def _update(direction: Tensor, whole: Tensor) -> Tensor:
    """This rank's part of the orthogonal matrix nearest to the one that ``direction`` is this rank's part of."""
    if not isinstance(whole, DTensor):
        return orthogonal(direction, _format(direction))
    mesh, placements = whole.device_mesh, whole.placements
    spread = DTensor.from_local(direction, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride())
    gathered = orthogonal(spread.full_tensor(), _format(direction))
    # Every rank has computed it, so nothing needs to be sent.
    return distribute_tensor(gathered, mesh, placements, src_data_rank=None).to_local()


def _format(direction: Tensor) -> torch.dtype:
    # bf16 is what the iteration was made to bear, and a GPU is many times faster in it. A CPU is not, and there the
    # same curve can be seen to more digits.
    return torch.bfloat16 if direction.is_cuda else direction.dtype


def orthogonal(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """U V^T of a matrix U S V^T, roughly: singular values come to lie between 0.7 and 1.2.

    Five steps of a Newton-Schulz iteration whose slope at 0 is as steep as it can be (Jordan et al. 2024).

    Args:
        matrix: two-dimensional.
        dtype: to compute in; the result has the format of ``matrix``.
    """
    first, second, third = COEFFICIENTS
    found = matrix.to(dtype)
    tall = matrix.shape[0] > matrix.shape[1]
    if tall:
        found = found.T
    found = found / found.norm().clamp(min=EPSILON)
    for _ in range(ITERATIONS):
        gram = found @ found.T
        found = torch.addmm(found, torch.addmm(gram, gram, gram, beta=second, alpha=third), found, beta=first)
    return (found.T if tall else found).to(matrix.dtype)
