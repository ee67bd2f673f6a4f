"""The fork server of a node: loads what every worker needs once, then forks a child for each that is asked for.

It must stay a process that is safe to fork: it never computes, starts no threads, and loads neither Ray nor CUDA, whose
threads and handles no child could use. A child dies with the server (its parent) and with its launcher.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import logging
import os
import runpy
import selectors
import signal
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PRELOADED = (
    "workers.engine.train",
    "torch._dynamo",  # the first optimizer would bring it in
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "pandas",  # what Ray and its training library load, as far as it is not Ray
    "pyarrow",
    "aiohttp",
    "requests",
    "jsonschema",
)
IDLE_S = 15.0
"""A server without children ends after so long: a replica that lost a worker comes back sooner."""

_PR_SET_PDEATHSIG = 1

log = logging.getLogger("rubato.forkserver")


@dataclass(frozen=True)
class Request:
    """What a launcher asks for: a script to run as if the launcher were its interpreter."""

    arguments: list[str]
    environment: dict[str, str]
    directory: str
    standard: list[int]

    @classmethod
    def receive(cls, connection: socket.socket) -> Request:
        """Reads it with its three descriptors. Raises ConnectionError when the launcher is gone."""
        data, standard, _, _ = socket.recv_fds(connection, 1 << 16, 3)
        while data and not data.endswith(b"\n"):
            more = connection.recv(1 << 16)
            if not more:
                break
            data += more
        if not data.endswith(b"\n") or len(standard) != 3:
            for handle in standard:
                os.close(handle)
            raise ConnectionError("a launcher was gone before it had asked")
        said = json.loads(data)
        return cls(said["arguments"], said["environment"], said["directory"], list(standard))


@dataclass(frozen=True)
class Child:
    """A worker that runs: its process, a descriptor that tells its end, and the launcher that waits for it."""

    pid: int
    end: int
    launcher: socket.socket


class Server:
    """Accepts launchers, forks children, hears of the end of both.

    Args:
        listener: where launchers connect.
        idle_s: how long it stays without a child.
    """

    def __init__(self, listener: socket.socket, idle_s: float = IDLE_S) -> None:
        self._listener = listener
        self._idle_s = idle_s
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._children: dict[int, Child] = {}

    def serve(self) -> Request | None:
        """Runs until it is idle for long: None. In a child it returns at once: the request to be fulfilled there."""
        while ready := self._selector.select(None if self._children else self._idle_s):
            for key, _ in ready:
                if key.fileobj is self._listener:
                    request = self._accept()
                    if request is not None:
                        return request
                elif key.data.pid in self._children:  # may have ended in this very round
                    self._ended(key.data, by_launcher=key.fileobj is key.data.launcher)
        return None

    def _accept(self) -> Request | None:
        launcher, _ = self._listener.accept()
        try:
            request = Request.receive(launcher)
        except ConnectionError as error:
            log.warning("%s", error)
            launcher.close()
            return None
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            die_with(parent)
            self._leave(launcher)
            return request
        for handle in request.standard:
            os.close(handle)
        child = Child(pid, os.pidfd_open(pid), launcher)
        self._children[pid] = child
        self._selector.register(child.end, selectors.EVENT_READ, child)
        self._selector.register(launcher, selectors.EVENT_READ, child)
        with contextlib.suppress(ConnectionError):  # its end will be heard in a moment
            launcher.sendall(b"started\n")
        log.info("started %d", pid)
        return None

    def _ended(self, child: Child, by_launcher: bool) -> None:
        if by_launcher:
            signal.pidfd_send_signal(child.end, signal.SIGKILL)
        _, status = os.waitpid(child.pid, 0)
        code = os.waitstatus_to_exitcode(status)
        log.info("%d ended with %d%s", child.pid, code, ", since its launcher was gone" if by_launcher else "")
        with contextlib.suppress(ConnectionError):
            child.launcher.sendall(b"%d\n" % (code if code >= 0 else 128 - code))
        self._selector.unregister(child.launcher)
        self._selector.unregister(child.end)
        child.launcher.close()
        os.close(child.end)
        del self._children[child.pid]

    def _leave(self, launcher: socket.socket) -> None:
        """Frees what belongs to the server; in a child."""
        for child in self._children.values():
            child.launcher.close()
            os.close(child.end)
        launcher.close()
        self._selector.close()
        self._listener.close()


def die_with(parent: int) -> None:
    """Has the kernel kill this process when the server ends."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def become(request: Request, base: Sequence[str]) -> None:
    """Makes this process what the launcher would have been as an interpreter, and runs the script.

    Args:
        base: where modules are found whatever the environment says.
    """
    os.setsid()
    for number, handle in enumerate(request.standard):
        os.dup2(handle, number)
        os.close(handle)
    os.environ.clear()
    os.environ.update(request.environment)
    os.chdir(request.directory)
    script = request.arguments[0]
    sys.argv[:] = request.arguments
    sys.path[:] = [str(Path(script).parent), *_python_path(), *base]
    logging.getLogger().handlers.clear()
    runpy.run_path(script, run_name="__main__")


def _python_path() -> list[str]:
    return [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]


def main(arguments: Sequence[str]) -> Any:
    path, told = arguments[0], int(arguments[1])
    logging.basicConfig(level=logging.INFO, format="%(asctime)s fork server %(process)d: %(message)s")
    with contextlib.suppress(FileNotFoundError):
        Path(path).unlink()  # of a server that was killed: nobody else may start one now
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    mask = os.umask(0o177)  # whoever may connect may run anything as this user
    listener.bind(path)
    os.umask(mask)
    listener.listen(128)
    os.write(told, b"1")
    os.close(told)
    base = [part for part in sys.path if part not in _python_path()]
    for name in PRELOADED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # so that a child's collector does not touch, and thereby copy, what it shares with the server
    log.info("ready")
    request = Server(listener).serve()
    if request is not None:
        become(request, base)
        return
    with contextlib.suppress(FileNotFoundError):
        Path(path).unlink()
    log.info("nobody needs it any more")


if __name__ == "__main__":
    main(sys.argv[1:])
