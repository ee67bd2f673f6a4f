"""The two halves of a stack as commands: a Ray head that listens on this machine only, and the control plane."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rubato.home import HOME_VARIABLE
from rubato.problems import RubatoError
from rubato.stack.ports import HOST, free_ports
from rubato.stack.processes import MARK_VARIABLE, identify
from rubato.stack.record import ProcessIdentity, StackRecord

RAY_PORTS = (
    "gcs",
    "dashboard",
    "node_manager",
    "object_manager",
    "client_server",
    "agent_http",
    "agent_grpc",
    "runtime_env_agent",
    "metrics",
)

# What travels through Ray's object store here is small: training state goes over sockets and files.
_OBJECT_STORE_BYTES = 200_000_000

# A unix socket's path holds 107 bytes on Linux and 103 on macOS; Ray appends up to 61 to its temporary folder.
LONGEST_TEMP_DIR = 42


@dataclass(frozen=True)
class Child:
    """A part that was just started, while its starter is still its parent."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path
    log_start: int

    @property
    def identity(self) -> ProcessIdentity:
        return identify(self.process.pid)

    def last_words(self) -> str:
        """The last line it wrote since it was started: what ends a program comes last."""
        with self.log.open("rb") as log:
            log.seek(self.log_start)
            lines = log.read().decode(errors="replace").strip().splitlines()
        return lines[-1].strip() if lines else "not a word"

    def require_alive(self) -> None:
        """Raises RubatoError when it has ended already."""
        code = self.process.poll()
        if code is not None:
            raise RubatoError(
                f"{self.name} did not start, it ended with code {code}: {self.last_words()}",
                fix=f"put that right, or read the end of {self.log} for more, and start again",
                code="ray_did_not_start" if self.name == "Ray" else "control_plane_did_not_start",
                status=503,
            )


def ray_log(home: Path) -> Path:
    return home / "logs" / "ray.log"


def control_plane_log(home: Path) -> Path:
    return home / "logs" / "control-plane.log"


def choose_ray_ports() -> dict[str, int]:
    return dict(zip(RAY_PORTS, free_ports(len(RAY_PORTS)), strict=True))


def start_ray(home: Path, record: StackRecord) -> Child:
    ports = record.ports
    command = [
        *(sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--disable-usage-stats"),
        *("--node-ip-address", HOST, "--dashboard-host", HOST, "--include-dashboard", "true"),
        *("--temp-dir", str(record.temp_dir), "--object-store-memory", str(_OBJECT_STORE_BYTES)),
        *("--num-cpus", str(record.cpus), "--log-style", "record", "--log-color", "false"),
        *("--port", str(ports["gcs"]), "--dashboard-port", str(ports["dashboard"])),
        *("--node-manager-port", str(ports["node_manager"]), "--object-manager-port", str(ports["object_manager"])),
        *("--ray-client-server-port", str(ports["client_server"])),
        *("--dashboard-agent-listen-port", str(ports["agent_http"])),
        *("--dashboard-agent-grpc-port", str(ports["agent_grpc"])),
        *("--runtime-env-agent-port", str(ports["runtime_env_agent"])),
        *("--metrics-export-port", str(ports["metrics"])),
        *("--min-worker-port", "0", "--max-worker-port", "0"),  # any: other Rays may share this machine
    ]
    environment = {
        "RAY_worker_niceness": "0",
        # Ray's name for single-machine mode. Without it the loopback address is replaced with the machine's own,
        # and who can reach Ray can run code on it.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",  # the whole cluster ends, there is nowhere to drain to
        "SPT_NOENV": "1",  # workers rename themselves; this keeps them from overwriting the mark in their environment
    }
    return _start("Ray", command, environment, ray_log(home), record)


def start_control_plane(home: Path, record: StackRecord) -> Child:
    environment = {
        HOME_VARIABLE: str(home),
        "RUBATO_HOST": HOST,
        "RUBATO_PORT": str(record.ports["api"]),
        "RUBATO_CONTROL_URL": record.urls["api"],
        "RUBATO_RAY_DASHBOARD": record.urls["dashboard"],
        "RUBATO_DRIVER_PYTHON": sys.executable,
    }
    return _start("the control plane", [sys.executable, "-m", "service"], environment, control_plane_log(home), record)


def _start(name: str, command: Sequence[str], environment: Mapping[str, str], log: Path, record: StackRecord) -> Child:
    # A stack is a world of its own: what points at another Ray or another control plane stays outside.
    inherited = {key: value for key, value in os.environ.items() if key not in ("RAY_ADDRESS", "RUBATO_URL")}
    inherited |= {name: _beside(os.environ.get(name), f"{HOST},localhost") for name in ("NO_PROXY", "no_proxy")}
    inherited |= {MARK_VARIABLE: str(record.temp_dir), "PYTHONUNBUFFERED": "1", **environment}
    with log.open("ab") as output:
        start = output.tell()
        process = subprocess.Popen(
            command,
            env=inherited,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,  # Ctrl+C in the terminal is for the command, not for the stack
            cwd=record.temp_dir,
        )
    return Child(name, process, log, start)


def _beside(given: str | None, more: str) -> str:
    return f"{given},{more}" if given else more
