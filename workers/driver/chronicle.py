"""Generations as the timeline tells them: once each has trained a step, with the pause that it cost."""

from __future__ import annotations

from workers.driver.journal import Journal
from workers.driver.rendezvous.orders import Ended, Formed


class Chronicle:
    """Hears of generations and of steps; writes ``generation.formed``. Times are in seconds, of any clock."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._unproved: Formed | None = None
        self._last_step: float | None = None

    @property
    def proved(self) -> bool:
        """Whether the newest generation has trained a step."""
        return self._unproved is None

    def formed(self, formed: Formed) -> None:
        """A generation begins."""
        self._unproved = formed

    def ended(self, ended: Ended) -> None:
        """A generation ended; of one that never trained nothing is told."""
        if self._unproved and self._unproved.number == ended.number:
            self._unproved = None

    def stepped(self, key: int, step: int, now: float) -> bool:
        """A worker holds ``step`` steps; whether that proves its generation."""
        formed = self._unproved
        proves = formed is not None and key in formed.keys and (formed.step is None or step > formed.step)
        if proves:
            self._tell(step - 1, now)
        self._last_step = now
        return proves

    def finished(self, step: int, now: float) -> None:
        """All steps are done; a generation that had none left to do is told of too."""
        if self._unproved:
            self._tell(step, now)

    def _tell(self, start: int, now: float) -> None:
        formed, self._unproved = self._unproved, None
        assert formed is not None
        count, workers = len(formed.replicas), len(formed.keys)
        replicas = f"{count} replica{'s' if count > 1 else ''}"
        self._journal.event(
            "generation.formed",
            f"generation {formed.number} goes on from step {start}: {workers} workers in {replicas}",
            {
                "generation": formed.number,
                "data": count,
                "workers": workers,
                "replicas": list(formed.replicas),
                "step": start,
                "source": formed.source,
                "healed": list(formed.healed),
                "pause_s": None if self._last_step is None else round(now - self._last_step, 3),
            },
        )
