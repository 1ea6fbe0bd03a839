"""What each verb of a task's life costs on DynamoDB by itself.

Local engines count the index wrongly: ministack bills it for every write, dynalite never. So the units are computed
too, by DynamoDB's rules, from the row before and after each write:

* the table takes one unit for each KB of the larger of both rows;
* the index takes nothing while no attribute in it changes, one unit for each KB that is put, deleted or replaced under
  the same key, and both when its key changes.

See "Item sizes and formats" and "Using Global Secondary Indexes" in Amazon's developer guide.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Final

from benchmarks.nojobs import Number, nothing
from thunderagent.client import Client
from thunderagent.model.task import Candidate, Row
from thunderagent.model.writes.tasks import succeed
from thunderagent.stores.dynamo.engine import DynamoEngine
from thunderagent.stores.dynamo.expressions import PROJECTED, encode_row
from thunderagent.stores.tasks import Beat, Wanted

INDEX_KEYS: Final = ("taskId", "status", "createdAt")
UNIT_BYTES: Final = 1024


def verb_units(client: Client, queue: str) -> tuple[dict[str, float], dict[str, float], int]:
    """Write units of enqueue, claim, heartbeat and end of one task.

    Returns:
        by DynamoDB's rules; as the engine tells; and the bytes of the largest row.
    """
    store = client.store
    engine = store.engine
    assert isinstance(engine, DynamoEngine)
    known = client.enqueue(nothing, Number(n=0), queue=queue)  # the first one makes the queue known
    computed, told = dict[str, float](), dict[str, float]()
    row: Row | None = None
    largest = 0

    def note(verb: str, task_id: str, units: float) -> None:
        nonlocal row, largest
        told[verb] = engine.consumed.write_units - units
        after = engine.get([task_id])[task_id]
        computed[verb] = write_units(row, after)
        row, largest = after, max(largest, item_bytes(after))

    units = engine.consumed.write_units
    task = client.enqueue(nothing, Number(n=1), queue=queue)
    note("enqueue", task.task_id, units)
    seen = Candidate(task.task_id, task.status_value, task.created_at, task.job, task.kind)
    units = engine.consumed.write_units
    [lease] = store.claim([Wanted(seen, 300.0)], owner="bench:00000:00000000")
    note("claim", task.task_id, units)
    units = engine.consumed.write_units
    [renewal] = store.renew([Beat(lease)])
    note("heartbeat", task.task_id, units)
    now = store.clock.now()
    units = engine.consumed.write_units
    store.settle([succeed(renewal.lease or lease, now=now, expire_at=now + 3600)])
    note("succeed", task.task_id, units)
    client.cancel(known)
    for status in ("SUCCESS", "DONE"):
        client.purge(status, queue=queue)
    return computed, told, largest


def write_units(before: Row | None, after: Row) -> float:
    """What DynamoDB bills for a write in the table and its index, which has no entry of a row without a status."""
    table = max(item_bytes(before or {}), item_bytes(after))
    indexed = [index_entry(before or {}), index_entry(after)]
    units = _units(table)
    if indexed[0] != indexed[1]:
        old, new = map(item_bytes, indexed)
        same_key = all(indexed[0].get(name) == indexed[1].get(name) for name in INDEX_KEYS)
        units += _units(max(old, new)) if same_key else _units(old) + _units(new)
    return units


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


def _units(size: int) -> float:
    return float(math.ceil(size / UNIT_BYTES))
