"""Where the tensors of a Hugging Face folder lie, and whether every file is whole; without reading them."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rubato.pretrained.config import pretrained_problem

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


@dataclass(frozen=True)
class TensorPlace:
    """A tensor in a file."""

    path: Path
    shape: tuple[int, ...]


def find_tensors(folder: str) -> dict[str, TensorPlace]:
    """The tensors of a folder, by name.

    Raises:
        RubatoError: a file is missing, cut short or no safetensors file, or lacks what the index says of it.
    """
    path = Path(folder).expanduser()
    index = path / INDEX
    if index.is_file():
        try:
            listed: dict[str, str] = json.loads(index.read_bytes())["weight_map"]
        except (ValueError, KeyError, TypeError) as error:
            raise pretrained_problem(f"{index} is no index of tensors", "copy the folder again") from error
        files = sorted(set(listed.values()))
    else:
        listed, files = {}, [SINGLE]
    found: dict[str, TensorPlace] = {}
    for name in files:
        found |= _tensors(path / name)
    for name, file in listed.items():
        if name not in found or found[name].path.name != file:
            raise pretrained_problem(
                f"{path / file} lacks {name}, which its index says it has", "copy the folder again"
            )
    return found


def _tensors(path: Path) -> dict[str, TensorPlace]:
    """What the header of a file says (https://github.com/huggingface/safetensors#format)."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header: dict[str, Any] = json.loads(file.read(min(length, size)))
    except OSError as error:
        cause = f"{path} cannot be read: {error.strerror}"
        raise pretrained_problem(cause, "copy the folder again, with all of its safetensors files") from error
    except (struct.error, ValueError) as error:
        raise pretrained_problem(f"{path} is cut short, or no safetensors file", "copy the file again") from error
    header.pop("__metadata__", None)
    end = 8 + length + max((each["data_offsets"][1] for each in header.values()), default=0)
    if size != end:
        raise pretrained_problem(f"{path} has {size} bytes instead of {end}: it is cut short", "copy the file again")
    return {name: TensorPlace(path, tuple(each["shape"])) for name, each in header.items()}
