"""The state of a user on each engine: versions, changes that come twice, races, lost replies."""

from __future__ import annotations

from functools import partial

import pytest

from tests.support.stands import Stand, together
from thunderagent.model.conditions import Is, Write
from thunderagent.model.errors import StoreError
from thunderagent.stores.sqlite.engine import MEMORY, SqliteEngine
from thunderagent.testing.faulty_engine import Fault, FaultyEngine
from thunderagent.websocket_api.protocol import CHANGES_KEPT, STATE_BYTES
from thunderagent.websocket_api.records import changes_of, state_id
from thunderagent.websocket_api.server.state import Conflict, Held, Saved, States, TooLarge, Unreadable


def states(stand: Stand, region: str = "eu-central-1") -> States:
    """The states of another process."""
    engine = stand.open().engine
    return States(engine, region, engine.clock.now)


def in_memory() -> tuple[FaultyEngine, States]:
    engine = FaultyEngine(SqliteEngine(MEMORY))
    return engine, States(engine, "eu-central-1", engine.clock.now)


def test_a_user_without_a_state_has_the_empty_one_of_version_0() -> None:
    _, one = in_memory()
    assert one.read("ada") == Held({}, 0)


def test_a_change_is_merged_and_counts_the_version_up(stand: Stand) -> None:
    one, user = states(stand), stand.id("ada")
    assert one.save(user, version=0, change="c1", patch={"a": 1, "b": {"c": 2}}) == Saved(1)
    assert one.save(user, version=1, change="c2", patch={"a": None, "b": {"d": "ä\U0001f600"}}) == Saved(2)
    assert states(stand).read(user) == Held({"b": {"c": 2, "d": "ä\U0001f600"}}, 2)


def test_a_change_of_another_version_is_a_conflict_with_the_present_state(stand: Stand) -> None:
    one, user = states(stand), stand.id("ada")
    one.save(user, version=0, change="c1", patch={"a": 1})
    held = Conflict(Held({"a": 1}, 1))
    assert one.save(user, version=0, change="c2", patch={"a": 2}) == held
    assert one.save(user, version=7, change="c2", patch={"a": 2}) == held
    assert one.read(user) == held.held


def test_a_change_that_comes_again_is_saved_with_the_version_that_it_made(stand: Stand) -> None:
    one, user = states(stand), stand.id("ada")
    one.save(user, version=0, change="c1", patch={"a": 1})
    one.save(user, version=1, change="c2", patch={"a": 2})
    assert states(stand).save(user, version=0, change="c1", patch={"a": 1}) == Saved(1)
    assert states(stand).save(user, version=2, change="c1", patch={"a": 1}) == Saved(1)
    assert one.read(user) == Held({"a": 2}, 2)


@pytest.mark.slow
def test_of_handlers_that_have_read_the_same_version_one_wins_and_the_others_are_told_what_is(stand: Stand) -> None:
    user = stand.id("ada")
    for version in range(3):  # the first is a put, the others are updates
        ones = [states(stand) for _ in range(4)]
        answers = together(
            *(
                partial(one.save, user, version=version, change=name, patch={"by": name})
                for name, one in ((f"{version}-{number}", one) for number, one in enumerate(ones))
            )
        )
        assert [one for one in answers if isinstance(one, Saved)] == [Saved(version + 1)]
        held = states(stand).read(user)
        assert held.version == version + 1
        assert [one for one in answers if isinstance(one, Conflict)] == [Conflict(held)] * 3


def test_the_same_change_delivered_to_several_handlers_at_once_is_made_once(stand: Stand) -> None:
    user = stand.id("ada")
    for version in range(2):
        ones = [states(stand) for _ in range(4)]
        answers = together(
            *(partial(one.save, user, version=version, change=f"c{version}", patch={"n": version}) for one in ones)
        )
        assert answers == [Saved(version + 1)] * 4
    assert states(stand).read(user) == Held({"n": 1}, 2)


def test_a_change_of_the_handler_that_read_first_and_wrote_last_is_a_conflict() -> None:
    engine = SqliteEngine(MEMORY)

    class Slow(FaultyEngine):
        """Lets another handler write between its reading and its writing."""

        def apply(self, batch):  # type: ignore[no-untyped-def]
            assert States(engine, "eu-central-1", engine.clock.now).save(
                "ada", version=1, change="other", patch={"who": "other"}
            ) == Saved(2)
            return super().apply(batch)

    one = States(engine, "eu-central-1", engine.clock.now)
    one.save("ada", version=0, change="c1", patch={"kept": True})
    slow = States(Slow(engine), "eu-central-1", engine.clock.now)
    assert slow.save("ada", version=1, change="c2", patch={"who": "slow"}) == Conflict(
        Held({"kept": True, "who": "other"}, 2)
    )


