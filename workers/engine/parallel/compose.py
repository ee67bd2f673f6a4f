"""The recipe: a worker's share of a model copy, from the spec and its place in the replica."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from rubato.spec import JobSpec
from workers.engine.checkpoint.pretrained import fill_pretrained
from workers.engine.compiled import Compilation
from workers.engine.memory.precision import PRECISIONS, apply_precision, cast_parameters
from workers.engine.memory.recompute import apply_recompute
from workers.engine.mesh import ReplicaMesh
from workers.engine.models import FAMILIES
from workers.engine.parallel.documents import documents_of
from workers.engine.parallel.pipeline import Boundary, ManyStages, OneStage, Runner, stretches
from workers.engine.parallel.placement import Placement
from workers.engine.parallel.rows import Rows
from workers.engine.parallel.tensor import (
    TokenLoss,
    is_replicated,
    local,
    set_whole,
    split_over_tensor_axis,
    vocab_share,
)
from workers.engine.parallel.tied import TIED_NAMES, TiedGradient


class ModelShare:
    """The parts of the model that this worker holds, ready to run.

    Attributes:
        parts: a module a stage, in the order of the stages.
        parameters: by global name, the same in every layout; DTensors where a tensor axis splits the model.
        counted: for each of them, whether its gradient counts here in a norm over the replica.
        compilation: whether the layers are compiled.
        loss: where the logits of the last stage end.
    """

    def __init__(self, spec: JobSpec, mesh: ReplicaMesh) -> None:
        self._spec = spec
        self._mesh = mesh
        self._family = FAMILIES[spec.model.family]
        self._documents = documents_of(spec.data)
        self._precision = PRECISIONS[spec.train.precision]
        self._config = self._family.configure(spec)
        self._axis = mesh.axes["tensor"] if mesh.axes is not None and mesh.tensor.size > 1 else None
        self.compilation = Compilation.of(spec, mesh)
        self._held = stretches(spec, mesh.pipeline.index)
        self.parts = [self._build(stretch.layers, stretch.first, stretch.last) for stretch in self._held]
        self._tie_parts()
        nominal = spec.train.global_batch * spec.data.sequence_length
        chunks, last = spec.memory.loss_chunks, self.parts[-1]
        head = last.head if chunks > 1 and last.output is not None else None
        self.loss = TokenLoss(nominal, spec.data.vocab_size, self._axis, head, chunks)
        self.compilation.apply_to_loss(self.loss)
        self.parameters: dict[str, nn.Parameter] = dict(self._named())
        self._tied = TiedGradient.of(mesh.pipeline, self._held, list(self.parameters), tied=spec.model.tie_embeddings)
        self.counted = [
            mesh.tensor.index == 0 or not is_replicated(parameter) for parameter in self.parameters.values()
        ]
        if self._tied is not None and self._tied.copy:
            self.counted[self._tied.place] = False

    def _build(self, layers: range, first: bool, last: bool) -> nn.Module:
        # On the meta device until the part is as small as it gets: the whole may fit on no single worker.
        with torch.device("meta"):
            part = self._family.part(self._config, layers, first=first, last=last)
        cast_parameters(part, self._precision)
        if self._axis is not None:
            split_over_tensor_axis(part, self._family.tensor_plan(part, self._axis.size()), self._axis)
        if self._spec.parallelism.device_map is None:
            self._materialise(part)
        else:
            Placement(self._spec, self._mesh.device).put(part)
        part.tie_weights()
        part.headless = self._spec.memory.loss_chunks > 1
        apply_recompute(part.layers, self._spec.memory.recompute)
        apply_precision(part, self._precision, self._mesh.device)
        self.compilation.apply(part.layers)
        return part

    def _materialise(self, part: nn.Module) -> None:
        """Puts a part on the device, with memory for its parameters only where they stay."""
        for module in part.modules():
            module.to_empty(device=self._mesh.device.torch_device, recurse=False)
            if self._spec.memory.zero == 3:
                for parameter in module.parameters(recurse=False):
                    local(parameter).untyped_storage().resize_(0)

    def _tie_parts(self) -> None:
        """Makes the last part use the embedding of the first, where both are here."""
        embeddings = [part.tok_embeddings for part in self.parts if part.tok_embeddings is not None]
        for part in self.parts:
            if self._config.tie_embeddings and part.output is not None and embeddings:
                part.output.weight = embeddings[0].weight

    def _named(self) -> Iterator[tuple[str, nn.Parameter]]:
        for part in self.parts:
            for name, parameter in part.named_parameters():
                yield TIED_NAMES.get(name, name) if self._config.tie_embeddings else name, parameter

    def sum_tied(self, gradients: Sequence[Tensor]) -> None:
        """Completes the gradient of an embedding that is also the head of another stage.

        After the sums over the data axis, so that both stages add the same two numbers and stay equal to the last bit.

        Args:
            gradients: of this rank's parameters, in their order.
        """
        if self._tied is not None:
            self._tied.sum(gradients)

    def initialise(self, weights: Mapping[str, Tensor]) -> None:
        """Sets weights, by global name, to their first values, the same in every layout.

        Those of the model that the job begins with, else functions of (seed, name).
        """
        if self._spec.model.source is not None:
            fill_pretrained(self._spec.model, weights)
            return
        for name, weight in weights.items():
            digest = hashlib.sha256(f"{self._spec.train.seed}/{name}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:8]) >> 1)
            value = self._family.initial_value(name, weight.shape, self._config, generator)
            if isinstance(weight, Rows):
                weight.set_whole(value)
            else:
                set_whole(weight, value)

    def runner(self, micro_batches: int) -> Runner:
        """Runs ``micro_batches`` of them a step. All workers of the replica ask for the same number."""
        shape = self._spec.parallelism
        if shape.pipeline == 1:
            return OneStage(self.parts[0], shape.micro_batch, self.loss, self._documents)
        boundary = self._boundary()
        return ManyStages(
            self.parts, self._held, shape, self._mesh, micro_batches, boundary, self.loss, self._documents
        )

    def _boundary(self) -> Boundary:
        batch, length = self._spec.parallelism.micro_batch, self._spec.data.sequence_length
        tensor, hidden = self._mesh.tensor, self._precision.hidden
        hidden_shape = (batch, length // tensor.size, self._spec.model.hidden_size)
        logits_shape = (batch, length, vocab_share(self._spec.data.vocab_size, tensor.size, tensor.index))
        # What has no gradient here gets none sent back.
        between = torch.empty(hidden_shape, dtype=hidden, device="meta", requires_grad=True)
        logits = torch.empty(logits_shape, dtype=self._precision.logits, device="meta", requires_grad=True)
        return Boundary(
            tokens=torch.empty(batch, length, dtype=torch.int64, device="meta"),
            hidden=between,
            output=between if self._spec.memory.loss_chunks > 1 else logits,
        )
