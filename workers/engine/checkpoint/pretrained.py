"""First weights from a Hugging Face folder: each rank reads the blocks that it holds, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from rubato.pretrained import TensorPlace, find_tensors
from rubato.pretrained.config import pretrained_problem
from rubato.spec import ModelSpec
from workers.engine.models.huggingface import Origin, origin
from workers.engine.parallel.rows import Rows
from workers.engine.parallel.tensor import local

_PREFIX = "transformer."  # folders that GPT-2's own tools wrote go without


def fill_pretrained(model: ModelSpec, weights: Mapping[str, Tensor]) -> None:
    """Sets this rank's share of weights, by global name, to those of the model that a spec begins with.

    Raises:
        RubatoError: they are not what the spec says, or cannot be read.
    """
    assert model.source is not None
    pretrained = PretrainedWeights(model.source, model.family)
    for name, weight in weights.items():
        if isinstance(weight, Rows):
            pretrained.fill(name, weight.shape, weight.held, weight.offsets)
            continue
        offsets: Sequence[int] = [0] * weight.ndim
        if isinstance(weight, DTensor):
            _, offsets = compute_local_shape_and_global_offset(weight.shape, weight.device_mesh, weight.placements)
        pretrained.fill(name, weight.shape, local(weight), offsets)


class PretrainedWeights:
    """The tensors of a folder, by the names that parameters have here.

    Raises:
        RubatoError: the folder is not whole.
    """

    def __init__(self, folder: str, family: str) -> None:
        self._folder, self._family = folder, family
        self._places = find_tensors(folder)
        self._open: dict[Path, Any] = {}

    @torch.no_grad()
    def fill(self, name: str, shape: Sequence[int], held: Tensor, offsets: Sequence[int]) -> None:
        """Sets a block of a parameter.

        Args:
            name: of the parameter, its global one.
            shape: of the whole parameter.
            held: the block, which is filled in place.
            offsets: of the block in the whole.

        Raises:
            RubatoError: the folder has no such tensor, or one of another shape, or it cannot be read.
        """
        if not held.numel():
            return
        from_there = origin(self._family, name)
        place = self._find(from_there)
        if place.shape != from_there.whole_shape(tuple(shape)):
            raise pretrained_problem(
                f"{from_there.name} in {self._folder} has the shape {list(place.shape)}, for {name} it would be "
                f"{list(from_there.whole_shape(tuple(shape)))}",
                "take the sizes, and the vocabulary, that its config.json has",
            )
        block = from_there.block(tuple(shape), tuple(offsets), tuple(held.shape))
        held.copy_(from_there.turned(self._read(place, from_there.name, block)))

    def _find(self, wanted: Origin) -> TensorPlace:
        found = self._places.get(wanted.name) or self._places.get(wanted.name.removeprefix(_PREFIX))
        if found is None:
            raise pretrained_problem(f"{self._folder} lacks {wanted.name}", "copy the folder again")
        return found

    def _read(self, place: TensorPlace, name: str, block: tuple[slice, ...]) -> Tensor:
        try:
            if place.path not in self._open:
                self._open[place.path] = safe_open(place.path, framework="pt")
            file = self._open[place.path]
            there = name if name in self._places else name.removeprefix(_PREFIX)
            tensor: Tensor = file.get_slice(there)[block]
        except (SafetensorError, OSError) as error:
            raise pretrained_problem(f"{place.path} cannot be read: {error}", "copy the file again") from error
        return tensor
