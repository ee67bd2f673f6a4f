"""The REST API in Python, sync and async: ``Client`` and ``AsyncClient``."""

from rubato.client.asynchronous import AsyncClient
from rubato.client.calls import new_idempotency_key
from rubato.client.synchronous import Client

__all__ = ["AsyncClient", "Client", "new_idempotency_key"]
