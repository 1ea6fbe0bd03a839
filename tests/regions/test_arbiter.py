"""The grant of a region: who has it, who takes it, and who stops before another begins."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from thunderagent.model.bus import EventBus
from thunderagent.model.conditions import Present, Write
from thunderagent.model.errors import StoreError
from thunderagent.model.events import StoreFailed, StoreRecovered
from thunderagent.model.fleet_events import GrantAsked, RegionsFrozen
from thunderagent.model.task import Row
from thunderagent.regions import writes as region_writes
from thunderagent.regions.arbiter import BACK_DWELL_S, Arbiter, RegionPolicy
from thunderagent.regions.grant import HOLDER_SHARE, TAKER_SHARE, Grant, Record, RegionState, scope_id
from thunderagent.stores.engine import Applied
from thunderagent.stores.sqlite.engine import SqliteEngine
from thunderagent.testing import FakeClock, FaultyEngine, Recorder
from thunderagent.testing.faulty_engine import Fault

LEASE_S = 30.0
BEAT_S = 10.0
HERE, THERE = "eu-central-1", "eu-west-1"


@dataclass
class Well:
    """How a region is, as the test says."""

    is_well: bool = True
    successes: int = 9


@dataclass
class World:
    """One arbiter, and the agents of two regions, whose clocks the test moves."""

    clock: FakeClock = field(default_factory=FakeClock)

    def __post_init__(self) -> None:
        self.engine = SqliteEngine(":memory:", clock=self.clock)
        self.bus = EventBus()
        self.told = Recorder(self.bus)
        self.lag_s: float | None = 1.0
        self.epoch = 0

    def agent(self, region: str, name: str = "", *, well: Well | None = None, **options: Any) -> Arbiter:
        engine = options.pop("engine", self.engine)
        given: dict[str, Any] = {"preferred": HERE, "lease_s": LEASE_S, "beat_s": BEAT_S, **options}
        return Arbiter(
            engine,
            RegionPolicy(region=region, scope="shop", owner=name or f"agent-{region}", **given),
            well=well or Well(),
            bus=self.bus,
            signs=self,
            monotonic=self.clock.monotonic,
            rng=random.Random(1),
        )

    def write(self) -> None:
        """The sign of a region that has beaten, which no test reads."""

    def age_s(self, record: Record) -> float | None:
        return self.lag_s

    def newest_epoch(self) -> int:
        return self.epoch

    def record(self) -> Record:
        return Record.from_row(self.engine.get([scope_id("shop")])[scope_id("shop")])

    def go(self, *agents: Arbiter, for_s: float, step_s: float = 1.0) -> list[Grant]:
        """Let time pass, each agent looking once in `step_s`; at no moment have two regions a grant."""
        grants: list[Grant] = []
        until = self.clock.monotonic() + for_s
        while self.clock.monotonic() < until:
            self.clock.advance(step_s)
            grants = [agent.step() for agent in agents]
            self.check(*agents)
        return grants

    def check(self, *agents: Arbiter) -> None:
        now = self.clock.monotonic()
        granted = {agent.policy.region for agent in agents if agent.grant().is_valid(now)}
        assert len(granted) <= 1, granted

    def valid(self, agent: Arbiter) -> bool:
        return agent.grant().is_valid(self.clock.monotonic())


@pytest.fixture
def world() -> World:
    return World()


def test_the_preferred_region_begins_and_the_other_waits(world: World) -> None:
    here, there = world.agent(HERE), world.agent(THERE)
    there.step()
    assert there.record is None and "no region was granted" in there.grant().reason
    here.step()
    there.step()
    assert world.valid(here) and not world.valid(there)
    assert (world.record().holder, world.record().epoch) == (HERE, 1)
    world.go(here, there, for_s=200.0)
    assert world.valid(here)
    assert 12 <= world.record().beat <= 30  # every 7.5 to 10 s


def test_a_region_that_is_not_well_does_not_begin(world: World) -> None:
    here = world.agent(HERE, well=Well(is_well=False))
    world.go(here, for_s=100.0)
    assert here.record is None


def test_agents_of_one_region_share_the_beats(world: World) -> None:
    agents = [world.agent(HERE, f"a{number}") for number in range(5)]
    world.go(*agents, for_s=200.0)
    assert all(map(world.valid, agents))
    assert world.record().beat <= 30


def test_the_holder_counts_from_before_it_asked_and_ends_before_the_whole_lease(world: World) -> None:
    here = world.agent(HERE)
    here.step()
    sent = world.clock.monotonic()
    world.clock.advance(LEASE_S * HOLDER_SHARE - 0.01)
    assert world.valid(here)
    world.clock.advance(0.02)
    assert not world.valid(here)
    assert here.grant().valid_until == sent + LEASE_S * HOLDER_SHARE


class Slow(FaultyEngine):
    """An engine whose writes take seconds to be answered."""

    def __init__(self, world: World) -> None:
        super().__init__(world.engine)
        self._clock = world.clock

    def put(self, rows: Sequence[Row], *, fresh: bool = False) -> list[Applied]:
        answers = super().put(rows, fresh=fresh)
        self._clock.advance(4.0)
        return answers

    def apply(self, batch: Sequence[Write]) -> list[Applied]:
        answers = super().apply(batch)
        self._clock.advance(4.0)
        return answers


def test_what_an_answer_takes_is_not_added_to_a_grant(world: World) -> None:
    here = world.agent(HERE, engine=Slow(world))
    for _ in range(3):
        sent = world.clock.monotonic()
        here.step()
        assert world.clock.monotonic() == sent + 4.0
        assert here.grant().valid_until == sent + LEASE_S * HOLDER_SHARE
        world.clock.advance(2 * BEAT_S)


def test_a_fresh_agent_of_the_holder_has_no_grant_before_it_has_seen_a_sign_of_life(world: World) -> None:
    here = world.agent(HERE)
    here.step()
    sick = world.agent(HERE, "sick", well=Well(is_well=False))
    sick.step()
    assert not world.valid(sick)  # the row may be of a holder that is long gone
    world.go(here, for_s=11.0)
    sick.step()
    assert world.valid(sick)  # its neighbour renews


def test_the_other_region_takes_the_grant_when_the_beat_stood_still_for_lease_and_guard(world: World) -> None:
    here, there = world.agent(HERE), world.agent(THERE)
    world.go(here, there, for_s=60.0)
    world.go(here, for_s=10.0)
    there.step()
    first_sight = world.clock.monotonic()
    while not world.valid(there):
        world.go(there, for_s=0.5, step_s=0.5)
        world.check(here, there)
        assert world.clock.monotonic() < first_sight + LEASE_S * TAKER_SHARE + 1.0
    assert world.clock.monotonic() >= first_sight + LEASE_S * TAKER_SHARE
    assert (world.record().holder, world.record().epoch) == (THERE, 2)
    assert here.step().is_valid(world.clock.monotonic()) is False
    assert THERE in here.grant().reason


def test_a_region_takes_nothing_while_it_is_not_well_itself(world: World) -> None:
    here, there = world.agent(HERE), world.agent(THERE, well=Well(is_well=False))
    world.go(here, there, for_s=20.0)
    world.go(there, for_s=300.0)
    assert world.record().holder == HERE


def test_a_holder_that_is_not_well_lets_its_grant_end(world: World) -> None:
    well = Well()
    here, there = world.agent(HERE, well=well), world.agent(THERE)
    world.go(here, there, for_s=20.0)
    well.is_well = False
    world.go(here, there, for_s=26.0)
    assert not world.valid(here)
    assert "canary" in here.grant().reason
    world.go(here, there, for_s=20.0)
    assert world.valid(there)


def test_of_two_agents_that_saw_the_same_stillness_one_takes_the_grant_and_both_have_it(world: World) -> None:
    here, one, two = world.agent(HERE), world.agent(THERE, "one"), world.agent(THERE, "two")
    world.go(here, one, two, for_s=20.0)
    world.go(one, two, for_s=40.0)
    world.go(one, two, for_s=8.0)
    assert world.record().epoch == 2
    assert world.valid(one) and world.valid(two)


def test_a_take_whose_reply_was_lost_is_found_to_be_ours(world: World) -> None:
    here = world.agent(HERE)
    faulty = FaultyEngine(world.engine)
    there = world.agent(THERE, engine=faulty)
    world.go(here, there, for_s=20.0)
    world.go(there, for_s=33.0)
    faulty.fail("take", Fault.LOST_REPLY)
    world.go(there, for_s=6.0)
    assert world.record().holder == THERE and world.record().epoch == 2
    world.go(there, for_s=12.0)
    assert world.valid(there)


def test_an_arbiter_that_does_not_answer_ends_the_grant_in_time_and_not_at_once(world: World) -> None:
    faulty = FaultyEngine(world.engine)
    here = world.agent(HERE, engine=faulty)
    world.go(here, for_s=20.0)
    faulty.outage()
    world.go(here, for_s=5.0)
    assert world.valid(here)
    world.go(here, for_s=25.0)
    assert not world.valid(here)
    assert "does not answer" in here.grant().reason
    faulty.outage(down=False)
    world.go(here, for_s=2.0)
    assert world.valid(here)


def test_after_an_outage_of_the_arbiter_the_holder_goes_on_and_nobody_takes_its_place(world: World) -> None:
    engines = [FaultyEngine(world.engine) for _ in range(2)]
    here, there = (world.agent(region, engine=engine) for region, engine in zip((HERE, THERE), engines, strict=True))
    world.go(here, there, for_s=60.0)
    for engine in engines:
        engine.outage()
    world.go(here, there, for_s=300.0)
    assert not world.valid(here)
    for engine in engines:
        engine.outage(down=False)
    there.step()  # it looks first, and has seen the beat stand still for five minutes
    world.go(there, here, for_s=60.0)
    assert world.valid(here) and world.record().epoch == 1
    engines[0].outage()
    world.go(there, here, for_s=60.0)
    assert world.valid(there) and world.record().epoch == 2


def test_after_a_long_pause_a_grant_is_not_counted_from_a_beat_that_may_be_old(world: World) -> None:
    here, paused = world.agent(HERE), world.agent(HERE, "paused", well=Well(is_well=False))
    world.go(here, paused, for_s=20.0)
    world.go(here, for_s=10.0)  # it beats meanwhile
    world.clock.advance(300.0)
    paused.step()
    assert not world.valid(paused)


def test_a_planned_move_hands_over_when_no_agent_can_have_a_grant_any_more(world: World) -> None:
    here, deaf, there = world.agent(HERE), world.agent(HERE, "deaf"), world.agent(THERE)
    world.go(here, deaf, there, for_s=30.0)
    order = region_writes.drain(world.record(), THERE, drain_s=20.0, by="ops", reason="drill", now=world.clock.now())
    assert world.engine.apply([order])[0].won
    begun = world.clock.monotonic()
    here.step()  # the other one does not hear of it
    assert here.grant().is_draining and world.valid(here) and world.valid(deaf)
    seen = {"deaf": begun, "here": begun}
    while world.record().holder == HERE:
        world.clock.advance(1.0)
        here.step()
        there.step()
        now = world.clock.monotonic()
        seen |= {name: now for name, one in (("deaf", deaf), ("here", here)) if world.valid(one)}
        world.check(here, deaf, there)
        assert now < begun + 60.0
    assert world.record().epoch == 2
    assert 19.0 <= seen["here"] - begun <= 21.0
    assert seen["deaf"] < world.clock.monotonic()
    there.step()
    assert world.valid(there)


def test_who_had_no_grant_when_it_was_told_to_drain_gets_none_any_more(world: World) -> None:
    here, late = world.agent(HERE), world.agent(HERE, "late")
    world.go(here, for_s=20.0)
    order = region_writes.drain(world.record(), THERE, drain_s=60.0, by="ops", reason="drill", now=world.clock.now())
    world.engine.apply([order])
    world.go(here, late, for_s=30.0)
    assert world.valid(here) and not world.valid(late)


def test_a_holder_that_dies_while_it_drains_is_taken_over(world: World) -> None:
    here, there = world.agent(HERE), world.agent(THERE)
    world.go(here, there, for_s=20.0)
    order = region_writes.drain(world.record(), THERE, drain_s=600.0, by="ops", reason="drill", now=world.clock.now())
    world.engine.apply([order])
    world.go(here, there, for_s=20.0)
    world.go(there, for_s=40.0)
    assert world.valid(there) and world.record().epoch == 2


def test_a_forced_move_stops_the_holder_at_once_and_begins_after_the_whole_lease(world: World) -> None:
    here, deaf, there = world.agent(HERE), world.agent(HERE, "deaf"), world.agent(THERE)
    world.go(here, deaf, there, for_s=30.0)
    order = region_writes.vacate(world.record(), THERE, by="ops", reason="it burns", now=world.clock.now())
    assert world.engine.apply([order])[0].won
    assert not here.step().is_valid(world.clock.monotonic())
    begun = world.clock.monotonic()
    while not world.valid(there):
        world.clock.advance(1.0)
        here.step()
        there.step()
        world.check(here, deaf, there)
        assert world.clock.monotonic() < begun + 40.0
    assert world.clock.monotonic() - begun >= LEASE_S * TAKER_SHARE
    assert world.record().reason == "it burns"


def test_a_frozen_grant_moves_by_order_only(world: World) -> None:
    here, there = world.agent(HERE), world.agent(THERE)
    world.go(here, there, for_s=20.0)
    assert world.engine.apply([region_writes.freeze(world.record(), "work", by="ops", now=world.clock.now())])[0].won
    world.go(here, there, for_s=20.0)
    assert world.valid(here)
    world.go(there, for_s=100.0)
    assert world.record().holder == HERE
    world.engine.apply([region_writes.freeze(world.record(), None, by="ops", now=world.clock.now())])
    world.go(there, for_s=40.0)
    assert world.valid(there)


def test_the_third_switch_within_an_hour_is_left_to_a_person(world: World) -> None:
    here, there = world.agent(HERE), world.agent(THERE)
    world.go(here, there, for_s=20.0)
    world.go(there, for_s=50.0)
    world.go(here, for_s=50.0)
    assert world.record().epoch == 3
    world.go(there, for_s=100.0)
    assert world.record().epoch == 3
    assert "within an hour" in (world.record().frozen or "")
    assert [event.region for event in world.told.of(RegionsFrozen)] == [THERE]


def test_switches_of_long_ago_do_not_count(world: World) -> None:
    here, there = world.agent(HERE), world.agent(THERE)
    world.go(here, there, for_s=20.0)
    world.go(there, for_s=50.0)
    world.go(here, for_s=50.0)
    world.go(here, for_s=3600.0, step_s=5.0)
    world.go(there, for_s=60.0)
    assert world.record().epoch == 4


def test_the_preferred_region_takes_its_place_back_when_it_is_well_has_waited_and_has_the_data(world: World) -> None:
    well = Well(successes=4)
    here, there = world.agent(HERE, goes_back=True, well=well), world.agent(THERE)
    world.go(here, there, for_s=20.0)
    world.go(there, for_s=50.0)
    world.go(here, there, for_s=BACK_DWELL_S)
    assert world.record().state is RegionState.ACTIVE  # four good canaries only
    well.successes, world.lag_s = 5, 30.0
    world.go(here, there, for_s=30.0)
    assert world.record().state is RegionState.ACTIVE  # what the other wrote is not here
    world.lag_s = 0.5
    world.go(here, there, for_s=4.0)
    assert world.record().state is RegionState.ACTIVE
    world.go(here, there, for_s=2.0)
    assert (world.record().state, world.record().to) == (RegionState.DRAINING, HERE)
    world.go(here, there, for_s=70.0)
    assert world.valid(here) and world.record().epoch == 3
    assert GrantAsked(region=THERE, verb="hand over", won=True) in world.told.of(GrantAsked)


def test_the_other_region_keeps_the_grant_for_a_while_however_well_the_preferred_one_is(world: World) -> None:
    here, there = world.agent(HERE, goes_back=True), world.agent(THERE)
    world.go(here, there, for_s=20.0)
    world.go(there, for_s=50.0)
    since = world.record().since
    while world.record().state is RegionState.ACTIVE:
        world.go(here, there, for_s=4.0, step_s=4.0)
    assert since + BACK_DWELL_S <= world.clock.now() <= since + BACK_DWELL_S + 8.0


def test_nobody_goes_back_by_itself_unless_it_is_told_to(world: World) -> None:
    here, there = world.agent(HERE), world.agent(THERE)
    world.go(here, there, for_s=20.0)
    world.go(there, for_s=50.0)
    world.go(here, there, for_s=2 * BACK_DWELL_S, step_s=4.0)
    assert world.record().holder == THERE


def test_an_order_and_a_beat_made_of_one_sight_do_not_both_happen(world: World) -> None:
    here = world.agent(HERE)
    here.step()
    seen = world.record()
    beat = region_writes.beat(seen, now=world.clock.now())
    order = region_writes.freeze(seen, "work", by="ops", now=world.clock.now())
    assert [answer.won for answer in world.engine.apply([beat, order])] == [True, False]
    seen = world.record()
    beat = region_writes.beat(seen, now=world.clock.now())
    order = region_writes.freeze(seen, "work", by="ops", now=world.clock.now())
    assert [answer.won for answer in world.engine.apply([order, beat])] == [True, False]


def test_a_row_that_is_not_ours_is_told_with_its_name() -> None:
    with pytest.raises(StoreError, match="region:shop"):
        Record.from_row({"taskId": "region:shop", "leaseOwner": HERE})


@pytest.mark.parametrize(
    "change",
    [
        {"info": "by hand"},
        {"leaseSec": 0},
        {"updatedAt": "yesterday"},
        {"handoffState": "SUSPENDED"},
        {"info": {"since": 0.0, "switches": ["yesterday"]}},
    ],
)
def test_a_row_of_a_person_or_of_a_newer_version_ends_the_grant_and_no_thread(
    world: World, change: dict[str, object]
) -> None:
    here, there = world.agent(HERE), world.agent(THERE)
    world.go(here, there, for_s=60.0)
    good = world.engine.get([scope_id("shop")])[scope_id("shop")]
    written = Write(verb="by hand", task_id=scope_id("shop"), set=change, require=(Present("taskId"),))
    assert world.engine.apply([written])[0].won
    world.go(here, there, for_s=200.0)
    assert not world.valid(here) and not world.valid(there)
    assert "cannot be read" in here.grant().reason and "upgrade" in here.grant().reason
    [first, second] = world.told.of(StoreFailed)
    assert (first.during, second.during) == ("asking the arbiter", "asking the arbiter"), "each once"
    mended = Write(
        verb="by hand",
        task_id=scope_id("shop"),
        set={name: good[name] for name in ("info", "leaseSec", "updatedAt", "handoffState")},
        require=(Present("taskId"),),
    )
    assert world.engine.apply([mended])[0].won
    world.go(here, there, for_s=60.0)
    assert world.valid(here) or world.valid(there)
    assert world.told.of(StoreRecovered)


def test_an_order_by_hand_that_names_no_region_is_told_and_the_other_takes_the_grant(world: World) -> None:
    here, there = world.agent(HERE), world.agent(THERE)
    world.go(here, there, for_s=60.0)
    by_hand = {"handoffState": "DRAINING"}
    assert world.engine.apply(
        [Write(verb="by hand", task_id=scope_id("shop"), set=by_hand, require=(Present("taskId"),))]
    )[0].won
    world.go(here, there, for_s=LEASE_S * TAKER_SHARE + 5.0)
    assert "region stay" in world.told.of(StoreFailed)[0].error
    world.go(here, there, for_s=LEASE_S * TAKER_SHARE)
    assert world.valid(there)


def test_a_region_that_waits_and_does_not_reach_the_arbiter_says_so_once(world: World) -> None:
    faulty = FaultyEngine(world.engine)
    here, there = world.agent(HERE), world.agent(THERE, engine=faulty)
    world.go(here, there, for_s=30.0)
    faulty.outage()
    world.go(here, there, for_s=100.0)
    [failed] = world.told.of(StoreFailed)
    assert failed.during == "asking the arbiter"
    assert "as far as is known: the arbiter does not answer" in there.grant().reason
    faulty.outage(down=False)
    world.go(here, there, for_s=10.0)
    [recovered] = world.told.of(StoreRecovered)
    assert recovered.seconds == pytest.approx(100.0, abs=5.0)
    assert "does not answer" not in there.grant().reason


def test_a_row_that_somebody_deletes_begins_again_after_every_grant_and_with_a_later_epoch(world: World) -> None:
    here, there = world.agent(HERE), world.agent(THERE)
    here.step()
    world.go(there, for_s=60.0)
    assert world.valid(there) and world.record().epoch == 2
    world.go(here, for_s=1.0)
    gone = world.clock.monotonic()
    gone_row = Write(verb="by hand", task_id=scope_id("shop"), delete=True, require=(Present("taskId"),))
    assert world.engine.apply([gone_row])[0].won
    while not world.valid(here):
        world.go(here, for_s=1.0)  # `there` is slow to look, and lives on the grant that it had
        world.check(here, there)
        assert world.clock.monotonic() < gone + 60.0
    assert world.clock.monotonic() >= gone + LEASE_S * TAKER_SHARE
    assert (world.record().holder, world.record().epoch) == (HERE, 3)


def test_an_arbiter_that_is_new_goes_on_behind_the_epochs_that_the_tasks_know(world: World) -> None:
    world.epoch = 7
    here = world.agent(HERE)
    assert here.step().epoch == 8


def test_a_grant_that_another_region_made_shorter_is_renewed_in_time(world: World) -> None:
    there = world.agent(THERE, preferred=THERE)
    here = world.agent(HERE, "slow", lease_s=300.0, beat_s=100.0)
    there.step()
    order = region_writes.drain(world.record(), HERE, drain_s=0.0, by="ops", reason="", now=world.clock.now())
    assert world.engine.apply([order])[0].won
    world.go(here, there, for_s=100.0)
    epoch = world.record().epoch
    world.go(here, there, for_s=600.0)
    assert (world.record().holder, world.record().epoch) == (HERE, epoch)
