"""DynamoDB refuses, throttles or breaks for one member of a batch: the others have their own answers."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.stands import Stand, seen
from tests.support.wire import refusals
from thunderagent.model.conditions import Present, Write
from thunderagent.model.errors import (
    AccessDenied,
    CredentialsExpired,
    StoreError,
    StoreRejected,
    StoreThrottled,
    StoreUnavailable,
)
from thunderagent.model.task import Lane, Status, new_task_id
from thunderagent.model.writes import tasks as writes
from thunderagent.stores.dynamo.batches import LEFT_OUT, PROBE_ID, batch_delays
from thunderagent.stores.dynamo.connection import Connection
from thunderagent.stores.dynamo.engine import DynamoEngine
from thunderagent.stores.dynamo.errors import Refused
from thunderagent.stores.tasks import Beat, TaskStore, Wanted


@pytest.fixture
def hasty(wire_stand: Stand) -> Iterator[TaskStore]:
    """A store that gives up early."""
    engine = wire_stand.dynamo.sibling()
    yield TaskStore(engine)
    engine.close()


@pytest.mark.slow
def test_a_throttled_heartbeat_is_no_loss_and_leaves_its_neighbours_alone(wire_stand: Stand, hasty: TaskStore) -> None:
    leases = [wire_stand.lease(name) for name in ("x", "throttled", "y")]
    reasons = [{"reason": "IndexWriteKeyRangeThroughputExceeded", "resource": "arn:index"}]
    code = "ProvisionedThroughputExceededException"
    with refusals(hasty.engine, "UpdateItem", 400, code, of=leases[1].task_id, ThrottlingReasons=reasons):
        renewals = hasty.renew([Beat(lease) for lease in leases])
        [answer] = hasty.engine.apply([writes.release(leases[1], now=1760000000.0)])
    assert [bool(renewal.lease) for renewal in renewals] == [True, False, True]
    assert not renewals[1].lost
    assert isinstance(answer.error, StoreThrottled)
    assert "IndexWriteKeyRangeThroughputExceeded arn:index" in str(answer.error)


@pytest.mark.slow
def test_a_broken_reply_is_told_for_its_task_alone(wire_stand: Stand, hasty: TaskStore) -> None:
    tasks = [wire_stand.enqueue(name) for name in ("x", "broken", "y")]
    with refusals(hasty.engine, "UpdateItem", 500, "InternalServerError", of=tasks[1].task_id) as fault:
        exchanged = hasty.exchange([], [Wanted(seen(task), 60.0) for task in tasks], owner="agent-1")
    assert fault.met == 2
    assert [lease.task_id for lease in exchanged.leases] == [tasks[0].task_id, tasks[2].task_id]
    assert [doubt.wanted.candidate.task_id for doubt in exchanged.doubts] == [tasks[1].task_id]
    assert isinstance(exchanged.error, StoreUnavailable)
    assert hasty.resolve(exchanged.doubts, owner="agent-1") == []


@pytest.mark.slow
def test_an_enqueue_that_was_throttled_says_so_and_the_others_are_there(wire_stand: Stand, hasty: TaskStore) -> None:
    tasks = [wire_stand.task(name) for name in ("x", "throttled", "y")]
    with refusals(hasty.engine, "PutItem", 400, "ThrottlingException", of=tasks[1].task_id):
        answers = hasty.enqueue(tasks)
    assert [answer.created for answer in answers] == [True, False, True]
    assert isinstance(answers[1].error, StoreThrottled)
    assert set(hasty.get(task.task_id for task in tasks)) == {tasks[0].task_id, tasks[2].task_id}


def test_one_passing_throttle_is_not_seen_by_anybody(wire_stand: Stand) -> None:
    lease = wire_stand.lease()
    with refusals(wire_stand.dynamo, "UpdateItem", 400, "ThrottlingException", times=1) as fault:
        assert wire_stand.store.renew([Beat(lease)])[0].lease is not None
    assert fault.met == 1


def test_expired_credentials_are_replaced_once_and_the_call_goes_on(wire_stand: Stand) -> None:
    lease = wire_stand.lease()
    before = wire_stand.dynamo.connection.client
    with refusals(wire_stand.dynamo, "UpdateItem", 400, "ExpiredTokenException"):
        assert wire_stand.store.renew([Beat(lease)])[0].lease is not None
    after = wire_stand.dynamo.connection.client
    assert after is not before
    with refusals(wire_stand.dynamo, "UpdateItem", 400, "ExpiredTokenException"):
        [answer] = wire_stand.store.engine.apply([writes.release(lease, now=1760000000.0)])
    assert isinstance(answer.error, CredentialsExpired)
    assert wire_stand.dynamo.connection.client is after, "not a new session for every request"


# Batch requests. What DynamoDB does only under load is put in between the engine and its connection.


class Between:
    """Stands in for the `call` of a connection and may answer by itself."""

    def __init__(self, engine: DynamoEngine) -> None:
        self.calls: list[str] = []
        self.real = engine.connection.call
        engine.connection.call = self  # type: ignore[method-assign]

    def __call__(self, action: str, **arguments: Any) -> dict[str, Any]:
        self.calls.append(action)
        return self.real(action, **arguments)


class LeavesOut(Between):
    """Does only the first of each batch for `rounds` rounds; the code says why a statement was left out."""

    def __init__(self, engine: DynamoEngine, rounds: int, done: int = 1, code: str = "ThrottlingError") -> None:
        super().__init__(engine)
        self.rounds, self.done, self.code = rounds, done, code

    def __call__(self, action: str, **arguments: Any) -> dict[str, Any]:
        if action not in ("BatchExecuteStatement", "BatchGetItem") or not self.rounds:
            return super().__call__(action, **arguments)
        if action == "BatchExecuteStatement":
            statements = arguments["Statements"]
            if statements[0]["Parameters"] == [{"S": PROBE_ID}]:
                return super().__call__(action, **arguments)
            self.rounds -= 1
            reply = super().__call__(action, Statements=statements[: self.done])
            left_out = {"Error": {"Code": self.code, "Message": "injected"}}
            return {"Responses": reply["Responses"] + [left_out] * len(statements[self.done :])}
        self.rounds -= 1
        [(table, wanted)] = arguments["RequestItems"].items()
        now, later = wanted["Keys"][: self.done], wanted["Keys"][self.done :]
        reply = super().__call__(action, RequestItems={table: {**wanted, "Keys": now}}) if now else {"Responses": {}}
        return {"Responses": reply["Responses"], "UnprocessedKeys": {table: {**wanted, "Keys": later}}}


@pytest.fixture
def slept() -> list[float]:
    return []


@pytest.fixture
def engine(dynamo_stand: Stand, slept: list[float]) -> Iterator[DynamoEngine]:
    """An engine that does not really wait."""
    place = dynamo_stand.dynamo.connection.place
    made = DynamoEngine(place.table, region=place.region, endpoint=place.endpoint, threads=1, sleep=slept.append)
    yield made
    made.close()


@pytest.fixture
def wired(wire_stand: Stand, slept: list[float]) -> Iterator[DynamoEngine]:
    """As `engine`, of a DynamoDB that inserts in batches."""
    place = wire_stand.dynamo.connection.place
    made = DynamoEngine(place.table, region=place.region, endpoint=place.endpoint, threads=1, sleep=slept.append)
    yield made
    made.close()


@pytest.mark.parametrize("code", ["ThrottlingError", "ProvisionedThroughputExceeded", "InternalServerError"])
def test_what_was_left_out_of_a_batch_is_put_again(
    wire_stand: Stand, wired: DynamoEngine, slept: list[float], code: str
) -> None:
    tasks = [wire_stand.task(task_id=new_task_id()) for _ in range(6)]
    LeavesOut(wired, rounds=3, code=code)
    answers = TaskStore(wired).enqueue(tasks, fresh=True)
    assert all(answer.created for answer in answers)
    assert len(slept) == 3
    assert wired.consumed.throttles() == {LEFT_OUT: 3}
    assert len(wire_stand.store.get(task.task_id for task in tasks)) == 6


def test_what_is_left_out_for_ever_is_throttled_and_the_others_are_there(
    wire_stand: Stand, wired: DynamoEngine, slept: list[float]
) -> None:
    tasks = [wire_stand.task(task_id=new_task_id()) for _ in range(10)]
    LeavesOut(wired, rounds=1000)
    answers = TaskStore(wired).enqueue(tasks, fresh=True)
    assert [type(answer.error) for answer in answers] == [type(None)] * 8 + [StoreThrottled] * 2
    assert set(wire_stand.store.get(task.task_id for task in tasks)) == {task.task_id for task in tasks[:8]}
    assert len(slept) == 8
    assert 0 < sum(slept) < 0.05 * 2**8


def test_a_bad_row_of_a_fresh_batch_does_not_sink_its_neighbours(wire_stand: Stand, wired: DynamoEngine) -> None:
    tasks = [wire_stand.task(task_id=new_task_id(), progress_text="x" * size) for size in (10, 20, 30)]

    class TooLarge(Between):
        """A real DynamoDB tells of a row over 400 KB in the answer to its statement."""

        def __call__(self, action: str, **arguments: Any) -> dict[str, Any]:
            if action != "BatchExecuteStatement" or len(arguments["Statements"]) == 1:
                return super().__call__(action, **arguments)
            first, _, last = arguments["Statements"]
            [one, three] = super().__call__(action, Statements=[first, last])["Responses"]
            error = {"Code": "ValidationError", "Message": "Item size has exceeded the maximum allowed size"}
            return {"Responses": [one, {"Error": error}, three]}

    between = TooLarge(wired)
    answers = TaskStore(wired).enqueue(tasks, fresh=True)
    assert [answer.created for answer in answers] == [True, False, True]
    assert isinstance(answers[1].error, StoreRejected)
    assert "too large" in str(answers[1].error)
    assert set(between.calls) == {"BatchExecuteStatement"}
    assert set(wired.get([task.task_id for task in tasks])) == {tasks[0].task_id, tasks[2].task_id}


def test_a_batch_that_is_not_acceptable_as_a_whole_is_put_row_by_row(wire_stand: Stand, wired: DynamoEngine) -> None:
    tasks = [wire_stand.task(task_id=new_task_id()) for _ in range(3)]

    class Whole(Between):
        def __call__(self, action: str, **arguments: Any) -> dict[str, Any]:
            if action == "BatchExecuteStatement" and len(arguments["Statements"]) > 1:
                raise StoreRejected("injected")
            return super().__call__(action, **arguments)

    between = Whole(wired)
    assert all(answer.created for answer in TaskStore(wired).enqueue(tasks, fresh=True))
    assert between.calls[-3:] == ["PutItem"] * 3


@pytest.mark.slow
def test_a_batch_without_an_answer_is_an_error_of_each_of_its_rows(wire_stand: Stand, wired: DynamoEngine) -> None:
    store = TaskStore(wired)
    store.enqueue([wire_stand.task(task_id=new_task_id()) for _ in range(2)], fresh=True)
    tasks = [wire_stand.task(task_id=new_task_id()) for _ in range(3)]
    with refusals(wired, "BatchExecuteStatement", 500, "InternalServerError"):
        answers = store.enqueue(tasks, fresh=True)
    assert [type(answer.error) for answer in answers] == [StoreUnavailable] * 3
    assert all(answer.created for answer in store.enqueue(tasks, fresh=True)), "put again, they are the same tasks"


class Batchless(Between):
    """Answers what an engine says that is not to be trusted with batches of INSERT."""

    def __init__(self, engine: DynamoEngine, answer: Exception | None) -> None:
        super().__init__(engine)
        self.answer = answer

    def __call__(self, action: str, **arguments: Any) -> dict[str, Any]:
        if action != "BatchExecuteStatement":
            return super().__call__(action, **arguments)
        self.calls.append(action)
        if self.answer is not None:
            raise self.answer
        return {"Responses": [{"TableName": "x"} for _ in arguments["Statements"]]}


@pytest.mark.parametrize(
    ("answer", "asked"),
    [
        (None, 2),
        (StoreRejected("no such action"), 1),
        (AccessDenied("dynamodb:PartiQLInsert"), 1),
        (ImportError("no parser"), 1),
    ],
    ids=["overwrites in silence", "knows no PartiQL", "a policy of before", "moto without its parser"],
)
def test_an_engine_that_does_not_refuse_what_is_there_gets_one_row_at_a_time(
    dynamo_stand: Stand, engine: DynamoEngine, answer: Exception | None, asked: int
) -> None:
    between = Batchless(engine, answer)
    for _ in range(2):
        tasks = [dynamo_stand.task(task_id=new_task_id()) for _ in range(3)]
        assert all(one.created for one in TaskStore(engine).enqueue(tasks, fresh=True))
    assert between.calls.count("BatchExecuteStatement") == asked, "it is asked once"
    assert between.calls.count("PutItem") == 6


def test_what_an_outage_says_of_batches_is_not_remembered(wire_stand: Stand, wired: DynamoEngine) -> None:
    between = Batchless(wired, StoreUnavailable("injected"))
    put = wired.put([wire_stand.task(task_id=new_task_id()).to_row() for _ in range(2)], fresh=True)
    assert all(one.won for one in put)
    wired.connection.call = between.real  # type: ignore[method-assign]
    again = Between(wired)
    wired.put([wire_stand.task(task_id=new_task_id()).to_row() for _ in range(2)], fresh=True)
    assert "PutItem" not in again.calls


def test_keys_that_were_left_out_are_read_again(dynamo_stand: Stand, engine: DynamoEngine, slept: list[float]) -> None:
    tasks = [dynamo_stand.enqueue(f"n{number}") for number in range(5)]
    LeavesOut(engine, rounds=3)
    assert len(engine.get([task.task_id for task in tasks])) == 5
    assert slept == [], "it went on"
    LeavesOut(engine, rounds=2, done=0)
    assert len(engine.get([task.task_id for task in tasks])) == 5
    assert len(slept) == 2
    LeavesOut(engine, rounds=1000, done=0)
    with pytest.raises(StoreThrottled):
        engine.get([task.task_id for task in tasks])


@pytest.mark.slow
def test_an_engine_that_tells_no_row_with_its_refusal_is_asked_for_it(
    dynamo_stand: Stand, engine: DynamoEngine
) -> None:
    class Silent(Between):
        def __call__(self, action: str, **arguments: Any) -> dict[str, Any]:
            try:
                return super().__call__(action, **arguments)
            except Refused:
                raise Refused(None) from None

    lease = dynamo_stand.lease(owner="agent-2")
    Silent(engine)
    store = TaskStore(engine)
    stale = seen(dynamo_stand.task(submitted_at=1.0))
    [answer] = engine.apply([writes.claim(stale, owner="agent-1", lease_s=9.0, now=1.0, until=10.0)])
    assert (answer.won, answer.error) == (False, None)
    assert answer.row is not None
    assert answer.row["leaseOwner"] == "agent-2"
    [again] = store.enqueue([dynamo_stand.task()])
    assert (again.created, again.task) == (False, lease.task)


def test_a_page_that_is_empty_but_not_the_last_is_gone_past(dynamo_stand: Stand, engine: DynamoEngine) -> None:
    class EmptyFirst(Between):
        def __call__(self, action: str, **arguments: Any) -> dict[str, Any]:
            if action == "Query" and "ExclusiveStartKey" not in arguments:
                return {"Items": [], "Count": 0, "LastEvaluatedKey": key}
            return super().__call__(action, **arguments)

    lane = Lane(f"lane-{dynamo_stand.mark}")
    dynamo_stand.enqueue("a", lane=lane, created_at=1760000000.0)
    dynamo_stand.enqueue("b", lane=lane, created_at=1760000001.0)
    pending = lane.value(Status.PENDING)
    key = engine.page(pending, limit=1).after
    EmptyFirst(engine)
    page = engine.page(pending, limit=10)
    assert (page.entries, page.after) == ((), key)
    assert [entry.task_id for entry in engine.page(pending, limit=10, after=page.after).entries] == [
        dynamo_stand.id("b")
    ]
    assert engine.count(pending) == 1


def test_a_value_that_is_not_json_is_refused_for_its_task_alone(dynamo_stand: Stand) -> None:
    leases = [dynamo_stand.lease(name) for name in ("a", "b")]
    beats = [writes.renew(lease, now=1.0, until=2.0, last_seq={"x": number}) for number, lease in enumerate(leases)]
    beats[0].set["lastSeq"]["x"] = object()
    answers = dynamo_stand.store.engine.apply(beats)
    assert [answer.won for answer in answers] == [False, True]
    assert isinstance(answers[0].error, StoreError)


def test_a_lane_is_registered_once_a_process(dynamo_stand: Stand, engine: DynamoEngine) -> None:
    between = Between(engine)
    lanes = [Lane(f"lane-{dynamo_stand.mark}", shard) for shard in range(3)]
    store = TaskStore(engine)
    for number in range(6):
        [answer] = store.enqueue([dynamo_stand.task(f"n{number}", lane=lanes[number % 3])])
        assert answer.created
    assert between.calls.count("UpdateItem") == 3
    other = DynamoEngine(
        engine.table, region=engine.connection.place.region, endpoint=engine.connection.place.endpoint, threads=1
    )
    assert set(lanes) <= set(other.lanes())
    known = Between(other)
    assert TaskStore(other).enqueue([dynamo_stand.task("again", lane=lanes[0])])[0].created
    assert known.calls == ["PutItem"]
    other.close()


def test_tasks_of_a_lane_that_cannot_be_registered_are_not_put(dynamo_stand: Stand, engine: DynamoEngine) -> None:
    class NoLanes(Between):
        def __call__(self, action: str, **arguments: Any) -> dict[str, Any]:
            if action == "UpdateItem":
                raise StoreThrottled
            return super().__call__(action, **arguments)

    NoLanes(engine)
    task = dynamo_stand.task(lane=Lane(f"lane-{dynamo_stand.mark}"))
    [answer] = TaskStore(engine).enqueue([task])
    assert isinstance(answer.error, StoreThrottled)
    assert dynamo_stand.store.get([task.task_id]) == {}


def test_a_write_that_the_engine_does_not_understand_is_an_error_with_its_reason(dynamo_stand: Stand) -> None:
    task = dynamo_stand.enqueue()
    write = Write(verb="bad", task_id=task.task_id, increase={"status": 1}, require=(Present("taskId"),))
    [answer] = dynamo_stand.store.engine.apply([write])
    assert isinstance(answer.error, StoreError)
    assert "UpdateItem" in str(answer.error)


def test_a_connection_says_where_it_goes(dynamo_stand: Stand) -> None:
    connection: Connection = dynamo_stand.dynamo.connection
    assert dynamo_stand.dynamo.url == connection.place.url
    assert dynamo_stand.dynamo.table in str(connection.place)


def test_leftovers_of_a_batch_are_sent_again_with_full_jitter() -> None:
    rng = random.Random()
    rng.uniform = lambda a, b: b  # type: ignore[method-assign]
    assert list(itertools.islice(batch_delays(rng), 9)) == [0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]
