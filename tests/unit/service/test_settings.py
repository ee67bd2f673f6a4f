"""What the environment says, and what follows from it."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from service.settings import Settings


def test_defaults_follow_home_and_port(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RUBATO_HOME", str(tmp_path))
    monkeypatch.setenv("RUBATO_PORT", "9000")
    monkeypatch.setenv("RUBATO_HOST", "::1")
    settings = Settings()
    assert settings.database_url == f"sqlite+aiosqlite:///{tmp_path}/rubato.db"
    assert settings.runs == tmp_path / "runs"
    assert settings.control_url == "http://[::1]:9000"


def test_what_is_given_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUBATO_DATABASE_URL", "postgresql://u:p@db/rubato")
    monkeypatch.setenv("RUBATO_CONTROL_URL", "https://rubato.example/")
    monkeypatch.setenv("RUBATO_RUNS", "~/runs")
    settings = Settings()
    assert settings.database_url == "postgresql+asyncpg://u:p@db/rubato"
    assert settings.control_url == "https://rubato.example"
    assert settings.runs == Path.home() / "runs"


def test_what_cannot_be_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUBATO_PORT", "70000")
    with pytest.raises(ValidationError, match="port"):
        Settings()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", ""])
def test_all_addresses_are_no_address_for_drivers(monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    monkeypatch.setenv("RUBATO_HOST", host)
    with pytest.raises(ValidationError, match="control_url"):
        Settings()
    monkeypatch.setenv("RUBATO_CONTROL_URL", "http://10.0.0.1:8700")
    assert Settings().host == host


@pytest.mark.parametrize("name", ["RUBATO_CONTROL_URL", "RUBATO_RAY_DASHBOARD"])
@pytest.mark.parametrize("url", ["10.0.0.1:8700", "rubato:8700", "ftp://rubato", "http://", "http://[::1"])
def test_a_url_is_a_url(monkeypatch: pytest.MonkeyPatch, name: str, url: str) -> None:
    monkeypatch.setenv(name, url)
    with pytest.raises(ValidationError, match=name.removeprefix("RUBATO_").lower()):
        Settings()
