"""What Alembic runs: migrations inside the transaction that ``service.database.migrate`` has begun."""

from __future__ import annotations

from alembic import context

from service.database.tables import Table

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=Table.metadata,
    render_as_batch=True,
)
with context.begin_transaction():
    context.run_migrations()
