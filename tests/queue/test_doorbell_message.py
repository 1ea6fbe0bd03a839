"""Rings: what goes through a message comes out of it, and nothing else does."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thunderagent.model.task import Lane, Status, Task
from thunderagent.queue.doorbell.message import MAX_BYTES, MOST_MESSAGES, DoorbellMessage, Verb, pack, parse

words = st.text(st.characters(exclude_categories=["C", "Z"]), min_size=1, max_size=40)
names = st.from_regex(r"[A-Za-z0-9_-]{1,64}", fullmatch=True)
moments = st.integers(0, 10**13).map(lambda milliseconds: milliseconds / 1000)
lanes = st.builds(Lane, names, st.integers(0, 63))


def task(**fields: Any) -> Task:
    values: dict[str, Any] = {"task_id": "a", "status": Status.PENDING, "created_at": 1.5, "submitted_at": 1.0}
    return Task(**{**values, "job": "test.job", **fields})


tasks = st.builds(
    lambda task_id, lane, at, job, kind: task(task_id=task_id, lane=lane, created_at=at, job=job, kind=kind),
    words,
    lanes,
    moments,
    words,
    st.sampled_from(["batch", "stream"]),
)
rings = st.one_of(
    st.builds(DoorbellMessage.task, tasks),
    st.builds(DoorbellMessage.look, names, moments),
    st.builds(DoorbellMessage.beat, words, words),
)
A_TASK: dict[str, Any] = {"verb": "task", "id": "a", "status": "PENDING#x.3", "at": 1.5, "job": "j", "kind": "batch"}


def message(*given: Any, **envelope: Any) -> str:
    return json.dumps({"thunderagent": 1, "rings": list(given)} | envelope)


@pytest.mark.slow
@given(sent=st.lists(rings, max_size=35), most=st.sampled_from([1, 3, MOST_MESSAGES]))
def test_rings_come_out_of_their_messages_as_they_went_in(sent: list[DoorbellMessage], most: int) -> None:
    messages = pack(sent, most=most)
    read = [parse(one) for one in messages]
    assert [ring for several in read for ring in several or ()] == sent
    assert all(several and len(several) <= most for several in read)
    assert all(len(one.encode()) <= MAX_BYTES for one in messages)


def test_a_ring_of_a_task_is_the_index_entry_that_a_poll_would_have_found() -> None:
    ring = DoorbellMessage.task(task(task_id="t", lane=Lane("reports", 3), created_at=7.25))
    assert ring.candidate == ("t", "PENDING#reports.3", 7.25, "test.job", "batch")
    assert (ring.verb, ring.queue, ring.at) == (Verb.TASK, "reports", 7.25)


def test_long_rings_are_spread_over_messages_and_one_that_is_too_long_alone_is_left_out() -> None:
    long = [DoorbellMessage.task(task(task_id=str(number) + "ä" * 250, job="ö" * 250)) for number in range(10)]
    messages = pack(long)
    assert len(messages) > 1
    assert sum(len(parse(one) or ()) for one in messages) == 10
    endless = DoorbellMessage.look("q" * MAX_BYTES)
    assert pack([endless, DoorbellMessage.look("a")]) == pack([DoorbellMessage.look("a")])
    assert pack([]) == []


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        "null",
        "[]",
        "{}",
        "[" * 8000,
        '{"a":' * 1500,
        "9" * 8000,
        b"\xff\xfe\x00",
        b"\x80abc",
        message(),
        message(*[A_TASK] * (MOST_MESSAGES + 1)),
        message(A_TASK, thunderagent=2),
        message(A_TASK, more=1),
        message(A_TASK) + " " * MAX_BYTES,
        message("task"),
        message({**A_TASK, "verb": "run"}),
        message({**A_TASK, "more": 1}),
        message({name: value for name, value in A_TASK.items() if name != "kind"}),
        message({**A_TASK, "kind": "other"}),
        message({**A_TASK, "status": "RUNNING"}),
        message({**A_TASK, "status": "BLOCKED@api"}),
        message({**A_TASK, "status": "PENDING@api"}),
        message({**A_TASK, "status": "PENDING#default"}),
        message({**A_TASK, "status": "PENDING#x.x"}),
        message({**A_TASK, "status": "PENDING#x.03"}),
        message({**A_TASK, "status": "PENDING#../.."}),
        message({**A_TASK, "status": 3}),
        message({**A_TASK, "at": -1}),
        message({**A_TASK, "at": 1e11}),
        message({**A_TASK, "at": True}),
        message({**A_TASK, "at": "1"}),
        message({**A_TASK, "at": float("nan")}),
        message({**A_TASK, "at": float("inf")}),
        message({**A_TASK, "id": ""}),
        message({**A_TASK, "id": "a" * 513}),
        message({**A_TASK, "id": "a\nb"}),
        message({**A_TASK, "id": "\ud800"}),
        message({**A_TASK, "id": None}),
        message({**A_TASK, "job": ["a"]}),
        message({"verb": "look", "queue": "a b", "at": 0}),
        message({"verb": "look", "queue": "a"}),
        message({"verb": "look", "queue": 1, "at": 0}),
        message({"verb": "beat", "id": "a", "owner": "x" * 600}),
        message({"verb": "beat", "id": "a", "owner": {}}),
        message(A_TASK, {"verb": "beat", "id": "a"}),
    ],
)
def test_what_is_not_exactly_a_message_of_ours_is_none(text: str | bytes) -> None:
    assert parse(text) is None


def test_the_message_from_which_those_were_made_is_one() -> None:
    assert parse(message(A_TASK)) == (DoorbellMessage.task(task(lane=Lane("x", 3), job="j")),)


@settings(max_examples=300)
@given(st.one_of(st.binary(max_size=200), st.text(max_size=200)))
def test_no_bytes_make_it_raise(garbage: str | bytes) -> None:
    assert parse(garbage) is None


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@given(name=st.sampled_from(sorted(A_TASK)), value=values)
def test_no_value_of_a_field_makes_it_raise(name: str, value: Any) -> None:
    read = parse(message({**A_TASK, name: value}))
    assert read is None or parse(pack(read)[0]) == read
