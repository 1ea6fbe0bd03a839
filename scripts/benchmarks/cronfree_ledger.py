"""An engine that notes what DynamoDB would bill for every request, by its rules; see `units`.

It stands before any engine, so what an agent costs can be found on one in memory and in time that is simulated. Beside
the rules for writes:

* a write whose condition does not hold is billed in the table by the size of the row that refused it, at least one
  unit;
* a consistent read takes one unit for each 4 KB of each row, and one for a row that does not exist;
* a query of the index takes half a unit for each 4 KB of its entries together, at least half a unit.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from benchmarks.units import UNIT_BYTES, index_entry, item_bytes, write_units
from thunderagent.model.clock import SharedClock
from thunderagent.model.conditions import Write
from thunderagent.model.task import Lane, Page, Row, StatusValue
from thunderagent.model.writes.shared import AGENT_STATUS, LINE_STATUS
from thunderagent.stores.dynamo.batches import GET_BATCH, chunks
from thunderagent.stores.engine import Applied, Engine, KeptText, Overdue

READ_BYTES: Final = 4096


@dataclass(slots=True)
class Cost:
    """What one kind of request came to."""

    requests: int = 0
    refused: int = 0
    read_units: float = 0.0
    write_units: float = 0.0

    def __iadd__(self, other: Cost) -> Cost:
        self.requests += other.requests
        self.refused += other.refused
        self.read_units += other.read_units
        self.write_units += other.write_units
        return self


@dataclass(slots=True)
class Ledger:
    """What was asked so far, by kinds that say what for."""

    costs: dict[str, Cost] = field(default_factory=dict)
    _guard: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(self, kind: str, cost: Cost) -> None:
        """Note requests; any thread."""
        with self._guard:
            known = self.costs.setdefault(kind, Cost())
            known += cost

    def take(self) -> dict[str, Cost]:
        """Everything since the last time."""
        with self._guard:
            costs, self.costs = self.costs, {}
        return costs


def total(costs: Mapping[str, Cost]) -> Cost:
    """All kinds together."""
    both = Cost()
    for cost in costs.values():
        both += cost
    return both


class LedgerEngine:
    """An engine that notes in a ledger what is asked of the one behind it."""

    def __init__(self, engine: Engine, ledger: Ledger, *, clock: SharedClock | None = None) -> None:
        self._engine = engine
        self._ledger = ledger
        self._clock = clock

    @property
    def url(self) -> str:
        return self._engine.url

    @property
    def clock(self) -> SharedClock:
        return self._clock or self._engine.clock

    @property
    def inline_bytes(self) -> int:
        return self._engine.inline_bytes

    def put(self, rows: Sequence[Row], *, fresh: bool = False) -> list[Applied]:
        answers = self._engine.put(rows, fresh=fresh)
        for row, answer in zip(rows, answers, strict=True):
            self._wrote(f"put {_what(row['taskId'])}", None, row, answer)
        return answers

    def apply(self, batch: Sequence[Write]) -> list[Applied]:
        before = self._engine.get(list({write.task_id: None for write in batch}))
        answers = self._engine.apply(batch)
        for write, answer in zip(batch, answers, strict=True):
            seen = before.get(write.task_id)
            self._wrote(write.verb, seen, {} if write.delete else answer.row, answer)
            if answer.won and answer.row is not None:
                before[write.task_id] = answer.row
        return answers

    def get(self, task_ids: Sequence[str]) -> dict[str, Row]:
        rows = self._engine.get(task_ids)
        for some in chunks(list(task_ids), GET_BATCH):
            units = sum(_read_units(item_bytes(rows.get(name, {}))) for name in some)
            kinds = sorted({_what(name) for name in some})
            self._ledger.add(f"get {', '.join(kinds)}", Cost(requests=1, read_units=units))
        return rows

    def page(self, status_value: str, **options: Any) -> Page:
        page = self._engine.page(status_value, **options)
        rows = self._engine.get([entry.task_id for entry in page.entries])
        units = _read_units(sum(item_bytes(index_entry(row)) for row in rows.values())) / 2
        self._ledger.add(f"query {_whose(status_value)}", Cost(requests=1, read_units=units))
        return page

    @property
    def most_counted(self) -> int | None:
        return self._engine.most_counted

    def count(self, status_value: str, *, until: float | None = None, most: int | None = None) -> int:
        return self._engine.count(status_value, until=until, most=most)

    def lanes(self, strange: Callable[[str], None] = lambda suffix: None) -> list[Lane]:
        self._ledger.add("get lanes", Cost(requests=1, read_units=1.0))
        return self._engine.lanes(strange)

    def delete(self, tasks: Sequence[Row]) -> list[bool]:
        before = self._engine.get([task["taskId"] for task in tasks])
        answers = self._engine.delete(tasks)
        for task, won in zip(tasks, answers, strict=True):
            row = before.get(task["taskId"])
            self._wrote(f"delete {_what(task['taskId'])}", row, {}, Applied(won=won, row=row))
        return answers

    def expire(self, now: float) -> int:
        return 0  # DynamoDB does it, and asks nothing for it

    def overdue(self, now: float) -> Overdue | None:
        return None

    def put_texts(self, texts: Mapping[str, str], *, expire_at: float) -> None:
        self._engine.put_texts(texts, expire_at=expire_at)

    def get_texts(self, keys: Sequence[str]) -> dict[str, KeptText]:
        return self._engine.get_texts(keys)

    def check(self) -> None:
        self._engine.check()

    def sibling(self) -> LedgerEngine:
        """The sibling of the engine behind, with the same ledger."""
        inner = self._engine.sibling()
        return self if inner is self._engine else LedgerEngine(inner, self._ledger, clock=self._clock)

    def close(self) -> None:
        self._engine.close()

    def _wrote(self, kind: str, before: Row | None, after: Row | None, answer: Applied) -> None:
        if answer.won:
            self._ledger.add(kind, Cost(requests=1, write_units=write_units(before, after or {})))
        else:
            units = max(1, math.ceil(item_bytes(answer.row or {}) / UNIT_BYTES))
            self._ledger.add(kind, Cost(requests=1, refused=1, write_units=units))


def _what(row_id: str) -> str:
    """What a row is, from its id."""
    prefix, found, _ = row_id.partition(":")
    return prefix if found and prefix in _PREFIXES else "task"


_PREFIXES: Final = frozenset({"agent", "control", "journal", "limit", "schedule", "turn", "unique"})


def _whose(status_value: str) -> str:
    """What a query of the index looks for."""
    status, _, line = StatusValue.parse(status_value)
    if status in (AGENT_STATUS, LINE_STATUS):
        return f"{status} rows"
    return f"{status} in line" if line is not None else status


def _read_units(size: int) -> float:
    return float(max(1, math.ceil(size / READ_BYTES)))
