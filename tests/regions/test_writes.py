"""Writes of the arbiter's row, and what a grant adds to those of tasks: whatever came before, one of two wins."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from thunderagent.model.conditions import Write
from thunderagent.model.errors import StoreError
from thunderagent.model.rows import LEASE_ATTRIBUTES
from thunderagent.model.task import Candidate, Lease, Row, Status, Task
from thunderagent.model.writes import tasks as writes
from thunderagent.regions import writes as region_writes
from thunderagent.regions.grant import Grant, Record, RegionState, scope_id
from thunderagent.stores.engine import Applied
from thunderagent.stores.sqlite.engine import MEMORY, SqliteEngine
from thunderagent.stores.tasks import TaskStore, Wanted
from thunderagent.testing import FakeClock

REGIONS = ("eu-central-1", "eu-west-1", "us-east-1")
VERBS = ("beat", "take", "drain", "hand over", "vacate", "stay", "freeze", "thaw")

times = st.floats(1_799_999_000.0, 1_800_001_000.0)
steps = st.tuples(st.sampled_from(VERBS), st.sampled_from(REGIONS), times)
few = settings(max_examples=30, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


def order(seen: Record, verb: str, region: str, now: float) -> Write | None:
    """A write of the arbiter's row by somebody who has seen it so."""
    if verb == "beat":
        return region_writes.beat(seen, now=now)
    if verb == "take":
        return region_writes.take(seen, region, lease_s=30.0, by=region, now=now)
    if verb == "drain":
        return region_writes.drain(seen, region, drain_s=20.0, by="ada", reason="move", now=now)
    if verb == "hand over":
        return region_writes.hand_over(seen, lease_s=30.0, by=region, now=now) if seen.to else None
    if verb == "vacate":
        return region_writes.vacate(seen, region, by="ada", reason="lost", now=now)
    if verb == "stay":
        return region_writes.stay(seen, by="ada", reason="stay", now=now)
    return region_writes.freeze(seen, "careful" if verb == "freeze" else None, by="ada", now=now)


def look(engine: SqliteEngine) -> Record:
    return Record.from_row(engine.get([scope_id("shop")])[scope_id("shop")])


def arbiter() -> SqliteEngine:
    engine = SqliteEngine(MEMORY)
    engine.put([region_writes.first_row("shop", REGIONS[0], lease_s=30.0, by="me", now=1_800_000_000.0)])
    return engine


@few
@given(history=st.lists(st.tuples(steps, steps), max_size=12))
def test_of_two_writes_made_of_one_sight_one_is_done_and_epochs_grow_with_each_new_holder(
    history: list[tuple[tuple[str, str, float], tuple[str, str, float]]],
) -> None:
    engine = arbiter()
    for first, second in history:
        seen = look(engine)
        made = [write for write in (order(seen, *first), order(seen, *second)) if write is not None]
        won = [answer.won for answer in engine.apply(made)]
        assert won == [True, False][: len(made)]
        if not made:
            continue
        now = look(engine)
        assert now.updated_at > seen.updated_at, "whatever the clock of the writer says"
        is_grant = made[0].verb in ("take", "hand over")
        assert now.epoch == seen.epoch + is_grant
        assert is_grant or now.holder == seen.holder
        assert now.beat == (0 if is_grant else seen.beat + (made[0].verb == "beat"))
        assert (now.to is None) == (now.state is RegionState.ACTIVE)
        if made[0].verb in ("beat", "freeze", "thaw"):
            before = (seen.state, seen.to, seen.drain_s, seen.ordered)
            assert (now.state, now.to, now.drain_s, now.ordered) == before, "the order to drain stands"
        if made[0].verb == "drain":
            assert now.ordered > seen.ordered
        assert made[0].verb == "thaw" or now.frozen == ("careful" if made[0].verb == "freeze" else seen.frozen)
        assert len(now.switches) <= region_writes.SWITCHES_KEPT
    engine.close()


@pytest.mark.parametrize("verb", VERBS)
def test_what_a_newer_version_keeps_with_the_grant_stays(verb: str) -> None:
    engine = arbiter()
    row = engine.get([scope_id("shop")])[scope_id("shop")]
    seen = Record.from_row({**row, "handoffOwner": REGIONS[1], "info": {**row["info"], "quorum": {"of": 3}}})
    write = order(seen, verb, REGIONS[1], 1_800_000_001.0)
    assert write is not None
    assert write.set.get("info", {"quorum": {"of": 3}})["quorum"] == {"of": 3}
    engine.close()


