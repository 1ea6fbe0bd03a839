"""Connections of users on each engine, and messages that come in pieces."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial

import pytest

from tests.support.stands import Stand, together
from thunderagent.model.conditions import Write
from thunderagent.model.errors import PushFailed, StoreError
from thunderagent.stores.engine import Applied
from thunderagent.stores.sqlite.engine import MEMORY, SqliteEngine
from thunderagent.testing import FakeClock
from thunderagent.testing.faulty_engine import Fault, FaultyEngine
from thunderagent.websocket_api.protocol import MESSAGE_BYTES, Chunk, ChunkRefused
from thunderagent.websocket_api.records import (
    CHUNKS_S,
    CONNECTION_S,
    MOST_CONNECTIONS,
    MOST_OPEN,
    chunks_id,
    connection_id_of,
    connections_id,
    holders_of,
)
from thunderagent.websocket_api.server.chunks import Chunks
from thunderagent.websocket_api.server.connections import PROBE_S, Connections


class World:
    """An engine in memory on a clock that moves by hand."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.engine = FaultyEngine(SqliteEngine(MEMORY, clock=self.clock))
        self.connections = Connections(self.engine, self.clock.now)
        self.chunks = Chunks(self.engine, self.clock.now)

    def add(self, chunk_id: str, index: int, of: int, data: str = "x", connection: str = "c1") -> str | None:
        return self.chunks.add(connection, Chunk(chunk_id, index, of, data))


@pytest.fixture
def world() -> World:
    return World()


def test_connections_are_listed_and_taken_from_the_list(stand: Stand) -> None:
    engine, user = stand.store.engine, stand.id("ada")
    one = Connections(engine, engine.clock.now)
    names = [stand.id(name) for name in ("c1", "c2")]
    assert [one.open(name, user) for name in names] == [True, True]
    assert one.of(user) == set(names)
    one.close(names[0], user)
    one.close(names[0], user)
    assert one.of(user) == {names[1]}
    assert set(engine.get([connection_id_of(name) for name in names])) == {connection_id_of(names[1])}


@pytest.mark.slow
def test_of_connects_at_the_same_moment_none_is_forgotten_and_none_is_one_too_many(stand: Stand) -> None:
    user = stand.id("ada")
    first = Connections(stand.store.engine, stand.store.engine.clock.now)
    for number in range(MOST_CONNECTIONS - 2):
        assert first.open(stand.id(f"old{number}"), user)

    def open_one(number: int) -> bool:
        engine = stand.open().engine
        return Connections(engine, engine.clock.now).open(stand.id(f"new{number}"), user)

    answers = together(*(partial(open_one, number) for number in range(5)))
    assert sorted(answers) == [False] * 3 + [True] * 2
    assert len(first.of(user)) == MOST_CONNECTIONS


def test_of_first_connects_at_the_same_moment_none_is_forgotten(stand: Stand) -> None:
    user = stand.id("ada")

    def open_one(number: int) -> bool:
        engine = stand.open().engine
        return Connections(engine, engine.clock.now).open(stand.id(f"c{number}"), user)

    assert together(*(partial(open_one, number) for number in range(4))) == [True] * 4
    assert len(Connections(stand.store.engine, stand.store.engine.clock.now).of(user)) == 4


def test_one_connection_too_many_is_refused_and_leaves_nothing(world: World) -> None:
    for number in range(MOST_CONNECTIONS):
        assert world.connections.open(f"c{number}", "ada")
    assert not world.connections.open("more", "ada")
    assert world.engine.get([connection_id_of("more")]) == {}
    assert world.connections.open("more", "bob")


def test_connections_that_are_over_by_their_time_make_room(world: World) -> None:
    for number in range(MOST_CONNECTIONS):
        world.connections.open(f"c{number}", "ada")
        world.clock.advance(1)
    world.clock.advance(CONNECTION_S - MOST_CONNECTIONS + 3)  # the first two or three are over
    assert world.connections.open("more", "ada")
    assert "more" in world.connections.of("ada")
    assert not {"c0", "c1"} & world.connections.of("ada")
    assert f"c{MOST_CONNECTIONS - 1}" in world.connections.of("ada")


