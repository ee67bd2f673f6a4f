"""The schema that migrations make is the one the code expects."""

from __future__ import annotations

import asyncio

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import inspect, text
from sqlalchemy.engine import Connection

from rubato.problems import RubatoError
from service.database.engine import Database
from service.database.migrate import configuration, migrate
from service.database.tables import Table
from service.settings import Settings
from tests.service.world import Host


@pytest.fixture
async def database(host: Host):
    found = Database(Settings(home=host.home, database_url=host.database_url).database_url)
    yield found
    await found.close()


async def test_migrations_make_what_the_code_expects(database: Database) -> None:
    await migrate(database)
    await migrate(database)

    def differences(connection: Connection) -> list[object]:
        return compare_metadata(MigrationContext.configure(connection), Table.metadata)

    async with database.reading() as session:
        assert await (await session.connection()).run_sync(differences) == []


async def test_several_control_planes_may_migrate_at_once(database: Database) -> None:
    await asyncio.gather(*(migrate(database) for _ in range(4)))
    async with database.reading() as session:
        assert (await session.execute(text("SELECT name FROM locks"))).scalars().all() == ["queue"]


async def test_migrations_can_be_taken_back(database: Database) -> None:
    await migrate(database)

    def back(connection: Connection) -> list[str]:
        config = configuration()
        config.attributes["connection"] = connection
        command.downgrade(config, "base")
        return inspect(connection).get_table_names()

    async with database.writing() as session:
        assert await (await session.connection()).run_sync(back) == ["alembic_version"]


@pytest.mark.parametrize("url", ["sqlite:////proc/none/x.db", "postgresql://nobody:secret@127.0.0.1:1/x"])
async def test_a_database_that_cannot_be_opened_is_named(url: str) -> None:
    database = Database(Settings(database_url=url).database_url)
    with pytest.raises(RubatoError) as refused:
        await migrate(database)
    await database.close()
    assert refused.value.problems[0].field == "RUBATO_DATABASE_URL"
    assert "secret" not in str(refused.value)


async def test_a_write_that_fails_leaves_nothing(host: Host) -> None:
    async with host.world() as world:

        async def breaks_off() -> None:
            async with world.plane.database.writing() as session:
                await session.execute(text("INSERT INTO locks (name) VALUES ('other')"))
                raise RuntimeError("half way")

        with pytest.raises(RuntimeError, match="half way"):
            await breaks_off()
        async with world.plane.database.reading() as session:
            assert (await session.execute(text("SELECT count(*) FROM locks"))).scalar() == 1
