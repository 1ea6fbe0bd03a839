"""Tasks that one poller tries to claim again and again, and never gets, although they stay where they are.

To lose a claim is nothing: another agent was quicker, and the task leaves the index. A task that is still there
minutes later, while this agent has room and wins nothing else, is for nobody.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from thunderagent.model.task import Candidate

REMEMBERED: Final = 2000


class Refusals:
    """Of one poller. Written by the agent's loop; read by any thread."""

    def __init__(self) -> None:
        self._first: dict[str, tuple[float, float]] = {}
        self._longest: tuple[Candidate, float, float] | None = None

    def over(self) -> None:
        """A task was won, or there is nothing to win."""
        self._longest = None

    def tried(self, candidates: Sequence[Candidate], now: float) -> None:
        """None of these was won at this monotonic second."""
        longest: tuple[Candidate, float, float] | None = None
        for one in candidates:
            created_at, first = self._first.get(one.task_id, (0.0, now))
            if created_at != one.created_at:
                first = now
                self._first[one.task_id] = (one.created_at, now)
            if longest is None or first < longest[1]:
                longest = one, first, now
        while len(self._first) > REMEMBERED:
            del self._first[next(iter(self._first))]
        self._longest = longest

    def longest(self, since: float) -> tuple[Candidate, float] | None:
        """The task that was tried in vain for longest, and for how many seconds; None: none was tried lately.

        Args:
            since: monotonic second; what was not tried since then is not held against the agent.
        """
        longest = self._longest
        return None if longest is None or longest[2] < since else (longest[0], longest[2] - longest[1])
