"""A local stack: a Ray head and a control plane on this machine, started and ended as one."""

from rubato.stack.local import down, status, up
from rubato.stack.record import PartView, StackView

__all__ = ["PartView", "StackView", "down", "status", "up"]