@given(until=st.floats(-1e6, 1e6), now=st.floats(-1e6, 1e6))
def test_a_grant_is_valid_up_to_its_end_and_not_at_it(until: float, now: float) -> None:
    grant = Grant(epoch=1, valid_until=until)
    assert grant.is_valid(now) == (now < until)
    assert not grant.is_valid(until)
    assert grant.is_valid(math.nextafter(until, -math.inf))


def test_there_is_nobody_to_hand_over_to_before_an_order() -> None:
    with pytest.raises(StoreError, match=r"eu-central-1 is ACTIVE and names no region"):
        region_writes.hand_over(look(arbiter()), lease_s=30.0, by="me", now=0.0)


# What a grant adds to the writes of tasks


def lease_of(engine: SqliteEngine, epoch: int, owner: str, now: float) -> Lease:
    """The lease of a task that was claimed under an epoch."""
    store = TaskStore(engine)
    task = Task(task_id="a", status=Status.PENDING, created_at=now, submitted_at=now, job="test.job")
    store.enqueue([task])
    candidate = Candidate("a", "PENDING", now, "test.job")
    claim = writes.claim(candidate, owner=owner, lease_s=30.0, now=now, until=now + 30.0)
    [answer] = engine.apply([region_writes.in_region(claim, epoch)])
    assert answer.won
    held = Task.from_row(answer.row or {})
    return Lease(task=held, owner=owner, fence=held.fence, lease_s=30.0, held_from=0.0)


def ways(lease: Lease, now: float) -> dict[str, Write]:
    """What a holder may write."""
    return {
        "renew": writes.renew(lease, now=now, until=now + 30.0),
        "succeed": writes.succeed(lease, now=now, expire_at=now + 100.0, result='"mine"'),
        "retry": writes.retry(lease, due=now, error="boom", now=now),
        "snooze": writes.snooze(lease, due=now, now=now),
        "release": writes.release(lease, now=now),
        "fail": writes.fail(lease, error="boom", now=now, expire_at=now + 100.0),
        "close": writes.close(lease, reason="enough", now=now, expire_at=now + 100.0),
    }


def the_row(engine: SqliteEngine) -> Row:
    return engine.get(["a"])["a"]


holder_verbs = st.sampled_from(["renew", "succeed", "retry", "snooze", "release", "fail", "close"])


@few
@given(verb=holder_verbs, epoch=st.integers(1, 5), ahead=st.integers(-4, 4))
def test_what_a_holder_writes_is_done_in_its_own_epoch_and_in_no_other(verb: str, epoch: int, ahead: int) -> None:
    clock = FakeClock()
    engine = SqliteEngine(MEMORY, clock=clock)
    write = ways(lease_of(engine, epoch, "me", clock.now()), clock.now())[verb]
    before = the_row(engine)
    [answer] = engine.apply([region_writes.in_region(write, epoch + ahead)])
    assert answer.won == (ahead == 0)
    assert the_row(engine)["regionEpoch"] == epoch
    if ahead:
        assert the_row(engine) == before
    engine.close()


@few
@given(theirs=st.integers(1, 5), ours=st.integers(1, 5))
def test_a_task_is_taken_over_from_an_earlier_epoch_and_from_no_later_one(theirs: int, ours: int) -> None:
    clock = FakeClock()
    engine = SqliteEngine(MEMORY, clock=clock)
    seen = lease_of(engine, theirs, "they", clock.now()).task
    take = writes.take_over(seen, owner="we", lease_s=30.0, now=clock.now(), until=clock.now() + 30.0)
    [answer] = engine.apply([region_writes.in_region(take, ours)])
    assert answer.won == (theirs <= ours)
    assert the_row(engine)["regionEpoch"] == max(theirs, ours if theirs <= ours else 0)
    engine.close()


