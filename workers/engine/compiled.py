"""Layers compiled by torch.compile: where it pays and can be done, and kept in the run directory for the next start."""

from __future__ import annotations

import hashlib
import os
import platform
import sysconfig
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from rubato.arithmetic import Decoder, training_flops_per_token
from rubato.problems import RubatoError
from rubato.spec import JobSpec
from workers.engine.device import Device
from workers.engine.mesh import ReplicaMesh
from workers.engine.parallel.tensor import TokenLoss

if TYPE_CHECKING:
    from workers.engine.hooks import Session

PAYS_FROM = {"cpu": 5e13, "cuda": 5e16}
"""FLOPs a worker from which on compiling is worth it: some ten minutes of a core, or of a GPU. Compiling takes 10 to 40
seconds and spares 5 to 20 % of every step after it (docs/experiments.md)."""

_CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


@dataclass(frozen=True)
class Compilation:
    """Whether the layers of a replica are compiled.

    Attributes:
        wanted: by the spec, or since it pays.
        missing: what this replica's machines lack for it; None: nothing.
        budget: share of activations that may be kept (``memory.recompute.budget``).
    """

    wanted: bool
    missing: str | None
    budget: float | None

    @classmethod
    def of(cls, spec: JobSpec, mesh: ReplicaMesh) -> Compilation:
        """What is to be done for a spec. All workers of the replica call it together and come to the same.

        Raises:
            RubatoError: the spec cannot do without, and this machine cannot compile.
        """
        wanted = spec.compiles(pays=flops_a_worker(spec) >= PAYS_FROM[mesh.device.type])
        missing = missing_for(mesh.device) if wanted else None
        # A mixture would compute and communicate in different orders.
        if wanted and mesh.max([float(missing is not None)])[0] and missing is None:
            missing = "another worker of this replica cannot compile"
        budget = spec.memory.recompute.budget
        if missing is not None and budget is not None:
            raise RubatoError(
                f"memory.recompute.budget is kept by compiled layers, and {missing}",
                fix="install what is missing, or use memory.recompute: selective or full",
                code="cannot_compile",
            )
        return cls(wanted, missing, budget)

    @property
    def runs(self) -> bool:
        """Whether anything is compiled."""
        return self.wanted and self.missing is None

    def apply(self, layers: nn.ModuleDict) -> None:
        """Makes layers compile when they are first called, each way of calling them once for all that are alike."""
        if not self.runs:
            return
        if self.budget is not None:
            torch._functorch.config.activation_memory_budget = self.budget
        for layer in layers.values():
            # The method, so that what hooks do (moving inputs, gathering parameters) stays outside.
            layer.forward = torch.compile(layer.forward, fullgraph=True, dynamic=False)

    def apply_to_loss(self, loss: TokenLoss) -> None:
        """Makes a loss over a whole vocabulary compile when it is first called: one pass over the logits."""
        if self.runs and loss.whole:
            loss.sum = torch.compile(loss.sum, fullgraph=True, dynamic=False)


@dataclass(frozen=True)
class CompileCost:
    """What compiling has come to in this process."""

    seconds: float
    graphs: int
    from_cache: int

    @classmethod
    def so_far(cls) -> CompileCost:
        """Since the process began."""
        from torch._dynamo.utils import calculate_time_spent, counters

        return cls(
            seconds=calculate_time_spent()["total_wall_time"],
            graphs=counters["stats"]["unique_graphs"],
            from_cache=counters["aot_autograd"]["autograd_cache_hit"],
        )


class CompileReport:
    """Tells once, when layers have run for the first time, what compiling them took, or why it could not be."""

    at_end = False

    def __init__(
        self, compilation: Compilation, mesh: ReplicaMesh, tell: Callable[[str, str, dict[str, Any]], None]
    ) -> None:
        first = mesh.pipeline.index == mesh.tensor.index == 0
        self.every = 1 if compilation.wanted and first else 0
        self._missing = compilation.missing
        self._tell = tell

    def __call__(self, session: Session) -> None:
        self.every = 0
        if session.generation.replica != 0:
            return
        if self._missing is not None:
            message = f"layers are not compiled: {self._missing}; training goes on without"
            self._tell("compile.unavailable", message, {"cause": self._missing})
            return
        cost = CompileCost.so_far()
        message = (
            f"layers were compiled in {cost.seconds:.1f} s ({cost.from_cache} of {cost.graphs} programs were kept)"
        )
        self._tell("compile.done", message, asdict(cost))


def flops_a_worker(spec: JobSpec) -> float:
    """What a worker computes in the whole run, when the job has all the workers it may have."""
    decoder = Decoder.of(spec.model, spec.data.vocab_size)
    tokens = spec.train.steps * spec.train.global_batch * spec.data.sequence_length
    return training_flops_per_token(decoder, spec.data.sequence_length) * tokens / spec.sizes[-1]


def missing_for(device: Device) -> str | None:
    """What this machine lacks to compile for a device; None: nothing."""
    if device.type == "cuda":
        from torch.utils._triton import has_triton

        return (
            None
            if has_triton()
            else "there is no Triton for this GPU (package triton, compute capability 7.0 or newer)"
        )
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return "there is no C++ compiler (g++, or the one that the environment variable CXX names)"
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        return "there are no header files of Python (package python3-dev)"
    return None


def keep_in(folder: Path) -> None:
    """Keeps what is compiled in a folder, where the next start of the run finds it; before anything is compiled.

    Machines that differ in what they can run have each a folder of their own in it. A user's own setting of
    ``TORCHINDUCTOR_CACHE_DIR`` is left alone.
    """
    if _CACHE_VARIABLE not in os.environ:
        os.environ[_CACHE_VARIABLE] = str(folder / machine())


def machine() -> str:
    """A name for all machines that can run each other's programs."""
    features = [platform.machine(), torch.__version__, platform.python_version()]
    if torch.cuda.is_available():
        features.append(torch.cuda.get_device_name())
    cpu = Path("/proc/cpuinfo")
    if cpu.is_file():
        features += [line for line in cpu.read_text().splitlines() if line.startswith(("model name", "flags"))][:2]
    return f"torch-{torch.__version__}-{hashlib.sha256(' '.join(features).encode()).hexdigest()[:12]}"
