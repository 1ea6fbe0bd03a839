"""The rendering of writes and queries for DynamoDB, and the codec of its values."""

from __future__ import annotations

import json
import subprocess
import sys
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as some

from thunderagent.model.conditions import (
    Above,
    Absent,
    Below,
    Condition,
    Either,
    Fewer,
    Is,
    Mistyped,
    OneOf,
    Present,
    Typed,
    Write,
)
from thunderagent.model.rows import ATTRIBUTES
from thunderagent.model.task import Candidate, Lane, Lease, Status, Task, timestamp
from thunderagent.model.writes import agents as agent_writes
from thunderagent.model.writes import tasks as writes
from thunderagent.stores.dynamo import expressions

CANDIDATE = Candidate("t1", "PENDING#reports.3", 1760000000.125, "report.build")
RUNNING = Task(
    task_id="t1",
    status=Status.RUNNING,
    lane=Lane("reports", 3),
    created_at=1760000000.125,
    submitted_at=1760000000.125,
    job="report.build",
    fence=7,
    hb=2,
    lease_owner="agent-1",
)
LEASE = Lease(task=RUNNING, owner="agent-1", fence=7, lease_s=300.0, held_from=0.0)


def test_a_claim_is_the_update_of_the_design() -> None:
    write = writes.claim(CANDIDATE, owner="agent-1", lease_s=300.0, now=1760000001.0, until=1760000301.5)
    assert expressions.update("TaskTable", write) == {
        "TableName": "TaskTable",
        "Key": {"taskId": {"S": "t1"}},
        "UpdateExpression": (
            "SET #status = :v0, #lockTime = :v1, #leaseOwner = :v2, #leaseSec = :v3, #hb = :v4, #lastAgent = :v5, "
            "#startedAt = :v6, #updatedAt = :v7 ADD #fence :v8"
        ),
        "ConditionExpression": (
            "#status = :v9 AND #createdAt = :v10 AND #job = :v11 "
            "AND (attribute_not_exists(#lockTime) OR #lockTime < :v12) "
            "AND (attribute_not_exists(#fence) OR #fence BETWEEN :v13 AND :v14)"
        ),
        "ExpressionAttributeNames": {
            f"#{name}": name
            for name in (
                *("status", "lockTime", "leaseOwner", "leaseSec", "hb", "lastAgent"),
                *("startedAt", "updatedAt", "fence", "createdAt", "job"),
            )
        },
        "ExpressionAttributeValues": {
            ":v0": {"S": "RUNNING#reports.3"},
            ":v1": {"N": "1760000301.5"},
            ":v2": {"S": "agent-1"},
            ":v3": {"N": "300"},
            ":v4": {"N": "0"},
            ":v5": {"S": "agent-1"},
            ":v6": {"N": "1760000001"},
            ":v7": {"N": "1760000001"},
            ":v8": {"N": "1"},
            ":v9": {"S": "PENDING#reports.3"},
            ":v10": {"N": "1760000000.125"},
            ":v11": {"S": CANDIDATE.job},
            ":v12": {"N": "1760000001.5"},
            ":v13": {"N": "0"},
            ":v14": {"N": "9007199254740992"},
        },
        "ReturnValues": "ALL_NEW",
        "ReturnValuesOnConditionCheckFailure": "ALL_OLD",
    }


def test_a_success_removes_the_lease() -> None:
    write = writes.succeed(LEASE, now=1760000002.0, expire_at=1760000100.9, result="1")
    rendered = expressions.update("TaskTable", write)
    assert rendered["UpdateExpression"] == (
        "SET #status = :v0, #finishedAt = :v1, #updatedAt = :v2, #expireAt = :v3, #result = :v4 "
        "REMOVE #lockTime, #leaseOwner, #leaseSec, #hb"
    )
    assert rendered["ConditionExpression"] == "#fence = :v5 AND #leaseOwner = :v6 AND #status = :v7"
    assert rendered["ExpressionAttributeValues"][":v3"] == {"N": "1760000100"}


@pytest.mark.parametrize(
    ("change", "expression", "value"),
    [
        ({"insert": {"dependents": frozenset({"c1", "c2"})}}, "ADD #dependents :v0", {"SS": ["c1", "c2"]}),
        ({"discard": {"waitingFor": "p1"}}, "DELETE #waitingFor :v0", {"SS": ["p1"]}),
        ({"increase": {"fence": 2}}, "ADD #fence :v0", {"N": "2"}),
        ({"set": {"waitingFor": {"b", "a"}}}, "SET #waitingFor = :v0", {"SS": ["a", "b"]}),
        ({"set": {"cancelRequested": True}}, "SET #cancelRequested = :v0", {"BOOL": True}),
        ({"set": {"lastSeq": {"n": 1}}}, "SET #lastSeq = :v0", {"M": {"n": {"N": "1"}}}),
        ({"set": {"errors": [{"at": 1.5}]}}, "SET #errors = :v0", {"L": [{"M": {"at": {"N": "1.5"}}}]}),
    ],
)
def test_each_kind_of_change(change: dict[str, Any], expression: str, value: dict[str, Any]) -> None:
    write = Write(verb="change", task_id="t1", require=(Present("taskId"),), **change)
    rendered = expressions.update("TaskTable", write)
    assert rendered["UpdateExpression"] == expression
    assert rendered["ExpressionAttributeValues"][":v0"] == value


