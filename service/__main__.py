"""``python -m service``: brings the schema up to date, then serves until it is told to stop."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import tempfile
from types import FrameType

import uvicorn
from pydantic import ValidationError

from rubato.problems import FieldProblem, RubatoError
from rubato.spec.load import explain
from service import logs
from service.app import create_app
from service.plane import open_control_plane
from service.settings import Settings
from service.wakeups import Wakeups


class Server(uvicorn.Server):
    """Ends held calls and streams as soon as it is told to stop; otherwise it would wait for them to end."""

    def __init__(self, config: uvicorn.Config, wakeups: Wakeups) -> None:
        super().__init__(config)
        self._wakeups = wakeups
        self._loop = asyncio.get_running_loop()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal asks for the end; a second SIGINT does not wait for it.

        The signal is not raised again afterwards, as uvicorn would do: an end that was asked for is no failure.
        """
        self._loop.call_soon_threadsafe(self._wakeups.close)
        self.force_exit = self.should_exit and sig == signal.SIGINT
        self.should_exit = True


async def serve(settings: Settings) -> None:
    """Serves until SIGTERM or SIGINT. Raises RubatoError when it cannot start."""
    _check_runs(settings)
    with _listen(settings) as listener:
        async with open_control_plane(settings) as plane:
            config = uvicorn.Config(
                create_app(plane), log_config=None, lifespan="off", timeout_graceful_shutdown=2, access_log=False
            )
            async with plane.supervising():
                await Server(config, plane.wakeups).serve(sockets=[listener])


def _listen(settings: Settings) -> socket.socket:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((settings.host, settings.port))
        listener.listen(1024)
    except OSError as error:
        listener.close()
        where = f"{settings.host}:{settings.port}"
        fix = "set RUBATO_PORT to a free port, or end the process that has this one"
        problem = FieldProblem("RUBATO_PORT", f"{where} cannot be listened on: {error.strerror}", fix)
        raise RubatoError(str(problem), fix=fix, code="port_in_use", status=503, problems=[problem]) from error
    listener.set_inheritable(False)
    return listener


def _check_runs(settings: Settings) -> None:
    try:
        settings.runs.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=settings.runs):
            pass
    except OSError as error:
        fix = "make it writable, or set RUBATO_RUNS to another folder"
        problem = FieldProblem("RUBATO_RUNS", f"{settings.runs} cannot be written: {error.strerror}", fix)
        raise RubatoError(
            str(problem), fix=fix, code="run_directory_not_writable", status=503, problems=[problem]
        ) from error


def main() -> int:
    """The exit code: 0 after a stop that was asked for, 1 when it could not start."""
    try:
        settings = Settings()
    except ValidationError as error:
        # Defaults that are made out of a value that was refused are refused as well, and say nothing new.
        faults = [fault for fault in error.errors() if not fault["type"].startswith("default_factory")]
        for problem in explain(faults, Settings):
            _say(f"RUBATO_{problem.field.upper()}: {problem.cause}; {problem.fix}")
        return 1
    logs.configure(settings.log_json)
    try:
        asyncio.run(serve(settings))
    except RubatoError as error:
        _say(error.detail)
        return 1
    return 0


def _say(line: str) -> None:
    sys.stderr.write(f"rubato: {line}{os.linesep}")


if __name__ == "__main__":
    sys.exit(main())
