"""The sweep of payloads that are kept apart from their rows, so that none ends before a task that waits for long.

A task that is claimed or put off has its payload looked after there. One that waits, or runs, for two months is found
here: its due time is at the head of the index.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Final

from thunderagent.model.task import Candidate, Lane, Status
from thunderagent.queue.limits.waitlist import open_waitlists, waitlist_value
from thunderagent.queue.sweeps import Rounds
from thunderagent.stores.engine import MAX_TEXT_BYTES
from thunderagent.stores.large_texts import DAY_S
from thunderagent.stores.tasks import TaskStore

EVERY_S: Final = 10 * DAY_S
"""Time between two sweeps, each done by one agent of the fleet."""

WAITS_S: Final = 60 * DAY_S
"""How long a task has been due of which the payload is looked after."""

ASK_S: Final = 3600.0
"""Time between two questions of one agent whose turn it is."""

PAGES_A_LOOK: Final = 5
"""Pages of 100 entries that one look reads; the next goes on from there."""

OPEN: Final = (Status.PENDING, Status.RUNNING, Status.BLOCKED)


class TextSweep:
    """Looks after the payloads of open tasks. Called in the agent's loop."""

    def __init__(self, store: TaskStore, *, owner: str) -> None:
        self._store = store
        self._owner = owner
        self._due = 0.0
        self._walk: Iterator[Sequence[Candidate]] | None = None

    def look(self, lanes: Sequence[Lane]) -> None:
        """Begin a sweep if it is this agent's turn, or go on with it.

        Raises:
            StoreError: the store did not answer; the sweep begins again with a later turn.
        """
        if self._walk is None and not self._is_my_turn():
            return
        walk, self._walk = self._walk or self._pages(lanes), None
        pages = list(islice(walk, PAGES_A_LOOK))
        for entries in pages:
            tasks = self._store.get(one.task_id for one in entries).values()
            is_open = (task for task in tasks if not task.status.is_terminal)
            self._store.large_texts.outlive_all(is_open, now=self._store.clock.now())
        if len(pages) == PAGES_A_LOOK:
            self._walk = walk

    def _is_my_turn(self) -> bool:
        has_texts = self._store.engine.inline_bytes < MAX_TEXT_BYTES or self._store.large_texts.blobs is not None
        if not has_texts or self._store.monotonic() < self._due:
            return False
        self._due = self._store.monotonic() + ASK_S
        return self._store.take_turn("texts", owner=self._owner, lasts_s=EVERY_S) is not None

    def _pages(self, lanes: Sequence[Lane]) -> Iterator[Sequence[Candidate]]:
        until = self._store.clock.now() - WAITS_S
        values = [lane.value(status) for lane in lanes for status in OPEN]
        values += [waitlist_value(lane, key) for key in open_waitlists(self._store) for lane in lanes]
        rounds = Rounds(self._store, most=sys.maxsize)
        for value in values:
            yield from rounds.pages(value, until=until)