@pytest.mark.parametrize("version", [0, 1])
def test_a_change_whose_reply_is_lost_is_saved_when_it_comes_again(version: int) -> None:
    engine, one = in_memory()
    if version:
        one.save("ada", version=0, change="c0", patch={"first": True})
    engine.fail("save state" if version else "put", Fault.LOST_REPLY)
    with pytest.raises(StoreError):
        one.save("ada", version=version, change="c1", patch={"a": 1})
    assert one.save("ada", version=version, change="c1", patch={"a": 1}) == Saved(version + 1)
    assert one.read("ada").version == version + 1


@pytest.mark.parametrize("version", [0, 1])
def test_a_write_that_the_sdk_repeats_after_a_lost_reply_is_saved_and_no_conflict(version: int) -> None:
    engine, one = in_memory()
    if version:
        one.save("ada", version=0, change="c0", patch={"first": True})
    engine.fail("save state" if version else "put", Fault.REPEATED)
    assert one.save("ada", version=version, change="c1", patch={"a": 1}) == Saved(version + 1)
    assert one.read("ada").version == version + 1


def test_a_row_that_another_region_replaced_under_the_same_version_is_a_conflict() -> None:
    engine = SqliteEngine(MEMORY)

    class Replicated(FaultyEngine):
        """The row of another region, with the same version, arrives between reading and writing."""

        def apply(self, batch):  # type: ignore[no-untyped-def]
            row = {"payload": '{"from":"b"}', "lastAgent": "b", "updatedAt": 1.0}
            engine.apply([Write(verb="replicate", task_id=state_id("ada"), set=row, require=(Is("fence", 1),))])
            return super().apply(batch)

    States(engine, "a", engine.clock.now).save("ada", version=0, change="c1", patch={"from": "a"})
    one = States(Replicated(engine), "a", engine.clock.now)
    assert one.save("ada", version=1, change="c2", patch={"more": 1}) == Conflict(Held({"from": "b"}, 1))


def test_the_last_changes_are_remembered_and_no_more() -> None:
    engine, one = in_memory()
    for version in range(CHANGES_KEPT + 5):
        assert one.save("ada", version=version, change=f"c{version}", patch={"n": version}) == Saved(version + 1)
    changes = changes_of(engine.get([state_id("ada")])[state_id("ada")])
    assert changes == {f"c{number}": number + 1 for number in range(5, CHANGES_KEPT + 5)}


def test_a_state_may_have_120_kb_and_one_byte_more_is_refused_and_changes_nothing(stand: Stand) -> None:
    one, user = states(stand), stand.id("ada")
    room = STATE_BYTES - len('{"a":""}')
    assert one.save(user, version=0, change="c1", patch={"a": "x" * room}) == Saved(1)
    assert one.save(user, version=1, change="c2", patch={"a": "x" * (room + 1)}) == TooLarge(STATE_BYTES + 1)
    assert one.save(user, version=1, change="c3", patch={"b": 1}) == TooLarge(STATE_BYTES + len(',"b":1'))
    assert states(stand).read(user).value == {"a": "x" * room}


def test_states_of_users_have_nothing_to_do_with_each_other() -> None:
    _, one = in_memory()
    one.save("ada", version=0, change="c", patch={"of": "ada"})
    assert one.save("bob", version=0, change="c", patch={"of": "bob"}) == Saved(1)
    assert (one.read("ada").value, one.read("bob").value) == ({"of": "ada"}, {"of": "bob"})


def test_a_state_that_somebody_deletes_meanwhile_is_a_conflict_with_the_empty_one() -> None:
    engine = SqliteEngine(MEMORY)

    class Deleted(FaultyEngine):
        def apply(self, batch):  # type: ignore[no-untyped-def]
            engine.apply([Write(verb="delete", task_id=state_id("ada"), delete=True, require=(Is("fence", 1),))])
            return super().apply(batch)

    States(engine, "a", engine.clock.now).save("ada", version=0, change="c1", patch={"a": 1})
    one = States(Deleted(engine), "a", engine.clock.now)
    assert one.save("ada", version=1, change="c2", patch={"b": 1}) == Conflict(Held({}, 0))


@pytest.mark.parametrize("payload", ["{", "[1]", "null"])
def test_a_row_made_by_hand_that_is_no_state_is_told_and_not_overwritten(payload: str) -> None:
    engine, one = in_memory()
    engine.put([{"taskId": state_id("ada"), "payload": payload, "fence": 1}])
    with pytest.raises(Unreadable, match="user:ada"):
        one.read("ada")
    with pytest.raises(Unreadable):
        one.save("ada", version=1, change="c", patch={})
    assert engine.get([state_id("ada")])[state_id("ada")]["payload"] == payload
