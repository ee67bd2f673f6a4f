"""The update: how far (schedules), how much at most (clipping), from gradients of which scale, in which direction."""

from workers.engine.optim.adamw import adamw
from workers.engine.optim.clipping import clip_factor, squared_norm
from workers.engine.optim.scaling import LossScale, NotFiniteError
from workers.engine.optim.schedules import learning_rate

__all__ = ["LossScale", "NotFiniteError", "adamw", "clip_factor", "learning_rate", "squared_norm"]
