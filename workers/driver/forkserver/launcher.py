"""Stands in for the interpreter of a Ray worker: has the node's fork server run the script, and waits for its end.

Whoever kills the launcher kills the worker, and the launcher ends with the worker's exit status, so Ray sees no
difference. Where there is no server it is started; where that fails the script runs the ordinary way.

It loads nothing but the standard library, and as little of that as it can: not pathlib, for one.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import socket
import sys

SERVER = "workers.driver.forkserver.server"
LONGEST_PATH = 107  # of a Unix socket


def main() -> None:
    key, *arguments = sys.argv[1:]
    flags = []
    while arguments and arguments[0].startswith("-"):  # such as -u
        flags.append(arguments.pop(0))
    try:
        status = run_forked(socket_path(key, arguments), arguments)
    except (OSError, ConnectionError) as error:
        sys.stderr.write(f"the worker starts without the fork server: {error}\n")
        sys.stderr.flush()
        os.execv(sys.executable, [sys.executable, *flags, *arguments])
    os._exit(status)


def socket_path(key: str, arguments: list[str]) -> str:
    """Where the server of this node listens: beside the socket of the raylet that starts the worker.

    So nodes on one machine do not share a server, nor do users or containers that cannot see each other's files.
    """
    raylet = next((each.partition("=")[2] for each in arguments if each.startswith("--raylet-name=")), "")
    if not raylet:
        raise OSError("the raylet's socket is not among the arguments")
    path = f"{raylet}.{hashlib.sha256(key.encode()).hexdigest()[:10]}"
    if len(path.encode()) > LONGEST_PATH:
        raise OSError(f"{path} is too long for a socket")
    return path


def run_forked(path: str, arguments: list[str]) -> int:
    """The exit status of the worker. Raises OSError when the server cannot start it."""
    with connected(path) as connection:
        request = json.dumps({"arguments": arguments, "environment": dict(os.environ), "directory": os.getcwd()})
        socket.send_fds(connection, [request.encode() + b"\n"], [0, 1, 2])
        replies = connection.makefile("rb")
        if replies.readline() != b"started\n":
            raise ConnectionError("the fork server ended before the worker began")
        ended = replies.readline()
        return int(ended) if ended else 1  # without a word: the server is gone, and its children with it


def connected(path: str) -> socket.socket:
    """A connection to the server, which is started when it does not run."""
    with contextlib.suppress(FileNotFoundError, ConnectionRefusedError):
        return connect(path)
    with open(f"{path}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # of several launchers one starts it
        with contextlib.suppress(FileNotFoundError, ConnectionRefusedError):
            return connect(path)
        start_server(path)
        return connect(path)


def connect(path: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(path)
    except OSError:
        connection.close()
        raise
    return connection


def start_server(path: str) -> None:
    """Starts the server and returns once it listens; it still has to load its modules then."""
    listening, told = os.pipe()
    with open(f"{path}.log", "ab") as log:
        if os.fork() == 0:
            os.setsid()
            os.set_inheritable(told, True)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
            # -P: the module is found where it is installed, not where the worker happens to start.
            os.execv(sys.executable, [sys.executable, "-P", "-m", SERVER, path, str(told)])
    os.close(told)
    with os.fdopen(listening, "rb") as pipe:
        if not pipe.read(1):
            raise OSError(f"the fork server does not start; {path}.log tells why")


if __name__ == "__main__":
    main()
