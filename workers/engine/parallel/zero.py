"""ZeRO: the data axis shards what its replicas would all hold (Rajbhandari et al. 2020, arXiv:1910.02054, section 5).

Stage 1 shards masters and optimizer states, stage 2 gradients too, stage 3 parameters too. A rank holds rows of every
parameter (`Rows`), updates these, and learns the others' from them. Layers are reduced and gathered one by one; what is
not in a layer (embedding, last norm, head) is one unit, whole from the first use in a step to the last.

Own code and not torch's ``fully_shard``, since its groups must let go of everybody at once when a replica is lost, and
are new in every generation. Calls in the midst of a pass never raise: a worker that left would leave its mates waiting.
What they leave behind after a failure is anything, and the vote at the end of the pass has all drop it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from rubato.layout import sharding_degree
from rubato.spec import JobSpec
from workers.engine.comm.buckets import ShardedGradients
from workers.engine.comm.codecs import Codec, codec_of
from workers.engine.comm.compression import encoded_bytes
from workers.engine.comm.exchange import Exchange
from workers.engine.comm.overlap import Overlap
from workers.engine.device import Call
from workers.engine.parallel.compose import ModelShare
from workers.engine.parallel.pipeline import LastPass, Runner, unobserved
from workers.engine.parallel.rows import Split
from workers.engine.parallel.tensor import NOT_COUNTED, local, local_gradient, sum_partial
from workers.engine.parallel.unit import Room, Unit
from workers.engine.state import TrainingState


class ShardingGroup(Protocol):
    """Those that share one copy of the state: a `DataGroup`, or a rehearsal of one."""

    @property
    def split(self) -> Split: ...
    @property
    def copies(self) -> int: ...
    def begin_gather(self, whole: Tensor, own: Tensor) -> Call | None: ...
    def finish_gather(self, call: Call | None) -> None: ...
    def begin_reduce(
        self, own: Tensor, whole: Tensor, take: Callable[[], Tensor], codec: Codec | None
    ) -> Call | None: ...
    def finish_reduce(self, call: Call | None, own: Tensor) -> None: ...
    def settle(self) -> None: ...
    def sum(self, tensors: Sequence[Tensor]) -> float: ...


class Rehearsal:
    """Takes the place of a group that is yet to form: what others hold is zero."""

    def __init__(self, degree: int) -> None:
        self.split, self.copies = Split(degree, 0), 1

    def begin_gather(self, whole: Tensor, own: Tensor) -> None:
        whole.zero_()
        whole[: own.numel()].copy_(own)

    def begin_reduce(self, own: Tensor, whole: Tensor, take: Callable[[], Tensor], codec: Codec | None) -> None:
        own.copy_(whole[: own.numel()])

    def finish_gather(self, call: Call | None) -> None: ...
    def finish_reduce(self, call: Call | None, own: Tensor) -> None: ...
    def settle(self) -> None: ...
    def sum(self, tensors: Sequence[Tensor]) -> float:
        return 0.0


class Zero:
    """Brings gradients to the ranks that own them, and parameters to those that compute with them.

    Replicas pass the same units in the same order, since they run as many micro-batches (`runner`).

    Args:
        share: whose parameters they are.
        state: whose rows of them are updated.
        tensor: group of the tensor axis.

    Attributes:
        buckets: the gradients of the rows this rank holds, in the order of the parameters; valid after `reducing`.
    """

    def __init__(
        self, spec: JobSpec, share: ModelShare, state: TrainingState, tensor: dist.ProcessGroup | None
    ) -> None:
        self._spec, self._stage, self._state, self._tensor = spec, spec.memory.zero, state, tensor
        self._codec = codec_of(spec.communication.compression)
        self._names = list(share.parameters)
        self._parameters = list(share.parameters.values())
        self._roots: list[Unit] = []
        self._layers: dict[nn.Module, list[Unit]] = {}
        self._open: set[Unit] = set()
        self._in_step = False
        self._reducing: tuple[Unit, Call | None, Tensor, list[Tensor]] | None = None
        self._make_units(share.parts)
        self._units = [*self._roots, *(unit for units in self._layers.values() for unit in units)]
        self.buckets = ShardedGradients(len(self._parameters))
        state.publish = self.publish
        # The first generation may have as many replicas as there will ever be, or fewer, and then there is room too.
        self.hold(Rehearsal(sharding_degree(spec.sizes[-1] // spec.parallelism.replica_size, spec.memory.shard_over)))

    def _make_units(self, parts: Sequence[nn.Module]) -> None:
        places = {parameter: place for place, parameter in enumerate(self._parameters)}
        for part in parts:
            self._layers[part] = []
            for layer in part.layers.values():  # type: ignore[union-attr, operator]
                held = [each for each in layer.parameters() if each in places]
                unit = Unit(held, [places.pop(each) for each in held])
                self._layers[part].append(unit)
                for parameter in held:
                    parameter.register_post_accumulate_grad_hook(partial(self._accumulated, unit))
                if self._stage == 3:
                    self._gather_around(layer, part, len(self._layers[part]) - 1)
        rest = [*places]
        if rest:
            self._roots.append(Unit(rest, [places[each] for each in rest]))

    # A generation.

    def hold(self, group: ShardingGroup) -> None:
        """Begins a generation: takes memory for the rows that are this rank's now, and forgets what it held."""
        self._state.share_out(group.split, apart=self._stage == 3)
        self._group, self._leaves = group, self._state.leaves
        self._reducing, self._in_step = None, False
        for unit in self._units:
            unit.lay_out(group.split)
            unit.gathering = None
            unit.clean = True
            unit.gradient = self._leaves[unit.places[0]].new_zeros(unit.part)
            for place, view in zip(unit.places, unit.views(unit.gradient), strict=True):
                self.buckets.gradients[place] = self._leaves[place].grad = view
            if self._stage == 3:
                unit.release()
        self._room = Room(max(unit.size for units in self._layers.values() for unit in units))
        self.buckets.flat = [unit.gradient for unit in self._units]
        for parameter in self._parameters:
            parameter.grad = None

    def publish(self) -> None:
        """Makes the parameters those whose rows the ranks hold.

        Raises:
            DataAxisError: the data axis failed.
        """
        if self._stage == 3:
            return  # they are gathered when they are used
        ahead = None
        for unit in self._units:
            begun = unit, *self._begin_gather(unit)
            if ahead is not None:
                self._finish_gather(*ahead)
            ahead = begun
        if ahead is not None:
            self._finish_gather(*ahead)
        self._group.settle()

    def runner(self, share: ModelShare, counts: Sequence[int], replica: int) -> Runner:
        """Runs the micro-batches of a replica, and some without a token that counts where others have more."""
        plain = sum(self._bytes_sent(unit, max(counts), None) for unit in self._units)
        self.buckets.sent_bytes = sum(self._bytes_sent(unit, max(counts), self._codec) for unit in self._units)
        self.buckets.saved_bytes = plain - self.buckets.sent_bytes
        return _EvenRunner(self, share.runner(max(counts)), max(counts) * self._spec.parallelism.micro_batch)

    def _bytes_sent(self, unit: Unit, passes: int, codec: Codec | None) -> int:
        """In a step: this rank's part goes to each of those that share a copy, sums of it once around all copies."""
        layer = unit not in self._roots
        reductions = passes if layer and self._stage > 1 else 1
        gathers = 2 * passes if layer and self._stage == 3 else 1
        sharers, copies = self._group.split.degree - 1, self._group.copies
        scattered = unit.gradient.nbytes if codec is None else encoded_bytes(codec, unit.part)
        summed = scattered * sharers + unit.gradient.nbytes * 2 * (copies - 1) / copies
        gathered = unit.part * unit.parameters[0].element_size() * sharers
        return round(reductions * summed + gathers * gathered)

    def totals(self, squares: Sequence[float]) -> list[float]:
        """Sums over the data axis of what each replica's rows come to."""
        sums = torch.tensor(squares, dtype=torch.float64, device=self._leaves[0].device)
        self._group.sum([sums])
        return [value / self._group.copies for value in sums.tolist()]

    # A step.

    @contextmanager
    def reducing(self, start: object) -> Iterator[None]:
        """To be entered around the passes of a step, after which the gradients are those of all replicas.

        Raises:
            RuntimeError: a parameter has no gradient.
        """
        self._open.clear()
        for unit in self._units:
            unit.missing = len(unit.parameters)
            unit.clean = True
        self._in_step = True
        yield
        self._in_step = False
        for unit in self._roots:
            self._reduce(unit)
        self._finish_reduce()

    @contextmanager
    def last_pass(self, part: nn.Module) -> Iterator[None]:
        """To be entered around the last backward pass through a part."""
        whole_now = self._stage == 1 and self._in_step  # an evaluation goes through the same schedule
        if whole_now:
            self._open.update(self._layers[part])
        yield
        if whole_now:
            # Where the gradients of weights are computed apart from those of inputs, no hook hears of them.
            for unit in reversed(self._layers[part]):
                if unit in self._open:
                    self._reduce(unit)

    @contextmanager
    def whole_roots(self) -> Iterator[None]:
        """Keeps what is in no layer whole, for a stretch of passes."""
        for unit in self._roots:
            self._need(unit)
        yield
        if self._stage == 3:
            for unit in self._units:
                self._forget(unit)

    # Gradients.

    def _accumulated(self, unit: Unit, parameter: Tensor) -> None:
        unit.missing -= 1
        if unit.missing:
            return
        unit.missing = len(unit.parameters)
        if self._stage > 1 or unit in self._open:
            self._reduce(unit)
        if self._stage == 3:
            self._forget(unit)

    def _reduce(self, unit: Unit) -> None:
        self._open.discard(unit)
        gradients = [self._gradient(place) for place in unit.places]
        sum_partial(gradients, self._tensor)
        self._finish_reduce()  # one at a time is under way, for the sake of memory
        own, whole = torch.empty_like(unit.gradient), self._room.take(unit.size, gradients[0])
        unit.pack(gradients, whole)
        taken = [whole]

        def take() -> Tensor:
            taken.append(self._room.take(unit.size, whole))
            return taken[-1]

        self._reducing = unit, self._group.begin_reduce(own, whole, take, self._codec), own, taken

    @torch.no_grad()
    def _finish_reduce(self) -> None:
        if self._reducing is None:
            return
        (unit, call, own, taken), self._reducing = self._reducing, None
        self._group.finish_reduce(call, own)
        self._room.give(taken)
        if unit.clean:
            unit.gradient.copy_(own)
        else:
            unit.gradient.add_(own)
        unit.clean = False

    def _gradient(self, place: int) -> Tensor:
        parameter = self._parameters[place]
        gradient, parameter.grad = parameter.grad, None
        if gradient is None:
            raise RuntimeError(f"parameter {self._names[place]} has no gradient: the loss does not depend on it")
        return local_gradient(gradient, parameter)

    # Parameters.

    def _gather_around(self, layer: nn.Module, part: nn.Module, number: int) -> None:
        """Makes a layer whole for its passes, and begins to gather the one that comes after."""

        def before(*_: Any) -> None:
            units = self._layers[part]
            self._need(units[number])
            self._ahead(units[number + 1 : number + 2])

        def before_backward(gradient: Tensor) -> None:
            units = self._layers[part]
            self._need(units[number])
            self._ahead(units[max(number - 1, 0) : number])

        def after(module: nn.Module, inputs: Any, output: Tensor) -> None:
            self._forget(self._layers[part][number])
            if output.requires_grad:
                output.register_hook(before_backward)

        layer.register_forward_pre_hook(before)
        layer.register_forward_hook(after)

    def _ahead(self, units: Sequence[Unit]) -> None:
        for unit in units:
            if not unit.whole and unit.gathering is None:
                unit.gathering = self._begin_gather(unit)

    def _need(self, unit: Unit) -> None:
        if unit.whole:
            return
        self._ahead([unit])
        assert unit.gathering is not None
        begun, unit.gathering = unit.gathering, None
        unit.allocate()
        self._finish_gather(unit, *begun)
        unit.whole = True

    def _forget(self, unit: Unit) -> None:
        if unit.whole:
            unit.release()

    def _begin_gather(self, unit: Unit) -> tuple[Call | None, Tensor]:
        dtype = local(unit.parameters[0]).dtype
        own = unit.pack_own([self._leaves[place] for place in unit.places], dtype)
        whole = self._room.take(unit.size, own)
        return self._group.begin_gather(whole, own), whole

    def _finish_gather(self, unit: Unit, call: Call | None, whole: Tensor) -> None:
        self._group.finish_gather(call)
        unit.unpack(whole)
        self._room.give([whole])


