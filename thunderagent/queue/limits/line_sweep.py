"""The sweep of the lines: finds what nobody else looks for.

An agent died between two writes, has no such job, or read an index that was late: after a sweep all is as it should be.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, Final

from thunderagent.model.rows import is_number
from thunderagent.model.task import Candidate, Lane, Row, Task
from thunderagent.model.writes import limits as limit_writes
from thunderagent.model.writes.limits import LINE_STATUS
from thunderagent.queue.limits.lines import PAGE, PAGES, keys_of, let_out, line_value
from thunderagent.queue.limits.slots import Slots, holders_of, number_of, rows_of
from thunderagent.queue.sweeps import ENTRIES_A_SWEEP, Rounds, fleet_rounds
from thunderagent.stores.tasks import TaskStore, passed_over

LINE_CLOSES_S: Final = 600.0
"""A line is closed when it is empty and nobody has spoken for it for so long: ten times longer than any write takes."""

LINE_SWEEP_S: Final = 2.0
"""How long one sweep of the lines may hold up an agent's loop."""


AT_ONCE: Final = 100
"""Tasks of one line that one sweep lets out."""

PLACES_KEPT: Final = 1000
"""Long lines of which an agent remembers how far it has read; of others it reads the head and what is next to it."""


class LineSweep:
    """Looks after all open lines; one agent of the fleet does so in each `sweep_s`. Called in the agent's loop."""

    def __init__(
        self,
        store: TaskStore,
        slots: Slots,
        *,
        told: Callable[[Task], None] = lambda task: None,
        most: int = PAGE * PAGES,
        most_lines: int = ENTRIES_A_SWEEP,
    ) -> None:
        """Make one.

        Args:
            store: where the lines are.
            slots: know whose leases are over.
            told: told of tasks that were let out of their line into their queue, for any agent.
            most: tasks in one lane of a line that are read at its head, and again behind that.
            most_lines: open lines that one sweep looks after.
        """
        self._store = store
        self._slots = slots
        self._told = told
        self._most = most
        self._most_lines = most_lines
        self._places: dict[str, Any] = {}

    def run(self, lanes: Sequence[Lane], numbers: Mapping[str, int], *, owner: str, turn_s: float) -> int:
        """Look after all open lines: free slots of leases that are over, let out who waits for a free slot, and close
        lines that have been empty for long. Bounded in time: the next sweep goes on where this one stops.

        Args:
            lanes: all that are known.
            numbers: of the limits of jobs that this agent has; of others the row tells.
            owner: the agent, which takes the turn when there is an open line at all.
            turn_s: length of the turn.

        Returns:
            how many tasks were let out.

        Raises:
            StoreError: the store did not answer.
        """
        number, until = 0, self._store.monotonic() + LINE_SWEEP_S
        if not self._store.engine.page(LINE_STATUS, limit=1).entries:
            return 0
        turn = fleet_rounds(self._store, "lines", owner=owner, lasts_s=turn_s, most=self._most_lines)
        with turn as rounds:
            for found in rounds.pages(LINE_STATUS) if rounds is not None else ():
                number += self._sweep(keys_of(found), lanes, numbers)
                if self._store.monotonic() >= until:
                    break
        return number

    def _sweep(self, keys: Sequence[str], lanes: Sequence[Lane], numbers: Mapping[str, int]) -> int:
        left = 0
        rows = rows_of(self._store, keys)
        self._slots.mend(rows.values())
        living = self._slots.living(rows.values())
        now = self._store.clock.now()
        over = [
            limit_writes.replace_holders(key, held, held & living, now=now)
            for key, row in rows.items()
            if not (held := holders_of(row)) <= living
        ]
        if over:
            self._store.write_rows(over, rejected=passed_over)  # where somebody was faster, he took or freed a slot
        for key, row in rows.items():
            number = numbers.get(key) or number_of(row.get("limitMax")) or 1
            free = number - len(holders_of(row) & living)
            if free <= 0:
                continue
            waiting = list(self._waiting(key, lanes, free))
            for task in let_out(self._store, waiting):
                self._told(task)
                left += 1
            if not waiting:
                self._close(key, lanes, row, number)
        return left

    def _waiting(self, key: str, lanes: Sequence[Lane], free: int) -> Iterator[Candidate]:
        """Who is to be let out: of each job in each lane as many as slots are free, so that no job whose tasks cannot
        start (paused, or no agent has it) holds up another."""
        number, seen = 0, Counter[tuple[Lane, str]]()
        for lane in lanes:
            for one in self._entries(line_value(lane, key)):
                seen[lane, one.job] += 1
                if seen[lane, one.job] <= free:
                    yield one
                    number += 1
                if number >= AT_ONCE:
                    return

    def _entries(self, value: str) -> Iterator[Candidate]:
        """The tasks that are due at the head of a line, and of those far behind another part in each sweep."""
        until = self._store.clock.latest()
        head = Rounds(self._store, most=self._most)
        yield from chain.from_iterable(head.pages(value, until=until))
        behind = self._places.pop(value, head.places.get(value))
        if behind is None or not head.places:
            return
        part = Rounds(self._store, most=self._most, places={value: behind})
        yield from chain.from_iterable(part.pages(value, until=until))
        self._places |= part.places
        while len(self._places) > PLACES_KEPT:
            del self._places[next(iter(self._places))]

    def _close(self, key: str, lanes: Sequence[Lane], row: Row, number: int) -> None:
        seen_at = row.get("updatedAt")
        if not is_number(seen_at):  # a row made by hand: from now on it counts
            keep = limit_writes.keep_line(key, number=number, now=self._store.clock.now())
            self._store.write_rows([keep], rejected=passed_over)
        elif self._store.clock.now() - seen_at >= LINE_CLOSES_S and not self._has_tasks(key, lanes):
            is_used, now = bool(holders_of(row)), self._store.clock.now()
            close = limit_writes.close_line(key, seen_at=seen_at, is_used=is_used, now=now)
            self._store.write_rows([close], rejected=passed_over)

    def _has_tasks(self, key: str, lanes: Sequence[Lane]) -> bool:
        return any(self._store.engine.page(line_value(lane, key), limit=1).entries for lane in lanes)
