"""Why a task does not run, in sentences, and at what cost they are found out."""

from __future__ import annotations

from typing import Any, Final

import pytest

from tests.support.engine import claimed, put, settings
from tests.support.streams import Watched
from thunderagent.agent.health.judgement import Facts, Limits, QueueFacts, judge
from thunderagent.client import Client
from thunderagent.model.clock import at_text, span_text
from thunderagent.model.task import Lane, Status, Task
from thunderagent.model.writes import unique as unique_writes
from thunderagent.model.writes.limits import holder, limit_row
from thunderagent.model.writes.unique import key_row
from thunderagent.ops.waiting import COUNTED, LISTED, pause_text, why
from thunderagent.queue.pauses import Pause, PauseKind
from thunderagent.stores.tasks import Beat, TaskStore
from thunderagent.testing import FakeClock, memory_store

REPORTS: Final = Lane("reports")
AGENT: Final = "host-1:4711:0a1b2c3d"


class At:
    """A store at a fixed time: 2027-01-15 08:00:00Z."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.engine = Watched(memory_store(self.clock).engine)
        self.store = TaskStore(self.engine, monotonic=self.clock.monotonic)
        self.client = Client(self.store, settings())

    def agent(self, name: str = AGENT, **changes: Any) -> None:
        """An agent that announced itself."""
        info: dict[str, Any] = {
            "queues": {"reports": 2},
            "running": {"reports": 0},
            "jobs": ["test.job"],
            "health": {"draining": False, "paused": False},
        }
        self.store.announce(name, {**info, **changes}, lives_s=60.0)

    def task(self, name: str = "a", **changes: Any) -> Task:
        return put(self.store, name, **{"lane": REPORTS, **changes})

    def in_line(self, name: str = "a", *, key: str = "api", number: int = 2, **changes: Any) -> Task:
        """A task in the line of a limit."""
        values = {"status": Status.BLOCKED, "waitlist": key, "limit_key": key, "limit_max": number}
        return self.task(name, **{**values, **changes})

    def limit(self, *holders: str, key: str = "api", number: int = 2) -> None:
        """The row of a limit; its holders run under the fence 1."""
        members = [holder(name, 1) for name in holders]
        self.store.insert_row(limit_row(key, number=number, now=self.clock.now(), holders=members))

    def why(self, task: Task | str) -> list[str]:
        return why(self.store, self.client.get(task))


@pytest.fixture
def at() -> At:
    return At()


# It only has to wait


def test_a_ready_task_waits_for_the_next_poll(at: At) -> None:
    at.agent()
    assert at.why(at.task()) == ["it is ready: an agent takes it with its next poll"]


def test_a_ready_task_is_told_how_many_are_before_it(at: At) -> None:
    at.agent()
    for number in range(3):
        at.task(f"before-{number}")
        at.clock.advance(1)
    task = at.task()
    at.clock.advance(1)
    at.task("behind")
    assert at.why(task) == ["it is ready, and 3 tasks are before it in the queue reports"]
    assert at.why("before-1") == ["it is ready, and 1 task is before it in the queue reports"]


def test_when_all_slots_are_taken_that_is_why(at: At) -> None:
    at.agent(running={"reports": 2})
    at.agent("host-2:1:b", running={"reports": 2})
    assert at.why(at.task()) == [
        "all 4 slots of the queue reports are taken, as its agents last reported; it is the next of reports"
    ]
    at.clock.advance(1)
    assert at.why(at.task("b")) == [
        "all 4 slots of the queue reports are taken, as its agents last reported; "
        "1 task is before it in the queue reports"
    ]


def test_a_delayed_task_is_due_later(at: At) -> None:
    at.agent()
    task = at.task(created_at=at.clock.now() + 7500)
    assert at.why(task) == ["it is due at 2027-01-15 10:05:00Z (in 2 h 5 min)"]


def test_a_retry_says_that_it_is_one(at: At) -> None:
    at.agent()
    task = at.task(created_at=at.clock.now() + 45, retry_count=1, error="boom")
    assert at.why(task) == ["it is due again, after an error, at 2027-01-15 08:00:45Z (in 45 s)"]


def test_what_runs_or_has_ended_needs_no_reason(at: At) -> None:
    at.agent()
    claimed(at.store, "runs", owner=AGENT)
    assert at.why("runs") == []
    at.task("ended", status=Status.SUCCESS)
    at.task("failed", status=Status.FAILED, unique_key="k", unique_scope="until_done")
    at.engine.gets.clear()
    at.engine.pages.clear()
    assert [at.why("ended"), at.why("failed")] == [[], []]
    assert (len(at.engine.gets), at.engine.pages) == (2, []), "only the task itself is read"


def test_what_a_lost_agent_held_waits_for_a_takeover(at: At) -> None:
    at.agent()
    claimed(at.store, "lost", owner="host-9:1:gone", lease_s=30.0, lane=REPORTS)
    at.clock.advance(90)
    at.agent()
    over = "the lease of host-9:1:gone ended 1 min ago: another agent takes the task over"
    assert at.why("lost") == [over]
    at.client.pauses.pause(queue="reports")
    assert at.why("lost") == ["its queue reports is paused since 2027-01-15 08:01:30Z", over]


def test_a_task_whose_agent_is_not_heard_of_says_when_another_takes_it(at: At) -> None:
    at.agent()
    claimed(at.store, "runs", owner=AGENT, lease_s=300.0, lane=REPORTS)
    at.clock.advance(45)
    assert at.why("runs") == [], "its next word may be on its way"
    at.clock.advance(1)
    at.agent("host-2:1:b")
    lost = f"its agent {AGENT} was last heard of 46 s ago: when the lease ends in 4 min 14 s, another agent takes the"
    assert at.why("runs") == [f"{lost} task over"]
    at.clock.advance(61)
    assert at.why("runs") == [
        f"its agent {AGENT} was last heard of 1 min 47 s ago: when the lease ends in 3 min 13 s, another agent takes "
        "the task over",
        "no agent is alive",
    ]
    at.agent("host-2:1:b", queues={"mail": 1})
    assert at.why("runs")[1:] == ["no live agent serves the queue reports"]


def test_an_agent_that_is_lost_is_not_the_one_that_takes_over(at: At) -> None:
    at.agent()
    claimed(at.store, "runs", owner=AGENT, lease_s=300.0, lane=REPORTS)
    at.clock.advance(50)
    assert at.why("runs")[1:] == ["no agent is alive"], "its row is not overdue yet"


def test_a_lease_that_was_renewed_is_a_word_of_its_agent(at: At) -> None:
    at.agent()
    lease = claimed(at.store, "runs", owner=AGENT, lease_s=300.0, lane=REPORTS)
    at.clock.advance(100)
    at.store.renew([Beat(lease)])
    at.clock.advance(30)
    assert at.why("runs") == [], "only its row is late"
    at.clock.advance(30)
    assert "was last heard of 1 min ago: when the lease ends in 4 min, another" in at.why("runs")[0]


def test_a_job_whose_handlers_do_not_stop_is_told_of_a_task_that_runs(at: At) -> None:
    leaks = QueueFacts(queue="reports", slots=4, free=2, leaked_s=(9.0,), leaked_jobs=("test.job",))
    [note] = judge(Facts(queues=(leaks,)), Limits(progress_s=60.0, pause_s=10.0)).notes
    at.agent(health={"notes": ["draining: 1 task is still held", note]})
    claimed(at.store, "runs", owner=AGENT, lane=REPORTS)
    claimed(at.store, "other", owner=AGENT, job="mail.send", lane=REPORTS)
    assert at.why("runs") == [f"its agent {AGENT} tells: {note}"]
    assert at.why("other") == []
    at.agent(health={"notes": 5, "reasons": [7, None]})
    assert at.why("runs") == []


def test_an_agent_without_a_row_is_not_among_those_that_live(at: At) -> None:
    at.agent("host-2:1:b")
    claimed(at.store, "runs", owner=AGENT, lease_s=300.0, lane=REPORTS)
    gone = f"its agent {AGENT} is not among the live agents"
    assert at.why("runs") == [f"{gone}: when the lease ends in 5 min, another agent takes the task over"]
    at.client.pauses.pause(queue="reports")
    assert at.why("runs")[1:] == ["its queue reports is paused since 2027-01-15 08:00:00Z"], "none takes over"


# Pauses


def test_a_paused_queue_and_a_paused_job_are_told_with_their_end_and_reason(at: At) -> None:
    at.agent()
    task = at.task()
    at.client.pauses.pause(queue="reports", for_s=5400, reason="the database moves")
    at.client.pauses.pause(queue="elsewhere")
    at.client.pauses.pause(job="test.job")
    assert at.why(task) == [
        "its queue reports is paused since 2027-01-15 08:00:00Z, until 2027-01-15 09:30:00Z (in 1 h 30 min): "
        "the database moves",
        "its job test.job is paused since 2027-01-15 08:00:00Z",
    ]
    at.clock.advance(5400)
    at.agent()
    assert at.why(task) == ["its job test.job is paused since 2027-01-15 08:00:00Z"]


def test_paused_agents_are_a_reason_only_when_no_other_could_run_it(at: At) -> None:
    task = at.task()
    at.agent()
    at.agent("host-2:1:b")
    at.agent("host-3:1:c", jobs=["other"])
    at.client.pauses.pause(agent=AGENT)
    assert at.why(task) == ["it is ready: an agent takes it with its next poll"]
    at.client.pauses.pause(agent="host-2", reason="disk")
    assert at.why(task) == [f"the agent {AGENT} and all others that could run it are paused since 2027-01-15 08:00:00Z"]


def test_the_only_agent_is_paused(at: At) -> None:
    task = at.task()
    at.agent()
    at.client.pauses.pause(agent="host-1", reason="disk")
    assert at.why(task) == [
        f"the agent {AGENT}, the only one that could run it, is paused since 2027-01-15 08:00:00Z: disk"
    ]


# Parents


def test_a_child_names_the_parents_it_waits_for(at: At) -> None:
    at.agent()
    at.task("load")
    task = at.task("child", status=Status.BLOCKED, waiting_for=frozenset({"load", "vanished"}))
    assert at.why(task) == ["it waits for load (PENDING) and vanished (gone), which it depends on"]


def test_of_many_parents_some_are_named_and_few_are_read(at: At) -> None:
    at.agent()
    names = [f"p{number:03}" for number in range(200)]
    for name in names:
        at.task(name)
    task = at.task("child", status=Status.BLOCKED, waiting_for=frozenset(names))
    at.engine.gets.clear()
    assert at.why(task) == [
        "it waits for p000 (PENDING), p001 (PENDING), p002 (PENDING) and 197 more, which it depends on"
    ]
    assert max(map(len, at.engine.gets)) <= LISTED


def test_a_task_that_nothing_holds_any_more_waits_for_the_sweep(at: At) -> None:
    at.agent()
    task = at.task(status=Status.BLOCKED)
    assert at.why(task) == ["nothing that it waits for is left: the next sweep puts it into its queue"]


# Limits


def test_a_task_in_line_tells_who_has_the_slots_and_who_is_before_it(at: At) -> None:
    at.agent()
    for name in ("one", "two"):
        claimed(at.store, name, lane=REPORTS)
    at.limit("one", "two")
    for number in range(3):
        at.in_line(f"before-{number}")
        at.clock.advance(1)
    task = at.in_line()
    at.clock.advance(1)
    at.in_line("behind")
    assert at.why(task) == [
        "it waits for a permit of the limit 'api': 2 of 2 permits are taken by one and two; 3 tasks are before it"
    ]
    assert at.why("before-0") == [
        "it waits for a permit of the limit 'api': 2 of 2 permits are taken by one and two; it is the next"
    ]


def test_holders_that_do_not_live_are_pointed_out(at: At) -> None:
    at.agent()
    claimed(at.store, "alive", lane=REPORTS, lease_s=300.0)
    claimed(at.store, "lost", lane=REPORTS, lease_s=10.0)
    put(at.store, "ended", status=Status.SUCCESS)
    at.limit("alive", "lost", "ended", "gone", number=4)
    at.clock.advance(30)
    [sentence] = at.why(at.in_line(number=4))
    assert "4 of 4 permits are taken by alive, ended (SUCCESS), gone (gone) and lost (its lease is over);" in sentence


def test_a_limit_of_one_and_free_slots_read_well(at: At) -> None:
    at.agent()
    claimed(at.store, "one", lane=REPORTS)
    at.limit("one", number=1)
    assert "the only permit is taken by one; it is the next" in at.why(at.in_line())[0]
    at.limit(key="free", number=3)
    assert "3 of 3 permits are free, and the next sweep gives them away" in at.why(at.in_line("b", key="free"))[0]
    at.limit("one", key="half", number=2)
    assert "1 of 2 permits is free" in at.why(at.in_line("c", key="half"))[0]
    assert "5 of 5 permits are free" in at.why(at.in_line("d", key="no row", number=5))[0]


def test_a_long_line_is_counted_to_a_thousand_and_many_holders_are_not_all_read(at: At) -> None:
    at.agent()
    at.limit(*(f"h{number:03}" for number in range(150)), number=150)
    now = at.clock.now()
    for number in range(COUNTED + 50):
        at.in_line(f"t{number:05}", number=150, created_at=now - 5000 + number)
    task = at.in_line(number=150)
    at.engine.gets.clear()
    [sentence] = at.why(task)
    assert sentence.endswith(
        "150 of 150 permits are taken by h000 (gone), h001 (gone), h002 (gone) and 147 more; "
        f"at least {COUNTED} tasks are before it"
    )
    assert max(map(len, at.engine.gets)) <= LISTED


# Unique keys


@pytest.mark.parametrize(("scope", "until"), [("until_start", "has started"), ("until_done", "has ended")])
def test_a_task_tells_that_it_holds_a_unique_key(at: At, scope: str, until: str) -> None:
    at.agent()
    task = at.task(unique_key="customer-42", unique_scope=scope)
    row_id = unique_writes.key_id("test.job", "customer-42")
    at.store.insert_row(key_row(row_id, "a", now=at.clock.now()))
    assert at.why(task) == [
        "it is ready: an agent takes it with its next poll",
        f"it holds the unique key 'customer-42' of test.job until it {until}",
    ]


def test_a_running_task_holds_its_key_only_until_done(at: At) -> None:
    at.agent()
    for name, scope in (("a", "until_start"), ("b", "until_done")):
        claimed(at.store, name, owner=AGENT, unique_key=f"key-{name}", unique_scope=scope)
        at.store.insert_row(key_row(unique_writes.key_id("test.job", f"key-{name}"), name, now=at.clock.now()))
    assert at.why("a") == []
    assert at.why("b") == ["it holds the unique key 'key-b' of test.job until it has ended"]


def test_a_key_that_another_has_is_told(at: At) -> None:
    at.agent()
    task = at.task(unique_key="k", unique_scope="until_done")
    assert len(at.why(task)) == 1, "no row, no sentence"
    at.store.insert_row(key_row(unique_writes.key_id("test.job", "k"), "other", now=at.clock.now()))
    assert at.why(task)[1] == "its unique key 'k' of test.job is held by other"


# Nobody is there


def test_without_agents_that_is_why(at: At) -> None:
    task = at.task()
    assert at.why(task) == ["no agent is alive"]
    at.agent(queues={"default": 2})
    assert at.why(task) == ["no live agent serves the queue reports"]


def test_agents_without_the_job_are_named(at: At) -> None:
    task = at.task()
    for number in range(6):
        at.agent(f"host-{number}", jobs=["other"])
    assert at.why(task) == [
        "no live agent of the queue reports has the job test.job: it is served by host-0, host-1, host-2 and 3 more"
    ]


def test_agents_that_stop_take_nothing(at: At) -> None:
    at.agent(health={"draining": True})
    assert at.why(at.task()) == ["every agent that could run it is stopping"]


def test_several_reasons_are_all_told(at: At) -> None:
    task = at.task(created_at=at.clock.now() + 60)
    at.client.pauses.pause(job="test.job")
    assert at.why(task) == [
        "its job test.job is paused since 2027-01-15 08:00:00Z",
        "it is due at 2027-01-15 08:01:00Z (in 1 min)",
        "no agent is alive",
    ]


@pytest.mark.parametrize(
    "odd",
    [
        {"jobs": None, "health": "fine", "running": 5},
        {"queues": {"reports": "many"}, "running": {"reports": None}, "health": {"paused": 1, "draining": 0}},
        {"queues": {"reports": 2}, "jobs": 7},
    ],
)
def test_agents_of_other_versions_are_no_trouble(at: At, odd: dict[str, Any]) -> None:
    at.agent(**odd)
    assert len(at.why(at.task())) == 1


# Words


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-5, "0 s"),
        (0.4, "0 s"),
        (59.4, "59 s"),
        (60, "1 min"),
        (90, "1 min 30 s"),
        (7200, "2 h"),
        (7500, "2 h 5 min"),
        (86400 * 3 + 4 * 3600 + 59, "3 d 4 h"),
    ],
)
def test_times_are_told_in_their_two_largest_units(seconds: float, text: str) -> None:
    assert span_text(seconds) == text


def test_a_pause_is_told_with_whatever_is_known_of_it() -> None:
    def text(**values: Any) -> str:
        return pause_text(Pause(kind=PauseKind.QUEUE, name="q", **values), 1_800_000_000.0)

    assert text() == "paused"
    assert text(until=1_800_000_060.0) == "paused until 2027-01-15 08:01:00Z (in 1 min)"
    assert text(reason="x") == "paused: x"
    assert text(since=1e300) == "paused since 1e+300"
    assert at_text(-1e18) == "-1e+18"