def test_connections_that_are_gone_make_room_though_nobody_has_told(world: World) -> None:
    asked: list[str] = []

    def post(connection: str, text: str) -> bool:
        asked.append(connection)
        assert text == '{"type":"probe"}'
        if connection == "c5":
            raise PushFailed("nobody knows")
        return connection != "c7"

    one = Connections(world.engine, world.clock.now, post)
    for number in range(MOST_CONNECTIONS):
        assert one.open(f"c{number}", "ada")
    assert asked == []
    assert one.open("more", "ada")
    assert sorted(asked) == sorted(f"c{number}" for number in range(MOST_CONNECTIONS))
    assert one.of("ada") == {*(f"c{number}" for number in range(MOST_CONNECTIONS) if number != 7), "more"}


def test_looking_for_connections_that_are_gone_takes_a_bounded_time(world: World) -> None:
    def post(connection: str, text: str) -> bool:
        world.clock.advance(1)
        return True

    one = Connections(world.engine, world.clock.now, post, monotonic=world.clock.monotonic)
    for number in range(MOST_CONNECTIONS):
        one.open(f"c{number}", "ada")
    begun = world.clock.monotonic()
    assert not one.open("more", "ada")
    assert world.clock.monotonic() - begun == PROBE_S


def test_the_row_of_a_connection_outlives_the_two_hours_that_one_can_last(world: World) -> None:
    world.connections.open("c1", "ada")
    row = world.engine.get([connection_id_of("c1")])[connection_id_of("c1")]
    assert row["expireAt"] >= world.clock.now() + 2 * 3600


def test_the_list_of_a_user_lives_as_long_as_the_last_connection_may(world: World) -> None:
    world.connections.open("c1", "ada")
    world.clock.advance(CONNECTION_S - 1)
    world.connections.open("c2", "ada")
    world.clock.advance(10)
    world.engine.expire(world.clock.now())
    assert "c2" in world.connections.of("ada")
    world.clock.advance(CONNECTION_S)
    world.engine.expire(world.clock.now())
    assert world.engine.get([connections_id("ada"), connection_id_of("c2")]) == {}


@pytest.mark.parametrize("fault", [Fault.LOST_REPLY, Fault.REPEATED])
@pytest.mark.parametrize("verb", ["put", "add connection"])
def test_a_connect_whose_reply_is_lost_is_listed_once(world: World, fault: Fault, verb: str) -> None:
    world.connections.open("old", "ada")
    world.engine.fail(verb, fault)
    try:
        assert world.connections.open("c1", "ada")
    except StoreError:
        assert world.connections.open("c1", "ada")
    assert world.connections.of("ada") == {"old", "c1"}


def test_the_last_connection_that_a_user_may_have_is_taken_when_its_first_answer_is_lost(world: World) -> None:
    for number in range(MOST_CONNECTIONS - 1):
        world.connections.open(f"c{number}", "ada")
    world.engine.fail("add connection", Fault.REPEATED)
    assert world.connections.open("last", "ada")
    assert world.engine.get([connection_id_of("last")])


# Messages in pieces


def test_a_message_in_pieces_is_whole_when_the_last_has_come(stand: Stand) -> None:
    connection = stand.id("c1")
    engine = stand.store.engine
    Connections(engine, engine.clock.now).open(connection, stand.id("ada"))
    pieces = ['{"a":"', "ä" * 9000, '\\"\n', "😀" * 3000, '"}']
    order = list(range(5))
    random.Random(3).shuffle(order)
    answers = []
    for index in order:
        other = stand.open().engine  # each in another process
        answers.append(Chunks(other, other.clock.now).add(connection, Chunk("m", index, 5, pieces[index])))
    assert answers == [None] * 4 + ["".join(pieces)]
    assert holders_of(engine.get([chunks_id(connection, "m")])[chunks_id(connection, "m")]) == set()


@pytest.mark.slow
def test_of_pieces_at_the_same_moment_exactly_one_completes_the_message(stand: Stand) -> None:
    connection = stand.id("c1")
    engine = stand.store.engine
    Connections(engine, engine.clock.now).open(connection, stand.id("ada"))

    def add(index: int) -> str | None:
        other = stand.open().engine
        return Chunks(other, other.clock.now).add(connection, Chunk("m", index, 4, str(index)))

    answers = together(*(partial(add, index) for index in range(4)))
    assert [one for one in answers if one is not None] == ["0123"]


