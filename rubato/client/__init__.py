"""The REST API in Python, sync and async: ``Client`` and ``AsyncClient``."""

from rubato.client.asynchronous import AsyncClient
from rubato.client.calls import LogQuery, new_idempotency_key
from rubato.client.synchronous import Client

__all__ = ["AsyncClient", "Client", "LogQuery", "new_idempotency_key"]
