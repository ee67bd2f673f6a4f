"""A commanded change and its phases, as they are told in the timeline."""

from __future__ import annotations

from dataclasses import dataclass

from workers.driver.journal import Journal


@dataclass
class Command:
    """A change somebody asked for: ``kind`` "scale" or "cancel"; ``operation`` is its name with the control plane.

    Phases of a scale: accepted -> starting (when it grows) -> regrouping -> done. Of a cancel: accepted -> saving ->
    done. A command that is superseded or refused ends in between.
    """

    journal: Journal
    kind: str
    operation: str | None
    phase: str = ""

    @property
    def over(self) -> bool:
        """Whether nothing more happens to it."""
        return self.phase in ("done", "superseded", "refused")

    def enter(self, phase: str, message: str, data: dict[str, object] | None = None) -> None:
        """Begins a phase, once."""
        if self.over or phase == self.phase:
            return
        self.phase = phase
        self.journal.event(
            f"{self.kind}.{phase}",
            message,
            data,
            operation=self.operation,
            phase=phase if self.operation else None,
            done=self.over,
            failed=self.over and phase != "done",
        )
