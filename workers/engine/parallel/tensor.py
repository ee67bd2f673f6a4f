"""The tensor axis: DTensor styles with sequence parallelism, and a loss over a vocabulary that is split.

DTensor is at work inside a part. What goes in and comes out is plain: token ids, this rank's shard of the sequence,
this rank's shard of the logits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle, loss_parallel, parallelize_module
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

NOT_COUNTED = -100


def split_over_tensor_axis(part: nn.Module, plan: dict[str, ParallelStyle], axis: DeviceMesh) -> None:
    """Makes the parameters of a part DTensors over ``axis`` (one dim), as its plan says."""
    parallelize_module(part, axis, plan)


class RepeatedHeads(ParallelStyle):
    """A linear layer whose heads are fewer than the ranks of the axis: all ranks hold and compute it whole.

    Each takes the one head that its queries attend to, so attention counts heads as it does elsewhere. That rank's
    gradient is of its head alone, hence partial, and `sum_partial` sums it.

    Args:
        heads: how many the layer makes; the size of the axis is a multiple of it.
    """

    def __init__(self, heads: int) -> None:
        super().__init__()
        self._heads = heads

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        head = device_mesh.get_local_rank() * self._heads // device_mesh.size()

        def own_head(module: nn.Module, inputs: object, output: DTensor) -> Tensor:
            return output.to_local(grad_placements=[Partial()]).unflatten(-1, (self._heads, -1))[..., head, :]

        distributed: nn.Module = distribute_module(module, device_mesh)
        distributed.register_forward_hook(own_head)
        return distributed


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor that this rank holds, sharing its memory."""
    return tensor.detach().to_local() if isinstance(tensor, DTensor) else tensor.detach()


def is_replicated(tensor: Tensor) -> bool:
    """Whether every rank of the tensor axis holds all of it."""
    return isinstance(tensor, DTensor) and all(placement.is_replicate() for placement in tensor.placements)


