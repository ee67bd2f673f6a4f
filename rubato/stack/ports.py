"""Ports: which are free, and who has one that is not."""

from __future__ import annotations

import errno
import random
import socket

import psutil

from rubato.problems import RubatoError

HOST = "127.0.0.1"

# Below the ports from which systems serve outgoing connections, so that one found free stays free.
_CANDIDATES = range(20_000, 32_000)


def is_free(port: int) -> bool:
    """Whether a server could listen on this port of the loopback address."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # closing connections do not hold a port
        try:
            probe.bind((HOST, port))
            probe.listen()
        except OSError as error:
            if error.errno in (errno.EADDRINUSE, errno.EACCES):
                return False
            raise
    return True


def free_ports(count: int) -> list[int]:
    """Different free ports."""
    found: list[int] = []
    for port in random.sample(_CANDIDATES, len(_CANDIDATES)):
        if len(found) == count:
            break
        if is_free(port):
            found.append(port)
    return found


def require_free(port: int) -> None:
    """Raises RubatoError ``port_in_use``, naming who has the port, unless it is free."""
    if is_free(port):
        return
    raise RubatoError(
        f"port {port} is in use{_by_whom(port)}",
        fix="give another one with --port (0: any free one), or end the process that has it",
        code="port_in_use",
        status=409,
    )


def _by_whom(port: int) -> str:
    try:
        connections = psutil.net_connections("tcp")
    except psutil.AccessDenied:
        return ""
    for connection in connections:
        listens = connection.status == psutil.CONN_LISTEN and connection.laddr and connection.laddr[1] == port
        if listens and connection.pid:
            try:
                return f" by process {connection.pid} ({psutil.Process(connection.pid).name()})"
            except psutil.NoSuchProcess:
                break
    return ""
