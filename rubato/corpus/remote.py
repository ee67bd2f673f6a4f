"""Corpora on storage that is reached over a network: s3://, gs://, http(s):// and whatever else fsspec knows."""

from __future__ import annotations

import fnmatch
import hashlib
from collections.abc import Iterator
from typing import Any, BinaryIO, cast

import fsspec

_EXTRAS = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs"}


class NoDriverError(OSError):
    """What speaks the protocol of a URL is not installed."""


def is_remote(location: str) -> bool:
    """Whether a location is a URL."""
    return "://" in location


def file_system(location: str) -> tuple[Any, str]:
    """The file system of a URL, and the path in it.

    Raises:
        NoDriverError: nothing that is installed speaks its protocol.
    """
    protocol = location.split("://", 1)[0]
    try:
        found, path = fsspec.core.url_to_fs(location)
    except (ImportError, ValueError) as error:
        package = _EXTRAS.get(protocol)
        fix = f"; install {package} on this machine" if package else ""
        raise NoDriverError(0, f"nothing here speaks {protocol}://{fix}") from error
    return found, path


def open_file(location: str) -> BinaryIO:
    """The bytes of a URL, readable from any place. Raises OSError."""
    system, path = file_system(location)
    return cast(BinaryIO, system.open(path, "rb"))


def listing(location: str) -> Iterator[tuple[str, str, int, str]]:
    """The files that a URL or a glob of URLs means, as (name below the part without wildcards, URL, bytes, stamp).

    Raises:
        OSError: it cannot be looked at.
    """
    system, path = file_system(location)
    parts = path.split("/")
    wild = next((number for number, part in enumerate(parts) if set(part) & set("*?[")), None)
    if wild is None:
        details = system.info(path)
        if details["type"] == "directory":
            raise IsADirectoryError(location)
        yield path.rsplit("/", 1)[-1], location, _size(details), _stamp(system, path)
        return
    base = "/".join(parts[:wild])
    found = system.glob(path, detail=True)
    for each, details in sorted(found.items()):
        if details["type"] == "directory" or (each.rsplit("/", 1)[-1].startswith(".") and not _names_hidden(parts)):
            continue
        yield each[len(base) :].lstrip("/"), system.unstrip_protocol(each), _size(details), _stamp(system, each)


def below(location: str) -> list[str]:
    """The URLs of the files right in a folder; empty when there is none. Raises OSError."""
    system, path = file_system(location)
    if not system.isdir(path):
        return []
    return [system.unstrip_protocol(each["name"]) for each in system.ls(path, detail=True) if each["type"] == "file"]


def _names_hidden(parts: list[str]) -> bool:
    return parts[-1].startswith(".") and fnmatch.fnmatchcase(".", parts[-1][:1])


def _size(details: dict[str, Any]) -> int:
    size = details.get("size")
    return -1 if size is None else int(size)


def _stamp(system: Any, path: str) -> str:
    """What the storage says of the state of a file: its ETag, else its size and times."""
    try:
        return str(system.ukey(path))
    except NotImplementedError:
        return hashlib.sha256(repr(sorted(system.info(path).items())).encode()).hexdigest()
