"""One engine for SQLite and PostgreSQL: transactions that begin as what they are, readers or writers."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

from sqlalchemy import event
from sqlalchemy.engine import Connection, make_url
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, create_async_engine

from rubato.problems import FieldProblem, RubatoError

_WRITES = "rubato_writes"


class DatabaseUnreachableError(SQLAlchemyError):
    """No connection could be made; SQLAlchemy itself lets the network's own errors through."""


class Database:
    """Sessions that read and sessions that write. No network call belongs inside either.

    SQLite has one writer at a time. Writers of this process queue here, in order, instead of polling the file's lock;
    other processes are waited for by SQLite itself.
    """

    def __init__(self, url: str) -> None:
        self.url = make_url(url)
        self._sqlite = self.url.get_backend_name() == "sqlite"
        self._writer = asyncio.Lock() if self._sqlite else None
        options: dict[str, Any] = {} if self._sqlite else {"pool_pre_ping": True, "pool_size": 10, "max_overflow": 20}
        self.engine = create_async_engine(url, json_deserializer=_json, **options)
        if self._sqlite:
            event.listen(self.engine.sync_engine, "connect", _prepare_sqlite)
            event.listen(self.engine.sync_engine, "begin", _begin_sqlite)

    @property
    def is_sqlite(self) -> bool:
        """Whether it is a SQLite file."""
        return self._sqlite

    @contextlib.asynccontextmanager
    async def reading(self) -> AsyncIterator[AsyncSession]:
        """A session whose queries all see one state of the database."""
        async with self._connection() as connection:
            if not self._sqlite:
                connection = await connection.execution_options(
                    isolation_level="REPEATABLE READ", postgresql_readonly=True
                )
            async with connection.begin(), self._session(connection) as session:
                yield session

    @contextlib.asynccontextmanager
    async def writing(self) -> AsyncIterator[AsyncSession]:
        """A session whose changes are committed at the end of the block, or not at all when it raises."""
        async with self._writer or contextlib.nullcontext(), self._connection() as connection:
            connection = await connection.execution_options(**{_WRITES: True})
            async with connection.begin(), self._session(connection) as session:
                yield session
                await session.flush()

    @contextlib.asynccontextmanager
    async def _connection(self) -> AsyncIterator[AsyncConnection]:
        try:
            connection = await self.engine.connect()
        except OSError as error:
            raise DatabaseUnreachableError(str(error)) from error
        try:
            yield connection
        finally:
            await connection.close()

    @staticmethod
    def _session(connection: AsyncConnection) -> AsyncSession:
        return AsyncSession(connection, expire_on_commit=False, join_transaction_mode="rollback_only")

    async def close(self) -> None:
        """Closes all connections."""
        await self.engine.dispose()

    def cannot_open(self, error: Exception) -> RubatoError:
        """What to tell a user whose database cannot be opened."""
        cause = error.orig if isinstance(error, SQLAlchemyError) and hasattr(error, "orig") else error
        where = self.url.render_as_string(hide_password=True)
        fix = (
            "point it at a SQLite file in a folder that can be written"
            if self._sqlite
            else "check that the PostgreSQL server runs, and the name, user and password in it"
        )
        problem = FieldProblem("RUBATO_DATABASE_URL", f"the database {where} cannot be opened: {cause}", fix)
        return RubatoError(str(problem), fix=fix, code="database_unavailable", status=503, problems=[problem])


def _json(text: str) -> Any:
    """What a JSON column holds. None for what is no JSON, so that one such row does not fail the query over all."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _prepare_sqlite(connection: Any, _record: Any) -> None:
    # The driver would begin transactions by itself, and only before the first write: too late to take the write lock
    # without a deadlock between two that have already read.
    connection.isolation_level = None
    cursor = connection.cursor()
    cursor.execute("PRAGMA busy_timeout=15000")
    cursor.execute("PRAGMA journal_mode=WAL")
    cursor.execute("PRAGMA synchronous=FULL")  # what was answered with 201 survives a power cut
    cursor.execute("PRAGMA foreign_keys=ON")
    cursor.close()


def _begin_sqlite(connection: Connection) -> None:
    writes = connection.get_execution_options().get(_WRITES, False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")
