"""An embedding that is also the head, where the first and the last stage of a pipeline are different ranks.

Both hold a copy, under the embedding's name. Each computes the part of the gradient that its use gives; the sum is the
gradient of the one matrix that both are, so equal copies stay equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from workers.engine.mesh import Axis
from workers.engine.parallel.pipeline import Stretch

EMBEDDING = "tok_embeddings.weight"
TIED_NAMES = {"output.weight": EMBEDDING}


@dataclass(frozen=True)
class TiedGradient:
    """This rank's half of the exchange.

    Attributes:
        pipeline: the axis that the stages are on.
        peer: the rank of the axis that has the other copy.
        place: which of this rank's parameters it is.
        copy: whether this is the head's copy, which a norm over all ranks leaves out.
    """

    pipeline: Axis
    peer: int
    place: int
    copy: bool

    @classmethod
    def of(cls, pipeline: Axis, held: Sequence[Stretch], names: Sequence[str], *, tied: bool) -> TiedGradient | None:
        """The half of a rank that holds these stages and parameters; None where it has nothing to exchange."""
        first, last = any(stretch.first for stretch in held), any(stretch.last for stretch in held)
        if not tied or first == last:
            return None
        return cls(pipeline, pipeline.size - 1 if first else 0, names.index(EMBEDDING), copy=last)

    @torch.no_grad()
    def sum(self, gradients: Sequence[Tensor]) -> None:
        """Adds the other copy's gradient to this rank's, in place. Both ranks call it together."""
        own = gradients[self.place]
        other = torch.empty_like(own)
        group = self.pipeline.group
        exchange = [
            dist.P2POp(dist.isend, own, group=group, group_peer=self.peer),
            dist.P2POp(dist.irecv, other, group=group, group_peer=self.peer),
        ]
        for transfer in dist.batch_isend_irecv(exchange):
            transfer.wait()
        own.add_(other)
