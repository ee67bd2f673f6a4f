"""Who may call: by which names, and from which pages."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.service.world import Host, World

pytestmark = pytest.mark.parametrize("host", ["sqlite"], indirect=True)  # nothing here depends on the database


@pytest.fixture
async def world(host: Host) -> AsyncIterator[World]:
    async with host.world(control_url="https://plane.example", allowed_hosts="rubato.test, extra.example") as found:
        yield found


@pytest.mark.parametrize(
    "name",
    ["127.0.0.1:8700", "localhost:8700", "LOCALHOST", "[::1]:8700", "10.1.2.3:9000", "plane.example", "extra.example"],
)
async def test_names_and_addresses_of_ours_are_answered_to(world: World, name: str) -> None:
    assert (await world.http.get("/v1/jobs", headers={"Host": name})).status_code == 200


@pytest.mark.parametrize("name", ["evil.example", "localhost.evil.example:8700", "127.0.0.1.evil.example", "[::1", ""])
async def test_other_names_are_not(world: World, name: str) -> None:
    answer = await world.http.get("/v1/jobs", headers={"Host": name})
    assert (answer.status_code, answer.json()["code"]) == (421, "host_refused")
    assert "RUBATO_ALLOWED_HOSTS" in answer.json()["fix"]


@pytest.mark.parametrize(
    ("origin", "name", "taken"),
    [
        (None, "127.0.0.1:8700", True),
        ("http://127.0.0.1:8700", "127.0.0.1:8700", True),
        ("http://localhost:8700", "localhost:8700", True),
        ("http://[::1]:8700", "[::1]:8700", True),
        ("https://plane.example", "10.0.0.7:8700", True),
        ("https://plane.example", "plane.example", True),
        ("https://extra.example", "10.0.0.7:8700", True),
        ("http://localhost:3000", "localhost:8700", False),
        ("https://evil.example", "127.0.0.1:8700", False),
        ("http://[::1", "127.0.0.1:8700", False),
        ("null", "127.0.0.1:8700", False),
    ],
)
async def test_only_our_own_pages_change_anything(world: World, origin: str | None, name: str, taken: bool) -> None:
    job = await world.submit()
    headers = {"Host": name, "Content-Type": "text/plain", **({} if origin is None else {"Origin": origin})}
    answer = await world.http.post(f"/v1/jobs/{job['id']}/cancel", headers=headers)
    assert answer.status_code == (202 if taken else 403), answer.text
    assert (await world.job(job["id"]))["state"] == ("CANCELLED" if taken else "QUEUED")
    if not taken:
        assert answer.json()["code"] == "origin_refused"
        assert (await world.http.get("/v1/jobs", headers=headers)).status_code == 200, "reading changes nothing"
