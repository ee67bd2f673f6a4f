"""Brings a database to the newest schema; several control planes may do so at once."""

from __future__ import annotations

from pathlib import Path

from alembic import command
from alembic.config import Config
from sqlalchemy import text
from sqlalchemy.engine import Connection
from sqlalchemy.exc import SQLAlchemyError

from service.database.engine import Database

_MIGRATIONS = Path(__file__).parent / "migrations"
_LOCK = 7262_1700  # any number that nobody else takes a PostgreSQL advisory lock on


async def migrate(database: Database) -> None:
    """Applies all migrations that the database lacks. Raises RubatoError when it cannot be opened."""
    try:
        if database.is_sqlite and database.url.database:
            Path(database.url.database).parent.mkdir(parents=True, exist_ok=True)
        async with database.writing() as session:
            connection = await session.connection()
            if not database.is_sqlite:
                await connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _LOCK})
            await connection.run_sync(_upgrade)
    except (SQLAlchemyError, OSError) as error:
        raise database.cannot_open(error) from error


def _upgrade(connection: Connection) -> None:
    config = configuration()
    config.attributes["connection"] = connection
    command.upgrade(config, "head")


def configuration() -> Config:
    """Alembic's configuration, without a file of its own."""
    config = Config()
    config.set_main_option("script_location", str(_MIGRATIONS))
    return config
