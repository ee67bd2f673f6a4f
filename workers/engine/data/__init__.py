"""Text on disk becomes the samples of a step."""

from workers.engine.data.corpus import Corpus, open_corpus
from workers.engine.data.sampler import Sampler

__all__ = ["Corpus", "Sampler", "open_corpus"]
