"""The update: how far (schedules), how much at most (clipping), and in which direction (AdamW)."""

from workers.engine.optim.adamw import adamw
from workers.engine.optim.clipping import clip_factor, squared_norm
from workers.engine.optim.schedules import learning_rate

__all__ = ["adamw", "clip_factor", "learning_rate", "squared_norm"]
