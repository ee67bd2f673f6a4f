"""One Ray head for all cluster tests, started and ended the way the product does it."""

from __future__ import annotations

import shutil
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import psutil
import pytest

from rubato.stack import parts, ports, processes
from rubato.stack.record import StackRecord

CPUS = 8
RAYS_OWN = ("ray::IDLE", "ray::DashboardAgent", "ray::RuntimeEnvAgent", "ray::_AutoscalingCoordinatorActor")
READY_WITHIN_S = 120.0


@dataclass(frozen=True)
class RayHead:
    """A Ray cluster of one node, on the loopback address.

    Attributes:
        address: what RAY_ADDRESS is to be for a driver.
        dashboard: URL of the dashboard, which serves the Jobs API.
    """

    address: str
    dashboard: str
    cpus: int
    temp_dir: Path

    def actors(self) -> list[str]:
        """What runs on it: the titles that Ray gives to its processes at work."""
        titles = []
        for process in processes.family([], self.temp_dir):
            try:
                titles.append(" ".join(process.cmdline()))
            except psutil.NoSuchProcess:
                continue
        return [title.strip() for title in titles if title.startswith("ray::") and not title.startswith(RAYS_OWN)]

    def wait_until_idle(self, timeout: float = 120.0) -> None:
        """Returns once no worker, controller or helper of a job is left."""
        deadline = time.monotonic() + timeout
        while left := self.actors():
            assert time.monotonic() < deadline, f"still there after {timeout:g} s: {left}"
            time.sleep(0.2)


@pytest.fixture(scope="session")
def ray_head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayHead]:
    home = tmp_path_factory.mktemp("ray-home")
    (home / "logs").mkdir()
    chosen = parts.choose_ray_ports()
    record = StackRecord(
        state="starting",
        cpus=CPUS,
        started_at=datetime.now(UTC),
        temp_dir=Path(tempfile.mkdtemp(prefix="rb-", dir="/tmp")),
        ports={"api": 0, **chosen},
        urls={"api": "", "dashboard": f"http://{ports.HOST}:{chosen['dashboard']}"},
    )
    child = parts.start_ray(home, record)
    try:
        _wait_until_ready(f"{record.urls['dashboard']}/api/version", child)
        yield RayHead(f"{ports.HOST}:{chosen['gcs']}", record.urls["dashboard"], CPUS, record.temp_dir)
    finally:
        processes.end_family([child.identity] if child.process.poll() is None else [], record.temp_dir, 15.0)
        child.process.wait()
        shutil.rmtree(record.temp_dir, ignore_errors=True)


def _wait_until_ready(url: str, child: parts.Child) -> None:
    deadline = time.monotonic() + READY_WITHIN_S
    while time.monotonic() < deadline:
        child.require_alive()
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError:
            time.sleep(0.2)
    pytest.fail(f"Ray was not ready within {READY_WITHIN_S:g} s: {child.last_words()}")