@pytest.mark.parametrize("is_bare", [False, True])
def test_what_is_given_up_under_a_later_epoch_says_so(is_bare: bool) -> None:
    """A holder of the earlier one may have ended it there: replicated, the row would look like a late write."""
    clock = FakeClock()
    engine = SqliteEngine(MEMORY, clock=clock)
    seen = lease_of(engine, 1, "they", clock.now()).task
    give_up = writes.give_up(seen, error="lost", now=clock.now(), expire_at=clock.now() + 100.0)
    [answer] = engine.apply([region_writes.in_region(writes.bare(give_up) if is_bare else give_up, 3)])
    assert answer.won
    assert (the_row(engine)["status"], the_row(engine)["regionEpoch"]) == ("FAILED", 3)
    engine.close()


@few
@given(late=holder_verbs, then=holder_verbs, theirs=st.integers(1, 4), later=st.integers(1, 3))
def test_the_holder_of_the_later_epoch_makes_the_row_what_it_would_have_been(
    late: str, then: str, theirs: int, later: int
) -> None:
    """The late row is put in the place of the holder's, as replication does it; the holder's next write stands."""
    clock = FakeClock()
    lost, own = SqliteEngine(MEMORY, clock=clock), SqliteEngine(MEMORY, clock=clock)
    old = lease_of(lost, theirs, "they", clock.now())
    assert lost.apply([ways(old, clock.now())[late]])[0].won
    lease = lease_of(own, theirs + later, "we", clock.now())
    write = region_writes.in_region(ways(lease, clock.now())[then], theirs + later)
    expected = answered(own.apply([write]))
    refused = the_row(lost)
    again = region_writes.reasserted(write, refused, theirs + later)
    assert again is not None
    row = answered(lost.apply([again]))
    for name in ("status", "fence", "leaseOwner", "regionEpoch", "result", "finishedAt", "expireAt", "doneReason"):
        assert row.get(name) == expected.get(name), name
    assert {name for name in LEASE_ATTRIBUTES if name in row} == {name for name in LEASE_ATTRIBUTES if name in expected}
    assert region_writes.reasserted(write, row, theirs + later) is None, "once is enough"
    assert answered_not(lost.apply([again])), "and it is never done over what came after it"
    lost.close()
    own.close()


@few
@given(verb=holder_verbs, ours=st.integers(1, 4), ahead=st.integers(0, 3), claimed=st.integers(1, 4))
def test_nothing_is_written_again_over_an_epoch_that_is_not_earlier_or_for_a_lease_of_an_earlier_one(
    verb: str, ours: int, ahead: int, claimed: int
) -> None:
    clock = FakeClock()
    engine = SqliteEngine(MEMORY, clock=clock)
    lease = lease_of(engine, claimed, "me", clock.now())
    write = region_writes.in_region(ways(lease, clock.now())[verb], ours)
    row = the_row(engine)
    assert region_writes.reasserted(write, row | {"regionEpoch": ours + ahead}, ours) is None
    without: dict[str, Any] = {name: value for name, value in row.items() if name != "regionEpoch"}
    assert region_writes.reasserted(write, without, ours) is None
    engine.close()


def test_writes_of_no_holder_are_never_made_again() -> None:
    clock = FakeClock()
    engine = SqliteEngine(MEMORY, clock=clock)
    lease = lease_of(engine, 2, "me", clock.now())
    cancel = region_writes.in_region(writes.request_cancel(lease.task, now=clock.now()), 3)
    assert region_writes.reasserted(cancel, the_row(engine) | {"regionEpoch": 1}, 3) is None
    assert engine.apply([cancel])[0].won
    engine.close()


def test_a_claim_takes_no_task_of_a_later_epoch() -> None:
    clock = FakeClock()
    engine = SqliteEngine(MEMORY, clock=clock)
    lease = lease_of(engine, 5, "they", clock.now())
    assert engine.apply([writes.release(lease, now=clock.now())])[0].won
    [entry] = engine.page("PENDING", limit=1).entries
    for epoch, won in ((4, False), (5, True)):
        claim = writes.claim(entry, owner="we", lease_s=30.0, now=clock.now(), until=clock.now() + 30.0)
        assert engine.apply([region_writes.in_region(claim, epoch)])[0].won is won
    assert [Wanted(entry, 30.0).candidate.task_id, the_row(engine)["regionEpoch"]] == ["a", 5]
    engine.close()


def answered(answers: list[Applied]) -> Row:
    [answer] = answers
    assert answer.won
    return answer.row or {}


def answered_not(answers: list[Applied]) -> bool:
    return not any(answer.won for answer in answers)
