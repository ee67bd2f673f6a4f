"""What happens every so many steps beside training: evaluation, reports, checkpoints. The loop knows none by name."""

from workers.engine.hooks.checkpoint import Checkpoint
from workers.engine.hooks.hook import Hook, Session, busy, due
from workers.engine.hooks.record import Record
from workers.engine.hooks.report import Report
from workers.engine.hooks.watching import watching

__all__ = ["Checkpoint", "Hook", "Record", "Report", "Session", "busy", "due", "watching"]
