"""What an agent claims, and when it looks again."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from tests.support.engine import Recorder, put
from thunderagent.agent.poller import FORGET_S, PAGE_ALONE, PAGES_A_LOOK, REMEMBERED, LostClaims, QueuePoller, SlotPool
from thunderagent.model import events
from thunderagent.model.bus import EventBus
from thunderagent.model.errors import StoreUnavailable
from thunderagent.model.pacing import PollPace
from thunderagent.model.task import Candidate, Lane, Page
from thunderagent.stores.tasks import TaskStore, Wanted
from thunderagent.testing import FakeClock, memory_store


class Spy(TaskStore):
    """Counts looks at the index, and does something in the middle of one when told to."""

    def __init__(self, store: TaskStore) -> None:
        super().__init__(store.engine, monotonic=store.monotonic)
        self.looked: list[Lane] = []
        self.meanwhile: Any = None

    def ready(self, lane: Lane, *, limit: int, after: Any = None, ahead_s: float = 0.0) -> Page:
        self.looked.append(lane)
        page = super().ready(lane, limit=limit, after=after, ahead_s=ahead_s)
        if self.meanwhile:
            self.meanwhile()
        return page


class Setting:
    """A poller of which each look is called by the test."""

    def __init__(self, slots: int = 3, page: int = 5, seed: int = 1) -> None:
        self.clock = FakeClock()
        self.store = Spy(memory_store(self.clock))
        self.bus = EventBus()
        self.record = Recorder(self.bus)
        self.poller = QueuePoller(
            "default",
            SlotPool(slots),
            self.store,
            jobs={"test.job": 300.0},
            page=page,
            pace=PollPace(1.0, 5.0, 10.0),
            bus=self.bus,
            rng=random.Random(seed),
        )

    def look(self) -> list[str]:
        """A look of which every claim is lost, so that the slots stay free."""
        wanted = self.poller.look()
        self.poller.took([], [], wanted)
        return [one.candidate.task_id for one in wanted]

    def claim(self, wanted: list[Wanted]) -> list[str]:
        """Claim what a look found, as the agent does."""
        exchanged = self.store.exchange((), wanted, owner="me")
        for _ in exchanged.leases:
            self.poller.began()
        won = [lease.task_id for lease in exchanged.leases]
        self.poller.took(won, exchanged.lost, wanted)
        return won

    @property
    def wait_s(self) -> float:
        return self.poller.due - self.clock.monotonic()


@pytest.fixture
def at() -> Setting:
    return Setting()


# How many


@pytest.mark.parametrize("running", [0, 1, 2])
def test_it_never_wants_more_than_there_are_free_slots(at: Setting, running: int) -> None:
    for number in range(20):
        put(at.store, f"t{number}")
    for _ in range(running):
        at.poller.began()
    assert len(at.look()) == 3 - running


def test_while_full_it_does_not_even_look_and_is_never_due(at: Setting) -> None:
    put(at.store)
    for _ in range(3):
        at.poller.began()
    assert at.poller.look() == []
    assert at.poller.due == math.inf
    assert at.store.looked == []


def test_a_freed_slot_makes_a_full_queue_due_at_once(at: Setting) -> None:
    for number in range(5):
        put(at.store, f"t{number}")
    assert len(at.claim(at.poller.look())) == 3
    assert at.poller.due == math.inf
    at.clock.advance(100)
    at.poller.freed()
    assert at.wait_s == 0
    assert at.poller.free == 1


def test_a_freed_slot_of_an_idle_queue_does_not_disturb_its_pace(at: Setting) -> None:
    put(at.store)
    assert at.claim(at.poller.look()) == ["a"]
    due = at.poller.due
    assert 0 < at.wait_s < math.inf
    at.poller.freed()
    assert at.poller.due == due


def test_the_page_is_shuffled_so_that_agents_do_not_try_the_same_task() -> None:
    firsts = set()
    for seed in range(10):
        at = Setting(slots=1, page=10, seed=seed)
        for number in range(10):
            put(at.store, f"t{number}")
        firsts.update(at.look())
    assert len(firsts) > 3


def test_what_is_not_due_yet_is_not_wanted(at: Setting) -> None:
    put(at.store, "later", created_at=at.clock.now() + 60)
    assert at.look() == []
    at.clock.advance(61)
    assert at.look() == ["later"]


# Jobs of other agents


def test_it_pages_past_more_foreign_jobs_than_one_look_reads_to_find_its_own() -> None:
    at = Setting(slots=3, page=50)
    for number in range(PAGE_ALONE * PAGES_A_LOOK + 15):
        put(at.store, f"foreign-{number:03}", job="other.job", created_at=at.clock.now() - 10)
    put(at.store, "mine")
    assert at.look() == []
    assert len(at.store.looked) == PAGES_A_LOOK
    assert at.wait_s == 0
    assert at.look() == ["mine"]
    assert len(at.store.looked) <= PAGES_A_LOOK + 2


def test_after_the_end_of_foreign_pages_it_starts_from_the_front_again_at_its_pace() -> None:
    at = Setting(slots=3, page=5)
    for number in range(5 * PAGES_A_LOOK + 2):
        put(at.store, f"foreign-{number:03}", job="other.job", created_at=at.clock.now() - 10)
    assert at.look() == []
    assert at.look() == []
    assert at.wait_s > 0
    put(at.store, "mine", created_at=at.clock.now() - 20)
    assert at.look() == ["mine"]


def test_unknown_jobs_are_told_once_and_again_when_they_change(at: Setting) -> None:
    put(at.store, "x", job="other.job")
    at.look()
    at.look()
    [event] = at.record.of(events.UnknownJobsSeen)
    assert (event.queue, event.jobs) == ("default", ("other.job",))
    put(at.store, "y", job="another.job")
    at.look()
    at.look()
    assert [event.jobs for event in at.record.of(events.UnknownJobsSeen)] == [
        ("other.job",),
        ("another.job", "other.job"),
    ]


def test_foreign_jobs_are_left_as_they_are(at: Setting) -> None:
    task = put(at.store, "x", job="other.job")
    at.claim(at.poller.look())
    assert at.store.get(["x"]) == {"x": task}


# Recent entries


def test_an_entry_that_somebody_claimed_is_not_tried_again_for_a_while(at: Setting) -> None:
    put(at.store)
    wanted = at.poller.look()
    at.poller.took([], [wanted[0].candidate], wanted)
    assert at.look() == []
    at.clock.advance(FORGET_S)
    assert at.look() == ["a"]


def test_a_task_that_came_back_with_another_due_time_is_a_new_entry(at: Setting) -> None:
    first = put(at.store)
    [wanted] = at.poller.look()
    at.poller.took([], [wanted.candidate], [wanted])
    at.clock.advance(1)
    at.store.engine.delete([first.to_row()])
    put(at.store)
    assert at.look() == ["a"]


def test_a_claim_without_an_answer_is_not_remembered_as_somebodys(at: Setting) -> None:
    put(at.store)
    wanted = at.poller.look()
    at.poller.took([], [], wanted)
    assert at.look() == ["a"]


# Lanes


def test_all_lanes_are_read_in_turn_and_none_is_always_the_first(at: Setting) -> None:
    at.poller.lanes = [Lane("default", shard) for shard in range(4)]
    firsts = set()
    for _ in range(40):
        at.store.looked.clear()
        at.look()
        assert sorted(lane.shard for lane in at.store.looked) == [0, 1, 2, 3]
        firsts.add(at.store.looked[0].shard)
    assert firsts == {0, 1, 2, 3}


def test_tasks_of_every_lane_are_found(at: Setting) -> None:
    at.poller.lanes = [Lane("default", shard) for shard in range(3)]
    for shard in range(3):
        put(at.store, f"t{shard}", lane=Lane("default", shard))
    assert sorted(at.look()) == ["t0", "t1", "t2"]


def test_it_reads_no_more_lanes_than_it_has_slots_to_fill() -> None:
    at = Setting(slots=1)
    at.poller.lanes = [Lane("default", shard) for shard in range(3)]
    for shard in range(3):
        put(at.store, f"t{shard}", lane=Lane("default", shard))
    assert len(at.look()) == 1
    assert len(at.store.looked) == 1


# Pace


def test_an_empty_queue_is_asked_ever_more_rarely(at: Setting) -> None:
    waits = []
    for _ in range(10):
        at.look()
        waits.append(at.wait_s)
        at.clock.advance(at.wait_s)
    assert 0.75 <= waits[0] <= 1
    assert waits[-1] >= 3.75
    for _ in range(90):
        at.look()
        at.clock.advance(at.wait_s)
    assert at.record.of(events.Polled)[-1].tried == 0
    at.look()
    assert at.wait_s >= 7.5


def test_more_work_than_was_seen_means_at_once_and_a_part_of_a_page_a_second() -> None:
    at = Setting(slots=8, page=5)
    for number in range(7):
        put(at.store, f"t{number}")
    first = at.claim(at.poller.look())
    assert len(first) == 7
    assert 0.75 <= at.wait_s <= 1
    at = Setting(slots=6, page=5)
    for number in range(5):
        put(at.store, f"t{number}")
    assert len(at.claim(at.poller.look())) == 5


def test_a_wake_makes_it_due_at_once(at: Setting) -> None:
    at.look()
    assert at.wait_s > 0
    at.poller.wake()
    assert at.wait_s == 0


def test_a_wake_during_a_look_is_not_lost(at: Setting) -> None:
    at.store.meanwhile = at.poller.wake
    at.look()
    assert at.wait_s == 0
    at.store.meanwhile = None
    at.look()
    assert at.wait_s > 0


def test_after_an_outage_it_waits_as_long_as_it_is_told(at: Setting) -> None:
    at.poller.postpone(7)
    assert at.wait_s == 7


def test_an_index_that_cannot_be_read_is_the_callers_affair(at: Setting) -> None:
    def fail() -> None:
        raise StoreUnavailable("away")

    at.store.meanwhile = fail
    with pytest.raises(StoreUnavailable):
        at.poller.look()


def test_each_look_is_told_in_numbers(at: Setting) -> None:
    for number in range(4):
        put(at.store, f"t{number}")
    put(at.store, "x", job="other.job")
    at.claim(at.poller.look())
    assert at.record.of(events.Polled) == [events.Polled(queue="default", seen=5, tried=3, won=3)]


# Shares


def _one_of(agents: int, rank: int, *, tasks: int) -> Setting:
    at = Setting(slots=5, page=5, seed=rank)
    for number in range(tasks):
        put(at.store, f"t{number:03}", created_at=at.clock.now() - 10)
    at.poller.share = (rank, agents)
    return at


def test_agents_that_know_of_each_other_want_different_tasks() -> None:
    wanted = [_one_of(4, rank, tasks=200).look() for rank in range(4)]
    everything = [task_id for one in wanted for task_id in one]
    assert [len(one) for one in wanted] == [5, 5, 5, 5]
    assert len(set(everything)) == 20


def test_an_agent_takes_from_the_share_of_others_when_its_own_runs_out() -> None:
    assert len(_one_of(4, 0, tasks=3).look()) == 3
    assert len(_one_of(1000, 0, tasks=20).look()) == 5


def test_lost_claims_make_a_poller_ask_who_the_others_are() -> None:
    at = _one_of(1, 0, tasks=20)
    wanted = at.poller.look()
    at.poller.took([one.candidate.task_id for one in wanted], [], wanted)
    assert not at.poller.is_contended
    wanted = at.poller.look()
    at.poller.took([], [one.candidate for one in wanted], wanted)
    assert at.poller.is_contended


def tried_one(name: str, created_at: float = 1.0) -> Candidate:
    return Candidate(name, "PENDING", created_at, "test.job", "batch")


def test_a_task_that_stays_where_it_is_is_refused_for_ever_longer() -> None:
    refusals = LostClaims()
    for now in (10.0, 40.0, 75.0):
        refusals.tried([tried_one(f"fresh-{now}"), tried_one("a")], now)
    assert refusals.longest(0.0) == (tried_one("a"), 65.0)
    assert refusals.longest(76.0) is None, "it is not tried any more"
    refusals.over()
    assert refusals.longest(0.0) is None


def test_claims_that_others_won_are_never_the_same_task_twice() -> None:
    refusals = LostClaims()
    for now in range(10, 200):
        refusals.tried([tried_one(f"task-{now}")], float(now))
        assert refusals.longest(0.0) == (tried_one(f"task-{now}"), 0.0)


def test_a_task_that_came_back_to_its_queue_is_a_new_tried_one() -> None:
    refusals = LostClaims()
    refusals.tried([tried_one("a", 1.0)], 10.0)
    refusals.tried([tried_one("a", 70.0)], 80.0)
    assert refusals.longest(0.0) == (tried_one("a", 70.0), 0.0)
    refusals.tried([tried_one("a", 70.0)], 90.0)
    assert refusals.longest(0.0) == (tried_one("a", 70.0), 10.0)


def test_what_is_remembered_has_a_limit() -> None:
    refusals = LostClaims()
    for now in range(REMEMBERED + 10):
        refusals.tried([tried_one(str(now))], float(now))
    assert len(refusals._first) == REMEMBERED
