"""Parameters that travel together over a sharded data axis, and how they lie in one flat tensor on their way."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from workers.engine.device import Call
from workers.engine.parallel.rows import Split
from workers.engine.parallel.tensor import local


@dataclass(eq=False)
class Unit:
    """Parameters that are gathered and reduced in one call.

    Attributes:
        places: of the parameters among all of this worker's.
        whole: whether the parameters are there to be computed with.
        missing: gradients that the current backward pass has yet to complete.
    """

    parameters: list[nn.Parameter]
    places: list[int]
    whole: bool = True
    missing: int = 0
    gathering: tuple[Call | None, Tensor] | None = None
    gradient: Tensor = field(default_factory=lambda: torch.empty(0))
    clean: bool = True

    def lay_out(self, split: Split) -> None:
        """Works out where in a rank's flat part of the unit the rows of each parameter are."""
        self._split = split
        self._spans: list[tuple[int, int, int]] = []  # start in the part, rows of the widest, elements a row
        self.part = 0
        for parameter in self.parameters:
            shape = local(parameter).shape
            widest, across = split.widest(shape[0]), shape[1:].numel()
            self._spans.append((self.part, widest, across))
            self.part += widest * across

    @property
    def size(self) -> int:
        """Elements of all ranks' parts."""
        return self._split.degree * self.part

    @torch.no_grad()
    def pack(self, tensors: Sequence[Tensor], flat: Tensor) -> None:
        """Fills ``flat`` with all ranks' parts of tensors of the local parameters' shapes, and up with zeros."""
        if self.size > sum(tensor.numel() for tensor in tensors):
            flat.zero_()
        flat = flat.view(self._split.degree, self.part)
        for tensor, (start, widest, across) in zip(tensors, self._spans, strict=True):
            for rows, block in self._blocks(flat, tensor.shape[0], start, widest, across):
                block.copy_(tensor[rows].reshape(block.shape))

    @torch.no_grad()
    def unpack(self, flat: Tensor) -> None:
        """Sets the local parameters from all ranks' parts. Autograd does not hear of it: they are what they were."""
        flat = flat.view(self._split.degree, self.part)
        for parameter, (start, widest, across) in zip(self.parameters, self._spans, strict=True):
            tensor = local(parameter).data
            for rows, block in self._blocks(flat, tensor.shape[0], start, widest, across):
                tensor[rows].view(block.shape).copy_(block)

    def _blocks(self, flat: Tensor, rows: int, start: int, widest: int, across: int) -> Iterator[tuple[slice, Tensor]]:
        """Rows of a tensor and where they are in all ranks' parts: of ranks with as many as the first, and the rest."""
        full, rest = divmod(rows, widest) if widest else (0, 0)
        if full:
            yield slice(full * widest), flat[:full, start : start + widest * across]
        if rest:
            yield slice(full * widest, rows), flat[full, start : start + rest * across]

    @torch.no_grad()
    def pack_own(self, pieces: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """This rank's part, from its pieces."""
        own = pieces[0].new_zeros(self.part, dtype=dtype)
        for piece, view in zip(pieces, self.views(own), strict=True):
            view.copy_(piece)
        return own

    def views(self, own: Tensor) -> list[Tensor]:
        """This rank's rows of each parameter in its flat part."""
        views = []
        for parameter, (start, _, across) in zip(self.parameters, self._spans, strict=True):
            shape = local(parameter).shape
            rows = self._split.of(shape[0])
            count = rows.stop - rows.start
            views.append(own[start : start + count * across].view(count, *shape[1:]))
        return views

    def release(self) -> None:
        """Gives the memory of the parameters back."""
        for parameter in self.parameters:
            local(parameter).untyped_storage().resize_(0)
        self.whole = False

    def allocate(self) -> None:
        """Takes memory for the parameters."""
        for parameter in self.parameters:
            tensor = local(parameter)
            tensor.untyped_storage().resize_(tensor.numel() * tensor.element_size())


class Room:
    """Flat tensors for what is on its way, used again and again: fresh ones would cost a fault a page each time.

    Only where their size is a layer's; what is larger is given back for good.

    Args:
        largest: elements to keep at most, in a tensor.
    """

    def __init__(self, largest: int) -> None:
        self._largest = largest
        self._free: list[Tensor] = []

    def take(self, size: int, like: Tensor) -> Tensor:
        """A tensor of so many elements, of a format and on a device; what is in it is anything."""
        for place, tensor in enumerate(self._free):
            if tensor.numel() == size and tensor.dtype == like.dtype and tensor.device == like.device:
                return self._free.pop(place)
        return like.new_empty(size)

    def give(self, tensors: Sequence[Tensor]) -> None:
        """Gives tensors back that nobody reads or writes any more."""
        self._free += [tensor for tensor in tensors if tensor.numel() <= self._largest]
