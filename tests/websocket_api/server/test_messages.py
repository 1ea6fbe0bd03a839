"""The protocol: texts in pieces and whole again, their limits, merge patches."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thunderagent.model.errors import MessageTooLarge
from thunderagent.websocket_api.protocol import (
    FRAME_BYTES,
    MESSAGE_BYTES,
    MOST_CHUNKS,
    ChunkRefused,
    Joiner,
    encode,
    frames,
    join,
    merge_patch,
    size,
)

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=8,
)


def test_a_text_that_fits_into_a_frame_is_sent_as_it_is() -> None:
    text = encode({"data": "x" * (FRAME_BYTES - 11)})
    assert size(text) == FRAME_BYTES
    assert frames(text, "m1") == [text]


@pytest.mark.parametrize("letter", ["x", '"', "\\", "\n", "\x01", "ä", "€", "😀", '"😀\\'])
def test_a_longer_text_goes_in_frames_below_the_limit_and_is_whole_again(letter: str) -> None:
    text = letter * (60_000 // size(letter))
    sent = frames(text, "m1", to_server=True)
    assert 1 < len(sent) <= MOST_CHUNKS
    assert max(map(size, sent)) <= FRAME_BYTES
    joiner = Joiner()
    assert [joiner.add(json.loads(one)) for one in sent] == [None] * (len(sent) - 1) + [text]


@pytest.mark.parametrize("letter", ["x", '"', "\\", "\x01", "😀"])
def test_the_largest_message_goes_in_no_more_chunks_than_may_be(letter: str) -> None:
    assert len(frames(letter * (MESSAGE_BYTES // size(letter)), "m1")) <= MOST_CHUNKS


def test_a_text_over_the_limit_of_a_message_is_refused_with_its_size_and_what_to_do() -> None:
    with pytest.raises(MessageTooLarge, match=r"131073 bytes, at most 131072 .* send a reference"):
        frames("x" * (MESSAGE_BYTES + 1), "m1")


@given(st.permutations(range(5)), st.integers(0, 4))
@settings(max_examples=30)
def test_chunks_may_come_in_any_order_and_twice(order: list[int], again: int) -> None:
    joiner = Joiner()
    chunks = [{"type": "chunk", "id": "m", "index": index, "of": 5, "data": str(index)} for index in order]
    answers = [joiner.add(one) for one in [*chunks[:-1], chunks[again] if again < 4 else chunks[0], chunks[-1]]]
    assert answers == [None] * 5 + ["01234"]


def test_messages_in_chunks_may_come_side_by_side() -> None:
    joiner = Joiner()

    def add(name: str, index: int) -> str | None:
        return joiner.add({"id": name, "index": index, "of": 2, "data": f"{name}{index}"})

    assert [add("a", 0), add("b", 0), add("b", 1), add("a", 1)] == [None, None, "b0b1", "a0a1"]


def test_of_too_many_incomplete_messages_the_oldest_is_forgotten() -> None:
    joiner = Joiner(most=2)
    for name in "abc":
        joiner.add({"id": name, "index": 0, "of": 2, "data": "x"})
    assert joiner.add({"id": "a", "index": 1, "of": 2, "data": "x"}) is None
    assert joiner.add({"id": "c", "index": 1, "of": 2, "data": "y"}) == "xy"


@pytest.mark.parametrize(
    "chunk",
    [
        {},
        {"id": 1, "index": 0, "of": 1, "data": ""},
        {"id": "a:b", "index": 0, "of": 1, "data": ""},
        {"id": "m", "index": 0, "of": 1, "data": 7},
        {"id": "m", "index": 1, "of": 1, "data": ""},
        {"id": "m", "index": -1, "of": 1, "data": ""},
        {"id": "m", "index": True, "of": 2, "data": ""},
        {"id": "m", "index": 0, "of": MOST_CHUNKS + 1, "data": ""},
        {"id": "m", "index": 0.0, "of": 1, "data": ""},
    ],
)
def test_what_is_no_chunk_is_refused(chunk: dict[str, Any]) -> None:
    with pytest.raises(ChunkRefused):
        Joiner().add(chunk)


def test_chunks_that_contradict_each_other_are_refused() -> None:
    joiner = Joiner()
    joiner.add({"id": "m", "index": 0, "of": 3, "data": "x"})
    with pytest.raises(ChunkRefused, match="contradict"):
        joiner.add({"id": "m", "index": 0, "of": 3, "data": "y"})
    joiner.add({"id": "m", "index": 0, "of": 3, "data": "x"})
    with pytest.raises(ChunkRefused, match="contradict"):
        joiner.add({"id": "m", "index": 1, "of": 2, "data": "y"})


def test_chunks_of_more_than_a_message_may_have_are_refused() -> None:
    joiner = Joiner()
    joiner.add({"id": "m", "index": 0, "of": 3, "data": "x" * MESSAGE_BYTES})
    with pytest.raises(ChunkRefused, match="131072"):
        joiner.add({"id": "m", "index": 1, "of": 3, "data": "y"})


def test_a_letter_that_was_cut_in_two_is_whole_again() -> None:
    high, low = json.loads('"\\ud83d"'), json.loads('"\\ude00"')
    assert join(["a", high, low, "b"]) == "a😀b"
    assert join([high]) == high


@pytest.mark.parametrize(
    ("state", "patch", "merged"),
    [  # the examples of RFC 7396
        ({"a": "b"}, {"a": "c"}, {"a": "c"}),
        ({"a": "b"}, {"b": "c"}, {"a": "b", "b": "c"}),
        ({"a": "b"}, {"a": None}, {}),
        ({"a": "b", "b": "c"}, {"a": None}, {"b": "c"}),
        ({"a": ["b"]}, {"a": "c"}, {"a": "c"}),
        ({"a": "c"}, {"a": ["b"]}, {"a": ["b"]}),
        ({"a": {"b": "c"}}, {"a": {"b": "d", "c": None}}, {"a": {"b": "d"}}),
        ({"a": [{"b": "c"}]}, {"a": [1]}, {"a": [1]}),
        (["a", "b"], ["c", "d"], ["c", "d"]),
        ({"a": "b"}, ["c"], ["c"]),
        ({"a": "foo"}, None, None),
        ({"e": None}, {"a": 1}, {"e": None, "a": 1}),
        ([1, 2], {"a": "b", "c": None}, {"a": "b"}),
        ({}, {"a": {"bb": {"ccc": None}}}, {"a": {"bb": {}}}),
    ],
)
def test_a_merge_patch_does_what_its_rfc_says(state: Any, patch: Any, merged: Any) -> None:
    assert merge_patch(state, patch) == merged


@given(JSON, JSON)
def test_a_merge_patch_applied_twice_is_applied_once_and_changes_neither(state: Any, patch: Any) -> None:
    before = json.dumps([state, patch])
    once = merge_patch(state, patch)
    assert merge_patch(once, patch) == once
    assert json.dumps([state, patch]) == before
