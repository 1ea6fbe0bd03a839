"""Places in a stream: what comes twice and what is missing."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thunderagent.model.errors import StreamFailed
from thunderagent.streams.connection.track import BEGIN_DROPPED, MANY_DROPPED, MOST_KEYS, Doubts, Track, Tracks
from thunderagent.streams.cursor import CURSOR_BYTES, LARGEST, Cursor, Gap, Span, joined_cursor, place_of
from thunderagent.streams.journal import REASON_BYTES

epochs = st.none() | st.integers(0, 3) | st.sampled_from(["a", "b"])
cursors = st.builds(Cursor, st.integers(0, 50), epochs)
keys = st.none() | st.text(min_size=1, max_size=20)
whole = st.builds(
    Cursor, st.integers(-LARGEST, LARGEST), epochs | st.text(max_size=50), st.none() | st.text(max_size=50), keys
)


def span(first: int, last: int | None = None, **rest: Any) -> Span:
    return Span(first=first, last=first if last is None else last, **rest)


@pytest.mark.slow
@given(st.lists(whole, min_size=1, max_size=5))
def test_a_cursor_comes_back_as_it_was_kept(places: list[Cursor]) -> None:
    cursor = joined_cursor(places)
    assert cursor is not None
    assert Cursor.from_map(json.loads(json.dumps(cursor.to_map()))) == cursor
    assert {place.key: place for place in cursor.places} == {place.key: place for place in places}


def test_a_row_of_the_release_before_is_read_and_one_of_a_later_release_too() -> None:
    assert Cursor.from_map({"seq": 7, "epoch": "e", "token": "t"}) == Cursor(7, "e", "t")
    later = {"seq": 7, "key": "BTC", "others": {"ETH": {"seq": 4, "new": 1}}, "new": 2}
    assert Cursor.from_map(later) == Cursor(7, key="BTC", others={"ETH": Cursor(4, key="ETH")})


def test_a_release_before_this_one_reads_the_number_of_a_cursor_with_keys() -> None:
    cursor = joined_cursor([Cursor(4, key="ETH"), Cursor(9, "e", key="LTC"), Cursor(7, key="BTC")])
    assert cursor is not None
    assert cursor.to_map() == {"seq": 7, "key": "BTC", "others": {"ETH": 4, "LTC": {"seq": 9, "epoch": "e"}}}


def test_each_sequence_of_a_cursor_has_its_own_place() -> None:
    cursor = Cursor(1, key="BTC").with_place(Cursor(5, "e", key="ETH")).with_place(Cursor(2, key="BTC"))
    assert [cursor.of("BTC"), cursor.of("ETH")] == [Cursor(2, key="BTC"), Cursor(5, "e", key="ETH")]
    assert cursor.of("LTC") is cursor.of(None) is None
    assert Cursor(3).with_place(Cursor(4)) == Cursor(4)
    mixed = cursor.with_place(Cursor(9))
    assert (mixed.seq, mixed.key, sorted(mixed.others)) == (9, None, ["BTC", "ETH"])
    assert mixed.with_place(Cursor(3, key="BTC")).seq == 9, "the place without a key comes first"
    assert not Cursor(1, key="BTC").is_behind(Cursor(2, key="ETH"))


def test_more_keys_than_a_row_has_room_for_are_refused_with_the_remedy() -> None:
    cursor: Cursor | None = None
    symbols = [f"SYM{number:03}USDT" for number in range(40)]
    with pytest.raises(ValueError, match=f"at most {CURSOR_BYTES} are kept: give each part of the keys a task"):
        for number, symbol in enumerate(symbols):
            place = Cursor(number, key=symbol)
            cursor = place if cursor is None else cursor.with_place(place)
            cursor.check_size()
    assert cursor is not None
    assert 15 < len(cursor.places) < 30
    room = joined_cursor(cursor.places[1:])
    assert room is not None
    for number, place in enumerate(room.places):
        room = room.with_place(Cursor(10**15 + number, key=place.key))
    room.check_size()  # what has room has it when its numbers have grown


@pytest.mark.parametrize(
    ("key", "why"), [("", "by a text"), (7, "by a text"), ("é" * 51, "102 bytes, at most 100 are kept")]
)
def test_what_cannot_name_a_sequence_is_refused(key: Any, why: str) -> None:
    for make in (lambda: Cursor(1, key=key), lambda: span(1, key=key)):
        with pytest.raises(ValueError, match=f"the key of a place .*{why}"):
            make()


def test_a_span_covers_whole_numbers_in_their_order() -> None:
    with pytest.raises(ValueError, match="a span from 5 to 4 covers nothing"):
        span(5, 4)
    for wrong in ({"first": "1", "last": 2}, {"first": 1, "last": True}):
        with pytest.raises(ValueError, match="a place in a stream is a whole number"):
            Span(**wrong)


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
    assert place_of(Cursor(7, "e", "t", "BTC")) == span(7, epoch="e", token="t", key="BTC").end
    assert place_of(span(7, 9)) == span(7, 9)
    assert place_of(None) is None
    with pytest.raises(ValueError, match="whole number"):
        place_of(True)


@given(st.lists(cursors, max_size=40))
def test_what_was_handed_out_is_never_handed_out_again_in_its_epoch(places: list[Cursor]) -> None:
    track = Track(None, contiguous=True)
    last: Cursor | None = None
    for place in places:
        at = span(place.seq, epoch=place.epoch)
        if track.is_duplicate(at):
            assert last is not None
            assert last.epoch == place.epoch
            assert place.seq <= last.seq
            continue
        gap = track.gap_before(at)
        follows = last is None or (last.epoch == place.epoch and place.seq == last.seq + 1)
        assert (gap is None) is follows
        track.handed_out(at)
        last = place


def test_a_jump_is_a_gap_and_says_how_many() -> None:
    gap = Track(Cursor(3, "a"), contiguous=True).gap_before(span(7, epoch="a"))
    assert gap == Gap(after=Cursor(3, "a"), before=Cursor(7, "a"), cause="missing")
    assert gap.missed == 3


def test_another_epoch_is_a_gap_of_unknown_size() -> None:
    gap = Track(Cursor(9, "a"), contiguous=False).gap_before(span(1, epoch="b"))
    assert gap is not None
    assert (gap.cause, gap.missed) == ("epoch", None)


def test_at_the_very_beginning_nothing_is_missing() -> None:
    track = Track(None, contiguous=True)
    assert track.gap_before(span(100)) is None
    assert not track.is_duplicate(span(0))


@pytest.mark.parametrize("contiguous", [True, False])
def test_what_our_own_buffer_dropped_is_a_gap_whatever_the_numbers_do(contiguous: bool) -> None:
    track = Track(Cursor(3), contiguous=contiguous)
    track.dropped = True
    gap = track.gap_before(span(7))
    assert gap is not None
    assert gap.cause == "dropped"
    assert track.gap_before(span(4)) is None
    track.handed_out(span(7))
    assert not track.dropped


def test_numbers_that_may_jump_leave_no_gap() -> None:
    assert Track(Cursor(3), contiguous=False).gap_before(span(7)) is None


def test_a_span_follows_where_it_touches_or_overlaps_what_was_handed_out() -> None:
    track = Track(Cursor(160), contiguous=True)
    assert track.is_duplicate(span(157, 160))
    for follows in (span(161, 165), span(158, 163), span(161)):
        assert not track.is_duplicate(follows)
        assert track.gap_before(follows) is None
    gap = track.gap_before(span(163, 165))
    assert gap is not None
    assert (gap.missed, gap.before) == (2, Cursor(163))
    track.handed_out(span(158, 163))
    assert track.last == Cursor(163)


def test_a_number_behind_the_last_one_is_a_gap_of_unknown_size_and_none_for_a_snapshot() -> None:
    track = Track(Cursor(160), contiguous=True)
    gap = track.gap_before(span(1))
    assert gap is not None
    assert (gap.cause, gap.missed) == ("restart", None)
    assert track.gap_before(span(1, snapshot=True)) is None
    assert track.gap_before(span(170, snapshot=True)) is not None


def test_the_sequences_in_memory_are_bounded() -> None:
    tracks = Tracks(None, contiguous=True)
    for number in range(MOST_KEYS):
        tracks.of(str(number))
    with pytest.raises(StreamFailed, match=f"over {MOST_KEYS} sequences, the last one 'one more': a key is to name"):
        tracks.of("one more")
    assert tracks.of("0").last is None


def told(doubts: Doubts, connection: int, dropped: int, handled: int = 10**6) -> str | None:
    return doubts.dropped(span(1), Cursor(900), connection=connection, dropped=dropped, handled=handled)


@pytest.mark.parametrize("due", [0, 256])
def test_a_run_of_duplicates_at_the_beginning_of_each_connection_is_told_once(due: int) -> None:
    doubts, run = Doubts(due), BEGIN_DROPPED + due
    for connection in (1, 2):
        answers = [told(doubts, connection, number) for number in range(1, run + 100)]
        [(at, text)] = [(number, one) for number, one in enumerate(answers, 1) if one]
        assert at == run
        assert f"the first {run} messages of the connection were dropped as duplicates" in text
        assert '(1, behind 900): does the peer restart its numbers (restart="accept")' in text
        assert len(text.encode()) <= REASON_BYTES, "the journal has all of it"
    assert told(doubts, 3, 1) is None
    doubts.handed_out(3)
    assert [told(doubts, 3, number) for number in range(run + 1)] == [None] * (run + 1), "its beginning is past"


def test_duplicates_above_a_tenth_are_told_and_again_at_twice_as_many() -> None:
    doubts = Doubts(0)
    doubts.handed_out(1)
    told_at = [number for number in range(1, 450) if told(doubts, 1, number, handled=number)]
    assert told_at == [MANY_DROPPED, 2 * MANY_DROPPED, 4 * MANY_DROPPED, 8 * MANY_DROPPED]
    few = Doubts(0)
    few.handed_out(1)
    assert not any(told(few, 1, number, handled=number * 9) for number in range(1, 450))
