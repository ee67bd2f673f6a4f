"""The update: how far (schedules), how much at most (clipping), from gradients of which scale, in which direction."""

from workers.engine.optim.clipping import clip_factor
from workers.engine.optim.norms import GroupNorms
from workers.engine.optim.optimizer import Optimizer
from workers.engine.optim.scaling import LossScale, NotFiniteError
from workers.engine.optim.schedules import learning_rate

__all__ = ["GroupNorms", "LossScale", "NotFiniteError", "Optimizer", "clip_factor", "learning_rate"]
