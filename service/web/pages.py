"""Serves the pages, their stylesheet and modules, and the chart library out of its installed package."""

from __future__ import annotations

from collections.abc import MutableMapping
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import FileResponse, HTMLResponse
from fastapi.staticfiles import StaticFiles
from fastapi.templating import Jinja2Templates
from starlette.exceptions import HTTPException
from starlette.middleware.gzip import GZipMiddleware
from starlette.responses import Response
from starlette.routing import Mount, Route, Router

from rubato import __version__

HERE = Path(__file__).parent
BOKEH = distribution("bokeh")
BOKEH_SCRIPTS = ("bokeh.min.js", "bokeh-api.min.js")

# Scripts come from this server alone, so text out of a job can never run; Bokeh styles its charts inline.
PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
    "object-src 'none'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
    "Referrer-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}

templates = Jinja2Templates(directory=HERE / "templates")
pages = APIRouter(include_in_schema=False)


class OwnFiles(StaticFiles):
    """Stylesheet and modules: the browser asks each time whether they changed, since their names do not."""

    def file_response(self, *args: Any, **kwargs: Any) -> Response:
        response = super().file_response(*args, **kwargs)
        response.headers["Cache-Control"] = "no-cache"
        return response


@pages.get("/")
async def jobs_page(request: Request) -> HTMLResponse:
    return _page(request, "jobs.html")


@pages.get("/jobs/{job}")
async def job_page(request: Request, job: str) -> HTMLResponse:
    """The page of a job, by id or name. The page itself says so when there is none."""
    return _page(request, "job.html", job=job)


def _page(request: Request, template: str, **values: str) -> HTMLResponse:
    context: MutableMapping[str, Any] = {"version": __version__, "bokeh": BOKEH.version, **values}
    return templates.TemplateResponse(request, template, dict(context), headers=PAGE_HEADERS)


async def bokeh_script(request: Request) -> FileResponse:
    """One of the two scripts that the charts need, whose address holds the version and so never goes stale."""
    name = request.path_params["name"]
    if name not in BOKEH_SCRIPTS or request.path_params["version"] != BOKEH.version:
        raise HTTPException(404)
    path = Path(str(BOKEH.locate_file(f"bokeh/server/static/js/{name}")))
    return FileResponse(
        path, media_type="text/javascript", headers={"Cache-Control": "public, max-age=31536000, immutable"}
    )


def mount(app: FastAPI) -> None:
    """Adds the pages at ``/`` and ``/jobs/{job}`` and what they load under ``/assets``."""
    app.include_router(pages)
    assets = Router(
        [Route("/bokeh/{version}/{name}", bokeh_script), Mount("/app", OwnFiles(directory=HERE / "static"))],
    )
    app.mount("/assets", GZipMiddleware(assets, compresslevel=6))
