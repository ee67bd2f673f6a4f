"""What both clients share beside the calls: address, time-outs, and when to try again."""

from __future__ import annotations

import time
from collections.abc import Callable

import httpx

from rubato import __version__
from rubato.client.calls import unreachable
from rubato.home import default_url
from rubato.problems import RubatoError

TIMEOUT = httpx.Timeout(10.0, read=60.0)
# Longer than the service's pauses between keep-alive comments: a stream that is silent for longer is dead.
STREAM_TIMEOUT = httpx.Timeout(10.0, read=45.0)
HEADERS = {"User-Agent": f"rubato/{__version__}"}

_LOOPBACK = {"127.0.0.1", "localhost", "::1"}

Notice = Callable[[RubatoError], None]


def base_url(url: str | None) -> httpx.URL:
    """The address of the control plane. Raises RubatoError when ``url`` is none."""
    text = url or default_url()
    try:
        parsed = httpx.URL(text)
    except httpx.InvalidURL as error:
        raise _bad_url(text, str(error)) from error
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise _bad_url(text, "it needs http:// or https:// and a host")
    return parsed


def _bad_url(text: str, cause: str) -> RubatoError:
    return RubatoError(
        f"'{text}' is not the address of a control plane: {cause}",
        fix="write it like http://127.0.0.1:8700 in --url or RUBATO_URL",
        code="bad_url",
    )


def through_proxies(url: httpx.URL) -> bool:
    """Whether proxies named in the environment apply: never to this machine."""
    return url.host not in _LOOPBACK


def stream_cut() -> httpx.TransportError:
    """What it is when a stream ends in good order and its job goes on: the control plane is going down."""
    return httpx.RemoteProtocolError("the stream ended before the job did")


class Persistence:
    """When a call whose connection broke is sent again: only when that is safe, and only a few times.

    A refused connection at the first try is final, nobody is there. After a connection that broke the control plane
    may be about to come back, so from then on a refused one is tried again too.
    """

    PAUSES_S = (0.2, 0.5, 1.0, 2.0)

    def __init__(self, repeatable: bool, url: httpx.URL) -> None:
        self._url = url
        self._pauses = list(self.PAUSES_S) if repeatable else []
        self._broke = False

    def pause_after(self, error: httpx.TransportError) -> float:
        """Seconds to wait before sending again. Raises RubatoError ``unreachable`` when it should not be."""
        self._broke = self._broke or not isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)
        if not (self._broke and self._pauses):
            raise unreachable(str(self._url), error) from error
        return self._pauses.pop(0)


class Gap:
    """How long a follower goes on trying when its stream ends before the job does."""

    LONGEST_PAUSE_S = 2.0

    def __init__(self, url: httpx.URL, patience_s: float, notice: Notice | None) -> None:
        self._url = url
        self._patience_s = patience_s
        self._notice = notice
        self._since: float | None = None
        self._pause_s = 0.0

    def over(self) -> None:
        """The stream delivers again, if only signs of life."""
        self._since, self._pause_s = None, 0.0

    def pause_after(self, error: httpx.TransportError) -> float:
        """Seconds to wait before the next try. Raises RubatoError ``unreachable`` when patience is at its end."""
        now = time.monotonic()
        if self._since is None:
            self._since = now
            if self._notice:
                self._notice(unreachable(str(self._url), error))
        if now - self._since > self._patience_s:
            raise unreachable(str(self._url), error) from error
        self._pause_s = min(self.LONGEST_PAUSE_S, self._pause_s * 2 or 0.1)
        return self._pause_s