def test_the_clauses_come_in_one_order() -> None:
    write = Write(
        verb="all",
        task_id="t1",
        set={"status": "DONE"},
        increase={"fence": 1},
        remove=("hb",),
        insert={"dependents": frozenset({"c"})},
        discard={"waitingFor": "p"},
        require=(Absent("hb"),),
    )
    assert expressions.update("T", write)["UpdateExpression"] == (
        "SET #status = :v0 ADD #fence :v1, #dependents :v2 REMOVE #hb DELETE #waitingFor :v3"
    )


@pytest.mark.parametrize(
    ("condition", "expression", "values"),
    [
        (Is("fence", 7), "#fence = :v0", [{"N": "7"}]),
        (Is("hb", None), "#hb = :v0", [{"NULL": True}]),
        (Absent("hb"), "attribute_not_exists(#hb)", []),
        (Present("hb"), "attribute_exists(#hb)", []),
        (Below("lockTime", 1.5), "#lockTime < :v0", [{"N": "1.5"}]),
        (Above("lockTime", 1.5), "#lockTime > :v0", [{"N": "1.5"}]),
        (
            Fewer("holders", 2),
            "(attribute_not_exists(#holders) OR (attribute_type(#holders, :v0) AND size(#holders) < :v1))",
            [{"S": "SS"}, {"N": "2"}],
        ),
        (Typed("lockTime"), "attribute_type(#lockTime, :v0)", [{"S": "N"}]),
        (
            Mistyped("holders"),
            "(attribute_exists(#holders) AND NOT attribute_type(#holders, :v0))",
            [{"S": "SS"}],
        ),
        (OneOf("status", ("A", "B")), "#status IN (:v0, :v1)", [{"S": "A"}, {"S": "B"}]),
        (Either((Absent("hb"), Is("hb", 1))), "(attribute_not_exists(#hb) OR #hb = :v0)", [{"N": "1"}]),
    ],
)
def test_each_kind_of_condition(condition: Condition, expression: str, values: list[object]) -> None:
    rendered = expressions.update("T", Write(verb="x", task_id="t", remove=("progress",), require=(condition,)))
    assert rendered["ConditionExpression"] == expression
    assert list(rendered.get("ExpressionAttributeValues", {}).values()) == values
    assert ("ExpressionAttributeValues" in rendered) == bool(values), "DynamoDB refuses an empty map"


def test_a_put_asks_that_the_id_is_free() -> None:
    row = {"taskId": "t1", "status": "PENDING", "createdAt": 1.25, "fence": 0, "error": None}
    assert expressions.put("TaskTable", row) == {
        "TableName": "TaskTable",
        "Item": {"taskId": {"S": "t1"}, "status": {"S": "PENDING"}, "createdAt": {"N": "1.25"}, "fence": {"N": "0"}},
        "ConditionExpression": "attribute_not_exists(#taskId)",
        "ExpressionAttributeNames": {"#taskId": "taskId"},
        "ReturnValuesOnConditionCheckFailure": "ALL_OLD",
    }


def test_an_insert_of_a_batch_names_each_attribute_of_the_row() -> None:
    row = {"taskId": "a", "status": "PENDING", "fence": 0, "waitingFor": {"p2", "p1"}, "error": None}
    assert expressions.insert("TaskTable", row) == {
        "Statement": "INSERT INTO \"TaskTable\" VALUE {'taskId': ?, 'status': ?, 'fence': ?, 'waitingFor': ?}",
        "Parameters": [{"S": "a"}, {"S": "PENDING"}, {"N": "0"}, {"SS": ["p1", "p2"]}],
    }


def test_a_delete_asks_for_status_and_fence() -> None:
    rendered = expressions.delete("TaskTable", {"taskId": "t1", "status": "DONE", "fence": 3, "job": "j"})
    assert rendered["ConditionExpression"] == "#status = :v0 AND #fence = :v1"
    assert rendered["ExpressionAttributeValues"] == {":v0": {"S": "DONE"}, ":v1": {"N": "3"}}
    assert rendered["Key"] == {"taskId": {"S": "t1"}}


