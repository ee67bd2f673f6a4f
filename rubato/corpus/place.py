"""A source of a corpus and where the spec names it, so that every refusal names its field."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rubato.problems import FieldProblem, RubatoError
from rubato.spec import CorpusSpec, SourceSpec

TRAIN = "data.train"


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


def places(corpus: CorpusSpec, field: str = TRAIN) -> Iterator[Place]:
    """The sources of a corpus, one or more."""
    if not corpus.blend:
        yield Place(corpus, field)
    for number, source in enumerate(corpus.blend):
        yield Place(source, f"{field}.blend.{number}")
