"""The pages without a browser: what they load is there, comes from here alone, and cannot be made to run anything."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from importlib.metadata import version
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI

from service import problems
from service.web import mount

STATIC = Path(__file__).parents[3] / "service" / "web" / "static"


@pytest.fixture
async def http() -> AsyncIterator[httpx.AsyncClient]:
    app = FastAPI()
    problems.install(app)
    mount(app)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://rubato") as client:
        yield client


@pytest.mark.parametrize("path", ["/", "/jobs/demo"])
async def test_all_that_a_page_loads_is_served_from_here(http: httpx.AsyncClient, path: str) -> None:
    page = await http.get(path)
    assert page.status_code == 200
    assets = re.findall(r'(?:src|href)="(/assets/[^"]+)"', page.text)
    assert len(assets) >= 3
    for asset in assets:
        reply = await http.get(asset)
        assert reply.status_code == 200, asset
        assert reply.headers["content-type"].split(";")[0] in ("text/css", "text/javascript", "image/svg+xml")
    assert re.findall(r'(?:src|href)="(?:https?:)?//', page.text) == []


async def test_every_module_imports_only_modules_that_exist(http: httpx.AsyncClient) -> None:
    for module in STATIC.glob("*.js"):
        for imported in re.findall(r'from "\./([^"]+)"', module.read_text()):
            assert (STATIC / imported).exists(), f"{module.name} imports {imported}"


async def test_the_policy_lets_only_scripts_from_here_run(http: httpx.AsyncClient) -> None:
    page = await http.get("/jobs/demo")
    policy = page.headers["content-security-policy"]
    assert "default-src 'self'" in policy
    assert "script-src" not in policy
    assert "frame-ancestors 'none'" in policy
    assert re.search(r"<script(?![^>]*\bsrc=)", page.text) is None


async def test_a_name_in_the_address_cannot_become_markup(http: httpx.AsyncClient) -> None:
    page = await http.get("/jobs/%22%3E%3Cscript%3Ealert(1)")
    assert page.status_code == 200
    assert "<script>alert" not in page.text


async def test_bokeh_is_served_compressed_and_for_ever_under_its_version(http: httpx.AsyncClient) -> None:
    script = await http.get(f"/assets/bokeh/{version('bokeh')}/bokeh.min.js", headers={"Accept-Encoding": "gzip"})
    assert script.headers["content-encoding"] == "gzip"
    assert "immutable" in script.headers["cache-control"]
    assert "Bokeh" in script.text


@pytest.mark.parametrize("name", ["bokeh/{version}/bokeh-widgets.js", "bokeh/0.0.1/bokeh.min.js", "app/nothing.js"])
async def test_nothing_else_of_the_package_is_served(http: httpx.AsyncClient, name: str) -> None:
    reply = await http.get(f"/assets/{name.format(version=version('bokeh'))}")
    assert reply.status_code == 404
    assert reply.headers["content-type"] == "application/problem+json"


async def test_own_files_are_asked_for_again_each_time(http: httpx.AsyncClient) -> None:
    first = await http.get("/assets/app/rubato.css")
    assert first.headers["cache-control"] == "no-cache"
    again = await http.get("/assets/app/rubato.css", headers={"If-None-Match": first.headers["etag"]})
    assert again.status_code == 304