def test_equal_pieces_are_two(world: World) -> None:
    world.connections.open("c1", "ada")
    assert [world.add("m", index, 3, "same") for index in range(3)] == [None, None, "same" * 3]


def test_a_piece_that_comes_twice_counts_once(world: World) -> None:
    world.connections.open("c1", "ada")
    assert [world.add("m", 0, 2), world.add("m", 0, 2), world.add("m", 1, 2)] == [None, None, "xx"]


def test_of_two_handlers_that_get_the_last_piece_at_once_one_has_the_message(world: World) -> None:
    world.connections.open("c1", "ada")
    world.add("m", 0, 2)
    other: list[str | None] = []

    class Slow(FaultyEngine):
        """Lets another handler get the same piece between adding it and taking the message."""

        def apply(self, batch: Sequence[Write]) -> list[Applied]:
            if batch[0].verb == "take chunks" and not other:
                other.append("begun")
                other[0] = world.add("m", 1, 2)
            return super().apply(batch)

    slow = Chunks(Slow(world.engine), world.clock.now).add("c1", Chunk("m", 1, 2, "x"))
    assert (other, slow) == (["xx"], None)


def test_a_letter_cut_in_two_between_pieces_is_whole_again(world: World) -> None:
    world.connections.open("c1", "ada")
    assert [world.add("m", 0, 2, 'é"\ud83d'), world.add("m", 1, 2, "\ude00\\n")] == [None, 'é"😀\\n']


@pytest.mark.parametrize("verb", ["add chunk", "take chunks", "end chunks", "begin chunks", "put"])
@pytest.mark.parametrize("fault", [Fault.LOST_REPLY, Fault.LOST_REQUEST, Fault.REPEATED])
def test_a_message_in_pieces_survives_lost_requests_and_replies_or_its_sender_is_told(
    world: World, verb: str, fault: Fault
) -> None:
    world.connections.open("c1", "ada")
    world.engine.fail(verb, fault)
    answers: list[str | None] = []
    for index in range(3):
        try:
            answers.append(world.add("m", index, 3, str(index)))
        except StoreError:
            answers.append("told")
            with_again = world.add("m", index, 3, str(index))
            answers.append(with_again)
    assert answers.count("012") == (0 if (verb, fault) == ("take chunks", Fault.LOST_REPLY) else 1)
    assert ("told" in answers) == (fault is not Fault.REPEATED and verb != "end chunks")
    assert [world.add("m", index, 3, str(index)) for index in range(3)] == [None] * 3  # late ones are recognised


def test_more_incomplete_messages_than_may_be_are_refused_until_they_are_over(world: World) -> None:
    world.connections.open("c1", "ada")
    for number in range(MOST_OPEN):
        world.add(f"m{number}", 0, 2)
    with pytest.raises(ChunkRefused, match="wait 60 s"):
        world.add("more", 0, 2)
    assert world.add("m0", 1, 2) == "xx"
    assert world.add("more", 0, 2) is None
    world.clock.advance(CHUNKS_S + 1)
    assert world.add("late", 0, 1) == "x"
    row = world.engine.get([connection_id_of("c1")])[connection_id_of("c1")]
    assert holders_of(row) == set()


def test_chunks_of_an_unknown_connection_are_refused(world: World) -> None:
    with pytest.raises(ChunkRefused, match="connect again"):
        world.add("m", 0, 2)


def test_pieces_that_contradict_each_other_are_refused(world: World) -> None:
    world.connections.open("c1", "ada")
    world.add("m", 0, 2, "x")
    with pytest.raises(ChunkRefused, match="contradict"):
        world.add("m", 0, 2, "y")
    world.add("n", 0, 2, "x")
    with pytest.raises(ChunkRefused, match="contradict"):
        world.add("n", 1, 3, "y")


def test_pieces_of_more_than_a_message_may_have_are_refused_before_all_have_come(world: World) -> None:
    world.connections.open("c1", "ada")
    assert world.add("m", 0, 64, "x" * (MESSAGE_BYTES // 2)) is None
    assert world.add("m", 1, 64, "x" * (MESSAGE_BYTES // 2)) is None
    with pytest.raises(ChunkRefused, match="131072"):
        world.add("m", 2, 64, "x")
    assert holders_of(world.engine.get([chunks_id("c1", "m")])[chunks_id("c1", "m")]) == set()
