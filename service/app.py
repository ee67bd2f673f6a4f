"""Wires routes, errors, documentation and pages into one application."""

from __future__ import annotations

from fastapi import FastAPI
from fastapi_offline import FastAPIOffline

from rubato import __version__
from service import problems
from service.attempts.routes import router as attempts
from service.cluster.routes import router as cluster
from service.events.routes import router as events
from service.health.measures import CountRequests, Measures
from service.health.routes import router as health
from service.jobs.routes import router as jobs
from service.operations.routes import router as operations
from service.origins import GuardOrigins
from service.plane import ControlPlane
from service.plans.calibrations import router as calibrations
from service.plans.routes import router as plans
from service.projects.routes import router as projects
from service.web import mount

_ABOUT = """\
Trains language models on a Ray cluster, and scales them while they train.

Everything the command line does is here: `POST /v1/jobs` with a spec, then look at `/v1/jobs/{job}`, follow
`/events` and `/metrics`, `POST` to `/scale` and `/cancel`. A job is named by its id, or by its name.

Errors are `application/problem+json` with `code`, `detail`, `fix` and, for each field at fault, `errors[]`.
Lists follow with `Accept: text/event-stream`.
"""


def create_app(plane: ControlPlane) -> FastAPI:
    """The application of one control plane."""
    app = FastAPIOffline(title="Rubato", version=__version__, description=_ABOUT)
    app.state.plane = plane
    app.state.measures = Measures()
    problems.install(app)
    app.add_middleware(GuardOrigins, settings=plane.settings)
    app.add_middleware(CountRequests, measures=app.state.measures)
    for router in (jobs, plans, calibrations, events, operations, projects, cluster, attempts, health):
        app.include_router(router)
    mount(app)
    return app
