"""Asks the model for text while it trains."""

from __future__ import annotations

from rubato.spec import JobSpec
from rubato.tokenizers import open_tokenizer
from workers.engine.hooks.hook import Session, busy
from workers.engine.membership import Membership
from workers.engine.mesh import ReplicaMesh
from workers.engine.parallel.compose import ModelShare
from workers.engine.parallel.generate import Generator
from workers.engine.state import TrainingState


class Samples:
    """Events of kind ``sample``: what the model makes of each prompt of the spec.

    All replicas compute the same, since parameters may be spread over them; the first worker of all tells.
    """

    def __init__(
        self, spec: JobSpec, membership: Membership, mesh: ReplicaMesh, share: ModelShare, state: TrainingState
    ) -> None:
        self.every = spec.monitor.samples.every
        self.at_end = self.every > 0
        self._wanted = spec.monitor.samples
        self._seed = spec.train.seed
        self._membership = membership
        self._generator = Generator(spec, mesh, share)
        if self.every:
            self._tokenizer = open_tokenizer(spec.data.tokenizer, spec.data.end_of_document)
            texts = [prompt.encode() for prompt in self._wanted.prompts]
            self._prompts = [ids.tolist() or [self._tokenizer.end] for ids in self._tokenizer.encode(texts)]
        self._state = state
        self._told: int | None = None

    def __call__(self, session: Session) -> None:
        step, wanted = self._state.done, self._wanted
        with busy(self._membership, "samples"):
            made = self._generator.continue_all(
                session.runner,
                session.rows,
                self._prompts,
                wanted.tokens,
                vocabulary=self._tokenizer.size,
                temperature=wanted.temperature,
                seed=self._seed * 1_000_003 % 2**31 + step,
            )
        if not session.data.first or step == self._told:
            return
        self._told = step
        for prompt, tokens in zip(wanted.prompts, made, strict=True):
            text = self._tokenizer.decode(tokens)
            data = {"step": step, "prompt": prompt, "text": text}
            self._membership.report("event", {"kind": "sample", "message": f"{prompt}{text}", "data": data})
