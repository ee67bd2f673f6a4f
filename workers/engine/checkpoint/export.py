"""Writes the model of a checkpoint as a Hugging Face folder, a few tensors at a time: the whole is never in memory."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from rubato.checkpoints import StoredCheckpoint
from rubato.durable import sync_folder, write_durably
from rubato.pretrained.hub import FORMATS, hub_config, write_tokenizer
from rubato.pretrained.weights import INDEX, SINGLE
from rubato.problems import RubatoError
from rubato.spec import JobSpec
from workers.engine.checkpoint.whole import MODEL, chosen_checkpoint, load_weights
from workers.engine.models.huggingface import Origin, origin
from workers.engine.run import RunDirectory

_FILE_BYTES = 2 << 30
_PREFIX = f"{MODEL}."


@dataclass(frozen=True)
class Parameter:
    """A parameter of the checkpoint, and where it goes."""

    name: str
    shape: tuple[int, ...]
    origin: Origin


@dataclass(frozen=True)
class Exported:
    """What was written."""

    path: Path
    step: int
    parameters: int
    bytes: int
    dtype: str


def export(
    run: RunDirectory,
    into: Path,
    step: int | None = None,
    dtype: str | None = None,
    file_bytes: int = _FILE_BYTES,
    tell: Callable[[int, int], None] = lambda done, whole: None,
) -> Exported:
    """Writes the folder, which appears when it is complete.

    Args:
        step: of the checkpoint; None: the newest.
        dtype: ``float32``, ``bfloat16`` or ``float16``; None: that of the model the job began with, else float32.
        file_bytes: of a file, at most; so many are in memory at once.
        tell: hears of files that are written, and of all.

    Raises:
        RubatoError: there is no such checkpoint, it is damaged, Hugging Face has no such model, or the folder is there
            already or cannot be written.
    """
    spec = run.read_spec()
    stored = chosen_checkpoint(run, step)
    config = hub_config(spec, dtype)
    chosen = str(config["dtype"])
    files = _planned(_parameters(stored, spec), torch.finfo(getattr(torch, chosen)).bits // 8, file_bytes)
    if into.exists():
        raise _unwritten(into, "is there already")
    try:
        into.parent.mkdir(parents=True, exist_ok=True)
        building = Path(tempfile.mkdtemp(prefix=f".{into.name}.", dir=into.parent))
    except OSError as error:
        raise _unwritten(into, f"cannot be written: {error.strerror}") from error
    try:
        written = 0
        where: dict[str, str] = {}
        for number, group in enumerate(files, 1):
            name = SINGLE if len(files) == 1 else f"model-{number:05}-of-{len(files):05}.safetensors"
            tensors = _tensors(stored, group, getattr(torch, chosen))
            save_file(tensors, building / name, metadata={"format": "pt"})
            written += sum(tensor.nbytes for tensor in tensors.values())
            where |= dict.fromkeys(tensors, name)
            tell(number, len(files))
        if len(files) > 1:
            index = {"metadata": {"total_size": written}, "weight_map": dict(sorted(where.items()))}
            write_durably(building / INDEX, json.dumps(index, indent=2))
        write_durably(building / "config.json", json.dumps(config, indent=2) + "\n")
        write_tokenizer(spec, building)
        building.chmod(0o755)
        building.rename(into)
        sync_folder(into.parent)
    except OSError as error:
        raise _unwritten(into, f"cannot be written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(building, ignore_errors=True)  # gone already when it was renamed
    return Exported(into, stored.step, sum(len(group) for group in files), written, chosen)


def _parameters(stored: StoredCheckpoint, spec: JobSpec) -> Iterator[Parameter]:
    """The parameters in a checkpoint, in the order of the model."""
    listed = FileSystemReader(stored.path).read_metadata().state_dict_metadata
    sizes = {
        name.removeprefix(_PREFIX): tuple(each.size)
        for name, each in listed.items()
        if name.startswith(_PREFIX) and isinstance(each, TensorStorageMetadata)
    }

    def place(name: str) -> tuple[int, int, str]:
        parts = name.split(".")
        layer = int(parts[1]) if parts[0] == "layers" else -1
        return (0 if parts[0] in ("tok_embeddings", "positions") else 1 if layer >= 0 else 2, layer, name)

    for name in sorted(sizes, key=place):
        yield Parameter(name, sizes[name], origin(spec.model.family, name))


def _planned(parameters: Iterator[Parameter], itemsize: int, file_bytes: int) -> list[list[Parameter]]:
    """Which parameters go to which file; parts of one tensor go to one."""
    files: list[list[Parameter]] = []
    room = 0
    together: dict[str, list[Parameter]] = {}
    for each in parameters:
        together.setdefault(each.origin.name, []).append(each)
    for group in together.values():
        size = sum(torch.Size(each.shape).numel() for each in group) * itemsize
        if size > room or not files:
            files.append([])
            room = file_bytes
        files[-1] += group
        room -= size
    return files


def _tensors(stored: StoredCheckpoint, group: list[Parameter], dtype: torch.dtype) -> dict[str, Tensor]:
    weights = {each.name: torch.empty(each.shape) for each in group}
    load_weights(stored, weights)
    tensors: dict[str, Tensor] = {}
    for each in group:
        value = weights[each.name].to(dtype)
        if each.origin.third is None:
            tensors[each.origin.name] = each.origin.turned(value).contiguous()
            continue
        whole = tensors.setdefault(each.origin.name, torch.empty(each.origin.whole_shape(each.shape), dtype=dtype))
        block = each.origin.block(each.shape, (0,) * len(each.shape), each.shape)
        whole[block] = each.origin.turned(value)
    return tensors


def _unwritten(into: Path, cause: str) -> RubatoError:
    return RubatoError(f"{into} {cause}", fix="give a new folder that can be written", code="export_unwritten")


__all__ = ["FORMATS", "Exported", "export"]
