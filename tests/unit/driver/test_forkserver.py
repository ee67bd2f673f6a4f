"""The fork server: a script run through it behaves as one run by an interpreter, and nobody outlives anybody."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from workers.driver.forkserver import py_executable
from workers.driver.forkserver.server import Server

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks only on Linux")

SCRIPT = """
import json, os, sys
said = sys.stdin.readline().strip()
parent = os.getppid()
print(json.dumps({
    "arguments": sys.argv[1:], "said": said, "directory": os.getcwd(), "mark": os.environ.get("MARK"),
    "name": __name__, "first": sys.path[0], "pid": os.getpid(), "parent": parent, "loaded": sorted(sys.modules),
    "threads": sorted(open(f"/proc/{parent}/task/{each}/comm").read() for each in os.listdir(f"/proc/{parent}/task")),
}), flush=True)
if sys.stdin.readline().strip() == "fail":
    print("it fails", file=sys.stderr)
    sys.exit(7)
"""


class Node:
    """What a raylet has: a socket that workers are told of, and a script that they run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.script = folder / "worker.py"
        self.script.write_text(SCRIPT)

    def start(self, *arguments: str, raylet: str = "raylet", **variables: str) -> subprocess.Popen[str]:
        """Runs the script as Ray does: by the shell, through the launcher."""
        command = f"exec {py_executable('test')} -u {self.script} --raylet-name={self.folder / raylet} "
        return subprocess.Popen(
            ["bash", "-c", command + " ".join(arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=self.folder,
            env=os.environ | {"OMP_NUM_THREADS": "1"} | variables,
        )

    def servers(self) -> list[psutil.Process]:
        """Fork servers of this node: their command line names its socket."""
        return [
            process
            for process in psutil.process_iter(["cmdline"])
            if any(part.startswith(f"{self.folder}/raylet") for part in process.info["cmdline"] or ())
            and process.ppid() == 1
        ]


def told(worker: subprocess.Popen[str]) -> dict[str, Any]:
    """What the script says of itself; it goes on until `finish`."""
    assert worker.stdin
    assert worker.stdout
    worker.stdin.write("hello\n")
    worker.stdin.flush()
    line = worker.stdout.readline()
    assert line, worker.stderr and worker.stderr.read()
    said: dict[str, Any] = json.loads(line)
    return said


def finish(worker: subprocess.Popen[str], word: str = "") -> tuple[int, str]:
    _, errors = worker.communicate(f"{word}\n", timeout=60)
    return worker.returncode, errors


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    with tempfile.TemporaryDirectory(prefix="rb-") as folder:  # a short path, since it holds sockets
        made = Node(Path(folder))
        yield made
        for process in made.servers():
            process.kill()


def test_a_worker_is_what_an_interpreter_would_have_made_of_it(node: Node) -> None:
    one, other = node.start("a", "b", MARK="one"), node.start(MARK="other")
    first, second = told(one), told(other)
    assert first["said"] == "hello"
    assert (first["arguments"][1:], first["mark"], second["mark"]) == (["a", "b"], "one", "other")
    assert (first["name"], first["directory"], first["first"]) == ("__main__", str(node.folder), str(node.folder))
    assert first["pid"] != second["pid"]
    assert first["parent"] == second["parent"], "one server for both"
    assert {"torch", "workers.engine.train", "torch._dynamo"} <= set(first["loaded"])
    assert not [name for name in first["loaded"] if name.split(".")[0] == "ray"]
    assert len(first["threads"]) - first["threads"].count("jemalloc_bg_thd\n") == 1, "forking drops threads"
    assert finish(one, "fail") == (7, "it fails\n")
    assert finish(other)[0] == 0


def test_whoever_kills_the_launcher_kills_the_worker(node: Node) -> None:
    launcher = node.start()
    worker = psutil.Process(told(launcher)["pid"])
    assert worker.pid != launcher.pid
    launcher.kill()
    psutil.wait_procs([worker], timeout=30)  # its input stays open, at whose end it would end by itself
    assert not worker.is_running()
    launcher.communicate()


def test_a_worker_that_is_killed_ends_its_launcher(node: Node) -> None:
    launcher = node.start()
    os.kill(told(launcher)["pid"], signal.SIGKILL)
    assert launcher.wait(timeout=30) == 128 + signal.SIGKILL


def test_no_worker_outlives_the_server_and_the_next_starts_another(node: Node) -> None:
    launcher = node.start()
    said = told(launcher)
    worker = psutil.Process(said["pid"])
    os.kill(said["parent"], signal.SIGKILL)
    psutil.wait_procs([worker], timeout=30)
    assert not worker.is_running()
    launcher.communicate(timeout=30)
    assert launcher.returncode == 1

    again = node.start()
    said_again = told(again)
    assert said_again["parent"] != said["parent"]
    assert "torch" in said_again["loaded"]
    assert finish(again)[0] == 0


def test_where_there_can_be_no_server_a_worker_starts_the_ordinary_way(node: Node) -> None:
    launcher = node.start("a", raylet="raylet" + "x" * 100)
    said = told(launcher)
    assert said["pid"] == launcher.pid
    assert said["arguments"][1:] == ["a"]
    assert "torch" not in said["loaded"]
    code, errors = finish(launcher)
    assert code == 0
    assert "without the fork server" in errors
    assert "too long" in errors


def test_a_server_that_nobody_needs_ends() -> None:
    with tempfile.TemporaryDirectory(prefix="rb-") as folder, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{folder}/socket")
        listener.listen()
        assert Server(listener, idle_s=0.01).serve() is None
