"""How an attempt ended, for the control plane, for the record and for whoever started the process."""

from __future__ import annotations

from dataclasses import dataclass

from rubato.resources import DriverState


@dataclass(frozen=True)
class Outcome:
    """How the attempt ended. ``state`` None: another attempt has taken over, and nothing more is to be written."""

    state: DriverState | None
    code: str
    message: str

    @property
    def exit_code(self) -> int:
        """0 succeeded or cancelled, 1 failed, 3 another attempt runs the job."""
        return {None: 3, DriverState.FAILED: 1}.get(self.state, 0)
