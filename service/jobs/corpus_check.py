"""Looks, before a job is stored, whether its data can be there: in threads of its own, and not for ever."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import structlog

from rubato.corpus import Place, corpus_path, fixed_part, is_remote, sources
from rubato.problems import FieldProblem, RubatoError, SpecError
from rubato.spec import JobSpec
from rubato.tokenizers import BYTES, NONE

log = structlog.get_logger(__name__)

PATIENCE_S = 5.0

# Apart from the threads that serve logs and run directories: a glob over a whole file system must not hold those up.
_threads = ThreadPoolExecutor(2, thread_name_prefix="corpus-check")


class _TooLongError(Exception):
    """The search is given up."""


async def check_corpus(corpus: Sequence[Place], ray_dashboard: str, patience_s: float = PATIENCE_S) -> None:
    """Refuses a corpus that can be seen from here to be empty or unreadable.

    The workers may run where the control plane cannot look. So what is missing here is an error only when it ought to
    be here: when the folder it should lie in exists, or when the cluster is this very machine. What cannot be told
    within ``patience_s`` the workers find out.

    Raises:
        SpecError: naming the field of the source.
    """
    until = time.monotonic() + patience_s
    looking = asyncio.get_running_loop().run_in_executor(_threads, _look, corpus, ray_dashboard, until)
    try:
        async with asyncio.timeout(patience_s):
            await looking
    except (TimeoutError, _TooLongError):
        log.info("corpus.not_checked", sources=[place.spec.path for place in corpus], seconds=patience_s)
    except RubatoError as error:
        raise SpecError(error.problems) from error


def check_paths(spec: JobSpec) -> None:
    """Refuses paths beside those of the corpus that would mean something else on each worker. Raises SpecError."""
    given = {
        "data.tokenizer": None if spec.data.tokenizer in (BYTES, NONE) else spec.data.tokenizer,
        "data.cache": spec.data.cache,
        "model.from": spec.model.source,
    }
    relative = [(field, path) for field, path in given.items() if path and not Path(path).expanduser().is_absolute()]
    if relative:
        raise SpecError(
            FieldProblem(
                field, f"'{path}' is relative, and workers run in folders of their own", "give an absolute path"
            )
            for field, path in relative
        )


def _look(corpus: Sequence[Place], ray_dashboard: str, until: float) -> None:
    def in_time() -> None:
        if time.monotonic() > until:
            raise _TooLongError

    here = urlsplit(ray_dashboard).hostname in ("127.0.0.1", "localhost", "::1")
    for place in corpus:
        if place.spec.path is not None:
            _look_at(place, place.spec.path, in_time, here=here)


def _look_at(place: Place, given: str, in_time: Callable[[], None], *, here: bool) -> None:
    path = None if is_remote(given) else corpus_path(place, given)
    if path is not None and not path.is_absolute():
        cause = f"'{given}' is relative, and workers run in folders of their own"
        raise place.problem("corpus_path", cause, "give an absolute path or glob")
    try:
        first = next(sources(place, in_time))
    except RubatoError as error:
        if path is None and error.code == "corpus_unreadable":
            return  # the workers may have the network, the driver or the rights that are missing here
        if path is not None and error.code == "corpus_missing" and not here and not fixed_part(path).is_dir():
            return
        raise
    if path is not None and not os.access(first.location, os.R_OK):
        cause = f"{first.location} cannot be read"
        raise place.problem("corpus_unreadable", cause, "make it readable, or leave it out of the glob")
