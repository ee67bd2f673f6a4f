"""Counts the bytes that tensors hold while operations run, and what is sent between ranks."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_FUNCTIONAL, _CLASSIC = "_c10d_functional", "c10d"
_WAITS = ("wait_tensor", "barrier")


@dataclass(frozen=True)
class Collective:
    """Calls of one kind: how many, and the bytes of their tensors on this rank (of the larger side) together."""

    kind: str
    calls: int
    bytes: int


class Ledger(TorchDispatchMode):
    """While entered, follows every storage from its making to its end.

    Views share a storage, and tensors on the meta device have none. ``torch.distributed._tools.MemTracker`` counts the
    same by module, but knows a single forward pass of each.

    Args:
        changing: tensors whose storage may grow and shrink while it stays the same, as parameters do that are gathered.
    """

    def __init__(self, changing: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self._paused = False
        self.peak = 0
        self._live = 0
        self._changing = list({each.untyped_storage()._cdata: each.untyped_storage() for each in changing}.values())
        self._of_changing = 0
        self.look_again()
        self._known = {storage._cdata for storage in self._changing}
        self._sent: dict[str, list[int]] = defaultdict(lambda: [0, 0])

    @property
    def collectives(self) -> list[Collective]:
        """What was sent, by kind."""
        return [Collective(kind, calls, size) for kind, (calls, size) in sorted(self._sent.items())]

    @property
    def total(self) -> int:
        """Bytes held now."""
        return self._live + self._of_changing

    def look_again(self) -> None:
        """Sees how large the changing tensors are now."""
        self._of_changing = sum(storage.nbytes() for storage in self._changing)
        self.peak = max(self.peak, self.total)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Counts no tensor that is made meanwhile."""
        self._paused, before = True, self._paused
        try:
            yield
        finally:
            self._paused = before

    def send(self, kind: str, tensor: Tensor) -> None:
        """Counts a call that is made without torch.distributed."""
        entry = self._sent[kind]
        entry[0] += 1
        entry[1] += tensor.numel() * tensor.element_size()

    def forget_sent(self) -> None:
        """Begins to count calls anew."""
        self._sent.clear()

    def hold(self, tensors: Iterable[Tensor]) -> None:
        """Counts tensors that are there already."""
        for tensor in tensors:
            self._hold(tensor.to_local() if isinstance(tensor, DTensor) else tensor)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it comes again as what it is made of
        out = func(*args, **(kwargs or {}))
        made = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        for tensor in made:
            self._hold(tensor)
        self.peak = max(self.peak, self.total)
        if func.namespace in (_FUNCTIONAL, _CLASSIC):
            self._count(func.overloadpacket.__name__, [*made, *_tensors(args)])
        return out

    def _count(self, kind: str, tensors: list[Tensor]) -> None:
        if kind.rstrip("_") in _WAITS or not tensors:
            return
        entry = self._sent[kind.strip("_").removesuffix("_into_tensor").removesuffix("_tensor")]
        entry[0] += 1
        entry[1] += max(tensor.numel() * tensor.element_size() for tensor in tensors)

    def _hold(self, tensor: Tensor) -> None:
        if tensor.device.type == "meta" or self._paused:
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        size = storage.nbytes()
        self._known.add(key)
        self._live += size
        weakref.finalize(storage, self._release, key, size)

    def _release(self, key: int, size: int) -> None:
        self._known.discard(key)
        self._live -= size


def _tensors(args: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]


class KernelNorm(torch.autograd.Function):
    """RMSNorm as a GPU's kernel computes it: it keeps its input and one number a row. On CPU it is composed."""

    @staticmethod
    def forward(context: Any, hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x / rms(x) x weight."""
        factor = torch.rsqrt(hidden.square().mean(-1, keepdim=True) + eps)
        context.save_for_backward(hidden, weight, factor)
        return (hidden * factor) * weight

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        """Of shapes and sizes alone: its values mean nothing."""
        hidden, weight, _ = context.saved_tensors
        (gradient,) = gradients
        return gradient * weight, (gradient * hidden).flatten(0, -2).sum(0), None


def kernel_norm(norm: Any) -> Callable[[Tensor], Tensor]:
    """The forward of an RMSNorm as one kernel."""
    return lambda hidden: KernelNorm.apply(hidden, norm.weight, norm.eps or 1e-6)
