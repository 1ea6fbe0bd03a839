"""What a task costs on DynamoDB: the numbers of section 4 of the design, by the documented rules on real rows.

With a real table (see `stands.py`) the same numbers are also measured.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support import stands
from tests.support.billing import size, write_units
from tests.support.stands import Stand, open_stand, seen
from thunderagent.model.task import Lane, Status
from thunderagent.model.writes import tasks as writes
from thunderagent.stores.dynamo import expressions
from thunderagent.stores.dynamo.consumed import Consumed
from thunderagent.stores.dynamo.engine import DynamoEngine
from thunderagent.stores.tasks import Beat, TaskStore, Wanted
from thunderagent.streams.cursor import Cursor, joined_cursor
from thunderagent.streams.journal import Journal, keep_journals

ENQUEUE = (2, 1)
CLAIM = SUCCEED = RETRY = (3, 2)
HEARTBEAT = TAKE_OVER = (1, 0)


class Bill:
    """Units of the last change of the test's task, by the rules."""

    def __init__(self, stand: Stand) -> None:
        self._stand = stand
        self._before: dict[str, Any] | None = None

    def item(self) -> dict[str, Any]:
        engine = self._stand.dynamo
        key = expressions.key(self._stand.id("a"))
        item: dict[str, Any] = engine.connection.call("GetItem", TableName=engine.table, Key=key, ConsistentRead=True)[
            "Item"
        ]
        return item

    def since(self) -> tuple[int, int]:
        before, self._before = self._before, self.item()
        return write_units(before, self._before)


@pytest.fixture
def bill(dynamo_stand: Stand) -> Bill:
    return Bill(dynamo_stand)


def test_a_small_task_costs_eight_write_units(dynamo_stand: Stand, bill: Bill) -> None:
    task = dynamo_stand.enqueue(payload_text='{"note":"' + "x" * 300 + '"}')
    assert bill.since() == ENQUEUE
    [lease] = dynamo_stand.store.claim([Wanted(seen(task), 300.0)], owner="agent-1@host-1234567890")
    assert bill.since() == CLAIM
    for beat in range(3):
        beats = [Beat(lease, progress=f'"{beat}"', last_seq={"seq": beat})]
        assert dynamo_stand.store.renew(beats)[0].lease is not None
        assert bill.since() == HEARTBEAT, "a heartbeat must not touch the index"
    now = dynamo_stand.store.clock.now()
    done = writes.succeed(lease, now=now, expire_at=now + 100, result='{"path":"/reports/1.csv"}')
    assert dynamo_stand.store.settle([done])[0].accepted
    assert bill.since() == SUCCEED
    assert ENQUEUE[0] + CLAIM[0] + SUCCEED[0] == 8


@pytest.mark.parametrize("ended", [Status.SUCCESS, Status.FAILED])
def test_a_task_writes_its_values_of_the_index_two_two_and_one_time_and_its_end_stays_in_its_shard(
    dynamo_stand: Stand, bill: Bill, ended: Status
) -> None:
    lane = Lane(f"q-{dynamo_stand.mark}", 3)
    told, before = Counter[str](), None

    def count() -> None:
        nonlocal before
        places, before = (before, place := {name: bill.item()[name] for name in ("status", "createdAt")}), place
        if places[0] != places[1]:
            told.update(place["status"]["S"] for place in places if place is not None)

    task = dynamo_stand.enqueue(lane=lane)
    count()
    [lease] = dynamo_stand.store.claim([Wanted(seen(task), 300.0)], owner="agent-1")
    count()
    now = dynamo_stand.store.clock.now()
    end = writes.succeed(lease, now=now, expire_at=now + 100, result="1")
    if ended is Status.FAILED:
        end = writes.fail(lease, now=now, expire_at=now + 100, error="no")
    assert dynamo_stand.store.settle([end])[0].accepted
    count()
    suffix = f"#{lane.queue}.3"  # the arithmetic of docs/guides/operations.md
    assert told == {f"PENDING{suffix}": 2, f"RUNNING{suffix}": 2, f"{ended}{suffix}": 1}


