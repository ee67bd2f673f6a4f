"""Tokens a second over the last steps, smooth enough to read and quick enough to show a change."""

from __future__ import annotations

from collections import deque


class Throughput:
    """A mean over the last ``window`` steps. Time outside of steps (saving, regrouping) is not in it."""

    def __init__(self, window: int = 10) -> None:
        self._steps: deque[tuple[int, float]] = deque(maxlen=window)

    def add(self, tokens: int, seconds: float) -> float:
        """Counts a step in; the tokens a second now."""
        self._steps.append((tokens, seconds))
        return sum(tokens for tokens, _ in self._steps) / sum(seconds for _, seconds in self._steps)

    def restart(self) -> None:
        """Forgets what was before: the layout has changed."""
        self._steps.clear()
