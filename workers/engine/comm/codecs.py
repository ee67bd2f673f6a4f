"""Fewer bytes for a stretch of gradients: casts, 8-bit blocks, and the largest values alone.

A codec turns rows of numbers into rows of bytes, as many for each, and back. What is not finite stays so, at least for
its block: a step that overflowed must be seen to have.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from rubato.spec import CompressionSpec


class Codec(Protocol):
    """How rows of values travel.

    Attributes:
        granule: rows are a multiple of so many values long.
        lossy: whether so much is left out that it has to be made up for later (error feedback).
    """

    granule: int
    lossy: bool

    def encode(self, rows: Tensor) -> Tensor:
        """Bytes (uint8) of each row of [rows, values]."""
        ...

    def decode(self, payload: Tensor, count: int, dtype: torch.dtype) -> Tensor:
        """The rows of ``count`` values that `encode` made ``payload`` of."""
        ...


@dataclass(frozen=True)
class Cast:
    """Half of the bits: fewer digits, the same range (bfloat16)."""

    dtype: torch.dtype
    granule: int = 1
    lossy: bool = False

    def encode(self, rows: Tensor) -> Tensor:
        return rows.to(self.dtype).view(torch.uint8)

    def decode(self, payload: Tensor, count: int, dtype: torch.dtype) -> Tensor:
        return payload.view(self.dtype).to(dtype)


@dataclass(frozen=True)
class Blocks:
    """Values as multiples of a scale that each block has of its own (Dettmers et al. 2022, arXiv:2110.02861).

    Attributes:
        dtype: of the multiples. An integer type is rounded to.
        largest: the multiple that the largest value of a block becomes.
        granule: values of a block.
    """

    dtype: torch.dtype
    largest: float
    granule: int
    lossy: bool

    def encode(self, rows: Tensor) -> Tensor:
        blocks = rows.unflatten(1, (-1, self.granule)).float()
        scales = blocks.abs().amax(dim=2) / self.largest
        multiples = blocks / torch.where(scales == 0, 1.0, scales)[:, :, None]
        if not self.dtype.is_floating_point:
            multiples.round_()
        codes = multiples.to(self.dtype).flatten(1)
        return torch.cat([codes.view(torch.uint8), scales.view(torch.uint8)], dim=1)

    def decode(self, payload: Tensor, count: int, dtype: torch.dtype) -> Tensor:
        codes, scales = payload.split(
            [count * self.dtype.itemsize, count // self.granule * torch.float32.itemsize], dim=1
        )
        multiples = codes.contiguous().view(self.dtype).unflatten(1, (-1, self.granule)).float()
        return (multiples * scales.contiguous().view(torch.float32)[:, :, None]).flatten(1).to(dtype)


@dataclass(frozen=True)
class Largest:
    """The values of the largest size, with their places (Aji & Heafield 2017, arXiv:1704.05021).

    Attributes:
        ratio: their share.
    """

    ratio: float
    granule: int = 1
    lossy: bool = True

    def encode(self, rows: Tensor) -> Tensor:
        places = rows.abs().topk(self._count(rows.shape[1]), dim=1, sorted=False).indices
        values = rows.gather(1, places).float()
        return torch.cat([values.view(torch.uint8), places.int().view(torch.uint8)], dim=1)

    def decode(self, payload: Tensor, count: int, dtype: torch.dtype) -> Tensor:
        values, places = payload.chunk(2, dim=1)
        rows = torch.zeros(len(payload), count, dtype=dtype, device=payload.device)
        found = places.contiguous().view(torch.int32).long()
        return rows.scatter_(1, found, values.contiguous().view(torch.float32).to(dtype))

    def _count(self, values: int) -> int:
        return math.ceil(self.ratio * values)


def codec_of(spec: CompressionSpec) -> Codec | None:
    """What a spec asks for; None where nothing is encoded (no compression, or that of matrices)."""
    match spec.name:
        case "bf16":
            return Cast(torch.bfloat16)
        case "fp16":
            # Gradients are often smaller than what fp16 can hold; as shares of the largest of a block they are not.
            return Blocks(torch.float16, 1.0, granule=256, lossy=False)
        case "int8":
            assert spec.block is not None
            return Blocks(torch.int8, 127.0, granule=spec.block, lossy=True)
        case "topk":
            assert spec.ratio is not None
            return Largest(spec.ratio)
        case _:
            return None
