"""Both databases the control plane runs on: a SQLite file, and a real PostgreSQL server of this machine."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import socket
import subprocess
import tempfile
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import asyncpg
import pytest

from tests.service.world import Host, World

_ACCOUNTS = ("postgres", "nobody")  # the server refuses to run as root


def _binaries() -> Path | None:
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: int(path.parts[-3]))
    on_path = shutil.which("initdb")
    if found:
        return found[-1].parent
    return Path(on_path).resolve().parent if on_path else None


def _account() -> int | None:
    if os.geteuid() != 0:
        return None
    for name in _ACCOUNTS:
        with contextlib.suppress(KeyError):
            return pwd.getpwnam(name).pw_uid
    return None


@pytest.fixture(scope="session")
def postgres() -> Iterator[str]:
    """The URL of a server's first database. Skips where there is no PostgreSQL."""
    binaries, account = _binaries(), _account()
    if binaries is None or (os.geteuid() == 0 and account is None):
        pytest.skip("no PostgreSQL server on this machine, or no account to run it as")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="rb-pg-", dir="/tmp") as folder:
        data = Path(folder, "data")
        if account is not None:
            os.chown(folder, account, -1)
        run = {"user": account, "check": True, "capture_output": True, "cwd": folder, "timeout": 120}
        subprocess.run(
            [binaries / "initdb", "-D", data, "-U", "rubato", "-A", "trust", "-E", "UTF8", "--no-sync"], **run
        )
        settings = f"-p {port} -k {folder} -c listen_addresses=127.0.0.1 -c fsync=off -c max_connections=100"
        control = [binaries / "pg_ctl", "-D", data, "-w", "-l", Path(folder, "log")]
        # Its output goes to the log alone: a pipe held by the server would never end.
        quiet = {**run, "capture_output": False, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        subprocess.run([*control, "-o", settings, "start"], **quiet)
        try:
            yield f"postgresql://rubato@127.0.0.1:{port}/postgres"
        finally:
            subprocess.run([*control, "-m", "immediate", "stop"], **quiet)


@pytest.fixture(params=["sqlite", "postgresql"])
async def host(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Host]:
    """A database of its own, empty."""
    if request.param == "sqlite":
        yield Host(f"sqlite:///{tmp_path}/rubato.db", tmp_path)
        return
    server = request.getfixturevalue("postgres")
    name = f"t{uuid.uuid4().hex[:12]}"
    connection = await asyncpg.connect(server)
    await connection.execute(f"CREATE DATABASE {name}")
    try:
        yield Host(server.rpartition("/")[0] + f"/{name}", tmp_path)
    finally:
        await connection.execute(f"DROP DATABASE {name} WITH (FORCE)")
        await connection.close()


@pytest.fixture
async def world(host: Host) -> AsyncIterator[World]:
    """A control plane whose supervisor does a round when told to."""
    async with host.world() as found:
        yield found
