"""What requests to DynamoDB are counted under, and the throttles that botocore repeats by itself."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from tests.support.stands import Stand, seen
from tests.support.wire import refusals
from thunderagent.model.errors import StoreThrottled
from thunderagent.model.task import Status
from thunderagent.model.writes import tasks as writes
from thunderagent.settings import Settings
from thunderagent.stores import open_store
from thunderagent.stores.dynamo.consumed import Consumed, Spent
from thunderagent.stores.dynamo.engine import DynamoEngine
from thunderagent.stores.purposes import RequestPurpose
from thunderagent.stores.tasks import Beat, TaskStore, Wanted

CODE = "ProvisionedThroughputExceededException"


@pytest.fixture
def metered(wire_stand: Stand) -> Iterator[DynamoEngine]:
    place = wire_stand.dynamo.connection.place
    engine = DynamoEngine(place.table, region=place.region, endpoint=place.endpoint, consumed=Consumed(enabled=True))
    yield engine
    engine.close()


def test_each_verb_of_a_task_is_counted_under_its_purpose(wire_stand: Stand, metered: DynamoEngine) -> None:
    store, now = TaskStore(metered), time.time()
    [enqueued] = store.enqueue([wire_stand.task()])
    store.ready(wire_stand.lane, limit=10)
    [lease] = store.claim([Wanted(seen(enqueued.task), 60.0)], owner="agent-1")
    assert store.claim([Wanted(seen(enqueued.task), 60.0)], owner="agent-2") == []
    store.renew([Beat(lease)])
    metered.page(Status.RUNNING, limit=5)
    store.settle([writes.succeed(lease, now=now, expire_at=now + 100)])
    store.get([lease.task_id])
    metered.count(Status.PENDING, until=now, most=10)
    store.announce("a:1:x", {"queues": {}}, lives_s=60)
    store.take_turn("measure", owner="a", lasts_s=55.0)
    metered.put_texts({"x#payload": "{}"}, expire_at=now + 60)
    metered.get_texts(["x#payload"])
    told = metered.consumed.by_purpose()
    assert set(told) == {
        RequestPurpose.ENQUEUE,
        RequestPurpose.POLL,
        RequestPurpose.CLAIM,
        RequestPurpose.HEARTBEAT,
        RequestPurpose.SWEEP,
        RequestPurpose.SETTLE,
        RequestPurpose.TASKS,
        RequestPurpose.MEASURE,
        RequestPurpose.REGISTRY,
        RequestPurpose.TEXTS,
    }
    claim = told[RequestPurpose.CLAIM]
    assert (claim.requests, claim.refused) == (2, 1)
    assert claim.billed_write_units == claim.write_units + 1 > 1
    assert told[RequestPurpose.POLL].read_units > 0 == told[RequestPurpose.POLL].write_units
    assert told[RequestPurpose.HEARTBEAT].write_units > 0


def test_the_purposes_add_up_to_the_whole(wire_stand: Stand, metered: DynamoEngine) -> None:
    store = TaskStore(metered)
    tasks = [wire_stand.task(str(number)) for number in range(30)]
    store.enqueue(tasks, fresh=True)
    store.claim([Wanted(seen(task), 60.0) for task in tasks], owner="agent-1")
    store.get(task.task_id for task in tasks)
    whole, told = metered.consumed, metered.consumed.by_purpose()
    assert told[RequestPurpose.ENQUEUE].requests == 2
    for name in ("requests", "refused", "write_units", "index_write_units", "read_units"):
        assert sum(getattr(spent, name) for spent in told.values()) == getattr(whole, name)


@pytest.mark.slow
def test_a_throttle_is_counted_by_its_reason_although_botocore_tries_again(
    wire_stand: Stand, metered: DynamoEngine
) -> None:
    task = wire_stand.enqueue()
    reasons = [{"reason": "IndexWriteKeyRangeThroughputExceeded", "resource": "arn:index"}]
    with refusals(metered, "UpdateItem", 400, CODE, times=1, ThrottlingReasons=reasons) as fault:
        assert TaskStore(metered).claim([Wanted(seen(task), 60.0)], owner="agent-1")
    assert fault.met == 1
    assert metered.consumed.throttles() == {"IndexWriteKeyRangeThroughputExceeded": 1}


@pytest.mark.slow
def test_a_throttle_without_a_reason_is_counted_by_its_code_once_a_reply(
    wire_stand: Stand, metered: DynamoEngine
) -> None:
    sibling = metered.sibling()
    with refusals(sibling, "Query", 400, "ThrottlingException") as fault, pytest.raises(StoreThrottled):
        sibling.page(Status.PENDING, limit=1)
    assert metered.consumed.throttles() == {"ThrottlingException": fault.met}
    sibling.close()


@pytest.mark.slow
def test_an_error_that_is_no_throttle_is_not_counted_as_one(wire_stand: Stand, metered: DynamoEngine) -> None:
    task = wire_stand.enqueue()
    with refusals(metered, "UpdateItem", 500, "InternalServerError", times=1):
        TaskStore(metered).claim([Wanted(seen(task), 60.0)], owner="agent-1")
    assert TaskStore(metered).claim([Wanted(seen(task), 60.0)], owner="agent-2") == []
    assert metered.consumed.throttles() == {}


def test_the_store_of_an_agent_counts_and_that_of_a_client_does_not_ask() -> None:
    settings = Settings(store="dynamodb://TaskTable?endpoint=http://127.0.0.1:1")
    for for_agent in (True, False):
        engine = open_store(settings, for_agent=for_agent).engine
        assert isinstance(engine, DynamoEngine)
        assert engine.consumed.enabled is for_agent
        engine.close()


def test_what_is_told_is_a_copy() -> None:
    consumed = Consumed(enabled=True)
    consumed.add_refused(RequestPurpose.CLAIM)
    told = consumed.by_purpose()
    consumed.add_refused(RequestPurpose.CLAIM)
    assert told == {RequestPurpose.CLAIM: Spent(requests=1, refused=1)}
    assert consumed.by_purpose()[RequestPurpose.CLAIM].billed_write_units == 2.0
