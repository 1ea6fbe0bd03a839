"""Payloads and results of every size, and deletion with all that belongs to a task."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any, Final, cast

import pytest

from tests.support.stands import Stand, only, seen
from thunderagent.model.clock import DateClock, since_boot
from thunderagent.model.errors import DuplicateTask, PayloadTooLarge
from thunderagent.model.task import Row, Status, timestamp
from thunderagent.model.writes import tasks as writes
from thunderagent.stores.dynamo import expressions
from thunderagent.stores.dynamo.engine import TEXT_SETTLES_S, DynamoEngine
from thunderagent.stores.engine import MAX_TEXT_BYTES, PAYLOAD_MARK, Applied, KeptText
from thunderagent.stores.large_texts import DAY_S, KEEP_PAYLOAD_S, SURE_S
from thunderagent.stores.tasks import TEXT_DOUBT_S, Beat, TaskStore, Wanted
from thunderagent.testing import FakeClock
from thunderagent.testing.faulty_engine import Fault, FaultyEngine

LONG_AGO_S: Final = TEXT_SETTLES_S + 60.0


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
    assert re.match(
        r"the payload of 'report\.build' has 358,401 bytes; .*THUNDERAGENT_BLOB_BUCKET", str(answers[1].error)
    )
    assert stand.store.get([stand.id("large")]) == {}


def test_a_payload_is_measured_in_bytes_not_in_letters(stand: Stand) -> None:
    text = json.dumps("ü" * (MAX_TEXT_BYTES // 2), ensure_ascii=False)
    assert isinstance(only(stand.store.enqueue([stand.task(payload_text=text)])).error, PayloadTooLarge)


def test_a_payload_over_the_limit_goes_to_the_bucket_if_there_is_one(stand: Stand) -> None:
    class Bucket:
        def __init__(self) -> None:
            self.large_texts: dict[str, str] = {}

        def put(self, key: str, text: str) -> str:
            self.large_texts[f"s3://bucket/{key}"] = text
            return f"s3://bucket/{key}"

        def get(self, ref: str) -> KeptText:
            return KeptText(self.large_texts[ref])

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
    ref = stand.store.large_texts.keep(f"{lease.task_id}#result", _text(5000), what="it", expire_at=now + 100)
    result = None if ref else _text(5000)
    done = writes.succeed(lease, now=now, expire_at=now + 100, result=result, result_ref=ref)
    assert stand.store.settle([done])[0].accepted
    assert stand.now().result_text == _text(5000)
    assert (ref is None) == stand.name.startswith("sqlite")


@pytest.mark.slow
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


def _ended(stand: Stand, *, age_s: float = LONG_AGO_S, change: str = ", updatedAt = :at", lives_s: float = 0.0) -> Row:
    """The row of a task that has ended, with a payload that was put some time ago and lives for longer by `lives_s`."""
    now = stand.store.clock.now()
    put_at = timestamp(now - age_s)
    lease = stand.lease(payload_text=_text(5000), created_at=put_at, submitted_at=put_at)
    ref = stand.store.large_texts.keep(f"{lease.task_id}#result", _text(5000), what="it", expire_at=now + 100)
    done = writes.succeed(lease, now=now, expire_at=now + 100, result_ref=ref)
    assert stand.store.settle([done])[0].accepted
    row = stand.store.engine.get([lease.task_id])[lease.task_id]
    marks = {":at": put_at, ":until": int(put_at + KEEP_PAYLOAD_S + lives_s)}
    change = f"SET expireAt = :until{change}"
    stand.dynamo.connection.call(
        "UpdateItem",
        TableName=stand.dynamo.table,
        Key=expressions.key(_keys(row)[0]),
        UpdateExpression=change,
        ExpressionAttributeValues={mark: {"N": str(at)} for mark, at in marks.items() if mark in change},
    )
    return row


def _keys(row: Row) -> list[str]:
    """The keys of the payload and of the result of a task."""
    return [str(row[name]).removeprefix("item:") for name in ("payloadRef", "resultRef")]


class Requests:
    """The writes that an engine sends, by operation and key; something may be done before one of them."""

    def __init__(
        self, engine: DynamoEngine, before: Callable[[str, str], object] = lambda operation, name: None
    ) -> None:
        self.sent: list[tuple[str, str]] = []
        connection: Any = engine.connection
        self._call, self._before = connection.call, before
        connection.call = self._sending

    def _sending(self, operation: str, **arguments: Any) -> Any:
        item = arguments.get("Item") or arguments.get("Key")
        if item:
            self._before(operation, item["taskId"]["S"])
            self.sent.append((operation, item["taskId"]["S"]))
        return self._call(operation, **arguments)


@pytest.mark.slow
@pytest.mark.parametrize("change", [", updatedAt = :at", " REMOVE updatedAt"], ids=["ours", "of a release before"])
def test_a_deleted_task_takes_its_texts_along(dynamo_stand: Stand, change: str) -> None:
    row = _ended(dynamo_stand, change=change)
    keys, requests = _keys(row), Requests(dynamo_stand.dynamo)
    assert len(dynamo_stand.store.engine.get_texts(keys)) == 2
    assert dynamo_stand.store.engine.delete([row]) == [True]
    assert dynamo_stand.store.engine.get_texts(keys) == {}
    assert requests.sent == [("DeleteItem", name) for name in (row["taskId"], *keys)]


BETWEEN: Final = ("row", "text", "end")
"""Before which step of a deletion something happens: the row goes, then the text, and it is over."""


@pytest.mark.slow
@pytest.mark.parametrize("lives_s", [-DAY_S, DAY_S], ids=["ends before", "lives longer"])
@pytest.mark.parametrize(
    ("text_at", "row_at"), [("row", "text"), ("row", "end"), ("text", "text"), ("text", "end"), ("end", "end")]
)
def test_a_task_that_is_put_while_an_equal_one_is_deleted_has_its_payload(
    dynamo_stand: Stand, text_at: str, row_at: str, lives_s: float
) -> None:
    row = _ended(dynamo_stand, lives_s=lives_s)
    other = dynamo_stand.open()
    stored, answers = [], list[Applied]()

    def reach(step: str) -> None:
        if step == text_at:
            stored.append(other.large_texts.put_payload(dynamo_stand.task(payload_text=_text(5000))))
        if step == row_at:
            answers.extend(other.engine.put([one.to_row() for one in stored if not isinstance(one, Exception)]))

    def before(operation: str, name: str) -> None:
        if operation == "DeleteItem" and "#result" not in name:
            reach("text" if PAYLOAD_MARK in name else "row")

    Requests(dynamo_stand.dynamo, before)
    assert dynamo_stand.dynamo.delete([row]) == [True]
    reach("end")
    assert [answer.won for answer in answers] == [True]
    task = dynamo_stand.now()
    assert task.payload_error is None
    assert (task.status, task.payload_text) == (Status.PENDING, _text(5000))
    assert (task.payload_until or 0.0) > dynamo_stand.store.clock.now() + KEEP_PAYLOAD_S - DAY_S


def test_a_deletion_that_stands_still_between_row_and_text_leaves_the_next_its_payload(dynamo_stand: Stand) -> None:
    """What is put lately counts from before the row went, however late the text is asked for."""
    row, slept_s = _ended(dynamo_stand), [0.0]
    engine = cast(DynamoEngine, dynamo_stand.open().engine)
    connection: Any = engine.connection
    connection.clock = DateClock(monotonic=lambda: since_boot() + slept_s[0])
    call = connection.call

    def sleepy(operation: str, **arguments: Any) -> Any:
        reply = call(operation, **arguments)
        if (operation, arguments["Key"]) == ("DeleteItem", expressions.key(row["taskId"])):
            dynamo_stand.enqueue(payload_text=_text(5000))
            slept_s[0] = LONG_AGO_S
        return reply

    connection.call = sleepy
    assert engine.delete([row]) == [True]
    assert dynamo_stand.now().payload_text == _text(5000)


def test_a_payload_whose_task_was_deleted_at_once_is_kept_no_longer_than_is_safe(dynamo_stand: Stand) -> None:
    row = _ended(dynamo_stand, age_s=1.0)
    [payload, result] = _keys(row)
    requests = Requests(dynamo_stand.dynamo)
    assert dynamo_stand.dynamo.delete([row]) == [True]
    assert requests.sent == [("DeleteItem", row["taskId"]), ("UpdateItem", payload), ("DeleteItem", result)]
    left = dynamo_stand.dynamo.get_texts([payload, result])
    assert left == {payload: KeptText(_text(5000), int(row["submittedAt"] + SURE_S))}
    dynamo_stand.enqueue(payload_text=_text(5000))
    assert (dynamo_stand.now().payload_until or 0.0) > dynamo_stand.store.clock.now() + KEEP_PAYLOAD_S - DAY_S


def test_a_payload_that_another_enqueue_has_written_since_is_left_as_it_is(dynamo_stand: Stand) -> None:
    for age_s in (LONG_AGO_S, 1.0):
        row = _ended(dynamo_stand, age_s=age_s)
        later = dynamo_stand.task(payload_text=_text(5000), created_at=dynamo_stand.store.clock.now() + 5 * DAY_S)
        assert not only(dynamo_stand.store.enqueue([later])).created
        assert dynamo_stand.dynamo.delete([row]) == [True]
        [(_, text)] = dynamo_stand.dynamo.get_texts(_keys(row)).items()
        assert text.expire_at == int(later.created_at + KEEP_PAYLOAD_S)


@pytest.mark.slow
@pytest.mark.parametrize("fails", [False, True])
def test_an_enqueue_that_stood_still_between_text_and_row_writes_the_text_once_more(
    dynamo_stand: Stand, fails: bool
) -> None:
    row, clock = _ended(dynamo_stand), FakeClock()

    class Slow(FaultyEngine):
        def put(self, rows: Sequence[Row], *, fresh: bool = False) -> list[Applied]:
            assert dynamo_stand.dynamo.delete([row]) == [True]
            key = expressions.key(_keys(row)[0])
            dynamo_stand.dynamo.connection.call("DeleteItem", TableName=dynamo_stand.dynamo.table, Key=key)
            clock.advance(TEXT_DOUBT_S + 1)
            if fails:
                self.fail("put_texts", Fault.LOST_REQUEST)
            return super().put(rows, fresh=fresh)

    store = TaskStore(Slow(dynamo_stand.dynamo), monotonic=clock.monotonic)
    task = dynamo_stand.task(payload_text=_text(5000))
    answer = only(store.enqueue([task]))
    assert bool(answer.error) == fails, "its caller may enqueue it once more"
    assert fails or dynamo_stand.now().payload_text == _text(5000)
    again = only(dynamo_stand.store.enqueue([task]))
    assert (again.error, again.created) == (None, True)
    assert dynamo_stand.now().payload_text == _text(5000)


@pytest.mark.parametrize(("ahead_s", "texts"), [(1.0, 1), (-5.0, 2)], ids=["lives on", "ends when it ended"])
def test_an_enqueue_that_finds_its_payload_writes_it_once_more(dynamo_stand: Stand, ahead_s: float, texts: int) -> None:
    """One write of its size; two where the text that is there lives longer."""
    first = dynamo_stand.enqueue(payload_text=_text(5000))
    due = first.created_at + ahead_s
    requests = Requests(dynamo_stand.dynamo)
    again = dynamo_stand.task(payload_text=_text(5000), created_at=due, submitted_at=due)
    assert not only(dynamo_stand.store.enqueue([again])).created
    assert len([name for _, name in requests.sent if PAYLOAD_MARK in name]) == texts


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
