"""What each verb of a stream's life costs on DynamoDB, by its rules, from the rows before and after (see `units`)."""

from __future__ import annotations

import math
from typing import Final

from benchmarks.streams_jobs import LEASE_S, Source, follow
from benchmarks.units import UNIT_BYTES, item_bytes, write_units
from thunderagent.client import Client
from thunderagent.model.conditions import Write
from thunderagent.model.task import Candidate, Lease, Row
from thunderagent.model.writes import tasks as writes
from thunderagent.stores.tasks import Beat, Wanted
from thunderagent.streams.connection.ending import State
from thunderagent.streams.cursor import Cursor
from thunderagent.streams.journal import Journal, journal_id, keep_journals

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


def stream_units(client: Client, queue: str) -> tuple[dict[str, float], int]:
    """Write units of each verb, and the bytes of the largest row of the task itself."""
    store = client.store
    known = client.enqueue(follow, Source(url=URL), queue=queue)  # the first one makes the queue known
    units = dict[str, float]()
    rows = dict[str, Row]()
    largest = 0

    def note(verb: str, name: str) -> None:
        after = store.engine.get([name])[name]
        units[verb] = _units(rows.get(name), after)
        rows[name] = after

    def do(verb: str, write: Write) -> None:
        [after] = store.write_tasks([write])
        assert after is not None, f"{verb} was refused"
        note(verb, write.task_id)

    def claim(verb: str) -> Lease:
        task = client.get(task_id)
        seen = Candidate(task.task_id, task.status_value, task.created_at, task.job, task.kind)
        [lease] = store.claim([Wanted(seen, LEASE_S)], owner=OWNER)
        note(verb, task_id)
        return lease

    def beat(verb: str, lease: Lease, cursor: dict[str, object] | None) -> Lease:
        [renewal] = store.renew([Beat(lease, last_seq=cursor)])
        assert renewal.lease is not None
        note(verb, task_id)
        return renewal.lease

    task_id = client.enqueue(follow, Source(url=URL), queue=queue).task_id
    note("enqueue", task_id)
    lease = claim("claim")
    lease = beat("heartbeat", lease, None)
    lease = beat("heartbeat with cursor", lease, CURSOR)
    lease = beat("heartbeat, next", lease, CURSOR | {"seq": 123_456_999})
    largest = item_bytes(rows[task_id])

    journal = Journal(task_id, lease.fence, OWNER)
    for verb, reconnects in (("journal, new", 1), ("journal, one reconnect later", 1), ("journal, full", 12)):
        for state, reason in RECONNECT * reconnects:
            journal.moved(store.clock.now(), state, reason)
        told = journal.take(0.0, connects=1, handled=1_000_000, duplicates=0)
        assert told is not None
        keep_journals(store, {journal.journal_id: told}, keep_s=DAY_S)
        note(verb, journal_id(task_id, lease.fence))

    now = store.clock.now()
    do("release", writes.with_cursor(writes.release(lease, now=now), CURSOR))
    lease = claim("claim again")
    do("offer", writes.with_cursor(writes.offer(lease, now=now, until=now + 15.0), CURSOR))
    lease = claim("claim of an offer")
    do("ready", writes.ready(lease, now=now))
    do("hand over", writes.hand_over(task_id, owner=OWNER, last_seq=CURSOR, now=now))
    do("request stop", writes.request_stop(lease.task, now=now))
    store.settle([writes.stop(lease, now=now, expire_at=now + DAY_S)])
    note("stop", task_id)
    client.cancel(known)
    client.purge("DONE", queue=queue)
    return units, largest


def _units(before: Row | None, after: Row) -> float:
    """Units of a write; a row without a status has no entry in the index."""
    if "status" in after:
        return write_units(before, after)
    return float(math.ceil(max(item_bytes(before or {}), item_bytes(after)) / UNIT_BYTES))
