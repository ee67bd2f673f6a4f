"""``python -m service`` as a process: it starts, refuses to start, is killed, and ends when it is told to."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.service.world import SPEC


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


class Process:
    """A control plane with a Ray dashboard that nobody answers at."""

    def __init__(self, home: Path, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("RUBATO_")},
            "RUBATO_HOME": str(home),
            "RUBATO_PORT": str(port),
            "RUBATO_RAY_DASHBOARD": f"http://127.0.0.1:{free_port()}",
        }
        self.process: subprocess.Popen[str] | None = None

    def popen(self, **environment: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "service"],
            env={**self.environment, **environment},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )

    def start(self) -> None:
        self.process = self.popen()
        while True:
            try:
                if httpx.get(f"{self.url}/healthz", trust_env=False).is_success:
                    return
            except httpx.TransportError:
                assert self.process.poll() is None, self.process.stderr.read()
                time.sleep(0.05)

    def end(self, sign: signal.Signals) -> tuple[int, str]:
        self.process.send_signal(sign)
        _, told = self.process.communicate(timeout=60)
        return self.process.returncode, told

    def refusal(self, **environment: str) -> str:
        process = self.popen(**environment)
        _, told = process.communicate(timeout=60)
        assert process.returncode == 1
        return told


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Process]:
    found = Process(tmp_path, free_port())
    yield found
    if found.process is not None and found.process.poll() is None:
        found.process.kill()
        found.process.communicate()


def test_killed_and_ended(service: Process, tmp_path: Path) -> None:
    service.start()
    with httpx.Client(base_url=service.url, trust_env=False, timeout=60) as http:
        job = http.post("/v1/jobs", json=SPEC, headers={"Idempotency-Key": "k"}).json()
        assert http.get("/readyz").status_code == 503
        told = service.refusal()
        assert "RUBATO_PORT" in told
        assert "in use" in told
        assert told.count("\n") == 1
        service.end(signal.SIGKILL)
    service.start()
    with httpx.Client(base_url=service.url, trust_env=False, timeout=60) as http:
        again = http.post("/v1/jobs", json=SPEC, headers={"Idempotency-Key": "k"}).json()
        assert (again["id"], again["created_at"]) == (job["id"], job["created_at"])
        with http.stream("GET", f"/v1/jobs/{job['id']}/events", headers={"Accept": "text/event-stream"}) as stream:
            lines = stream.iter_lines()
            assert next(lines) == "retry: 1000"
            code, told = service.end(signal.SIGTERM)  # does not wait for the stream to be left
            assert not any(line == "event: end" for line in lines)
    assert code == 0, told
    assert "Traceback" not in told


def test_what_cannot_start_says_why_in_a_line(service: Process, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    told = service.refusal(RUBATO_RUNS=str(tmp_path / "file" / "runs"))
    assert told.startswith("rubato: RUBATO_RUNS: ")
    told += service.refusal(RUBATO_DATABASE_URL="sqlite:////proc/none/x.db")
    assert "rubato: RUBATO_DATABASE_URL: " in told
    told += service.refusal(RUBATO_PORT="many")
    assert "rubato: RUBATO_PORT: 'many'" in told
    told += service.refusal(RUBATO_HOST="0.0.0.0")
    assert "rubato: RUBATO_CONTROL_URL: is not set" in told
    told += service.refusal(RUBATO_CONTROL_URL="10.0.0.1:8700")
    assert "rubato: RUBATO_CONTROL_URL: '10.0.0.1:8700' will not do; give a URL with http://" in told
    assert "Traceback" not in told
    assert told.count("\n") == 5
    assert not (tmp_path / "rubato.db").exists()
