"""A control plane of a few lines: keeps what a driver reports, says what it is told to, and can be away."""

from __future__ import annotations

import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal

from rubato.resources import DriverEvent, DriverState, Metric, SyncReply, SyncRequest

TOKEN = "the-token"
ENDS = (DriverState.SUCCEEDED, DriverState.FAILED, DriverState.CANCELLED)


class ControlPlane:
    """Serves one attempt on a port of its own, from threads of this process."""

    def __init__(self, workers: int) -> None:
        self.changed = threading.Condition()
        self.events: list[DriverEvent] = []
        self.metrics: list[Metric] = []
        self.request: SyncRequest | None = None
        self.states: list[str] = []
        self._version = 1
        self._wanted: dict[str, Any] = {"workers": workers, "operation": None, "cancel": "no"}
        self._port = 0
        self.come_back()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    # What a user and the world do.

    def scale(self, workers: int, operation: str) -> None:
        self._want(workers=workers, operation=operation)

    def cancel(self, how: Literal["drain", "force"], operation: str) -> None:
        self._want(cancel=how, operation=operation)

    def _want(self, **changes: Any) -> None:
        with self.changed:
            self._wanted |= changes
            self._version += 1
            self.changed.notify_all()

    def go_away(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def come_back(self) -> None:
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(handler) -> None:  # noqa: N805 (self is the control plane)
                self._answer(handler)

            def log_message(self, *_: object) -> None:
                pass

        self._server = _Server(("127.0.0.1", self._port), Handler)
        self._port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    def _answer(self, handler: BaseHTTPRequestHandler) -> None:
        length = int(handler.headers["Content-Length"])
        body = handler.rfile.read(length)
        if len(body) < length:  # the driver hung up because it has more to say
            handler.close_connection = True
            return
        assert handler.headers["Authorization"] == f"Bearer {TOKEN}"
        request = SyncRequest.model_validate_json(body)
        with self.changed:
            self._take(request)
            self.changed.notify_all()
            self.changed.wait_for(lambda: self._version > request.seen_version, timeout=min(request.wait_s, 2.0))
            reply = SyncReply(
                version=self._version,
                events_acknowledged=len(self.events),
                metrics_acknowledged=len(self.metrics),
                **self._wanted,
            )
        content = reply.model_dump_json().encode()
        try:
            handler.send_response(200)
            handler.send_header("Content-Type", "application/json")
            handler.send_header("Content-Length", str(len(content)))
            handler.end_headers()
            handler.wfile.write(content)
        except OSError:  # the driver hung up because it has more to say
            handler.close_connection = True

    def _take(self, request: SyncRequest) -> None:
        if self.request is None or self.request.state not in ENDS:  # a call that was hung up may come in late
            self.request = request
        if not self.states or self.states[-1] != self.request.state:
            self.states.append(self.request.state)
        self.events += [event for event in request.events if event.seq > len(self.events)]
        self.metrics += [item.metric for item in request.metrics if item.seq > len(self.metrics)]

    # What a test waits for.

    def wait(self, what: str, condition: Any, timeout: float = 300.0) -> None:
        """Until a condition holds of what was reported. Fails with what is known."""
        with self.changed:
            held = self.changed.wait_for(condition, timeout)
            if not held:
                lines = "\n".join(f"{event.at:%H:%M:%S} {event.kind}: {event.message}" for event in self.events)
                state = self.request and f"{self.request.state} {self.request.reason_message}"
                raise AssertionError(f"not within {timeout:g} s: {what}; state {state}, step {self.step}\n{lines}")

    @property
    def step(self) -> int:
        return self.metrics[-1].step if self.metrics else 0

    def of_kind(self, kind: str) -> list[DriverEvent]:
        return [event for event in self.events if event.kind == kind]


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A driver that hangs up is no error."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)
