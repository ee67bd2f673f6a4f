"""Keeps pages of other sites from commanding the control plane through the browser of somebody who may."""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit

from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from service import problems
from service.settings import Settings

_READS = frozenset({"GET", "HEAD", "OPTIONS"})
_PORTS = {"http": 80, "https": 443}


class GuardOrigins:
    """Refuses hosts that are not ours and, where something is to change, origins that are not ours.

    A name under somebody else's control can be made to mean this address after its page was loaded (DNS rebinding),
    so only known names are answered to. A host that is an address was given by nobody's name service.
    """

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self._app = app
        self._names = settings.host_names
        self._trusted = settings.extra_hosts
        own = urlsplit(settings.control_url)
        self._own = _place(own.netloc, own.scheme)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes the request on, or refuses it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        host = headers.get(b"host", b"").decode("latin-1")
        origin = headers.get(b"origin", b"").decode("latin-1")
        if not self._known(host):
            await _wrong_host(host)(scope, receive, send)
        elif origin and scope["method"] not in _READS and not self._ours(origin, host):
            await _wrong_origin(origin)(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _known(self, host: str) -> bool:
        name, _ = _place(host, "http")
        return "*" in self._names or name in self._names or _is_address(name)

    def _ours(self, origin: str, host: str) -> bool:
        try:
            parts = urlsplit(origin)
        except ValueError:
            return False
        if parts.scheme not in _PORTS:
            return False
        # Behind a proxy that ends TLS the page has another scheme than the request, so only the default port differs.
        place = _place(parts.netloc, parts.scheme)
        return place in (_place(host, parts.scheme), self._own) or place[0] in self._trusted


def _place(netloc: str, scheme: str) -> tuple[str, int | None]:
    """Host name and port; a name that cannot be one is empty."""
    try:
        parts = urlsplit(f"//{netloc}")
        return parts.hostname or "", parts.port or _PORTS.get(scheme)
    except ValueError:
        return "", None


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _wrong_host(host: str) -> JSONResponse:
    fix = "call it by an address or a name it knows, or add the name to RUBATO_ALLOWED_HOSTS and restart it"
    return problems.response(421, "host_refused", f"'{host}' is no name of this control plane", fix)


def _wrong_origin(origin: str) -> JSONResponse:
    fix = "send it from a page of the control plane, or add the name of the site to RUBATO_ALLOWED_HOSTS"
    return problems.response(403, "origin_refused", f"a page of '{origin}' may not change anything here", fix)
