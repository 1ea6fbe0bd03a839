"""Marks that an agent's loop leaves as it gets on, for whoever looks at it from another thread.

Single assignments, so that nobody waits for anybody.
"""

from __future__ import annotations

import threading
from collections.abc import Callable


class Marks:
    """Left by the agent's loop as it gets on."""

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self.moved_at = self.answered_at = self.round_at = monotonic()
        self.outage_since: float | None = None
        self.store_error = ""
        self.is_ready = False
        """True once the store has answered a whole round: the agent looks for work."""
        self.loop_thread: int | None = None

    def begin(self) -> None:
        """The loop begins, in this thread; the store has just answered."""
        self.loop_thread = threading.get_ident()
        self.moved()
        self.answered()

    def moved(self) -> None:
        """The loop got on, whatever came of it."""
        self.moved_at = self._monotonic()

    def answered(self) -> None:
        """The store has answered the loop."""
        self.moved()
        self.answered_at = self.moved_at

    def good_round(self, *, asked: bool) -> None:
        """Whatever a round asked for was answered."""
        self.moved()
        self.round_at = self.moved_at
        if asked:
            self.answered_at, self.outage_since, self.store_error = self.moved_at, None, ""
            self.is_ready = True

    def missed(self, error: object) -> None:
        """The store failed for something beside the work."""
        self.moved()
        self.store_error = str(error)

    def failed(self, error: object, *, answered: bool) -> None:
        """The store failed for the loop, wholly, or `answered` a part."""
        self.missed(error)
        if answered:
            self.answered_at, self.outage_since = self.moved_at, None
        elif self.outage_since is None:
            self.outage_since = self.moved_at
