"""Projects with quotas, and between which sizes the queue chooses for a job."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Applies the step. Jobs that run keep the size their users chose for them: nobody said that it may change."""
    op.add_column("jobs", sa.Column("size_min", sa.Integer(), nullable=True))
    op.add_column("jobs", sa.Column("size_max", sa.Integer(), nullable=True))
    op.add_column("jobs", sa.Column("sized_at", sa.DateTime(timezone=True), nullable=True))
    op.execute("UPDATE jobs SET size_min = wanted_workers, size_max = wanted_workers")
    op.create_table(
        "projects",
        sa.Column("name", sa.String(length=63), nullable=False),
        sa.Column("weight", sa.Double(), nullable=False),
        sa.Column("max_workers", sa.Integer(), nullable=True),
        sa.Column("max_gpus", sa.Integer(), nullable=True),
        sa.Column("max_running_jobs", sa.Integer(), nullable=True),
        sa.Column("usage", sa.Double(), nullable=False),
        sa.Column("usage_at", sa.DateTime(timezone=True), nullable=True),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_projects")),
    )


def downgrade() -> None:
    """Takes the step back."""
    op.drop_table("projects")
    for column in ("sized_at", "size_max", "size_min"):
        op.drop_column("jobs", column)
