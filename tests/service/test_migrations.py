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


async def test_jobs_from_before_sharing_keep_their_sizes_and_survive_both_ways(database: Database) -> None:
    def to(connection: Connection, revision: str, direction: str) -> None:
        config = configuration()
        config.attributes["connection"] = connection
        getattr(command, direction)(config, revision)

    async with database.writing() as session:
        await (await session.connection()).run_sync(to, "0001", "upgrade")
        numbers = ("number", "priority", "epoch", "generation", "step", "tokens", "events_acknowledged")
        numbers += ("metrics_acknowledged", "idle_attempts", "revision", "wanted_version", "wanted_workers")
        texts = ("name", "project", "run_dir", "request_hash", "reason_code", "reason_message", "reason_actor")
        columns = {
            **dict.fromkeys(numbers, "8"),
            **dict.fromkeys(texts, "'x'"),
            **dict.fromkeys(("spec", "members", "restarts", "restarts_before"), "'{}'"),
            **dict.fromkeys(("reason_at", "created_at"), "'2026-01-01 00:00:00'"),
            "id": "'job-1'",
            "state": "'RUNNING'",
            "wanted_cancel": "'no'",
        }
        names, values = ", ".join(columns), ", ".join(columns.values())
        await session.execute(text(f"INSERT INTO jobs ({names}) VALUES ({values})"))
        await session.execute(  # a row that refers to the job: its table must not have to be made anew
            text(
                "INSERT INTO operations (id, job_id, kind, request, state, phases, created_at) "
                "VALUES ('op-1', 'job-1', 'scale', '{}', 'DONE', '[]', '2026-01-01 00:00:00')"
            )
        )
    await migrate(database)
    async with database.reading() as session:
        row = (await session.execute(text("SELECT size_min, size_max, sized_at, wanted_workers FROM jobs"))).one()
        assert tuple(row) == (8, 8, None, 8), "nobody said that the queue may change it"
    async with database.writing() as session:
        await (await session.connection()).run_sync(to, "0001", "downgrade")
    async with database.reading() as session:
        assert tuple((await session.execute(text("SELECT id, wanted_workers FROM jobs"))).one()) == ("job-1", 8)
        assert (await session.execute(text("SELECT job_id FROM operations"))).scalar() == "job-1"


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