def test_a_query_reads_the_index_in_order_and_filters_nothing() -> None:
    plain = {
        "TableName": "TaskTable",
        "IndexName": "status-createdAt-index",
        "KeyConditionExpression": "#status = :v0",
        "ExpressionAttributeNames": {"#status": "status"},
        "ExpressionAttributeValues": {":v0": {"S": "PENDING#reports"}},
        "ScanIndexForward": True,
    }
    assert expressions.query("TaskTable", "PENDING#reports") == plain
    after = {"taskId": {"S": "t"}}
    assert expressions.query(
        "TaskTable", "PENDING#reports", until=9.5, limit=50, after=after, newest_first=True
    ) == plain | {
        "KeyConditionExpression": "#status = :v0 AND #createdAt <= :v1",
        "ExpressionAttributeNames": {"#status": "status", "#createdAt": "createdAt"},
        "ExpressionAttributeValues": {":v0": {"S": "PENDING#reports"}, ":v1": {"N": "9.5"}},
        "ScanIndexForward": False,
        "Limit": 50,
        "ExclusiveStartKey": after,
    }
    assert expressions.count("TaskTable", "PENDING#reports") == plain | {"Select": "COUNT"}
    capped = expressions.count("TaskTable", "PENDING#reports", limit=7)
    assert capped == plain | {"Select": "COUNT", "Limit": 7}, "no more than that is read, nor paid"


def test_every_attribute_that_a_verb_names_has_an_alias_and_a_type() -> None:
    seen = RUNNING
    every = [
        writes.renew(LEASE, now=1.0, until=2.0, progress="1", last_seq={"n": 1}),
        writes.take_over(seen, owner="b", lease_s=1.0, now=1.0, until=2.0),
        writes.give_up(seen, error="x", now=1.0, expire_at=2.0),
        writes.retry(LEASE, due=1.0, error="x", now=1.0),
        writes.snooze(LEASE, due=1.0, now=1.0),
        writes.release(LEASE, now=1.0),
        writes.fail(LEASE, error="x", now=1.0, expire_at=2.0),
        writes.close(LEASE, reason="x", now=1.0, expire_at=2.0),
        writes.request_cancel(seen, now=1.0),
        writes.register_dependent(seen, "c"),
        writes.parent_done(seen, "p"),
        writes.unpark(seen, now=1.0),
        writes.doom(seen, status=Status.FAILED, reason="x", now=1.0, expire_at=2.0),
        writes.cancel_waiting(seen, reason="x", now=1.0, expire_at=2.0),
        agent_writes.take_turn("turn:x", owner="a", now=1.0, until=2.0),
        agent_writes.announce("agent:x", info={"n": 1}, now=1.0, expire_at=2.0),
    ]
    for write in every:
        rendered = expressions.update("T", write)
        text = f"{rendered['UpdateExpression']} {rendered['ConditionExpression']}"
        aliases, values = rendered["ExpressionAttributeNames"], rendered["ExpressionAttributeValues"]
        words = set(text.replace("(", " ").replace(")", " ").replace(",", " ").split())
        assert {word for word in words if word.startswith("#")} == aliases.keys()
        assert {word for word in words if word.startswith(":")} == values.keys()
        assert set(aliases.values()) <= ATTRIBUTES.keys()
        assert len(text) < 4096


json_values = some.recursive(
    some.none()
    | some.booleans()
    | some.integers(-(10**30), 10**30)
    | some.floats(-1e15, 1e15, allow_nan=False)
    | some.text(max_size=20),
    lambda inner: some.lists(inner, max_size=4) | some.dictionaries(some.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


@given(json_values)
def test_json_values_come_back_as_they_were(value: Any) -> None:
    assert expressions.decode(expressions.encode_json(value)) == value


@given(some.floats(0, 1e11).map(timestamp))
def test_timestamps_come_back_exactly(moment: float) -> None:
    text = expressions.encode("createdAt", moment)["N"]
    assert expressions.decode({"N": text}) == moment
    assert len(text.partition(".")[2]) <= 3


@given(some.dictionaries(some.sampled_from(["waitingFor", "dependents"]), some.frozensets(some.text(), min_size=1)))
def test_sets_come_back_as_frozensets(row: dict[str, frozenset[str]]) -> None:
    assert expressions.decode_row(expressions.encode_row(row)) == row


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("7", 7),
        ("-7", -7),
        ("7.0", 7),
        ("1E+2", 100),
        ("0.125", 0.125),
        ("00042", 42),
        ("1760000000.999", 1760000000.999),
    ],
)
def test_whole_numbers_come_back_as_int_and_others_as_float(text: str, number: float) -> None:
    read = expressions.decode({"N": text})
    assert (read, type(read)) == (number, type(number))


@pytest.mark.parametrize(
    ("number", "text"), [(300.0, "300"), (0, "0"), (0.1, "0.1"), (10**30, "1" + "0" * 30), (Decimal("1.50"), "1.50")]
)
def test_numbers_are_written_in_their_shortest_exact_form(number: float | Decimal, text: str) -> None:
    assert expressions.number(number) == text


def test_attributes_of_a_newer_version_are_left_out() -> None:
    item: dict[str, Any] = {"taskId": {"S": "t"}, "colour": {"S": "red"}, "blob": {"B": b"x"}}
    assert expressions.decode_row(item) == {"taskId": "t"}


def test_what_is_not_json_is_refused() -> None:
    with pytest.raises(TypeError, match="object is not JSON"):
        expressions.encode_json({"x": [object()]})


@pytest.mark.slow
def test_rendering_needs_no_boto() -> None:
    code = "import sys, thunderagent.stores.dynamo.expressions as e; print([m for m in sys.modules if 'boto' in m])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == []
