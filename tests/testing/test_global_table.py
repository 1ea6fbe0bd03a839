"""The simulated global table: what DynamoDB promises of one, and what it does not."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.stands import eventually, together
from thunderagent.model.clock import SharedClock
from thunderagent.model.conditions import Absent, Is, Present, Write
from thunderagent.model.errors import ConfigurationError, StoreError, StoreThrottled, StoreUnavailable
from thunderagent.model.task import Row
from thunderagent.stores.engine import Applied, Engine
from thunderagent.stores.sqlite.engine import MEMORY, SqliteEngine
from thunderagent.testing import FakeClock, Fault, FaultyEngine, GlobalTableSim, memory_store
from thunderagent.testing.global_table import replica as replicas
from thunderagent.testing.global_table import table as globaltable

HERE, THERE, FAR = "eu-central-1", "eu-west-1", "us-east-1"


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def table(clock: FakeClock) -> Iterator[GlobalTableSim]:
    with GlobalTableSim([HERE, THERE], lag_s=1.0, clock=clock) as one:
        yield one


def a_row(name: str = "a", **changes: Any) -> Row:
    return {"taskId": name, "status": "PENDING", "createdAt": 1.0, "fence": 0, "job": "test.job", **changes}


def change(name: str = "a", *, delete: bool = False, **changes: Any) -> Write:
    return Write(verb="test", task_id=name, set=changes, delete=delete, require=(Present("taskId"),))


def found(table: GlobalTableSim, region: str, name: str = "a") -> Row | None:
    return table.engine(region).get([name]).get(name)


def put(table: GlobalTableSim, region: str = HERE, name: str = "a", **changes: Any) -> None:
    [answer] = table.engine(region).put([a_row(name, **changes)])
    assert answer.won


def write(table: GlobalTableSim, region: str, *writes: Write) -> list[bool]:
    return [answer.won for answer in table.engine(region).apply(writes)]


def test_a_row_is_in_the_other_region_after_the_lag_and_not_before(table: GlobalTableSim, clock: FakeClock) -> None:
    put(table)
    clock.advance(0.9)
    assert table.deliver() == 0
    assert found(table, THERE) is None
    clock.advance(0.1)
    assert table.deliver() == 1
    assert found(table, THERE) == a_row()
    assert table.pending() == 0


def test_an_item_is_replicated_whole_and_what_was_removed_is_gone(table: GlobalTableSim) -> None:
    put(table, leaseOwner="me", holders=frozenset({"x", "y"}), info={"a": [1, {"b": 2}]}, cancelRequested=True)
    table.settle()
    before = Write(
        verb="test",
        task_id="a",
        set={"error": "boom"},
        increase={"fence": 1},
        remove=("leaseOwner", "cancelRequested"),
        insert={"dependents": frozenset({"child"})},
        discard={"holders": "x"},
        require=(Is("leaseOwner", "me"),),
    )
    assert write(table, HERE, before) == [True]
    table.settle()
    assert found(table, THERE) == found(table, HERE)
    assert found(table, THERE) == a_row(
        error="boom", fence=1, dependents=frozenset({"child"}), holders=frozenset({"y"}), info={"a": [1, {"b": 2}]}
    )


def test_a_condition_is_judged_by_the_replica_that_it_reaches(table: GlobalTableSim) -> None:
    put(table)
    table.settle()
    assert write(table, HERE, change(leaseOwner="here")) == [True]
    free = Write(verb="test", task_id="a", set={"leaseOwner": "there"}, require=(Absent("leaseOwner"),))
    assert write(table, THERE, free) == [True], "the other region does not know of the first writer yet"
    assert write(table, HERE, free) == [False]


def test_of_two_writes_the_later_stays_in_every_region_and_the_loss_is_told(
    table: GlobalTableSim, clock: FakeClock
) -> None:
    put(table)
    table.settle()
    write(table, THERE, change(leaseOwner="first"))
    clock.advance(0.5)
    write(table, HERE, change(leaseOwner="second"))
    table.settle()
    for region in table.regions:
        assert (found(table, region) or {})["leaseOwner"] == "second"
    [lost] = table.overwritten
    assert (lost.item_id, lost.region, lost.by) == ("a", THERE, HERE)
    assert (lost.row or {})["leaseOwner"] == "first"


def test_of_two_writes_at_one_moment_that_of_the_larger_name_stays(table: GlobalTableSim) -> None:
    put(table)
    table.settle()
    write(table, THERE, change(leaseOwner="there"))
    write(table, HERE, change(leaseOwner="here"))
    table.settle()
    assert [(found(table, region) or {})["leaseOwner"] for region in table.regions] == ["there", "there"]


def test_a_clock_that_is_ahead_wins_over_later_writes_that_did_not_see_its_own(
    table: GlobalTableSim, clock: FakeClock
) -> None:
    put(table)
    table.settle()
    table.skew(THERE, 60.0)
    assert table.engine(THERE).clock.now() == clock.now() + 60.0
    assert table.engine(THERE).clock.latest() == table.engine(THERE).clock.earliest() == clock.now() + 60.0
    assert table.engine(THERE).clock.is_usable
    write(table, THERE, change(leaseOwner="ahead"))
    clock.advance(30.0)
    write(table, HERE, change(leaseOwner="later in truth"))
    table.settle()
    assert [(found(table, region) or {})["leaseOwner"] for region in table.regions] == ["ahead", "ahead"]


def test_a_write_that_has_seen_another_is_later_however_the_clocks_are_set(table: GlobalTableSim) -> None:
    put(table)
    table.skew(THERE, 3600.0)
    table.settle()
    write(table, THERE, change(leaseOwner="there"))
    table.settle()
    write(table, HERE, change(leaseOwner="here"))
    write(table, HERE, change(leaseOwner="here again"))
    table.settle()
    assert [(found(table, region) or {})["leaseOwner"] for region in table.regions] == ["here again", "here again"]
    assert not table.overwritten, "nothing was overwritten that was not seen"


def test_writes_of_one_region_that_arrive_in_another_order_end_with_the_last(clock: FakeClock) -> None:
    lags = iter([5.0, 1.0, 3.0])
    with GlobalTableSim([HERE, THERE], lag_s=lambda source, target: next(lags), clock=clock) as table:
        put(table)
        write(table, HERE, change(progress="1"), change(progress="2"))
        for seconds, progress in ((1.0, "1"), (2.0, "2"), (2.0, "2")):
            clock.advance(seconds)
            assert table.deliver() == 1
            assert (found(table, THERE) or {})["progress"] == progress


def test_lag_may_differ_from_link_to_link(clock: FakeClock) -> None:
    def lag_s(source: str, target: str) -> float:
        return 1.0 if target == THERE else 10.0

    with GlobalTableSim([HERE, THERE, FAR], lag_s=lag_s, clock=clock) as table:
        put(table)
        clock.advance(1.0)
        assert table.deliver() == 1
        assert found(table, THERE)
        assert found(table, FAR) is None
        assert (table.replication_lag(HERE, THERE), table.replication_lag(HERE, FAR)) == (0.0, 1.0)
        clock.advance(9.0)
        table.deliver()
        assert found(table, FAR)
        assert table.pending() == 0, "what arrives is not sent on"


def test_rows_of_one_batch_arrive_separately(clock: FakeClock) -> None:
    lags = iter([1.0, 9.0])
    with GlobalTableSim([HERE, THERE], lag_s=lambda *link: next(lags), clock=clock) as table:
        assert [one.won for one in table.engine(HERE).put([a_row("a"), a_row("b")])] == [True, True]
        clock.advance(1.0)
        table.deliver()
        assert found(table, THERE, "a")
        assert found(table, THERE, "b") is None


def test_a_deletion_is_replicated_and_an_older_write_does_not_bring_the_row_back(
    table: GlobalTableSim, clock: FakeClock
) -> None:
    put(table, status="SUCCESS")
    table.settle()
    write(table, THERE, change(error="late"))
    clock.advance(0.5)
    assert table.engine(HERE).delete([a_row(status="SUCCESS")]) == [True]
    table.settle()
    assert [found(table, region) for region in table.regions] == [None, None]
    put(table, THERE, status="PENDING")
    table.settle()
    assert [found(table, region) for region in table.regions] == [a_row(), a_row()]


def test_a_write_that_takes_a_row_away_is_replicated_also_of_rows_without_a_status(table: GlobalTableSim) -> None:
    [answer] = table.engine(HERE).put([{"taskId": "unique:x", "heldBy": "a"}])
    assert answer.won
    table.settle()
    assert write(table, HERE, change("unique:x", delete=True)) == [True]
    assert found(table, THERE, "unique:x")
    table.settle()
    assert found(table, THERE, "unique:x") is None


def test_time_to_live_takes_a_row_in_all_regions(table: GlobalTableSim, clock: FakeClock) -> None:
    put(table, status="SUCCESS", expireAt=clock.now() + 10)
    put(table, name="b", status="SUCCESS")
    table.settle()
    clock.advance(11)
    assert table.engine(HERE).expire(clock.now()) == 1
    assert found(table, THERE)
    table.settle()
    assert found(table, THERE) is None
    assert found(table, THERE, "b")
    assert table.engine(THERE).expire(clock.now()) == 0


def test_a_partition_holds_back_what_is_on_its_way_and_lets_it_go_when_it_heals(
    table: GlobalTableSim, clock: FakeClock
) -> None:
    table.partition(HERE, THERE)
    put(table)
    put(table, THERE, "b")
    clock.advance(30.0)
    assert (table.deliver(), table.settle()) == (0, 0)
    assert table.replication_lag(HERE, THERE) == 30.0
    assert found(table, HERE), "each goes on by itself"
    table.heal()
    assert table.deliver() == 2
    assert found(table, THERE)
    assert found(table, HERE, "b")
    assert table.replication_lag(HERE, THERE) == 0.0


def test_one_partition_heals_and_the_others_stay(clock: FakeClock) -> None:
    with GlobalTableSim([HERE, THERE, FAR], clock=clock) as table:
        for other in (THERE, FAR):
            table.partition(HERE, other)
        put(table)
        table.heal(FAR, HERE)
        assert table.settle() == 1
        assert found(table, FAR)
        assert found(table, THERE) is None


def test_an_isolated_region_answers_nobody_and_comes_back_with_what_it_had(
    table: GlobalTableSim, clock: FakeClock
) -> None:
    put(table)
    put(table, THERE, "b")
    table.isolate(HERE)
    engine = table.engine(HERE)
    for call in (
        lambda: engine.get(["a"]),
        lambda: engine.page("PENDING", limit=1),
        lambda: engine.count("PENDING"),
        engine.lanes,
        engine.check,
        lambda: engine.expire(clock.now()),
        lambda: engine.delete([a_row()]),
        lambda: engine.get_texts(["x"]),
        lambda: engine.put_texts({"x": "y"}, expire_at=0.0),
    ):
        with pytest.raises(StoreUnavailable, match=HERE):
            call()
    answers = [*engine.apply([change(error="x")]), *engine.put([a_row("c")])]
    assert [type(answer.error) for answer in answers] == [StoreUnavailable] * 2
    assert table.settle() == 0
    assert found(table, THERE, "a") is None
    table.rejoin(HERE)
    assert table.settle() == 2
    assert found(table, HERE) == found(table, THERE) == a_row()
    assert found(table, HERE, "b")


def test_the_index_of_a_region_has_what_has_arrived(table: GlobalTableSim) -> None:
    put(table, status="PENDING#reports")
    there = table.engine(THERE)
    assert not there.page("PENDING#reports", limit=10).entries
    table.settle()
    assert [entry.task_id for entry in there.page("PENDING#reports", limit=10).entries] == ["a"]
    assert there.count("PENDING#reports") == 1
    assert "reports" in {lane.queue for lane in there.lanes()}


def test_writes_of_one_item_in_one_batch_end_the_same_everywhere_though_engines_do_a_batch_in_any_order(
    clock: FakeClock,
) -> None:
    class Backwards(SqliteEngine):
        def apply(self, batch: Sequence[Write]) -> list[Applied]:
            return super().apply(batch[::-1])[::-1]

    def open_engine(region: str, clock: SharedClock) -> Engine:
        return Backwards(MEMORY, clock=clock)

    with GlobalTableSim([HERE, THERE], clock=clock, open_engine=open_engine) as table:
        put(table)
        put(table, name="b")
        writes = change(progress="1"), change("b", error="y"), change(progress="2"), change(error="x")
        assert write(table, HERE, *writes) == [True] * 4
        table.settle()
        assert found(table, HERE) == found(table, THERE) == a_row(progress="2", error="x")
        assert found(table, THERE, "b") == a_row("b", error="y")


def test_what_somebody_puts_is_not_changed_with_the_row_that_he_keeps(table: GlobalTableSim) -> None:
    row = a_row()
    table.engine(HERE).put([row])
    row["error"] = "changed afterwards"
    table.settle()
    assert found(table, THERE) == a_row()


def test_over_the_limit_of_what_is_on_its_way_writes_are_throttled(clock: FakeClock) -> None:
    with GlobalTableSim([HERE, THERE], clock=clock, most_pending=2) as table:
        assert [answer.won for answer in table.engine(HERE).put([a_row("a"), a_row("b")])] == [True, True]
        [answer] = table.engine(HERE).put([a_row("c")])
        assert isinstance(answer.error, StoreThrottled)
        assert found(table, HERE, "c") is None
        table.settle()
        put(table, name="c")


def test_a_write_without_an_answer_is_replicated_as_it_turned_out(clock: FakeClock) -> None:
    faulty: dict[str, FaultyEngine] = {}

    def open_engine(region: str, clock: SharedClock) -> Engine:
        faulty[region] = FaultyEngine(SqliteEngine(MEMORY, clock=clock))
        return faulty[region]

    with GlobalTableSim([HERE, THERE], clock=clock, open_engine=open_engine) as table:
        put(table)
        put(table, name="b")
        put(table, name="c")
        table.settle()
        for fault in (Fault.LOST_REPLY, Fault.LOST_REQUEST, Fault.BROKEN_CALL):
            faulty[HERE].fail("test", fault)
        [done, lost] = table.engine(HERE).apply([change("a", error="done"), change("b", error="lost")])
        assert done.error
        assert lost.error
        with pytest.raises(StoreUnavailable):
            table.engine(HERE).apply([change("c", error="done too")])
        table.settle()
        assert [(found(table, THERE, name) or {}).get("error") for name in "abc"] == ["done", None, "done too"]


def test_an_image_that_the_engine_of_a_region_does_not_take_stays_on_its_way(clock: FakeClock) -> None:
    faulty: dict[str, FaultyEngine] = {}

    def open_engine(region: str, clock: SharedClock) -> Engine:
        faulty[region] = FaultyEngine(SqliteEngine(MEMORY, clock=clock))
        return faulty[region]

    with GlobalTableSim([HERE, THERE], clock=clock, open_engine=open_engine) as table:
        put(table)
        faulty[THERE].fail("put", Fault.THROTTLED)
        with pytest.raises(StoreThrottled):
            table.settle()
        assert table.pending() == 1
        assert table.settle() == 1
        write(table, HERE, change(error="x"))
        faulty[THERE].fail("replicate", Fault.LOST_REPLY)
        with pytest.raises(StoreUnavailable):
            table.settle()
        assert table.settle() == 1, "an image that is there already changes nothing"
        assert found(table, THERE) == a_row(error="x")


def test_rows_that_were_changed_past_the_simulation_are_noticed(clock: FakeClock) -> None:
    class Deaf(SqliteEngine):
        def get(self, task_ids: Sequence[str]) -> dict[str, Row]:
            return {}

    def open_engine(region: str, clock: SharedClock) -> Engine:
        engine = Deaf(MEMORY, clock=clock)
        if region == THERE:
            engine.put([a_row()])
        return engine

    with GlobalTableSim([HERE, THERE], clock=clock, open_engine=open_engine) as table:
        put(table)
        with pytest.raises(StoreError, match=r"past the simulation.*engine\(region\)"):
            table.settle()


def test_what_is_gone_everywhere_is_forgotten_when_nothing_is_on_its_way(
    table: GlobalTableSim, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(globaltable, "TOMBSTONES_KEPT", 2)
    for name in "abc":
        put(table, name=name)
    table.engine(HERE).delete([a_row(name) for name in "abc"])
    table.partition(HERE, THERE)
    table.settle()
    here = table._replicas[HERE]
    assert here.tombstones == 3, "something may still be on its way that would bring them back"
    table.heal()
    table.settle()
    assert [replica.tombstones for replica in table._replicas.values()] == [0, 0]
    assert replicas.TOMBSTONES_KEPT > 2
    put(table)
    table.settle()
    assert found(table, THERE) == a_row()


def test_closing_the_engine_of_a_region_takes_nothing_away(table: GlobalTableSim) -> None:
    put(table)
    table.engine(HERE).close()
    assert found(table, HERE) == a_row()
    assert table.engine(HERE).sibling().get(["a"])


def test_a_sibling_writes_through_the_table_too(clock: FakeClock, tmp_path: Any) -> None:
    def open_engine(region: str, clock: SharedClock) -> Engine:
        return SqliteEngine(str(tmp_path / f"{region}.db"), clock=clock)

    with GlobalTableSim([HERE, THERE], clock=clock, open_engine=open_engine) as table:
        sibling = table.engine(HERE).sibling()
        assert sibling.put([a_row()])[0].won
        sibling.close()
        table.settle()
        assert found(table, THERE) == a_row()


def test_an_engine_of_a_region_tells_where_its_rows_are(table: GlobalTableSim) -> None:
    engine, plain = table.engine(HERE), memory_store().engine
    assert (engine.url, engine.inline_bytes, engine.most_counted) == (plain.url, plain.inline_bytes, plain.most_counted)


@pytest.mark.parametrize("regions", [[], [HERE], [HERE, HERE]])
def test_a_table_needs_two_regions(regions: list[str]) -> None:
    with pytest.raises(ConfigurationError, match="two regions"):
        GlobalTableSim(regions)


def test_names_that_the_table_does_not_know_are_told(table: GlobalTableSim) -> None:
    calls: list[Callable[[], object]] = [
        lambda: table.engine("mars"),
        lambda: table.partition(HERE, "mars"),
        lambda: table.heal("mars"),
        lambda: table.isolate("mars"),
        lambda: table.rejoin("mars"),
        lambda: table.skew("mars", 1.0),
        lambda: table.replication_lag("mars", HERE),
    ]
    for call in calls:
        with pytest.raises(ConfigurationError, match="no region 'mars', but eu-central-1, eu-west-1"):
            call()
    with pytest.raises(ConfigurationError, match="MREC or MRSC"):
        GlobalTableSim([HERE, THERE], mode="ACID")  # type: ignore[arg-type]


# Strong consistency


def test_with_mrsc_every_region_reads_what_was_written_last(clock: FakeClock) -> None:
    with GlobalTableSim([HERE, THERE, FAR], mode="MRSC", clock=clock) as table:
        put(table)
        assert [found(table, region) for region in table.regions] == [a_row()] * 3
        assert table.pending() == table.settle() == 0
        assert table.replication_lag(HERE, THERE) == 0.0


def test_with_mrsc_a_write_that_meets_one_of_another_region_has_to_be_repeated(clock: FakeClock) -> None:
    with GlobalTableSim([HERE, THERE, FAR], mode="MRSC", lag_s=0.1, clock=clock) as table:
        put(table)
        [answer] = table.engine(THERE).apply([change(error="x")])
        assert isinstance(answer.error, StoreUnavailable)
        assert "ReplicatedWriteConflict" in str(answer.error)
        assert found(table, THERE) == a_row()
        assert write(table, HERE, change(error="y")) == [True], "the same region is in nobody's way"
        clock.advance(0.1)
        assert write(table, THERE, change(error="x")) == [True]
        assert found(table, HERE) == a_row(error="x")


@pytest.mark.parametrize("regions", [[HERE, THERE], [HERE, THERE, FAR]])
def test_with_mrsc_an_isolated_region_stops_and_the_others_go_on(regions: list[str], clock: FakeClock) -> None:
    with GlobalTableSim(regions, mode="MRSC", clock=clock) as table:
        table.isolate(HERE)
        [answer] = table.engine(HERE).put([a_row()])
        assert isinstance(answer.error, StoreUnavailable)
        with pytest.raises(StoreUnavailable):
            table.engine(HERE).get(["a"])
        put(table, THERE)
        table.rejoin(HERE)
        assert found(table, HERE) == a_row(), "nothing that was answered is lost"


def test_with_mrsc_a_region_without_a_majority_stops(clock: FakeClock) -> None:
    with GlobalTableSim([HERE, THERE, FAR], mode="MRSC", clock=clock) as table:
        table.partition(HERE, THERE)
        put(table, HERE)
        table.partition(HERE, FAR)
        [answer] = table.engine(HERE).put([a_row("b")])
        assert isinstance(answer.error, StoreUnavailable)
        put(table, FAR, "b")
        table.heal(HERE, FAR)
        assert found(table, HERE, "b")


def test_with_mrsc_there_is_no_time_to_live_and_clocks_may_be_wrong(clock: FakeClock) -> None:
    with GlobalTableSim([HERE, THERE], mode="MRSC", clock=clock) as table:
        put(table, expireAt=clock.now() - 100)
        assert table.engine(HERE).expire(clock.now()) == 0
        assert found(table, THERE)
        table.skew(THERE, 5.0)
        assert table.engine(THERE).clock.now() - table.engine(HERE).clock.now() == 5.0


# In real time


def test_a_thread_delivers_and_ends_with_the_table() -> None:
    table = GlobalTableSim([HERE, THERE], lag_s=0.02).start()
    assert table.start() is table, "once is enough"
    put(table)
    assert eventually(lambda: found(table, THERE)) == a_row()
    table.partition(HERE, THERE)
    put(table, name="b")
    time.sleep(0.1)  # proves a negative: long after the lag, and the links are cut
    assert found(table, THERE, "b") is None
    table.heal()
    eventually(lambda: found(table, THERE, "b"))
    table.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "global table"]


def test_a_thread_goes_on_when_the_engine_of_a_region_does_not_answer_for_a_while() -> None:
    faulty: dict[str, FaultyEngine] = {}

    def open_engine(region: str, clock: SharedClock) -> Engine:
        faulty[region] = FaultyEngine(SqliteEngine(MEMORY, clock=clock))
        return faulty[region]

    with GlobalTableSim([HERE, THERE], lag_s=0.0, open_engine=open_engine).start() as table:
        faulty[THERE].outage()
        put(table)
        eventually(lambda: faulty[THERE].hits)
        faulty[THERE].calm()
        eventually(lambda: found(table, THERE))


def test_the_end_of_the_thread_is_told_to_all_who_write_and_to_who_closes() -> None:
    class Broken(SqliteEngine):
        def put(self, rows: Sequence[Row], *, fresh: bool = False) -> list[Applied]:
            raise RuntimeError("a bug")

    def open_engine(region: str, clock: SharedClock) -> Engine:
        return Broken(MEMORY, clock=clock) if region == THERE else SqliteEngine(MEMORY, clock=clock)

    table = GlobalTableSim([HERE, THERE], lag_s=0.0, open_engine=open_engine).start()
    put(table)
    [answer] = eventually(lambda: [one for one in table.engine(HERE).put([a_row("b")]) if one.error])
    assert "RuntimeError('a bug')" in str(answer.error)
    with pytest.raises(RuntimeError, match="a bug"):
        table.close()


def test_writers_in_both_regions_and_the_thread_come_to_the_same_end() -> None:
    with GlobalTableSim([HERE, THERE], lag_s=0.001).start() as table:
        names = [f"t{number}" for number in range(8)]
        for name in names:
            put(table, name=name)
        eventually(lambda: table.pending() == 0)

        def count(region: str) -> None:
            engine = table.engine(region)
            for number in range(100):
                step = {"increase": {"hb": 1}} if number % 3 else {"set": {"leaseOwner": f"{region} {number}"}}
                engine.apply([Write(verb="test", task_id=names[number % 8], require=(Present("taskId"),), **step)])

        together(lambda: count(HERE), lambda: count(THERE), lambda: count(HERE))
        eventually(lambda: table.pending() == 0)
        assert table.engine(HERE).get(names) == table.engine(THERE).get(names)


# Any history

STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            ["put", "change", "change", "delete", "expire", "deliver", "cut", "heal", "lose", "back", "skew"]
        ),
        st.integers(0, 2),
        st.integers(0, 3),
        st.floats(0.0, 20.0),
    ),
    max_size=60,
)


@pytest.mark.slow
@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(steps=STEPS, seed=st.randoms(use_true_random=False))
def test_whatever_happened_all_regions_end_with_the_same_rows(
    steps: list[tuple[str, int, int, float]], seed: Any
) -> None:
    clock = FakeClock()
    with GlobalTableSim([HERE, THERE, FAR], lag_s=lambda *link: seed.uniform(0.0, 30.0), clock=clock) as table:
        names = [f"t{number}" for number in range(4)]
        answered: dict[str, set[str]] = {name: set() for name in names}
        for number, (what, at, which, seconds) in enumerate(steps):
            region, name, other = table.regions[at], names[which], table.regions[(at + 1) % 3]
            engine, mark = table.engine(region), f"{region} {number}"
            if what == "put":
                if engine.put([a_row(name, error=mark)])[0].won:
                    answered[name].add(mark)
            elif what == "change":
                if engine.apply([change(name, error=mark, expireAt=clock.now() + seconds)])[0].won:
                    answered[name].add(mark)
            elif what == "delete":
                engine.apply([change(name, delete=True)])
            elif what == "expire" and region not in table._isolated:
                engine.expire(clock.now())
            elif what == "deliver":
                clock.advance(seconds)
                table.deliver()
            elif what == "cut":
                table.partition(region, other)
            elif what == "heal":
                table.heal()
            elif what == "lose":
                table.isolate(region)
            elif what == "back":
                table.rejoin(region)
            elif what == "skew":
                table.skew(region, seconds - 10.0)
        table.heal()
        for region in table.regions:
            table.rejoin(region)
        table.settle()
        ends = [table.engine(region).get(names) for region in table.regions]
        assert ends[0] == ends[1] == ends[2]
        for name, row in ends[0].items():
            assert row["error"] in answered[name], "what stays is what somebody wrote, whole"
        assert table.pending() == 0
