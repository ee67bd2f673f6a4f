"""The TCP connections of this process, and how one that a library owns is ended."""

from __future__ import annotations

import contextlib
import os
import socket
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Connection:
    """A TCP connection of this process. The inode tells it from a later one with the same descriptor."""

    descriptor: int
    inode: str
    local: tuple[str, int]
    remote: tuple[str, int]

    def shut(self) -> None:
        """Ends it for both sides, without closing a descriptor that others own."""
        with contextlib.suppress(OSError):  # closed since by its owner, which serves as well
            if _inode(self.descriptor) == self.inode:
                with socket.socket(fileno=os.dup(self.descriptor)) as copy:
                    copy.shutdown(socket.SHUT_RDWR)


def _inode(descriptor: int) -> str:
    return str(Path(f"/proc/self/fd/{descriptor}").readlink())


def tcp_connections() -> set[Connection]:
    """Those that are connected now."""
    found = set()
    for descriptor in [int(entry.name) for entry in Path("/proc/self/fd").iterdir()]:
        with contextlib.suppress(OSError):  # no socket, not connected, or closed since
            inode = _inode(descriptor)
            if inode.startswith("socket:"):
                with socket.socket(fileno=os.dup(descriptor)) as copy:
                    if copy.family in (socket.AF_INET, socket.AF_INET6):
                        local, remote = copy.getsockname()[:2], copy.getpeername()[:2]
                        found.add(Connection(descriptor, inode, local, remote))
    return found
