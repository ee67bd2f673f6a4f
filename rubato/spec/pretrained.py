"""What a job takes over with a model trained before: its tokenizer, its vocabulary, the reach of its attention."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rubato.pretrained import Pretrained, read_pretrained
from rubato.problems import FieldProblem, RubatoError
from rubato.spec.section import refuse
from rubato.tokenizers import NONE, open_tokenizer


def with_pretrained(given: dict[str, Any]) -> dict[str, Any]:
    """A spec, not yet checked, with the tokenizer and the vocabulary of the model it begins with.

    A spec that has a vocabulary was resolved before, and is left as it is.
    """
    model, data = given.get("model"), given.get("data")
    if not isinstance(model, dict) or not isinstance(data, dict) or not isinstance(model.get("from"), str):
        return given
    if data.get("vocab_size") is not None:
        return given
    folder = model["from"]
    try:
        found = read_pretrained(folder)
    except RubatoError:
        return given  # the model section tells
    tokenizer = data.get("tokenizer")
    if tokenizer is None:
        if not (Path(folder).expanduser() / "tokenizer.json").is_file():
            cause = f"is missing, and {folder} has no tokenizer.json"
            raise refuse([FieldProblem("data.tokenizer", cause, "name the tokenizer the model was trained with")])
        tokenizer = folder
    _check_tokenizer(tokenizer, data, found, folder)
    _check_length(data, found, folder)
    return {**given, "data": {**data, "tokenizer": tokenizer, "vocab_size": found.vocab_size}}


def _check_tokenizer(tokenizer: Any, data: dict[str, Any], found: Pretrained, folder: str) -> None:
    if not isinstance(tokenizer, str) or tokenizer == NONE:
        return
    try:
        size = open_tokenizer(tokenizer, data.get("end_of_document")).size
    except RubatoError as error:
        raise refuse(error.problems) from error
    if size > found.vocab_size:
        cause = f"{tokenizer} has {size} tokens, the model in {folder} knows {found.vocab_size}"
        raise refuse([FieldProblem("data.tokenizer", cause, "leave it out for the model's own tokenizer")])


def _check_length(data: dict[str, Any], found: Pretrained, folder: str) -> None:
    length = data.get("sequence_length", 256)
    if found.longest is not None and isinstance(length, int) and length > found.longest:
        cause = (
            f"the attention of the model in {folder} is a window of {found.longest} positions, which is built for "
            f"sequences within it, not for {length}"
        )
        raise refuse([FieldProblem("data.sequence_length", cause, f"use at most {found.longest}")])
