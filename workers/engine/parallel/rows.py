"""Rows of a parameter: what one rank holds of it where the data axis shards the state.

Every parameter is split along its first dim, on each rank of the tensor axis what that rank has of it. So a piece is a
block of the whole parameter, which a checkpoint names by its offsets; and matrices stay matrices to the optimizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from workers.engine.parallel.tensor import local


@dataclass(frozen=True)
class Split:
    """How the data axis shards parameters: over how many ranks, and which of them this is."""

    degree: int
    index: int

    def widest(self, rows: int) -> int:
        """Rows of the first rank; nobody has more."""
        return -(-rows // self.degree)

    def of(self, rows: int) -> slice:
        """This rank's rows of so many: as many as the first rank's, as long as there are any."""
        widest = self.widest(rows)
        start = min(self.index * widest, rows)
        return slice(start, min(start + widest, rows))


class Rows(Tensor):
    """A block of a tensor, whole rows of what this rank's place on the tensor axis has.

    A tensor of the whole shape without memory, so that what asks for tensors takes it for one (as DTensor is); all that
    can be computed with is ``held``.

    Attributes:
        held: the block.
        offsets: of the block in the whole.
    """

    held: Tensor
    offsets: torch.Size

    @staticmethod
    def __new__(cls, held: Tensor, shape: torch.Size, offsets: Sequence[int]) -> Rows:
        rows: Rows = Tensor._make_wrapper_subclass(cls, shape, dtype=held.dtype, device=held.device)
        rows.held, rows.offsets = held, torch.Size(offsets)
        return rows

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(f"{func} on rows of a tensor: compute with what is held of it")

    @classmethod
    def of(cls, parameter: Tensor, split: Split, held: Tensor) -> Rows:
        """This rank's rows of a parameter, ``held`` elsewhere or in the parameter."""
        offsets: Sequence[int] = [0] * parameter.ndim
        if isinstance(parameter, DTensor):
            _, offsets = compute_local_shape_and_global_offset(
                parameter.shape, parameter.device_mesh, parameter.placements
            )
        first = offsets[0] + split.of(local(parameter).shape[0]).start
        return cls(held, parameter.shape, [first, *offsets[1:]])

    def like(self, held: Tensor) -> Rows:
        """The same rows of another tensor of this shape."""
        return Rows(held, self.shape, self.offsets)

    @torch.no_grad()
    def set_whole(self, value: Tensor) -> None:
        """Sets the block from the value of the whole tensor."""
        block = zip(self.offsets, self.held.shape, strict=True)
        self.held.copy_(value[tuple(slice(start, start + size) for start, size in block)])

    # How torch.distributed.checkpoint asks what is here.

    def __create_write_items__(self, name: str, piece: Rows) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self.held)
        return [
            WriteItem(
                index=MetadataIndex(name, self.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.shape),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        if not self.held.numel():
            return []
        return [ChunkStorageMetadata(offsets=self.offsets, sizes=self.held.size())]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        return self.held
