"""What a task and a stream cost on DynamoDB, by its rules, from the rows before and after each write.

Local engines count the index wrongly: ministack bills it for every write, dynalite never. So the units are computed:

* the table takes one write unit for each KB of the larger of both rows;
* the index takes nothing while no attribute in it changes, one unit for each KB that is put, deleted or replaced under
  the same key, and both when its key changes; it has no entry of a row without a status;
* a query of the index takes half a read unit for each 4 KB of its entries together, at least half a unit.

See "Item sizes and formats" and "Using Global Secondary Indexes" in Amazon's developer guide.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Final

from benchmarks.agent import BEAT_S, LEASE_S, Number, Source, follow, nothing
from benchmarks.harness import Section, section
from thunderagent.client import Client
from thunderagent.model.conditions import Write
from thunderagent.model.task import Candidate, Lease, Row
from thunderagent.model.writes import tasks as writes
from thunderagent.settings import load_settings
from thunderagent.stores import open_store
from thunderagent.stores.dynamo.expressions import PROJECTED, encode_row
from thunderagent.stores.sqlite.engine import MEMORY
from thunderagent.stores.tasks import Beat, Wanted
from thunderagent.streams.connection.ending import State
from thunderagent.streams.cursor import Cursor
from thunderagent.streams.journal import Journal, journal_id, keep_journals
from thunderagent.telemetry.prices import MONTH_S, store_dollars

TASK_UNITS: Final = 8.0
"""Write units of a task: two to put it, and three for each of two changes of its status."""
PAGE: Final = 50
"""Entries of the index that a poll reads."""
INDEX_KEYS: Final = ("taskId", "status", "createdAt")
OWNER: Final = "bench-host:00000:00000000"
URL: Final = "wss://feed.example.com/v1/market/ticker?symbol=EURUSD"
CURSOR: Final = Cursor(123_456_789, "2026-07-01").to_map()
DAY_S: Final = 86400.0
RECONNECT: Final = (
    (State.BACKOFF, "closed 1006 (ConnectionResetError: [Errno 104] reset by peer); next attempt in 0.3 s"),
    (State.RESOLVING, ""),
    (State.CONNECTING, ""),
    (State.LIVE, ""),
)
"""The moves of one reconnect, as they are usual."""


def measure_units() -> list[Section]:
    """The verbs of a task, what a poll reads, and the verbs of a stream; from rows of a store in memory."""
    task, stream = _Bill(), _Bill()
    _live_as_task(task)
    polls = _polls(task.client)
    _live_as_stream(stream)
    hour = stream.units["heartbeat with cursor"] * 3600 / BEAT_S
    whole = {
        **stream.units,
        "largest row, bytes": stream.largest,
        "a stream and hour, at most": hour,
        "100 streams a month, $, at most": store_dollars(write_units=hour * 100 * MONTH_S / 3600),
    }
    verbs = {**task.units, "largest row, bytes": task.largest}
    lasting = sum(units for verb, units in task.units.items() if verb != "heartbeat")
    one, beats = (1.0, 1.0), ("heartbeat", "heartbeat with cursor", "heartbeat, next")
    goals = {"all but heartbeats": (TASK_UNITS, TASK_UNITS), **dict.fromkeys(beats, one)}
    return [
        section("write units of a task", {"all but heartbeats": lasting, **verbs}, goals=goals),
        section("read units of polls", polls),
        section("write units of a stream", whole, goals=goals),
    ]


class _Bill:
    """One task and what its writes cost."""

    def __init__(self) -> None:
        settings = load_settings(store=f"sqlite://{MEMORY}")
        self.client = Client(open_store(settings), settings)
        self.store = self.client.store
        self.units: dict[str, float] = {}
        self.largest = 0
        self._rows: dict[str, Row] = {}

    def note(self, verb: str, row_id: str) -> None:
        """A row was written; largest is that of a task."""
        after = self.store.engine.get([row_id])[row_id]
        self.units[verb] = write_units(self._rows.get(row_id), after)
        self._rows[row_id] = after
        if "status" in after:
            self.largest = max(self.largest, item_bytes(after))

    def claim(self, verb: str, task_id: str) -> Lease:
        """Claim the task."""
        task = self.client.get(task_id)
        seen = Candidate(task.task_id, task.status_value, task.created_at, task.job, task.kind)
        [lease] = self.store.claim([Wanted(seen, LEASE_S)], owner=OWNER)
        self.note(verb, task_id)
        return lease

    def beat(self, verb: str, lease: Lease, cursor: dict[str, object] | None = None) -> Lease:
        """Renew the lease."""
        [renewal] = self.store.renew([Beat(lease, last_seq=cursor)])
        assert renewal.lease is not None
        self.note(verb, lease.task_id)
        return renewal.lease

    def write(self, verb: str, write: Write) -> None:
        """Any other write."""
        [after] = self.store.write_tasks([write])
        assert after is not None, f"{verb} was refused"
        self.note(verb, write.task_id)


def _live_as_task(bill: _Bill) -> None:
    task_id = bill.client.enqueue(nothing, Number(n=1)).task_id
    bill.note("enqueue", task_id)
    lease = bill.beat("heartbeat", bill.claim("claim", task_id))
    now = bill.store.clock.now()
    bill.store.settle([writes.succeed(lease, now=now, expire_at=now + 3600)])
    bill.note("succeed", task_id)


def _polls(client: Client) -> dict[str, float]:
    """Read units of one poll that finds nothing, and of one with a full page for each of its tasks."""
    client.enqueue_many(nothing, (Number(n=number) for number in range(PAGE)))
    engine = client.store.engine
    [lane, *_] = engine.lanes()
    page = engine.page(lane.value("PENDING"), limit=PAGE)
    rows = engine.get([entry.task_id for entry in page.entries])
    size = sum(item_bytes(index_entry(row)) for row in rows.values())
    return {"a poll that finds nothing": 0.5, f"a poll of {PAGE} tasks, each": math.ceil(size / 4096) / 2 / len(rows)}


def _live_as_stream(bill: _Bill) -> None:
    store = bill.store
    task_id = bill.client.enqueue(follow, Source(url=URL)).task_id
    bill.note("enqueue", task_id)
    lease = bill.beat("heartbeat", bill.claim("claim", task_id))
    lease = bill.beat("heartbeat with cursor", lease, CURSOR)
    lease = bill.beat("heartbeat, next", lease, CURSOR | {"seq": 123_456_999})
    journal = Journal(task_id, lease.fence, OWNER)
    for verb, reconnects in (("journal, new", 1), ("journal, one reconnect later", 1), ("journal, full", 12)):
        for state, reason in RECONNECT * reconnects:
            journal.moved(store.clock.now(), state, reason)
        entries = journal.take(0.0, connects=1, handled=1_000_000, duplicates=0)
        assert entries is not None
        keep_journals(store, {journal.journal_id: entries}, keep_s=DAY_S)
        bill.note(verb, journal_id(task_id, lease.fence))
    now = store.clock.now()
    bill.write("release", writes.with_cursor(writes.release(lease, now=now), CURSOR))
    lease = bill.claim("claim again", task_id)
    bill.write("offer", writes.with_cursor(writes.offer(lease, now=now, until=now + 15.0), CURSOR))
    lease = bill.claim("claim of an offer", task_id)
    bill.write("ready", writes.ready(lease, now=now))
    bill.write("hand over", writes.hand_over(task_id, owner=OWNER, last_seq=CURSOR, now=now))
    bill.write("request stop", writes.request_stop(lease.task, now=now))
    store.settle([writes.stop(lease, now=now, expire_at=now + DAY_S)])
    bill.note("stop", task_id)


# The rules


def write_units(before: Row | None, after: Row) -> float:
    """What DynamoDB bills for a write in the table and its index."""
    units = _kilobytes(max(item_bytes(before or {}), item_bytes(after)))
    old, new = index_entry(before or {}), index_entry(after)
    if old == new:
        return units
    sizes = item_bytes(old), item_bytes(new)
    is_same_key = all(old.get(name) == new.get(name) for name in INDEX_KEYS)
    return units + (_kilobytes(max(sizes)) if is_same_key else sum(map(_kilobytes, sizes)))


def index_entry(row: Row) -> Row:
    """What the index has of a row; nothing if the row lacks one of its keys."""
    if any(name not in row for name in INDEX_KEYS):
        return {}
    return {name: row[name] for name in (*INDEX_KEYS, *PROJECTED) if name in row}


def item_bytes(row: Row) -> int:
    """Size of an item as DynamoDB counts it."""
    return sum(len(name.encode()) + _value_bytes(value) for name, value in encode_row(row).items()) if row else 0


def _value_bytes(value: Mapping[str, Any]) -> int:
    [(kind, held)] = value.items()
    sizes: dict[str, Callable[[], int]] = {
        "S": lambda: len(held.encode()),
        "N": lambda: math.ceil(len(held.strip("-").replace(".", "")) / 2) + 1,
        "SS": lambda: sum(len(one.encode()) for one in held),
        "L": lambda: 3 + sum(1 + _value_bytes(one) for one in held),
        "M": lambda: 3 + sum(1 + len(name.encode()) + _value_bytes(one) for name, one in held.items()),
    }
    return sizes[kind]() if kind in sizes else 1


def _kilobytes(size: int) -> float:
    return float(math.ceil(size / 1024))
