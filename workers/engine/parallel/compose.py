"""The recipe: a worker's share of a model copy, from the spec and its place in the replica."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch
from torch import nn

from rubato.spec import JobSpec
from workers.engine.memory.precision import apply_precision
from workers.engine.mesh import ReplicaMesh
from workers.engine.models import FAMILIES
from workers.engine.parallel.pipeline import Boundary, ManyStages, OneStage, Runner, stretches
from workers.engine.parallel.tensor import TokenLoss, set_whole, split_over_tensor_axis


class ModelShare:
    """The parts of the model that this worker holds, ready to run.

    Attributes:
        parameters: by global name, the same in every layout; DTensors where a tensor axis splits the model.
    """

    def __init__(self, spec: JobSpec, mesh: ReplicaMesh) -> None:
        self._spec = spec
        self._mesh = mesh
        self._family = FAMILIES[spec.model.family]
        self._config = self._family.configure(spec)
        self._axis = mesh.axes["tensor"] if mesh.axes is not None and mesh.tensor.size > 1 else None
        self._held = stretches(spec, mesh.pipeline.index)
        self._parts = [self._build(stretch.layers, stretch.first, stretch.last) for stretch in self._held]
        self._loss = TokenLoss(spec.train.global_batch * spec.data.sequence_length, self._axis)
        self.parameters: dict[str, nn.Parameter] = dict(self._named())

    def _build(self, layers: range, first: bool, last: bool) -> nn.Module:
        # On the meta device until the part is as small as it gets: the whole may fit on no single worker.
        with torch.device("meta"):
            part = self._family.part(self._config, layers, first=first, last=last)
        if self._axis is not None:
            split_over_tensor_axis(part, self._family.tensor_plan(part), self._axis)
        part.to_empty(device=self._mesh.device.torch_device)
        part.tie_weights()
        apply_precision(part, self._spec.train.precision, self._mesh.device)
        return part

    def _named(self) -> Iterator[tuple[str, nn.Parameter]]:
        for part in self._parts:
            yield from part.named_parameters()

    def initialise(self) -> None:
        """Sets every parameter to its first value, a function of (seed, global name): the same in every layout."""
        for name, parameter in self.parameters.items():
            digest = hashlib.sha256(f"{self._spec.train.seed}/{name}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:8]) >> 1)
            set_whole(parameter, self._family.initial_value(name, parameter.shape, self._config, generator))

    def runner(self, micro_batches: int) -> Runner:
        """Runs ``micro_batches`` of them a step. All workers of the replica ask for the same number."""
        shape = self._spec.parallelism
        if shape.pipeline == 1:
            return OneStage(self._parts[0], shape.micro_batch, self._loss)
        return ManyStages(self._parts, self._held, shape, self._mesh, micro_batches, self._boundary(), self._loss)

    def _boundary(self) -> Boundary:
        batch, length = self._spec.parallelism.micro_batch, self._spec.data.sequence_length
        share = self._mesh.tensor.size
        logits = torch.bfloat16 if self._spec.train.precision == "bf16" else torch.get_default_dtype()
        hidden_shape = (batch, length // share, self._spec.model.hidden_size)
        logits_shape = (batch, length, self._spec.data.vocab_size // share)
        # What has no gradient here gets none sent back.
        return Boundary(
            tokens=torch.empty(batch, length, dtype=torch.int64, device="meta"),
            hidden=torch.empty(hidden_shape, device="meta", requires_grad=True),
            logits=torch.empty(logits_shape, dtype=logits, device="meta", requires_grad=True),
        )