def test_a_take_over_costs_one_and_a_retry_three(dynamo_stand: Stand, bill: Bill) -> None:
    dynamo_stand.lease()
    bill.since()
    [taken] = dynamo_stand.store.take_over([(dynamo_stand.now(), 60.0)], owner="agent-2").leases
    assert bill.since() == TAKE_OVER
    now = dynamo_stand.store.clock.now()
    retry = writes.retry(taken, due=now + 5, error="boom", now=now)
    assert dynamo_stand.store.settle([retry])[0].accepted
    assert bill.since() == RETRY


def test_a_large_payload_is_not_billed_with_each_change(dynamo_stand: Stand, bill: Bill) -> None:
    task = dynamo_stand.enqueue(payload_text='"' + "x" * 9000 + '"')
    assert bill.since() == ENQUEUE
    assert dynamo_stand.store.claim([Wanted(seen(task), 60.0)], owner="agent-1")
    assert bill.since() == CLAIM


def test_the_largest_inline_payload_leaves_the_row_under_a_kilobyte(dynamo_stand: Stand, bill: Bill) -> None:
    lease = dynamo_stand.lease(payload_text='"' + "x" * 510 + '"')
    dynamo_stand.store.renew([Beat(lease, progress='"half"', last_seq={"seq": 123456})])
    assert size(bill.item()) < 1024


def of_many_keys() -> Cursor:
    """As large as a cursor of several sequences may be."""
    cursor = joined_cursor(Cursor(10**16 + number, key=f"SYM{number:02}USDT") for number in range(20))
    assert cursor is not None
    cursor.check_size()  # once its numbers are as large as they become
    with pytest.raises(ValueError, match="at most 400"):
        cursor.with_place(Cursor(10**9, key="AVERYLONGSYMBOL")).check_size()
    return cursor


@pytest.mark.slow
@pytest.mark.parametrize("whole", [Cursor(2**53, "e" * 36, "t" * 100), of_many_keys()], ids=["token", "keys"])
def test_a_stream_costs_one_unit_a_beat_with_its_cursor_and_none_for_the_index(
    dynamo_stand: Stand, bill: Bill, whole: Cursor
) -> None:
    lease = dynamo_stand.lease(
        kind="stream",
        job="ticker.follow",
        payload_text='{"url":"' + "x" * 200 + '"}',
        desired_state="STARTED",
        last_seq=whole.to_map(),
        handoff_owner="host-1.eu-central-1.compute.internal:12345:deadbeef",
        handoff_until=1_800_000_000.123,
        handoff_state="DONE",
        max_retry=3,
    )
    bill.since()
    for beat in range(3):
        cursor = replace(whole, seq=whole.seq + beat).to_map()
        assert dynamo_stand.store.renew([Beat(lease, last_seq=cursor, forgive=beat == 1)])[0].lease is not None
        assert bill.since() == HEARTBEAT
    assert size(bill.item()) < 1024
    moment = dynamo_stand.store.clock.now()
    assert dynamo_stand.store.write_tasks([writes.request_stop(dynamo_stand.now(), now=moment)]) != [None]
    assert bill.since() == HEARTBEAT


def test_of_a_handoff_the_offer_and_the_claim_touch_the_index_and_the_rest_does_not(
    dynamo_stand: Stand, bill: Bill
) -> None:
    lease, store = dynamo_stand.lease(kind="stream"), dynamo_stand.store
    bill.since()
    moment = store.clock.now()
    assert store.settle([writes.offer(lease, now=moment, until=moment + 15)])[0].accepted
    assert bill.since() == RETRY
    [after] = store.claim([Wanted(seen(dynamo_stand.now()), 20.0)], owner="agent-2")
    assert bill.since() == CLAIM
    assert store.write_tasks([writes.ready(after, now=moment)]) != [None]
    assert bill.since() == HEARTBEAT
    assert store.write_tasks([writes.hand_over(after.task_id, owner="agent-1", last_seq={"seq": 5}, now=moment)]) != [
        None
    ]
    assert bill.since() == HEARTBEAT


