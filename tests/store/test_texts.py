"""Payloads and results of every size, and deletion with all that belongs to a task."""

from __future__ import annotations

import json
import re

import pytest

from tests.stands import Stand, only, seen
from thunderagent import writes
from thunderagent.errors import DuplicateTask, PayloadTooLarge
from thunderagent.port import MAX_TEXT_BYTES, KeptText
from thunderagent.store import Beat, TaskStore, Wanted
from thunderagent.task import Status, timestamp
from thunderagent.texts import DAY_S


def _text(size: int) -> str:
    return json.dumps("x" * (size - 2))


@pytest.mark.parametrize("size", [10, 512, 513, 20_000, MAX_TEXT_BYTES])
def test_a_payload_comes_back_whatever_its_size(stand: Stand, size: int) -> None:
    task = stand.enqueue(payload_text=_text(size))
    assert stand.now().payload_text == _text(size)
    [lease] = stand.store.claim([Wanted(seen(task), 60.0)], owner="agent-1")
    assert lease.task.payload_text == _text(size)


def test_a_payload_over_the_limit_is_refused_at_enqueue(stand: Stand) -> None:
    batch = [stand.task("x"), stand.task("large", payload_text=_text(MAX_TEXT_BYTES + 1)), stand.task("y")]
    answers = stand.store.enqueue(batch)
    assert [answer.created for answer in answers] == [True, False, True]
    assert isinstance(answers[1].error, PayloadTooLarge)
    assert re.search(r"358,401 bytes.*THUNDERAGENT_BLOB_BUCKET", str(answers[1].error))
    assert stand.store.get([stand.id("large")]) == {}


