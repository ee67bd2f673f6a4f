"""Every error leaves as application/problem+json with a code, a cause and a fix."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from http import HTTPStatus
from typing import Any, cast

import structlog
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel
from pydantic_core import ErrorDetails
from sqlalchemy.exc import InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolExhausted
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rubato.problems import FieldProblem, RubatoError
from rubato.resources import Problem
from rubato.spec.load import explain
from service.database.engine import DatabaseUnreachableError

log = structlog.get_logger(__name__)

MEDIA_TYPE = "application/problem+json"
MAX_BODY = 32 * 1024 * 1024


def not_found(what: str, name: str, fix: str) -> RubatoError:
    """The error for something that does not exist."""
    return RubatoError(f"there is no {what} '{name}'", fix=fix, code=f"{what}_not_found", status=404)


def install(app: FastAPI) -> None:
    """Makes all errors of an application problems."""
    app.add_exception_handler(RubatoError, _rubato_error)
    app.add_exception_handler(RequestValidationError, _invalid_request)
    app.add_exception_handler(HTTPException, _http_error)
    for unreachable in (DatabaseUnreachableError, OperationalError, InterfaceError, PoolExhausted):
        app.add_exception_handler(unreachable, _database_error)
    app.add_exception_handler(Exception, _bug)
    app.add_middleware(RequestLimits, most=MAX_BODY)


def response(
    status: int,
    code: str,
    detail: str,
    fix: str,
    errors: Iterable[FieldProblem] = (),
    headers: Mapping[str, str] | None = None,
) -> JSONResponse:
    """A problem as a response."""
    problem = Problem(
        title=HTTPStatus(status).phrase,
        status=status,
        code=code,
        detail=detail,
        fix=fix,
        errors=[{"field": error.field, "cause": error.cause, "fix": error.fix} for error in errors],
    )
    return JSONResponse(problem.model_dump(mode="json"), status, dict(headers or {}), MEDIA_TYPE)


async def _rubato_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RubatoError)
    headers = {"WWW-Authenticate": "Bearer"} if error.status == 401 else None
    return response(error.status, error.code, error.detail, error.fix, error.problems, headers)


async def _invalid_request(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    problems = list(_field_problems(error, _body_model(request)))
    listed = "; ".join(str(problem) for problem in problems)
    code = "spec_refused" if _is_spec(request) else "request_refused"
    what = "spec" if _is_spec(request) else "request"
    return response(
        422, code, f"the {what} was refused: {listed}", "correct the fields listed and send it again", problems
    )


def _field_problems(error: RequestValidationError, model: type[BaseModel] | None) -> Iterable[FieldProblem]:
    for details in error.errors():
        where, *location = details["loc"]
        if details["type"] == "json_invalid":
            cause = f"is not JSON: {details['ctx']['error']} at character {location[0] if location else 0}"
            yield FieldProblem("body", cause, "send JSON")
        elif where == "body" and not location and details["type"] != "refused":
            cause = "is missing" if details["input"] is None else "is not a JSON object"
            yield FieldProblem("body", cause, "send a JSON object, with Content-Type: application/json")
        else:
            inside = cast(ErrorDetails, {**details, "loc": tuple(location)})
            yield from explain([inside], model if where == "body" else None)


def _body_model(request: Request) -> type[BaseModel] | None:
    route = request.scope.get("route")
    if not isinstance(route, APIRoute) or route.body_field is None:
        return None
    found = route.body_field.field_info.annotation
    return found if isinstance(found, type) and issubclass(found, BaseModel) else None


def _is_spec(request: Request) -> bool:
    model = _body_model(request)
    return model is not None and model.__name__ == "JobSpec"


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    headers = dict(error.headers or {})
    if error.status_code == 404:
        return response(404, "not_found", f"there is nothing at {request.url.path}", "see /docs for what there is")
    if error.status_code == 405:
        allowed = headers.get("Allow") or headers.get("allow") or "another method"
        detail = f"{request.url.path} does not take {request.method}"
        return response(405, "method_not_allowed", detail, f"use {allowed}", headers=headers)
    code = HTTPStatus(error.status_code).name.lower()
    return response(error.status_code, code, str(error.detail), "see /docs for what is taken", headers=headers)


async def _database_error(request: Request, error: Exception) -> Response:
    log.warning("database.failed", path=request.url.path, cause=str(error))
    return response(
        503,
        "database_unavailable",
        "the control plane cannot reach its database",
        "try again; jobs on the cluster go on in the meantime",
        headers={"Retry-After": "2"},
    )


async def _bug(request: Request, error: Exception) -> Response:
    log.error(
        "request.failed", method=request.method, path=request.url.path, cause=repr(error)
    )  # the server adds the traceback
    return response(
        500,
        "internal_error",
        "the control plane failed to answer; this is an error in Rubato, not in the request",
        "look for request.failed in the log of the control plane, and report what is there",
    )


class RequestLimits:
    """Refuses what no request of ours holds: a body that would fill the memory, and NUL, which no database takes."""

    def __init__(self, app: ASGIApp, most: int) -> None:
        self._app = app
        self._most = most

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes the request on, counting what is received."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if "\0" in scope["path"] or b"%00" in scope["query_string"]:
            await self._no_text(scope, receive, send)
            return
        declared = dict(scope["headers"]).get(b"content-length", b"0")
        if declared.isdigit() and int(declared) > self._most:
            await self._refusal(scope, receive, send)
            return
        received = 0

        async def counted() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._most:
                raise _TooLarge
            return message

        try:
            await self._app(scope, counted, send)
        except _TooLarge:
            await self._refusal(scope, receive, send)

    @property
    def _no_text(self) -> JSONResponse:
        return response(400, "request_refused", "the address holds a NUL character", "leave it out")

    @property
    def _refusal(self) -> JSONResponse:
        return response(
            413,
            "body_too_large",
            f"the body is larger than {self._most // 2**20} MiB",
            "send less at a time",
            headers={"Connection": "close"},
        )


class _TooLarge(BaseException):
    """Not an Exception: no handler between the body and the limit may take it for an error of its own."""


def problems_doc(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The ``responses`` of a route that refuses with these statuses."""
    return {
        status: {
            "model": Problem,
            "description": HTTPStatus(status).phrase,
            "content": {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}},
        }
        for status in statuses
    }
