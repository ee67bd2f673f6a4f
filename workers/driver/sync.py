"""The line to the control plane: what happened goes up, what is wanted comes down, and neither waits for the other."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from typing import Protocol

import httpx
from pydantic import ValidationError

from rubato.resources import SyncReply, SyncRequest
from workers.driver.journal import Journal

log = logging.getLogger(__name__)

HOLD_S = 20.0
APART_S = 0.5
LONGEST_PAUSE_S = 5.0

STUMBLED = "an error on the line to the control plane; it goes on"


class FencedError(Exception):
    """A newer attempt runs the job: this one must stop and write nothing more."""


class Listener(Protocol):
    """Who acts on what the control plane says."""

    def wanted(self, reply: SyncReply) -> None: ...
    def fenced(self, detail: str) -> None: ...
    def control_unreachable(self, cause: str) -> None: ...
    def control_reachable(self) -> None: ...


class ControlPlane:
    """Keeps the control plane informed, for as long as it takes.

    Args:
        url: of the control plane.
        attempt, token: who reports.
        journal: what is to be told.
        describe: the request as things stand, without events, metrics and waiting.
        transport: replaces the network in tests.
    """

    def __init__(
        self,
        url: str,
        attempt: str,
        token: str,
        journal: Journal,
        describe: Callable[[], SyncRequest],
        listener: Listener,
        *,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._path = f"/v1/attempts/{attempt}/sync"
        self._client = httpx.AsyncClient(
            base_url=url,
            headers={"Authorization": f"Bearer {token}"},
            timeout=httpx.Timeout(10, read=HOLD_S + 10),
            transport=transport,
            trust_env=False,
        )
        self._journal = journal
        self._describe = describe
        self._listener = listener
        self._news = asyncio.Event()
        self._seen = 0
        self._reachable = True
        self._pause = 0.0

    def tell(self) -> None:
        """There is something new to say."""
        self._news.set()

    async def run(self) -> None:
        """Talks until cancelled, or until another attempt has taken over."""
        while True:
            try:
                await self._talk()
            except FencedError as error:
                self._listener.fenced(str(error))
                return
            except Exception:  # whatever it is: without this line nobody could scale or cancel the job any more
                log.exception(STUMBLED)
                self._pause = _longer(self._pause)
                await asyncio.sleep(self._pause)

    async def tell_end(self, patience_s: float) -> bool:
        """Tells the last of it; whether the control plane has it all.

        The run directory holds the same, so after ``patience_s`` seconds without an answer it is left at that.
        """
        try:
            async with asyncio.timeout(patience_s):
                while True:
                    try:
                        told = await self._post(self._request(wait_s=0))
                    except FencedError:
                        raise
                    except Exception:  # as in `run`
                        log.exception(STUMBLED)
                        self._pause = _longer(self._pause)
                    else:
                        if told and self._journal.all_told:
                            return True
                    await asyncio.sleep(max(self._pause, 0.05))
        except TimeoutError:
            log.warning("the control plane did not take the end of the attempt within %g s", patience_s)
            return False
        except FencedError as error:
            self._listener.fenced(str(error))
            return True

    async def close(self) -> None:
        """Ends all connections."""
        await self._client.aclose()

    async def _talk(self) -> None:
        """One call. It hangs up early when there is more to say, but not sooner than half a second after it began."""
        self._news.clear()
        began = asyncio.get_running_loop().time()
        request = self._request(wait_s=0 if any(self._journal.pending()) else HOLD_S)
        call = asyncio.create_task(self._post(request))
        news = asyncio.create_task(self._news.wait())
        try:
            await asyncio.wait({call, news}, return_when=asyncio.FIRST_COMPLETED)
            if not call.done():
                await asyncio.wait({call}, timeout=self._left_apart(began))
            if call.done():
                call.result()
        finally:
            call.cancel()
            news.cancel()
            await asyncio.gather(call, news, return_exceptions=True)
        if self._pause:
            await asyncio.sleep(self._pause)
        elif request.wait_s == 0 and self._news.is_set():
            await asyncio.sleep(self._left_apart(began))

    @staticmethod
    def _left_apart(began: float) -> float:
        return max(0.0, began + APART_S - asyncio.get_running_loop().time())

    def _request(self, wait_s: float) -> SyncRequest:
        events, metrics = self._journal.pending()
        told = {"events": events, "metrics": metrics, "seen_version": self._seen, "wait_s": wait_s}
        return self._describe().model_copy(update=told)

    async def _post(self, request: SyncRequest) -> bool:
        """Whether it was taken. Raises FencedError."""
        try:
            # Not httpx's json=, which refuses a loss that is not a number: of all steps the one to be told of.
            body = json.dumps(request.model_dump(mode="json"))
            response = await self._client.post(self._path, content=body, headers={"Content-Type": "application/json"})
            if response.status_code == 409 and _code(response) == "fenced":
                raise FencedError(response.text)
            response.raise_for_status()
            reply = SyncReply.model_validate_json(response.content)
        except (httpx.HTTPError, ValidationError) as error:
            self._failed(error)
            return False
        self._journal.acknowledged(reply.events_acknowledged, reply.metrics_acknowledged)
        if not self._reachable:
            self._reachable = True
            self._listener.control_reachable()
        if reply.version > self._seen:
            self._listener.wanted(reply)
            self._seen = reply.version  # not before: what could not be acted on comes again
        self._pause = 0.0
        return True

    def _failed(self, error: httpx.HTTPError | ValidationError) -> None:
        """Nobody is to blame for a control plane that is away: try again, ever more seldom."""
        self._pause = _longer(self._pause)
        cause = str(error) or type(error).__name__
        if isinstance(error, httpx.HTTPStatusError):
            cause = f"{error.response.status_code} {error.response.text[:500]}"
        if self._reachable:
            self._reachable = False
            log.warning("the control plane cannot be reached: %s", cause)
            self._listener.control_unreachable(cause)


def _longer(pause: float) -> float:
    return min(LONGEST_PAUSE_S, max(0.25, 2 * pause))


def _code(response: httpx.Response) -> str | None:
    try:
        content = response.json()
    except ValueError:
        return None
    return content.get("code") if isinstance(content, dict) else None
