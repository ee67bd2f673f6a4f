"""Sums over replicas that send fewer bytes, and what they leave out of a step and owe to later ones.

Error feedback (Seide et al. 2014; Karimireddy et al. 2019, arXiv:1901.09847): what encoding leaves out of this rank's
contribution is kept and added to its gradients of the next step, so nothing is lost for good. A step that is repeated,
or skipped since its gradients are not finite, changes nothing of that: what is owed changes with the commit alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from workers.engine.comm.codecs import Codec
from workers.engine.device import BreakableGroup, Call


class Scheme(Protocol):
    """Sums a bucket over the members of a group.

    Attributes:
        lossy: whether something is owed afterwards.
    """

    lossy: bool

    def sum(self, group: BreakableGroup, number: int, bucket: Tensor) -> Tensor | None:
        """Puts the sum over all members in the place of ``bucket``, the same to the last bit for all of them.

        Args:
            group: who sums.
            number: the place of the bucket among all.
            bucket: flat; what this member contributes.

        Returns:
            What was left out of this member's contribution; None when nothing is owed.
        """
        ...

    def commit(self) -> None:
        """What the sums since the last call have changed of the scheme itself stands from now on."""
        ...

    def begin_anew(self, step: int) -> None:
        """Forgets what was learned; all members do so at the same steps."""
        ...

    def bytes_sent(self, number: int, count: int, members: int) -> int:
        """By each member, for a bucket of ``count`` values."""
        ...


class Encoded:
    """A sum in two rounds of encoded values: each member sums a part, then all receive all parts.

    So a member sends twice its bucket, less its own parts, however many members there are. What encoding the sum of a
    part leaves out is owed by the member that summed it.
    """

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self.lossy = codec.lossy

    def sum(self, group: BreakableGroup, number: int, bucket: Tensor) -> Tensor | None:
        size, codec = group.size, self._codec
        part = encoded_width(codec, -(-bucket.numel() // size))
        rows = bucket.new_zeros(size * part)
        rows[: bucket.numel()] = bucket
        rows = rows.view(size, part)
        sent = codec.encode(rows)
        received = torch.empty_like(sent)
        group.all_to_all(received, sent)
        total = codec.decode(received, part, bucket.dtype).sum(dim=0, keepdim=True)
        summed = codec.encode(total)
        gathered = torch.empty_like(sent)
        group.all_gather(gathered, summed)
        result = codec.decode(gathered, part, bucket.dtype)
        bucket.copy_(result.flatten()[: bucket.numel()])
        if not codec.lossy:
            return None
        owed = rows.sub_(codec.decode(sent, part, bucket.dtype))
        owed[group.rank] += total[0] - result[group.rank]
        return owed.flatten()[: bucket.numel()]

    def commit(self) -> None:
        """Nothing is learned."""

    def begin_anew(self, step: int) -> None:
        """Nothing was learned."""

    def bytes_sent(self, number: int, count: int, members: int) -> int:
        return 2 * (members - 1) * encoded_bytes(self._codec, -(-count // members))


def begin_reduce_scatter(group: BreakableGroup, codec: Codec, own: Tensor, whole: Tensor) -> Call:
    """Begins to fill ``own`` with this member's part of the sum of all ``whole``, which travel encoded.

    What encoding leaves out is not made up for later, as in ZeRO++ (Wang et al. 2023, arXiv:2306.10209, section 3.3):
    a rank would have to keep it for whole parameters, of which it holds but some rows.

    Args:
        group: who sums.
        codec: how values travel.
        own: flat; of this member's part.
        whole: flat; the parts of all members, as long as ``own`` each. It may be written to as soon as this returns.
    """
    width = encoded_width(codec, own.numel())
    sent = codec.encode(functional.pad(whole.view(group.size, -1), (0, width - own.numel())))
    received = torch.empty_like(sent)
    call = group.begin_all_to_all(received, sent)
    call.then = lambda: own.copy_(codec.decode(received, width, own.dtype).sum(dim=0)[: own.numel()])
    return call


def encoded_width(codec: Codec, count: int) -> int:
    """Values that are encoded for so many: a whole number of granules."""
    return -(-count // codec.granule) * codec.granule


def encoded_bytes(codec: Codec, count: int) -> int:
    """What a row of so many values takes on its way."""
    return codec.encode(torch.empty(1, encoded_width(codec, count), device="meta")).numel()


class LowRank:
    """PowerSGD: matrices by factors of low rank (Vogels et al. 2019, arXiv:1905.13727), the rest as it is.

    Args:
        rank: of the factors.
        seed: of the first factors, the same for all members.
        shapes: of the gradients in each bucket, in their order.
    """

    lossy = True

    def __init__(self, rank: int, seed: int, shapes: Sequence[Sequence[torch.Size]]) -> None:
        self._rank, self._seed = rank, seed
        self._shapes = [list(held) for held in shapes]
        self.begin_anew(0)

    def begin_anew(self, step: int) -> None:
        self._step = step
        self._factors: dict[tuple[int, int], Tensor] = {}
        self._learned: dict[tuple[int, int], Tensor] = {}

    def commit(self) -> None:
        self._factors |= self._learned
        self._learned = {}

    def sum(self, group: BreakableGroup, number: int, bucket: Tensor) -> Tensor | None:
        self._learned = {key: value for key, value in self._learned.items() if key[0] != number}
        pieces = bucket.split([shape.numel() for shape in self._shapes[number]])
        matrices: dict[int, Tensor] = {}
        plain: list[Tensor] = []
        for place, (piece, shape) in enumerate(zip(pieces, self._shapes[number], strict=True)):
            if self._pays(shape):
                matrices[place] = piece.view(shape[0], -1)
            else:
                plain.append(piece)
        right = {place: self._factor(number, place, matrix) for place, matrix in matrices.items()}
        left = {place: matrix @ right[place] for place, matrix in matrices.items()}
        _sum_all(group, [*left.values(), *plain])
        left = {place: torch.linalg.qr(factor).Q for place, factor in left.items()}
        right = {place: matrix.T @ left[place] for place, matrix in matrices.items()}
        own = {place: factor.clone() for place, factor in right.items()}
        _sum_all(group, list(right.values()))
        owed = torch.zeros_like(bucket)
        for place, rest in enumerate(owed.split([piece.numel() for piece in pieces])):
            if place in matrices:
                rest.view_as(matrices[place]).copy_(matrices[place] - left[place] @ own[place].T)
                matrices[place].copy_(left[place] @ right[place].T)
                self._learned[number, place] = right[place]
        return owed

    def bytes_sent(self, number: int, count: int, members: int) -> int:
        values = sum(
            self._rank * (shape[0] + shape.numel() // shape[0]) if self._pays(shape) else shape.numel()
            for shape in self._shapes[number]
        )
        return plain_bytes(values * torch.float32.itemsize, members)

    def _pays(self, shape: torch.Size) -> bool:
        if len(shape) < 2:
            return False
        across = shape.numel() // shape[0]
        return self._rank * (shape[0] + across) < shape.numel()

    def _factor(self, number: int, place: int, matrix: Tensor) -> Tensor:
        known = self._factors.get((number, place))
        if known is not None:
            return known
        generator = torch.Generator().manual_seed(hash((self._seed, self._step, number, place)) & (2**63 - 1))
        return torch.randn(matrix.shape[1], self._rank, generator=generator, dtype=matrix.dtype).to(matrix.device)


def _sum_all(group: BreakableGroup, tensors: Sequence[Tensor]) -> None:
    if not tensors:
        return
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    group.all_reduce([flat], dist.ReduceOp.SUM)
    for tensor, summed in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(summed.view_as(tensor))


def plain_bytes(size: int, members: int) -> int:
    """What each member of a ring sends to sum ``size`` bytes."""
    return round(2 * (members - 1) / members * size)


class Debt:
    """What this rank owes to later steps, a tensor a bucket, in units of gradients without a loss scale.

    Attributes:
        owed: as of the last commit.
    """

    def __init__(self, buckets: Sequence[Tensor]) -> None:
        self.owed = [torch.zeros_like(bucket) for bucket in buckets]
        self._next: dict[int, Tensor] = {}

    def pay(self, number: int, bucket: Tensor, scale: float) -> None:
        """Adds what is owed to this step's gradients, which are ``scale`` times as large."""
        bucket.add_(self.owed[number], alpha=scale)

    def remember(self, number: int, left_out: Tensor | None, scale: float) -> None:
        """This is owed once the step is committed; None: nothing."""
        self._next[number] = torch.zeros_like(self.owed[number]) if left_out is None else left_out.div_(scale)

    def commit(self) -> None:
        """The step was taken."""
        for number, owed in self._next.items():
            self.owed[number] = owed
        self._next = {}

    def clear(self) -> None:
        """Nothing is owed."""
        for owed in self.owed:
            owed.zero_()
        self._next = {}

    def share_out(self, sum_over_all: Callable[[Sequence[Tensor]], object], debtors: int, is_debtor: bool) -> None:
        """Spreads what all owe evenly over those that encode, so that no one's leaving loses it."""
        total = [owed.clone() for owed in self.owed]  # an aborted sum may write to it later
        sum_over_all(total)
        self._next = {}
        self.owed = [owed.div_(debtors) if is_debtor else owed.zero_() for owed in total]
