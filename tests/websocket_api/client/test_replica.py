"""The state as a client sees it: changes are applied once, rebased, and sent again when a server has lost them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.websocket_api.client.server import Row
from thunderagent.websocket_api.client.options import ClientOptions
from thunderagent.websocket_api.client.replica import Replica

HERE, THERE = "eu-central-1", "eu-west-1"


def replica(**options: Any) -> Replica:
    return Replica(ClientOptions(**options))


def send_all(one: Replica, row: Row, region: str = HERE, now: float = 0.0) -> None:
    """Bring every change to a server that answers at once."""
    for _ in range(500):
        change = one.head
        if change is None:
            return
        sent = one.version
        if change.id in row.changes:
            one.saved(change.id, row.changes[change.id], region, now)
        elif sent != row.version:
            one.conflict(sent, row.state, row.version, region, now)
        else:
            one.saved(change.id, row.save(change.patch, change.id), region, now)
    raise AssertionError("the tail does not become empty")


def test_changes_are_seen_at_once_and_counted_when_they_are_acknowledged() -> None:
    one = replica()
    one.add("c1", {"a": 1, "b": {"c": 2}})
    one.add("c2", {"b": {"d": 3}, "a": None})
    assert (one.state, one.version, one.confirmed) == ({"b": {"c": 2, "d": 3}}, 0, {})
    one.saved("c1", 1, HERE, 0.0)
    assert (one.state, one.version, one.confirmed) == ({"b": {"c": 2, "d": 3}}, 1, {"a": 1, "b": {"c": 2}})


def test_a_conflict_puts_the_change_upon_what_the_others_have_made() -> None:
    one, row = replica(), Row()
    row.save({"theirs": 1, "both": "theirs"}, "x")
    one.add("c1", {"ours": 2, "both": "ours"})
    send_all(one, row)
    assert row.state == one.confirmed == {"theirs": 1, "ours": 2, "both": "ours"}
    assert one.version == 2


def test_a_change_whose_answer_was_lost_is_not_made_twice() -> None:
    one, row = replica(), Row()
    change = one.add("c1", {"a": 1})
    row.save(change.patch, change.id)
    row.save({"a": 5}, "x")
    one.observed(row.state, row.version, HERE, 0.0)
    send_all(one, row)
    assert (row.state, row.version, one.state, one.version) == ({"a": 5}, 2, {"a": 5}, 2)


def test_what_a_server_that_is_behind_has_lost_is_sent_again_in_its_order_before_what_is_new() -> None:
    one, here = replica(), Row()
    for number in range(5):
        one.add(f"c{number}", {"last": number, f"n{number}": True})
        send_all(one, here)
        if number == 1:
            there = here.copy()
    one.add("new", {"last": "new"})
    assert one.observed(there.state, there.version, THERE, 0.0, is_behind=True) == (3, True)
    assert one.state == {**here.state, "last": "new"}  # the user sees nothing of it
    assert [change.id for change in one.unacknowledged] == ["c2", "c3", "c4", "new"]
    send_all(one, there, THERE)
    assert there.state == one.confirmed == {**here.state, "last": "new"}
    assert list(there.changes) == ["c0", "c1", "c2", "c3", "c4", "new"]
    assert one.version == 6


def test_a_loss_behind_the_same_number_is_found_when_another_region_answers() -> None:
    one, here = replica(), Row()
    one.add("kept", {"kept": 1})
    send_all(one, here, now=0.0)
    there = here.copy()
    one.add("lost", {"lost": 2})
    send_all(one, here, now=10.0)
    there.save({"theirs": 3}, "x")  # by another client, in the region that took over: version 2 there as well
    assert there.version == one.version
    assert one.observed(there.state, there.version, THERE, 20.0) == (2, False)
    assert one.state == there.state, "a change that is sent to be sure is not shown before it is known to be lost"
    send_all(one, there, THERE, now=20.0)
    assert there.state == one.confirmed == {"kept": 1, "lost": 2, "theirs": 3}
    assert there.version == one.version == 3


def test_what_was_acknowledged_long_ago_is_not_asked_for_again() -> None:
    one, here = replica(recheck_s=60.0), Row()
    one.add("old", {"old": 1})
    send_all(one, here, now=0.0)
    one.heard(61.0)
    assert one.observed(here.state, here.version, THERE, 62.0) == (0, False)


def test_what_was_acknowledged_just_before_the_region_was_lost_is_asked_for_however_long_the_way_took() -> None:
    one, here = replica(recheck_s=60.0), Row()
    one.add("young", {"young": 1})
    there = here.copy()
    send_all(one, here, now=0.0)
    there.save({"of another device": 1}, "x")  # so the version says nothing
    one.heard(20.0)
    assert one.observed(there.state, there.version, THERE, 240.0) == (1, False)
    send_all(one, there, THERE)
    assert there.state == {"young": 1, "of another device": 1}


def test_an_answer_that_was_overtaken_changes_nothing() -> None:
    one, here = replica(), Row()
    before = here.copy()
    one.add("c1", {"a": 1})
    send_all(one, here)
    assert one.observed(before.state, before.version, HERE, 0.0) == (0, False)
    assert (one.state, one.version) == ({"a": 1}, 1)


def test_what_is_kept_of_acknowledged_changes_is_bounded_by_number_and_by_bytes() -> None:
    one, here = replica(keep_acknowledged=3, keep_acknowledged_bytes=100), Row()
    for number in range(10):
        one.add(f"c{number}", {"a": number})
        send_all(one, here)
    assert one.observed({}, 0, HERE, 0.0, is_behind=True)[0] == 3
    big, there = replica(keep_acknowledged=3, keep_acknowledged_bytes=100), Row()
    for number in range(3):
        big.add(f"c{number}", {"a": "x" * 60, "n": number})
        send_all(big, there)
    assert big.observed({}, 0, HERE, 0.0, is_behind=True)[0] == 1


def test_a_refused_change_is_taken_back() -> None:
    one = replica()
    one.add("bad", {"a": 1})
    one.add("good", {"b": 2})
    one.drop("bad")
    assert one.state == {"b": 2}
    assert one.head is not None
    assert one.head.id == "good"


def test_an_update_is_made_once_for_each_state_that_it_has_not_seen() -> None:
    one, row, made = replica(), Row(), Counter[str]()

    def tagged(name: str) -> Callable[[Any], dict[str, Any]]:
        def make(state: Any) -> dict[str, Any]:
            made[name] += 1  # an id that is made inside would be another each time
            return {name: made[name]}

        return make

    for name in ("c1", "c2", "c3"):
        one.add(name, tagged(name))
    one.observed(row.state, row.version, HERE, 0.0)  # as it was
    one.sent("c1", 0)
    one.saved("c1", row.save({"c1": 1}, "c1"), HERE, 0.0)
    assert (made, one.state) == ({"c1": 1, "c2": 1, "c3": 1}, {"c1": 1, "c2": 1, "c3": 1})
    one.changed("x", row.save({"theirs": 1}, "x"), {"theirs": 1}, HERE)
    assert (made, one.state) == ({"c1": 1, "c2": 2, "c3": 2}, {"c1": 1, "c2": 2, "c3": 2, "theirs": 1})
    send_all(one, row)
    assert made["c3"] == 2
    assert row.state == one.confirmed


def test_an_update_that_changes_the_state_itself_ends_with_a_reason() -> None:
    failures: list[Exception] = []
    one, row = Replica(ClientOptions(), lambda change, error: failures.append(error)), Row()
    one.add("c1", lambda state: {"a": 1, **({} if not state else {"b": one.add("c2", {"x": 1}).id})})
    one.add("c3", {"kept": 1})
    one.changed("x", row.save({"theirs": 1}, "x"), {"theirs": 1}, None)
    assert "may only compute" in str(failures)
    assert [change.id for change in one.unacknowledged] == ["c3"]


def test_an_update_that_another_region_may_have_is_only_asked_for_if_it_cannot_be_made_again() -> None:
    def once(state: Any) -> dict[str, Any]:
        if "ours" in state:
            raise LookupError("it is there")
        return {"ours": 1}

    failures: list[str] = []
    one, here = Replica(ClientOptions(), lambda change, error: failures.append(change.id)), Row()
    one.add("c1", once)
    send_all(one, here)
    there = here.copy()
    there.save({"ours": 2}, "x")  # of others, who have seen ours
    assert one.observed(there.state, there.version, THERE, 1.0) == (1, False)
    change = one.head
    assert change is not None
    assert one.version_for(change) < there.version  # so that it is not made, whether the region knows it or not
    assert (one.state, one.unacknowledged, failures) == ({"ours": 2}, (), [])
    one.sent("c1", one.version_for(change))
    one.sent("c1", None)  # a conflict: the region does not have it
    assert (one.head, failures) == (None, ["c1"])


NAMES = st.sampled_from("abc")
PATCHES = st.dictionaries(NAMES, st.one_of(st.none(), st.integers(0, 9), st.dictionaries(NAMES, st.integers(0, 9))))
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("set"), PATCHES),
        st.tuples(st.just("theirs"), PATCHES),
        st.tuples(st.sampled_from(["send", "lose", "replicate", "switch", "read"]), st.none()),
    ),
    max_size=40,
)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(STEPS)
def test_whatever_happens_every_change_of_ours_is_in_the_state_that_is_read_at_last_once(
    steps: list[tuple[str, Any]],
) -> None:
    one, rows, at, count = replica(keep_acknowledged=100), [Row(), Row()], 0, 0
    regions = (HERE, THERE)

    def read() -> None:
        row = rows[at]
        one.observed(row.state, row.version, regions[at], 0.0, is_behind=row.version < one.version)

    ours = []
    for verb, patch in steps:
        row = rows[at]
        match verb:
            case "set":
                count += 1
                one.add(f"c{count}", patch)
                ours.append(f"c{count}")
            case "theirs":
                count += 1
                row.save(patch, f"x{count}")
            case "send":
                send_all(one, row, regions[at])
            case "lose":  # the head arrives, its answer does not
                if one.head is not None and one.head.id not in row.changes and one.version == row.version:
                    row.save(one.head.patch, one.head.id)
            case "replicate":
                rows[1 - at] = row.copy()
            case "switch":  # the other region takes over, with what was replicated
                at = 1 - at
                read()
            case "read":
                read()
    read()
    send_all(one, rows[at], regions[at])
    row = rows[at]
    assert set(ours) <= set(row.changes), "a change is lost"
    assert len(row.changes) == row.version, "a change was made twice"
    assert (one.confirmed, one.version, one.state) == (row.state, row.version, row.state)
