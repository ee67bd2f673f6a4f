"""The data section of the spec: which text, held out how, turned into which tokens, cut into which windows."""

from __future__ import annotations

from fractions import Fraction as Ratio
from typing import Annotated, Any, Literal, Self

from pydantic import Field, PositiveFloat, model_validator

from rubato.problems import FieldProblem, RubatoError
from rubato.spec.section import NonNegativeInt, PositiveInt, Section, refuse
from rubato.tokenizers import BYTES, NONE, open_tokenizer

FINEST_WEIGHT = 10**6
"""Weights of a blend are whole parts of at most so many."""

Fraction = Annotated[float, Field(ge=0.0, lt=1.0)]
Format = Literal["auto", "text", "jsonl", "parquet", "dataset", "megatron", "tokens"]


class SourceSpec(Section):
    """Where text comes from: files on any storage that fsspec knows, or a corpus that every machine has."""

    path: str | None = Field(
        None,
        description="a file, a folder of a saved dataset, or a glob such as corpus/**/*.txt; also s3://, gs://, http(s)://",
    )
    builtin: Literal["python-stdlib"] | None = Field(None, description="the sources of Python's standard library")
    format: Format = Field(
        "auto",
        description="auto: by the ending (.jsonl, .parquet, .arrow, .bin with .idx, .bin; then .gz, .zst), else text",
    )
    field: str = Field("text", description="jsonl, parquet, dataset: the field with the text, or with chat messages")
    token_type: Literal["uint16", "uint32"] = Field(
        "uint16", description="tokens: their size in a file without a header"
    )
    bad_records: Literal["stop", "skip"] = Field(
        "stop", description="what cannot be read, such as a broken line: stop, or skip and count"
    )
    weight: PositiveFloat = Field(1.0, description="share of the samples, against the weights of the other sources")

    @model_validator(mode="after")
    def _check(self) -> Self:
        self._exactly_one_source()
        return self

    def _exactly_one_source(self) -> None:
        if (self.path is None) == (self.builtin is None):
            given = "neither was given" if self.path is None else "both were given"
            raise refuse(
                [FieldProblem("path", f"a corpus is a path or a builtin, {given}", "give exactly one of path, builtin")]
            )


class CorpusSpec(SourceSpec):
    """One source, or a blend of several. A blend is written as a list, or as ``{blend: [...]}``."""

    blend: tuple[SourceSpec, ...] = Field((), description="several sources, each with its weight")

    @model_validator(mode="before")
    @classmethod
    def _short_form(cls, given: Any) -> Any:
        return {"blend": given} if isinstance(given, list | tuple) else given

    def _exactly_one_source(self) -> None:
        if not self.blend:
            super()._exactly_one_source()
            return
        mine = sorted(self.model_fields_set - {"blend"} - self._unset())
        if mine:
            cause = f"a blend has sources of its own, beside it stands {', '.join(mine)}"
            raise refuse([FieldProblem(mine[0], cause, f"move {mine[0]} into the sources of the blend")])
        whole = sum(Ratio(str(source.weight)) for source in self.blend)
        for place, source in enumerate(self.blend):
            if Ratio(str(source.weight)) / whole < Ratio(1, FINEST_WEIGHT):
                cause = f"{source.weight:g} of {float(whole):g} is less than a millionth of the samples"
                raise refuse([FieldProblem(f"blend.{place}.weight", cause, "give it more, or leave the source out")])

    def _unset(self) -> set[str]:
        """Fields that were given their own default, as a resolved spec has them."""
        return {name for name in self.model_fields_set if getattr(self, name) == type(self).model_fields[name].default}

    @property
    def sources(self) -> tuple[SourceSpec, ...]:
        """All sources, one or more."""
        return self.blend or (self,)


class ValidationSpec(Section):
    """Held-out loss: a share of the documents of the training corpus, or a source of its own, never trained on."""

    fraction: Fraction = Field(0.02, description="share of documents held out, where there is no source")
    source: SourceSpec | None = Field(
        None,
        description="what to evaluate on instead; its documents are left out of the training corpus",
    )
    every: NonNegativeInt = Field(0, description="steps between evaluations; 0: never")
    batches: PositiveInt = Field(1, description="global batches an evaluation reads")
    ema: bool = Field(False, description="evaluate the moving average of the weights (optimizer.ema)")


class DataSpec(Section):
    """What is trained on, and how it becomes samples."""

    train: CorpusSpec
    validation: ValidationSpec = ValidationSpec()
    tokenizer: str = Field(
        BYTES,
        description="bytes; a tokenizer.json; a Hugging Face folder; a .tiktoken file; none: the corpus is tokens",
    )
    end_of_document: str | None = Field(
        None, description="the token that ends a document; left out: what the tokenizer says"
    )
    vocab_size: PositiveInt = Field(256, description="rows of the embedding; left out: the ids of the tokenizer")
    sequence_length: PositiveInt = 256
    shuffle: Literal["windows", "documents"] = Field(
        "windows",
        description="windows: the corpus is cut in its own order, and what was cut is shuffled; documents: these are "
        "shuffled before, so that neighbours in a window are strangers",
    )
    packing: Literal["stream", "padded"] = Field(
        "stream",
        description="stream: documents follow one another without gaps; padded: a window holds one document or a piece "
        "of it, the rest of it does not count",
    )
    document_mask: bool = Field(False, description="attention does not look from one document of a window into another")
    answers_only: bool = Field(
        False, description="the loss counts what the assistant says in chats, and nothing else; for fine-tuning"
    )
    cache: str | None = Field(
        None,
        description="folder for tokens, shared by all runs that see it; left out: that of the run, for it alone",
    )

    @model_validator(mode="before")
    @classmethod
    def _vocabulary(cls, given: Any) -> Any:
        """Takes the size of the vocabulary from the tokenizer, where it was not said."""
        if not isinstance(given, dict) or given.get("vocab_size") is not None:
            return given
        name = given.get("tokenizer", BYTES)
        if name == NONE:
            cause = "is missing, and tokenizer none has no vocabulary of its own"
            raise refuse([FieldProblem("vocab_size", cause, "give one more than the largest token")])
        if not isinstance(name, str):
            return given
        try:
            size = open_tokenizer(name, given.get("end_of_document")).size
        except RubatoError as error:
            raise refuse(
                [FieldProblem(each.field.removeprefix("data."), each.cause, each.fix) for each in error.problems]
            ) from error
        return {**given, "vocab_size": size}

    @model_validator(mode="after")
    def _check_mask(self) -> Self:
        if self.document_mask and self.tokenizer == NONE:
            cause = "tokenizer none does not say where a document ends"
            raise refuse([FieldProblem("document_mask", cause, "name the tokenizer that made the tokens")])
        return self

    @model_validator(mode="after")
    def _check_bytes(self) -> Self:
        if self.tokenizer == BYTES and self.vocab_size < 256:
            raise refuse([FieldProblem("vocab_size", f"bytes have 256 values, not {self.vocab_size}", "leave it out")])
        return self
