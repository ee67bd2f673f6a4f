"""Writes one and the same set of documents in every format a corpus may have."""

from __future__ import annotations

import gzip
import json
import struct
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.ipc
import pyarrow.parquet

DOCUMENTS = [f"document {number}: " + "word " * (number % 7) + "ü\n" * (number % 3) for number in range(300)]


def jsonl(path: Path, documents: Sequence[str] = DOCUMENTS) -> Path:
    path.write_text("".join(json.dumps({"id": number, "text": text}) + "\n" for number, text in enumerate(documents)))
    return path


def jsonl_gz(path: Path) -> Path:
    path.write_bytes(gzip.compress(jsonl(path).read_bytes()))
    return path


def jsonl_zst(path: Path) -> Path:
    content = jsonl(path).read_bytes()
    with pyarrow.OSFile(str(path), "wb") as file, pyarrow.CompressedOutputStream(file, "zstd") as out:
        out.write(content)
    return path


def parquet(path: Path, documents: Sequence[str | None] = DOCUMENTS) -> Path:
    table = pyarrow.table({"id": list(range(len(documents))), "text": list(documents)})
    pyarrow.parquet.write_table(table, path, row_group_size=64)
    return path


def dataset(path: Path) -> Path:
    """As `datasets.Dataset.save_to_disk` writes it."""
    path.mkdir()
    names = [f"data-{part:05}-of-00002.arrow" for part in range(2)]
    for part, name in enumerate(names):
        table = pyarrow.table({"text": DOCUMENTS[150 * part : 150 * (part + 1)]})
        with pyarrow.OSFile(str(path / name), "wb") as file, pyarrow.ipc.new_stream(file, table.schema) as out:
            out.write_table(table, max_chunksize=40)
    (path / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    (path / "dataset_info.json").write_text("{}")
    return path


def megatron(path: Path, kind: str = "<i4", code: int = 4, version: int = 1) -> Path:
    """As Megatron's IndexedDatasetBuilder writes it, documents ended by a zero."""
    tokens = [np.frombuffer(text.encode() + b"\0", np.uint8).astype(kind) for text in DOCUMENTS]
    path.write_bytes(b"".join(each.tobytes() for each in tokens))
    sizes = np.array([len(each) for each in tokens], "<i4")
    pointers = np.concatenate([[0], np.cumsum(sizes[:-1])]).astype("<i8") * np.dtype(kind).itemsize
    index = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", version, code, len(sizes), len(sizes) + 1)
    index += sizes.tobytes() + pointers.tobytes() + np.arange(len(sizes) + 1, dtype="<i8").tobytes()
    path.with_suffix(".idx").write_bytes(index)
    return path


def flat(path: Path, kind: str = "<u2") -> Path:
    """As nanoGPT writes it."""
    text = "".join(text + "\0" for text in DOCUMENTS).encode()
    np.frombuffer(text, np.uint8).astype(kind).tofile(path)
    return path


def headed(path: Path) -> Path:
    """As modded-nanogpt writes it."""
    tokens = flat(path).read_bytes()
    head = np.zeros(256, "<i4")
    head[:3] = 20240520, 1, len(tokens) // 2
    path.write_bytes(head.tobytes() + tokens)
    return path


WRITERS: dict[str, tuple[str, Callable[[Path], Path], dict[str, str]]] = {
    "jsonl": ("a.jsonl", jsonl, {}),
    "jsonl.gz": ("a.jsonl.gz", jsonl_gz, {}),
    "jsonl.zst": ("a.jsonl.zst", jsonl_zst, {}),
    "parquet": ("a.parquet", parquet, {}),
    "dataset": ("saved", dataset, {}),
    "megatron-int32": ("a.bin", megatron, {}),
    "megatron-uint16": ("a.bin", lambda path: megatron(path, "<u2", 8), {}),
    "flat-uint16": ("a.bin", flat, {}),
    "flat-uint32": ("a.bin", lambda path: flat(path, "<u4"), {"token_type": "uint32"}),
    "flat-headed": ("a.bin", headed, {}),
}
