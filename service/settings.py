"""What the control plane is told by its environment: the only place that reads it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, PositiveFloat, PositiveInt, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

_DRIVERS = {"sqlite": "sqlite+aiosqlite", "postgresql": "postgresql+asyncpg", "postgres": "postgresql+asyncpg"}


def _own_url(given: dict[str, Any]) -> str:
    host = "127.0.0.1" if given.get("host") in ("0.0.0.0", "::", "") else given.get("host")
    return f"http://{host}:{given.get('port')}"


class Settings(BaseSettings):
    """Each field is read from ``RUBATO_<NAME>``. Times are in seconds."""

    model_config = SettingsConfigDict(env_prefix="RUBATO_", frozen=True, extra="ignore", validate_default=True)

    home: Path = Field(Path("~/.rubato"), description="where state is kept that has no other place")
    database_url: str = Field(
        default_factory=lambda given: f"sqlite:///{given.get('home', '')}/rubato.db",
        description="SQLite or PostgreSQL, as SQLAlchemy writes it",
    )
    runs: Path = Field(
        default_factory=lambda given: Path(given.get("home", "")) / "runs",
        description="run directories; on a cluster of several machines a folder that all of them mount",
    )
    ray_dashboard: str = Field("http://127.0.0.1:8265", description="where Ray's dashboard and Jobs API listen")
    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8700
    control_url: str = Field(default_factory=_own_url, description="how drivers on the cluster reach the control plane")
    driver_python: str = Field("python", description="the interpreter that starts a driver on the cluster")

    heartbeat_timeout: PositiveFloat = Field(30.0, description="silence of a driver that is the first sign of its loss")
    drain_timeout: PositiveFloat = Field(120.0, description="time a cancelled job has to save and to stop by itself")
    force_timeout: PositiveFloat = Field(5.0, description="the same when it was cancelled by force")
    reconcile_every: PositiveFloat = Field(1.0, description="pause between two looks at what is wanted and what is")
    ray_timeout: PositiveFloat = Field(5.0, description="time Ray has to answer a request")
    lease_seconds: PositiveFloat = Field(15.0, description="how long a control plane may hold an attempt it acts on")
    max_idle_attempts: PositiveInt = Field(5, description="attempts in a row that may end without a new step")
    database_poll: PositiveFloat = Field(0.5, description="how often changes by another control plane are looked for")
    log_json: bool = Field(False, description="write logs as JSON lines")

    @field_validator("home", "runs")
    @classmethod
    def _absolute(cls, value: Path) -> Path:
        return value.expanduser().absolute()

    @field_validator("database_url")
    @classmethod
    def _with_async_driver(cls, value: str) -> str:
        scheme, separator, rest = value.partition("://")
        return f"{_DRIVERS.get(scheme, scheme)}{separator}{rest}"

    @field_validator("ray_dashboard", "control_url")
    @classmethod
    def _without_slash(cls, value: str) -> str:
        return value.rstrip("/")
