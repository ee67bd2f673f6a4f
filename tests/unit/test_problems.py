"""Errors that a user can act on."""

from __future__ import annotations

from rubato.problems import FieldProblem, RubatoError, SpecError, nearest


def test_an_error_says_what_is_wrong_and_what_to_do() -> None:
    error = RubatoError("port 8700 is in use", fix="give another with --port", code="port_in_use", status=409)
    assert str(error) == "port 8700 is in use (give another with --port)"
    assert (error.code, error.status, error.problems) == ("port_in_use", 409, ())


def test_a_refused_spec_carries_every_field() -> None:
    found = (FieldProblem("train.steps", "0 will not do", "give 1 or more"), FieldProblem("name", "is missing", "add"))
    error = SpecError(iter(found))
    assert error.problems == found
    assert (error.code, error.status) == ("spec_refused", 422)
    assert "train.steps: 0 will not do; give 1 or more" in error.detail
    assert "name: is missing; add" in error.detail


def test_the_nearest_name_is_the_one_a_typo_meant() -> None:
    known = ["steps", "global_batch", "seed"]
    assert nearest("stpes", known) == "steps"
    assert nearest("zzz", known) is None
