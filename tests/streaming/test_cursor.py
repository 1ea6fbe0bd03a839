"""Places in a stream: what comes twice and what is missing."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thunderagent.streaming.cursor import Cursor, Gap, Track, place_of

epochs = st.none() | st.integers(0, 3) | st.sampled_from(["a", "b"])
cursors = st.builds(Cursor, st.integers(0, 50), epochs)


@given(st.builds(Cursor, st.integers(), epochs | st.text(max_size=50), st.none() | st.text(max_size=50)))
def test_a_cursor_comes_back_as_it_was_kept(cursor: Cursor) -> None:
    assert Cursor.from_map(json.loads(json.dumps(cursor.to_map()))) == cursor


def test_without_a_kept_cursor_there_is_none() -> None:
    assert Cursor.from_map(None) is Cursor.from_map({}) is None


@pytest.mark.parametrize("seq", [True, 1.0, "1", None])
def test_a_place_is_a_whole_number(seq: Any) -> None:
    with pytest.raises(ValueError, match="a whole number"):
        Cursor(seq)


@pytest.mark.parametrize("name", ["epoch", "token"])
def test_long_texts_are_refused_as_the_row_must_stay_small(name: str) -> None:
    rest: dict[str, Any] = {name: "é" * 101}
    with pytest.raises(ValueError, match=f"the {name} of a cursor has 202 bytes, at most 200"):
        Cursor(1, **rest)


@pytest.mark.parametrize("name", ["seq", "epoch"])
def test_a_number_that_no_store_keeps_is_refused(name: str) -> None:
    largest = 10**38 - 1
    assert Cursor(**{"seq": 1, name: largest}).to_map()[name] == largest  # type: ignore[arg-type]
    for number in (largest + 1, -largest - 1):
        with pytest.raises(ValueError, match="at most 38 digits are kept"):
            Cursor(**{"seq": 1, name: number})  # type: ignore[arg-type]


def test_only_places_of_one_epoch_can_be_compared() -> None:
    assert Cursor(1, "a").is_behind(Cursor(2, "a"))
    assert not Cursor(2, "a").is_behind(Cursor(2, "a"))
    assert not Cursor(1, "a").is_behind(Cursor(2, "b"))


def test_a_place_may_be_a_plain_number() -> None:
    assert place_of(7) == Cursor(7)
    assert place_of(None) is None
    with pytest.raises(ValueError, match="whole number"):
        place_of(True)


@given(st.lists(cursors, max_size=40))
def test_what_was_handed_out_is_never_handed_out_again_in_its_epoch(places: list[Cursor]) -> None:
    track = Track(None, contiguous=True)
    last: Cursor | None = None
    for place in places:
        if track.is_duplicate(place):
            assert last is not None
            assert last.epoch == place.epoch
            assert place.seq <= last.seq
            continue
        gap = track.gap_before(place)
        follows = last is None or (last.epoch == place.epoch and place.seq == last.seq + 1)
        assert (gap is None) is follows
        track.handed_out(place)
        last = place


def test_a_jump_is_a_gap_and_says_how_many() -> None:
    gap = Track(Cursor(3, "a"), contiguous=True).gap_before(Cursor(7, "a"))
    assert gap == Gap(after=Cursor(3, "a"), before=Cursor(7, "a"), cause="missing")
    assert gap.missed == 3


def test_another_epoch_is_a_gap_of_unknown_size() -> None:
    gap = Track(Cursor(9, "a"), contiguous=False).gap_before(Cursor(1, "b"))
    assert gap is not None
    assert (gap.cause, gap.missed) == ("epoch", None)


def test_at_the_very_beginning_nothing_is_missing() -> None:
    track = Track(None, contiguous=True)
    assert track.gap_before(Cursor(100)) is None
    assert not track.is_duplicate(Cursor(0))


@pytest.mark.parametrize("contiguous", [True, False])
def test_what_our_own_buffer_dropped_is_a_gap_whatever_the_numbers_do(contiguous: bool) -> None:
    track = Track(Cursor(3), contiguous=contiguous)
    track.dropped = True
    gap = track.gap_before(Cursor(7))
    assert gap is not None
    assert gap.cause == "dropped"
    assert track.gap_before(Cursor(4)) is None
    track.handed_out(Cursor(7))
    assert not track.dropped


def test_numbers_that_may_jump_leave_no_gap() -> None:
    assert Track(Cursor(3), contiguous=False).gap_before(Cursor(7)) is None
