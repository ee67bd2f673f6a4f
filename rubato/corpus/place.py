"""A source of a corpus and where the spec names it, so that every refusal names its field."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rubato.problems import FieldProblem, RubatoError
from rubato.spec import CorpusSpec, DataSpec, SourceSpec

TRAIN, VALIDATION = "data.train", "data.validation.source"


@dataclass(frozen=True)
class Place:
    """A source, and the dotted name of its section."""

    spec: SourceSpec
    field: str = TRAIN

    def problem(self, code: str, cause: str, fix: str, field: str | None = None) -> RubatoError:
        """A refusal that names a field of the source; without one the field that chose it."""
        chosen = field or ("path" if self.spec.builtin is None else "builtin")
        name = f"{self.field}.{chosen}"
        problem = FieldProblem(name, cause, fix)
        return RubatoError(f"{name}: {cause}", fix=fix, code=code, status=422, problems=[problem])

    def unreadable(self, location: object, error: OSError) -> RubatoError:
        """The refusal of a corpus of which a file cannot be read."""
        cause = f"{location} cannot be read: {error.strerror or error}"
        return self.problem("corpus_unreadable", cause, "make it readable for the user the workers run as")


def all_places(data: DataSpec) -> list[Place]:
    """The sources of a corpus, and the one that is held out as a whole."""
    apart = data.validation.source
    return [*places(data.train), *([Place(apart, VALIDATION)] if apart is not None else [])]


def places(corpus: CorpusSpec, field: str = TRAIN) -> Iterator[Place]:
    """The sources of a corpus, one or more."""
    if not corpus.blend:
        yield Place(corpus, field)
    for number, source in enumerate(corpus.blend):
        yield Place(source, f"{field}.blend.{number}")