def test_a_journal_touches_no_index(dynamo_stand: Stand) -> None:
    engine, rows = dynamo_stand.dynamo, []
    journal = Journal(dynamo_stand.id("a"), 1, "agent-1")
    for _ in range(2):
        journal.moved(1.0, "live")
        info = journal.take(
            0.0,
        )
        assert info is not None
        keep_journals(dynamo_stand.store, {journal.journal_id: info}, keep_s=600)
        key = expressions.key(journal.journal_id)
        rows.append(engine.connection.call("GetItem", TableName=engine.table, Key=key, ConsistentRead=True)["Item"])
    assert write_units(None, rows[0]) == (1, 0)
    assert write_units(rows[0], rows[1]) == (1, 0)


def test_the_meter_counts_requests_refusals_and_units_of_all_siblings(wire_stand: Stand) -> None:
    place = wire_stand.dynamo.connection.place
    engine = DynamoEngine(place.table, region=place.region, endpoint=place.endpoint, consumed=Consumed(enabled=True))
    store = TaskStore(engine)
    sibling = store.sibling()
    task = wire_stand.enqueue()
    assert sibling.claim([Wanted(seen(task), 60.0)], owner="agent-1")
    assert store.claim([Wanted(seen(task), 60.0)], owner="agent-2") == []
    consumed = engine.consumed
    assert (consumed.requests, consumed.refused) == (2, 1)
    assert consumed.write_units > consumed.index_write_units > 0
    assert consumed.read_units == 0
    store.ready(wire_stand.lane, limit=10)
    assert consumed.read_units > 0
    sibling.engine.close()
    engine.close()


def test_the_meter_adds_up_what_replies_say() -> None:
    consumed = Consumed(enabled=True)
    index = {"status-createdAt-index": {"CapacityUnits": 2.0}}
    consumed.add("UpdateItem", {"ConsumedCapacity": {"CapacityUnits": 3.0, "GlobalSecondaryIndexes": index}})
    put = {"CapacityUnits": 50.0, "GlobalSecondaryIndexes": index}
    duplicate = {"Error": {"Code": "DuplicateItem"}}
    consumed.add("BatchExecuteStatement", {"ConsumedCapacity": [put], "Responses": [{}, duplicate, {}]})
    consumed.add("Query", {"ConsumedCapacity": {"CapacityUnits": 0.5}})
    consumed.add("PutItem", {})
    consumed.add_refused()
    assert (consumed.write_units, consumed.index_write_units, consumed.read_units) == (53.0, 4.0, 0.5)
    assert (consumed.requests, consumed.refused) == (5, 2)


@pytest.fixture
def real_stand(tmp_path: Path) -> Iterator[Stand]:
    if not stands.REAL:
        pytest.skip("no real table: set THUNDER_TEST_DYNAMODB to its URL")
    with open_stand("aws", tmp_path) as stand:
        yield stand


def test_the_real_dynamodb_bills_the_same(real_stand: Stand) -> None:
    place = real_stand.dynamo.connection.place
    engine = DynamoEngine(place.table, region=place.region, consumed=Consumed(enabled=True))
    store, told = TaskStore(engine), engine.consumed
    real_stand.enqueue("lane")  # registers the lane
    engine.lanes()
    task = real_stand.task()
    last = 0.0

    def since() -> float:
        nonlocal last
        before, last = last, told.write_units
        return last - before

    assert store.enqueue([task])[0].created
    assert since() == ENQUEUE[0]
    [lease] = store.claim([Wanted(seen(task), 60.0)], owner="agent-1")
    assert since() == CLAIM[0]
    assert store.renew([Beat(lease)])[0].lease is not None
    assert since() == HEARTBEAT[0]
    now = store.clock.now()
    assert store.settle([writes.succeed(lease, now=now, expire_at=now + 100, result="1")])[0].accepted
    assert since() == SUCCEED[0]
    engine.close()
