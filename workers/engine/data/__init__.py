"""Tokens on disk become the samples of a step."""

from rubato.corpus.open import Corpus, open_corpus
from workers.engine.data.ahead import Ahead
from workers.engine.data.jumps import data_step
from workers.engine.data.sampler import Sampler

__all__ = ["Ahead", "Corpus", "Sampler", "data_step", "open_corpus"]
