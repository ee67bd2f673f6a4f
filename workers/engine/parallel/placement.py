"""The layers of one model on several devices of one process: for a machine whose GPUs are each too small for it.

No process group and no copy of the model: activations go from device to device in the forward pass, and autograd sends
their gradients back. One device computes at a time, which is the price; a pipeline over several workers overlaps them.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from rubato.spec import JobSpec
from workers.engine.device import Device


class Placement:
    """Which device each layer is on. The embedding is with the first layer, and the head with the last one, unless it
    is the embedding.

    Args:
        spec: with a ``parallelism.device_map``.
        device: the first of the worker's devices.

    Raises:
        RubatoError: the worker has fewer devices than the map names.
    """

    def __init__(self, spec: JobSpec, device: Device) -> None:
        assert spec.layer_devices is not None
        self._numbers = spec.layer_devices
        self._places = {number: device.place(number) for number in sorted({0, *self._numbers})}
        self._tied = spec.model.tie_embeddings

    def put(self, part: nn.Module) -> None:
        """Gives the modules of a whole model memory on their devices, and makes them fetch what they are called with.

        Args:
            part: on the meta device.
        """
        first = before = self._numbers[0]
        for module in (part.tok_embeddings, getattr(part, "positions", None)):
            if module is not None:
                module.to_empty(device=self._places[first].torch_device)
        for layer, number in zip(part.layers.values(), self._numbers, strict=True):
            layer.to_empty(device=self._places[number].torch_device)
            self._fetch(layer, number, hidden=number != before, rest=number != first)
            before = number
        last = first if self._tied else before
        for module in (part.norm, part.output):
            module.to_empty(device=self._places[last].torch_device)
        self._fetch(part.norm, last, hidden=last != before, rest=False)

    def _fetch(self, module: nn.Module, number: int, *, hidden: bool, rest: bool) -> None:
        """Has a module move its first argument, or the others, here before it runs."""
        if not hidden and not rest:
            return
        place = self._places[number]

        def fetch(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            return tuple(
                place.receive(value) if isinstance(value, Tensor) and (rest if index else hidden) else value
                for index, value in enumerate(inputs)
            )

        module.register_forward_pre_hook(fetch)
