"""What the control plane is told by its environment: the only place that reads it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Self
from urllib.parse import urlsplit

from pydantic import Field, PositiveFloat, PositiveInt, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from rubato.problems import FieldProblem
from rubato.spec.section import refuse

_DRIVERS = {"sqlite": "sqlite+aiosqlite", "postgresql": "postgresql+asyncpg", "postgres": "postgresql+asyncpg"}


_WILDCARDS = frozenset({"0.0.0.0", "::", ""})


def _own_url(given: dict[str, Any]) -> str:
    host = str(given.get("host"))
    return f"http://{f'[{host}]' if ':' in host else host}:{given.get('port')}"


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
    allowed_hosts: str = Field(
        "", description="more names that users reach the control plane by, with commas between; * for any name"
    )
    driver_python: str = Field("python", description="the interpreter that starts a driver on the cluster")

    elastic: bool = Field(
        True, description="give free room to running jobs between workers.min and max, and shrink them to let others in"
    )
    share_half_life: PositiveFloat = Field(
        3 * 86_400.0, description="after this time what a project held counts for half when its next turn is decided"
    )

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
    def _url(cls, value: str) -> str:
        parts = urlsplit(value)  # raises ValueError itself for brackets that do not match
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("a URL with http:// or https:// and a host, such as http://10.0.0.1:8700")
        return value.rstrip("/")

    @model_validator(mode="after")
    def _drivers_reach_it(self) -> Self:
        if self.host in _WILDCARDS and "control_url" not in self.model_fields_set:
            cause = f"is not set, and drivers cannot report to '{self.host}' (RUBATO_HOST), which is no address"
            fix = "set it to how the cluster reaches this machine, such as http://10.0.0.1:8700"
            raise refuse([FieldProblem("control_url", cause, fix)])
        return self

    @property
    def host_names(self) -> frozenset[str]:
        """The names by which users may call: its own, and those that were allowed beside them."""
        known = {"localhost", self.host.lower(), urlsplit(self.control_url).hostname or ""}
        return frozenset({*known, *self.extra_hosts} - _WILDCARDS)

    @property
    def extra_hosts(self) -> frozenset[str]:
        """``allowed_hosts``, one by one."""
        return frozenset(name.strip().lower() for name in self.allowed_hosts.split(",") if name.strip())
