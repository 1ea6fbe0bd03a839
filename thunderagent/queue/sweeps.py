"""Sweeps over lanes of any length: each reads a part, and the next goes on from there.

Where one agent sweeps for the fleet, the row of its turn keeps the places for the next agent.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, Final

from thunderagent.model.errors import StoreError
from thunderagent.model.rows import as_map
from thunderagent.model.task import Candidate
from thunderagent.model.writes import agents as agent_writes
from thunderagent.stores.tasks import TaskStore

PAGE: Final = 100
"""Index entries of one page."""

ENTRIES_A_SWEEP: Final = 10_000
"""Index entries of one status value that one sweep reads at most."""


class Rounds:
    """Reads the index entries of status values in parts, round after round.

    Args:
        most: entries of one status value that one part has at most.
        places: where to go on, by status value; without one at the start.
    """

    def __init__(
        self, store: TaskStore, *, most: int = ENTRIES_A_SWEEP, places: Mapping[str, Any] | None = None
    ) -> None:
        self._store = store
        self._most = most
        self.places: dict[str, Any] = dict(places or {})
        """Where the next part begins, for status values whose end is not reached."""

    def pages(self, status_value: str, *, until: float | None = None) -> Iterator[tuple[Candidate, ...]]:
        """The entries of the next part, page by page; a part that ends early goes on behind its last page.

        The place is forgotten at the end of the lane, and when the store refuses it.

        Raises:
            StoreError: the store did not answer.
        """
        after, left = self.places.pop(status_value, None), self._most
        while left > 0:
            page = self._store.engine.page(status_value, limit=min(PAGE, left), until=until, after=after)
            left -= PAGE
            after = page.after
            if after is None:
                self.places.pop(status_value, None)
            else:
                self.places[status_value] = after
            if page.entries:
                yield page.entries
            if after is None:
                return


@contextmanager
def fleet_rounds(
    store: TaskStore, name: str, *, owner: str, lasts_s: float, most: int = ENTRIES_A_SWEEP
) -> Iterator[Rounds | None]:
    """The rounds of a sweep that one agent does for all, from where the last one has ended.

    Yields:
        the rounds; None while it is the turn of another agent.

    Raises:
        StoreError: the store did not answer.
    """
    row = store.take_turn(name, owner=owner, lasts_s=lasts_s)
    if row is None:
        yield None
        return
    kept = as_map(row.get("info"))
    places = {value: place for value, place in kept.items() if isinstance(place, (list, Mapping))}
    rounds = Rounds(store, most=most, places=places)
    before = dict(rounds.places)
    try:
        yield rounds
    finally:
        if rounds.places != before:
            with suppress(StoreError):  # the next sweep begins where this one did
                store.write_rows([agent_writes.keep_places(row["taskId"], rounds.places, owner=owner)])