def vocab_share(vocab_size: int, degree: int, index: int) -> int:
    """Tokens of the vocabulary on a rank of the tensor axis: as many as on the first, as long as there are any."""
    widest = -(-vocab_size // degree)
    return max(0, min(widest, vocab_size - index * widest))


@torch.no_grad()
def set_whole(tensor: Tensor, value: Tensor) -> None:
    """Sets a tensor, or this rank's shard of it, from the value of the whole."""
    if isinstance(tensor, DTensor):
        # Every rank has the value, so nothing needs to be sent.
        value = distribute_tensor(
            value.to(tensor.device), tensor.device_mesh, tensor.placements, src_data_rank=None
        ).to_local()
    local(tensor).copy_(value)


def local_gradient(gradient: Tensor, parameter: nn.Parameter) -> Tensor:
    """The gradient of the shard that this rank holds.

    That of a parameter which all ranks of the tensor axis hold may be of this rank's positions or heads alone, and is
    partial then: it stays a DTensor until `sum_partial`.
    """
    if not isinstance(gradient, DTensor) or not isinstance(parameter, DTensor):
        return gradient
    if gradient.placements == parameter.placements:
        return gradient.to_local()
    if is_replicated(parameter) and gradient.placements[0].is_partial():
        return gradient
    return gradient.redistribute(placements=parameter.placements).to_local()


def sum_partial(gradients: list[Tensor], group: dist.ProcessGroup | None) -> None:
    """Puts sums over the tensor axis, made in one call, in the place of partial gradients."""
    partial = [place for place, gradient in enumerate(gradients) if isinstance(gradient, DTensor)]
    if not partial:
        return
    mine = [local(gradients[place]) for place in partial]
    flat = torch.cat([gradient.flatten() for gradient in mine])
    dist.all_reduce(flat, group=group)
    for place, own, whole in zip(partial, mine, flat.split([each.numel() for each in mine]), strict=True):
        gradients[place] = whole.view_as(own)


def summed_cross_entropy(logits_BSV: Tensor, targets_BS: Tensor) -> Tensor:
    """The losses of real tokens in fp32 or wider, added up."""
    if logits_BSV.dtype in (torch.bfloat16, torch.float16):
        logits_BSV = logits_BSV.float()
    return functional.cross_entropy(
        logits_BSV.flatten(0, 1), targets_BS.flatten(), ignore_index=NOT_COUNTED, reduction="sum"
    )


class TokenLoss:
    """Cross-entropy summed over real tokens and divided by ``nominal``, a constant of the run.

    A constant, since the number of real tokens is known only when all replicas have counted theirs; that is put right
    in the sums afterwards, so neither micro-batches nor replicas have a weight to get wrong.

    Args:
        nominal: positions of a global batch.
        vocab_size: of the whole vocabulary.
        axis: the tensor axis the vocabulary is split over; None: it is whole. Shares that are smaller than the first
            are filled up with logits that no token has, so that all are of one size.
        head: makes logits of hidden states, which the model returns then; None: the model returns logits.
        chunks: parts of the sequence whose logits are there at a time. They are computed once more in the backward
            pass, so a vocabulary of any size needs the memory of one part.

    Attributes:
        sum: `summed_cross_entropy`, or the same compiled.
    """

    def __init__(
        self,
        nominal: int,
        vocab_size: int,
        axis: DeviceMesh | None,
        head: Callable[[Tensor], Tensor] | None = None,
        chunks: int = 1,
    ) -> None:
        self._nominal = nominal
        self._axis = axis
        self._share = vocab_share(vocab_size, axis.size(), 0) if axis is not None else vocab_size
        self._head = head
        self._chunks = chunks
        self._scale = 1.0
        self._listener: Callable[[Tensor], None] | None = None
        self.sum: Callable[[Tensor, Tensor], Tensor] = summed_cross_entropy

    @property
    def whole(self) -> bool:
        """Whether a rank has the logits of the whole vocabulary."""
        return self._axis is None

    def __call__(self, outputs: Tensor, targets_BS: Tensor) -> Tensor:
        """The loss of one micro-batch, from its logits (B, S, V), or from this rank's hidden states (B, S, D)."""
        if self._listener is not None:
            self._listener(outputs if self._head is None else self._head(outputs))
            return outputs.new_zeros(())
        targets_BS = targets_BS.to(outputs.device)  # which is another one where layers are placed by hand
        if self._head is None:
            return self._of_logits(outputs, targets_BS)
        # Each rank of the tensor axis has a stretch of the sequence; a chunk is a part of each of them.
        ranks = 1 if self._axis is None else self._axis.size()
        targets = targets_BS.unflatten(1, (ranks, -1)).chunk(self._chunks, dim=2)
        losses = [
            checkpoint(self._of_hidden, hidden, part.flatten(1, 2), use_reentrant=False, preserve_rng_state=False)
            for hidden, part in zip(outputs.chunk(self._chunks, dim=1), targets, strict=True)
        ]
        return torch.stack(losses).sum()

    def _of_hidden(self, hidden_BCD: Tensor, targets_BC: Tensor) -> Tensor:
        assert self._head is not None
        return self._of_logits(self._head(hidden_BCD), targets_BC)

    def _of_logits(self, logits_BSV: Tensor, targets_BS: Tensor) -> Tensor:
        if self._axis is not None:
            missing = self._share - logits_BSV.shape[-1]
            if missing:
                logits_BSV = functional.pad(logits_BSV, (0, missing), value=-torch.inf)
            logits_BSV = DTensor.from_local(logits_BSV, self._axis, [Shard(2)], run_check=False)
        loss = self.sum(logits_BSV, targets_BS)
        return (loss.to_local() if isinstance(loss, DTensor) else loss) * (self._scale / self._nominal)

    @contextmanager
    def scaled(self, scale: float) -> Iterator[None]:
        """Multiplies the loss while it is entered."""
        self._scale = scale
        try:
            yield
        finally:
            self._scale = 1.0

    @contextmanager
    def heard_by(self, listener: Callable[[Tensor], None]) -> Iterator[None]:
        """While it is entered, the listener is given the logits of each micro-batch, this rank's share of them."""
        self._listener = listener
        try:
            yield
        finally:
            self._listener = None

    @contextmanager
    def computing(self) -> Iterator[None]:
        """To be entered around the forward and the backward pass."""
        if self._axis is None:
            yield
        else:
            with loss_parallel():
                yield

    @contextmanager
    def forward_only(self) -> Iterator[None]:
        """To be entered around a forward pass that no backward pass follows."""
        # Under inference_mode DTensor is not asked how to split what it knows only in parts, such as cross-entropy.
        with torch.inference_mode() if self._axis is None else torch.no_grad():
            yield