class _EvenRunner:
    """As many micro-batches on every replica, with the roots whole throughout."""

    def __init__(self, zero: Zero, inner: Runner, samples: int) -> None:
        self._zero, self._inner, self._samples = zero, inner, samples

    def train(
        self, tokens_BS: Tensor, targets_BS: Tensor, scale: float = 1.0, last_pass: LastPass = unobserved
    ) -> Tensor:
        with self._zero.whole_roots():
            return self._inner.train(*self._fill_up(tokens_BS, targets_BS), scale, last_pass)

    def evaluate(self, tokens_BS: Tensor, targets_BS: Tensor) -> Tensor:
        with self._zero.whole_roots():
            return self._inner.evaluate(*self._fill_up(tokens_BS, targets_BS))

    def _fill_up(self, tokens_BS: Tensor, targets_BS: Tensor) -> tuple[Tensor, Tensor]:
        missing = self._samples - len(tokens_BS)
        filled = functional.pad(tokens_BS, (0, 0, 0, missing))
        return filled, functional.pad(targets_BS, (0, 0, 0, missing), value=NOT_COUNTED)


def exchange_of(spec: JobSpec, share: ModelShare, state: TrainingState, tensor: dist.ProcessGroup | None) -> Exchange:
    """What brings gradients to where they are applied: over a data axis that shards the state, or one that does not."""
    if spec.memory.zero:
        return Zero(spec, share, state, tensor)
    return Overlap(share, state.leaves, spec.communication.bucket_mb, tensor)
