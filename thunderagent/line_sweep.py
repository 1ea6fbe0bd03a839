"""The sweep of the lines: finds what nobody else looks for.

An agent died between two writes, has no such job, or read an index that was late: after a sweep all is as it should be.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from thunderagent import shared_writes
from thunderagent.limits import Slots, holders_of, number_of, rows_of
from thunderagent.lines import entries, let_out, line_value, pages_of_open_lines
from thunderagent.pacing import LINE_CLOSES_S, LINE_SWEEP_S
from thunderagent.store import TaskStore
from thunderagent.task import Candidate, Lane, Row, Task

AT_ONCE: Final = 100
"""Tasks of one line that one sweep lets out."""


class LineSweep:
    """Looks after all open lines; one agent of the fleet does so in each `sweep_s`. Called in the agent's loop."""

    def __init__(self, store: TaskStore, slots: Slots, *, told: Callable[[Task], None] = lambda task: None) -> None:
        """Make one.

        Args:
            store: where the lines are.
            slots: know whose leases are over.
            told: told of tasks that were let out of their line into their queue, for any agent.
        """
        self._store = store
        self._slots = slots
        self._told = told
        self._after: Any = None

    def run(self, lanes: Sequence[Lane], numbers: Mapping[str, int], *, is_my_turn: Callable[[], bool]) -> int:
        """Look after all open lines: free slots of leases that are over, let out who waits for a free slot, and close
        lines that have been empty for long. Bounded in time: the next sweep goes on where this one stops.

        Args:
            lanes: all that are known.
            numbers: of the limits of jobs that this agent has; of others the row tells.
            is_my_turn: asked once when there is an open line at all.

        Returns:
            how many tasks were let out.

        Raises:
            StoreError: the store did not answer.
        """
        number, until = 0, self._store.monotonic() + LINE_SWEEP_S
        has_turn = False
        after, self._after = self._after, None
        for keys, behind in pages_of_open_lines(self._store, after):
            if not keys:
                continue
            if not has_turn and not is_my_turn():
                return 0
            has_turn = True
            number += self._sweep(keys, lanes, numbers)
            if self._store.monotonic() >= until:
                self._after = behind
                break
        return number

    def _sweep(self, keys: Sequence[str], lanes: Sequence[Lane], numbers: Mapping[str, int]) -> int:
        left = 0
        rows = rows_of(self._store, keys)
        self._slots.mend(rows.values())
        living = self._slots.living(rows.values())
        now = self._store.clock.now()
        over = [
            shared_writes.replace_holders(key, held, held & living, now=now)
            for key, row in rows.items()
            if not (held := holders_of(row)) <= living
        ]
        if over:
            self._store.attempt(over)  # where somebody was faster, he took or freed a slot
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
            for one in entries(self._store, key, lane):
                seen[lane, one.job] += 1
                if seen[lane, one.job] <= free:
                    yield one
                    number += 1
                if number >= AT_ONCE:
                    return

    def _close(self, key: str, lanes: Sequence[Lane], row: Row, number: int) -> None:
        seen_at = row.get("updatedAt")
        if not isinstance(seen_at, (int, float)):  # a row made by hand: from now on it counts
            self._store.attempt([shared_writes.keep_line(key, number=number, now=self._store.clock.now())])
        elif self._store.clock.now() - seen_at >= LINE_CLOSES_S and not self._has_tasks(key, lanes):
            self._store.attempt([shared_writes.close_line(key, seen_at=seen_at)])

    def _has_tasks(self, key: str, lanes: Sequence[Lane]) -> bool:
        return any(self._store.engine.page(line_value(lane, key), limit=1).entries for lane in lanes)