def test_a_payload_is_measured_in_bytes_not_in_letters(stand: Stand) -> None:
    text = json.dumps("ü" * (MAX_TEXT_BYTES // 2), ensure_ascii=False)
    assert isinstance(only(stand.store.enqueue([stand.task(payload_text=text)])).error, PayloadTooLarge)


def test_a_payload_over_the_limit_goes_to_the_bucket_if_there_is_one(stand: Stand) -> None:
    class Bucket:
        def __init__(self) -> None:
            self.texts: dict[str, str] = {}

        def put(self, key: str, text: str) -> str:
            self.texts[f"s3://bucket/{key}"] = text
            return f"s3://bucket/{key}"

        def get(self, ref: str) -> KeptText:
            return KeptText(self.texts[ref])

    store = TaskStore(stand.store.engine, blobs=Bucket())
    task = stand.task(payload_text=_text(MAX_TEXT_BYTES + 1))
    assert only(store.enqueue([task])).created
    assert store.get([task.task_id])[task.task_id].payload_text == task.payload_text


def test_the_row_of_a_task_with_a_large_payload_stays_small(dynamo_stand: Stand) -> None:
    task = dynamo_stand.enqueue(payload_text=_text(5000))
    reply = dynamo_stand.dynamo.connection.call(
        "GetItem", TableName=dynamo_stand.dynamo.table, Key={"taskId": {"S": task.task_id}}
    )
    assert len(json.dumps(reply["Item"])) < 1024


def test_the_same_large_payload_answers_with_the_task_that_has_it(stand: Stand) -> None:
    stand.enqueue(payload_text=_text(5000), submitted_at=1760000000.5)
    again = only(stand.store.enqueue([stand.task(payload_text=_text(5000))]))
    assert (again.created, again.error) == (False, None)


def test_a_refused_duplicate_leaves_the_large_payload_of_the_task_alone(stand: Stand) -> None:
    stand.enqueue(payload_text=_text(5000))
    answer = only(stand.store.enqueue([stand.task(payload_text=_text(6000))]))
    assert isinstance(answer.error, DuplicateTask)
    assert stand.now().payload_text == _text(5000)


def test_a_large_result_is_kept_beside_the_row(stand: Stand) -> None:
    lease = stand.lease()
    now = stand.store.clock.now()
    ref = stand.store.texts.keep(f"{lease.task_id}#result", _text(5000), expire_at=now + 100)
    result = None if ref else _text(5000)
    done = writes.succeed(lease, now=now, expire_at=now + 100, result=result, result_ref=ref)
    assert stand.store.settle([done])[0].accepted
    assert stand.now().result_text == _text(5000)
    assert (ref is None) == stand.name.startswith("sqlite")


def test_a_hundred_and_twenty_large_texts_are_read_together(dynamo_stand: Stand) -> None:
    texts = {dynamo_stand.id(f"t{number}"): f"{number}" * 600 for number in range(120)}
    dynamo_stand.store.engine.put_texts(texts, expire_at=1760000000.0)
    found = dynamo_stand.store.engine.get_texts([*texts, dynamo_stand.id("none")])
    assert found == {key: KeptText(text, 1760000000) for key, text in texts.items()}


def test_a_row_is_deleted_only_with_the_status_and_fence_that_were_seen(stand: Stand) -> None:
    stand.lease()
    row = stand.store.engine.get([stand.id("a")])[stand.id("a")]
    other_fence = {**row, "fence": 0}
    other_status = {**row, "status": stand.lane.value(Status.SUCCESS)}
    nobody = {**row, "taskId": stand.id("nobody")}
    assert stand.store.engine.delete([other_fence, other_status, nobody]) == [False, False, False]
    assert stand.now().status is Status.RUNNING
    assert stand.store.engine.delete([row]) == [True]
    assert stand.store.get([stand.id("a")]) == {}


def test_a_deleted_task_takes_its_texts_along(dynamo_stand: Stand) -> None:
    lease = dynamo_stand.lease(payload_text=_text(5000))
    now = dynamo_stand.store.clock.now()
    ref = dynamo_stand.store.texts.keep(f"{lease.task_id}#result", _text(5000), expire_at=now + 100)
    done = writes.succeed(lease, now=now, expire_at=now + 100, result_ref=ref)
    assert dynamo_stand.store.settle([done])[0].accepted
    row = dynamo_stand.store.engine.get([lease.task_id])[lease.task_id]
    keys = [str(row[name]).removeprefix("item:") for name in ("payloadRef", "resultRef")]
    assert len(dynamo_stand.store.engine.get_texts(keys)) == 2
    assert dynamo_stand.store.engine.delete([row]) == [True]
    assert dynamo_stand.store.engine.get_texts(keys) == {}


def test_rows_whose_time_is_over_are_deleted_by_somebody(stand: Stand) -> None:
    lease = stand.lease()
    now = stand.store.clock.now()
    assert stand.store.settle([writes.succeed(lease, now=now, expire_at=now - 10)])[0].accepted
    stand.enqueue("young")
    deleted = stand.store.engine.expire(now)
    if stand.name.startswith("sqlite"):
        assert deleted == 1
        assert stand.store.get([lease.task_id]) == {}
    else:
        assert deleted == 0, "the time to live of the table does it"
    assert stand.now("young").status is Status.PENDING


@pytest.mark.parametrize("again", [-400, 0, 10], ids=["earlier", "as early", "later"])
def test_a_payload_that_is_put_again_never_ends_earlier(dynamo_stand: Stand, again: int) -> None:
    """An idempotent enqueue without the delay of the first must not end its payload before its due time."""
    due = timestamp(dynamo_stand.store.clock.now() + 500 * DAY_S)
    first = dynamo_stand.task(payload_text=_text(5000), created_at=due)
    assert only(dynamo_stand.store.enqueue([first])).created
    was = dynamo_stand.now().payload_until
    assert was is not None
    assert was >= due + 364 * DAY_S
    second = dynamo_stand.task(payload_text=_text(5000), created_at=due + again * DAY_S)
    assert only(dynamo_stand.store.enqueue([second])).error is None
    assert dynamo_stand.now().payload_until == max(was, was + again * DAY_S)


def test_a_payload_of_a_task_that_was_due_long_ago_is_there(dynamo_stand: Stand) -> None:
    dynamo_stand.enqueue(payload_text=_text(5000), created_at=0.0)
    assert (dynamo_stand.now().payload_until or 0.0) > dynamo_stand.store.clock.now() + 300 * DAY_S


@pytest.mark.parametrize(("left_days", "writes"), [(170, 1), (190, 0)])
def test_a_claim_lets_a_payload_live_on(dynamo_stand: Stand, left_days: int, writes: int) -> None:
    now = dynamo_stand.store.clock.now()
    put_at = now - (365 - left_days) * DAY_S
    task = dynamo_stand.enqueue(payload_text=_text(5000), created_at=timestamp(put_at), submitted_at=timestamp(put_at))
    [lease] = dynamo_stand.store.claim([Wanted(seen(task), 60.0)], owner="agent-1")
    until = dynamo_stand.now().payload_until
    assert until is not None
    assert until // DAY_S == (now + (365 if writes else left_days) * DAY_S) // DAY_S
    [renewal] = dynamo_stand.store.renew([Beat(lease)])
    assert renewal.lease is not None
    assert renewal.lease.task.payload == "x" * 4998, "a heartbeat forgets no payload"
