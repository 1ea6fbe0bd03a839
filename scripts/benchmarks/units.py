"""What each verb of a task's life costs on DynamoDB by itself."""

from __future__ import annotations

from benchmarks.nojobs import Number, nothing
from thunderagent.client import Client
from thunderagent.store import Beat, Wanted
from thunderagent.stores.dynamo import DynamoEngine
from thunderagent.task import Candidate
from thunderagent.writes import succeed


def verb_units(client: Client, queue: str) -> dict[str, float]:
    """Write units of enqueue, claim, heartbeat and end of one task."""
    store, units = client.store, dict[str, float]()
    engine = store.engine
    assert isinstance(engine, DynamoEngine)

    def note(verb: str) -> None:
        units[verb] = engine.consumed.write_units - sum(units.values()) - base

    known = client.enqueue(nothing, Number(n=0), queue=queue)  # the first one makes the queue known
    base = engine.consumed.write_units
    task = client.enqueue(nothing, Number(n=1), queue=queue)
    note("enqueue")
    seen = Candidate(task.task_id, task.status_value, task.created_at, task.job, task.kind)
    [lease] = store.claim([Wanted(seen, 300.0)], owner="bench")
    note("claim")
    [renewal] = store.renew([Beat(lease)])
    note("heartbeat")
    now = store.clock.now()
    store.settle([succeed(renewal.lease or lease, now=now, expire_at=now + 3600)])
    note("succeed")
    client.cancel(known)
    for status in ("SUCCESS", "DONE"):
        client.purge(status, queue=queue)
    return units
