"""Doorbell messages change when something happens and never what."""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import pytest

from tests.support.engine import LONG_S, Recorder, a_core, a_job, claimed, put, running, settings
from tests.support.stands import eventually
from thunderagent.agent.doorbell import MOST_HELD, MOST_RECEIVED, STALE_S, DoorbellInbox, DoorbellListener
from thunderagent.agent.heartbeat import BEAT_AGAIN_S, Heartbeat
from thunderagent.agent.poller import QueuePoller, SlotPool
from thunderagent.client import Client
from thunderagent.jobs.registry import Registry
from thunderagent.model import events, queue_events
from thunderagent.model.bus import EventBus
from thunderagent.model.errors import DoorbellError
from thunderagent.model.pacing import PollPace
from thunderagent.model.task import BATCH, STREAM, Candidate, Lane, Page, Status, Task
from thunderagent.queue.doorbell.memory import MemoryDoorbell
from thunderagent.queue.doorbell.message import DoorbellMessage, Verb
from thunderagent.queue.doorbell.port import Accepts
from thunderagent.queue.doorbell.sender import DoorbellSender
from thunderagent.stores.tasks import TaskStore, Wanted
from thunderagent.streams.job import stream
from thunderagent.testing import FakeClock, memory_store

SLOTS: Final = 3


async def follow(ctx: Any, payload: dict[str, Any]) -> None:
    """A stream that does nothing."""


class Spy(TaskStore):
    """Counts looks at the index."""

    def __init__(self, store: TaskStore) -> None:
        super().__init__(store.engine, monotonic=store.monotonic)
        self.looks = 0

    def ready(self, lane: Lane, *, limit: int, after: Any = None, ahead_s: float = 0.0) -> Page:
        self.looks += 1
        return super().ready(lane, limit=limit, after=after, ahead_s=ahead_s)


class Setting:
    """The messages of an agent whose rounds are called by the test, on a clock set by the test."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.store = Spy(memory_store(self.clock))
        self.bus = EventBus()
        self.jobs = Registry(a_job("test.job"), a_job("test.other", queue="other"), stream("test.stream")(follow))
        self.pollers = {
            ("default", BATCH): self.poller("default", BATCH, {"test.job"}),
            ("default", STREAM): self.poller("default", STREAM, {"test.stream"}),
            ("other", BATCH): self.poller("other", BATCH, {"test.other"}),
        }
        self.inbox = DoorbellInbox(self.pollers, self.jobs, store=self.store)
        for poller in self.pollers.values():
            poller.postpone(3600)

    def poller(self, queue: str, kind: str, jobs: set[str]) -> QueuePoller:
        return QueuePoller(
            queue,
            SlotPool(SLOTS),
            self.store,
            kind=kind,
            jobs=dict.fromkeys(jobs, 300.0),
            page=5,
            pace=PollPace(1.0, 5.0, 10.0),
            bus=self.bus,
            rng=random.Random(1),
        )

    @property
    def batch(self) -> QueuePoller:
        return self.pollers["default", BATCH]

    def receive(self, *messages: DoorbellMessage) -> list[str]:
        """Receive messages; the ids that the next round claims."""
        for message in messages:
            self.inbox.receive(message)
        return self.round()

    def round(self, *chosen: str) -> list[str]:
        self.inbox.process()
        return [one.candidate.task_id for one in self.inbox.claims(lambda one: 300.0, chosen)]

    def woken(self) -> list[str]:
        return [f"{queue} {kind}" for (queue, kind), one in self.pollers.items() if one.due <= self.clock.monotonic()]

    def due(self, name: str = "a", in_s: float = 0.0, **changes: Any) -> DoorbellMessage:
        now = self.clock.now()
        values: dict[str, Any] = {"status": Status.PENDING, "submitted_at": now, "job": "test.job", **changes}
        return DoorbellMessage.task(Task(task_id=name, created_at=now + in_s, **values))


@pytest.fixture
def at() -> Setting:
    return Setting()


# What becomes of messages


def test_a_task_that_is_due_is_claimed_by_id_without_a_look_into_the_index(at: Setting) -> None:
    message = DoorbellMessage.task(put(at.store))
    at.inbox.receive(message)
    at.inbox.process()
    [wanted] = at.inbox.claims(lambda one: 60.0, ())
    [lease] = at.store.claim([wanted], owner="me")
    assert (lease.task_id, lease.lease_s, at.store.looks) == ("a", 60.0, 0)


def test_a_task_that_is_not_due_is_held_until_it_is(at: Setting) -> None:
    assert at.receive(at.due(in_s=20.0)) == []
    assert at.inbox.idle_s() == pytest.approx(20.0)
    at.clock.advance(19.9)
    assert at.round() == []
    at.clock.advance(0.2)
    assert at.inbox.idle_s() == 0.0
    assert at.round() == ["a"]
    assert at.inbox.idle_s() == math.inf


def test_a_forged_early_due_time_starts_nothing_early(at: Setting) -> None:
    task = put(at.store, created_at=at.clock.now() + 3600)
    at.inbox.receive(at.due(task.task_id, -1.0))
    at.inbox.process()
    wanted = at.inbox.claims(lambda one: 300.0, ())
    assert len(wanted) == 1, "it cannot be known"
    assert at.store.claim(wanted, owner="me") == []
    assert at.store.get(["a"])["a"].status is Status.PENDING


def test_a_forged_job_or_status_wins_nothing(at: Setting) -> None:
    task = put(at.store, job="test.secret")
    put(at.store, "b", lane=Lane("other"), job="test.job")
    forged = [
        DoorbellMessage.task(Candidate("a", "PENDING", task.created_at, "test.job")),
        DoorbellMessage.task(Candidate("b", "PENDING", task.created_at, "test.job")),
        DoorbellMessage.task(Candidate("nobody", "PENDING", task.created_at, "test.job")),
    ]
    for message in forged:
        at.inbox.receive(message)
    at.inbox.process()
    wanted = at.inbox.claims(lambda one: 300.0, ())
    assert len(wanted) == 3
    assert at.store.claim(wanted, owner="me") == []


def test_a_message_that_comes_twice_is_one_claim(at: Setting) -> None:
    assert at.receive(*[at.due()] * 5) == ["a"]


def test_what_a_poll_has_found_in_the_same_round_is_not_claimed_twice(at: Setting) -> None:
    at.inbox.receive(at.due())
    assert at.round("a") == []


def test_a_queue_or_a_job_that_is_not_served_here_is_nothing(at: Setting) -> None:
    messages = [at.due(lane=Lane("elsewhere")), at.due(job="test.unknown"), DoorbellMessage.look("elsewhere")]
    assert at.receive(*messages) == []
    assert at.woken() == []


def test_a_message_to_look_wakes_the_pollers_of_its_queue_at_its_time(at: Setting) -> None:
    at.receive(DoorbellMessage.look("default"), DoorbellMessage.look("other", at.clock.now() + 5))
    assert at.woken() == ["default batch", "default stream"]
    at.clock.advance(5.01)
    at.round()
    assert at.woken() == ["default batch", "default stream", "other batch"]


def test_streams_are_left_to_the_agent_that_shares_them_out(at: Setting) -> None:
    assert at.receive(at.due(job="test.stream", kind=STREAM)) == []
    assert at.woken() == ["default stream"]


def test_an_old_message_is_a_look(at: Setting) -> None:
    assert at.receive(at.due(in_s=-STALE_S - 1)) == []
    assert at.woken() == ["default batch"]


def test_a_full_agent_leaves_the_task_to_its_poller(at: Setting) -> None:
    at.inbox.receive(at.due())
    at.inbox.process()
    assert at.inbox.claims(lambda one: None, ()) == []
    assert at.batch.due <= at.clock.monotonic() + 1.0, "there may be room after all"
    for _ in range(SLOTS):
        at.batch.began()
    assert at.batch.due == math.inf
    at.batch.freed()
    assert at.woken() == ["default batch"], "the next free slot looks"


def test_messages_fill_the_last_slot_and_then_the_pollers_turn_comes(at: Setting) -> None:
    """Else a queue with a long pause would not notice that a slot is free while tasks wait."""
    for _ in range(SLOTS):
        assert at.woken() == []
        at.batch.began()
    at.batch.freed()
    assert at.woken() == ["default batch"]


def test_of_a_message_that_all_receive_each_agent_leaves_the_others_their_share(at: Setting) -> None:
    at.inbox.is_shared = True
    claims = []
    for rank in range(3):
        at.batch.share = (rank, 3)
        claims += at.receive(*[at.due(f"t{number}") for number in range(60)])
    assert sorted(claims) == sorted(f"t{number}" for number in range(60))
    assert at.woken() == []
    at.clock.advance(0.11)
    at.round()
    assert at.woken() == ["default batch", "default stream"], "what its agent did not take is looked for later"


def test_many_messages_for_others_are_one_look(at: Setting) -> None:
    at.inbox.is_shared, at.batch.share = True, (0, 1000)
    at.receive(*[at.due(f"t{number}") for number in range(500)])
    assert len(at.inbox._held) == 1


def test_a_flood_costs_a_bounded_room_and_the_pollers_look(at: Setting) -> None:
    for number in range(MOST_RECEIVED + 100):
        at.inbox.receive(at.due(f"t{number}"))
    assert len(at.inbox._received) == MOST_RECEIVED
    assert len(at.round()) == 100
    assert at.woken() == ["default batch", "default stream", "other batch"]
    for number in range(MOST_HELD + 100):
        at.receive(at.due(f"t{number}", in_s=1000.0 - number / 100))
    assert len(at.inbox._held) == MOST_HELD
    assert max(at.inbox._held)[0] < at.clock.now() + 999.1, "those due last go first"


def test_a_store_that_does_not_answer_is_not_hurried(at: Setting) -> None:
    at.inbox.is_muted = True
    assert at.receive(at.due(), DoorbellMessage.look("default")) == []
    assert at.woken() == []
    at.inbox.is_muted = False
    assert at.round() == []


def test_a_full_agent_accepts_no_messages_unless_it_serves_the_queue_alone(at: Setting) -> None:
    assert at.inbox.has_room(at.due())
    for _ in range(SLOTS):
        at.batch.began()
    assert at.inbox.has_room(at.due())
    at.batch.share = (0, 2)
    assert not at.inbox.has_room(at.due())
    assert at.inbox.has_room(DoorbellMessage.look("default")), "for a stream there is room"
    assert not at.inbox.has_room(at.due(job="test.unknown"))


def test_an_agent_accepts_no_more_messages_at_once_than_it_has_slots(at: Setting) -> None:
    at.batch.share = (0, 2)
    assert [at.inbox.has_room(at.due(f"t{number}")) for number in range(5)] == [True] * SLOTS + [False] * 2
    at.round()
    assert at.inbox.has_room(at.due())


# Polls that are stretched


def polls(at: Setting, seconds: float) -> int:
    """How often an idle poller looks in this time."""
    before, poller, until = at.store.looks, at.batch, at.clock.monotonic() + seconds
    while poller.due < until:
        at.clock.advance(max(0.0, poller.due - at.clock.monotonic()))
        poller.took([], [], poller.look())
    at.clock.advance(until - at.clock.monotonic())
    return at.store.looks - before


def test_idle_polls_are_rare_while_the_doorbell_works_and_usual_when_it_does_not(at: Setting) -> None:
    at.batch.wake()
    assert 360 <= polls(at, 3600) <= 480 + 60
    at.batch.stretch(60.0)
    polls(at, 600)
    assert 60 <= polls(at, 3600) <= 80
    at.batch.stretch(0.0)
    assert at.batch.due - at.clock.monotonic() <= 5.0, "at once, but not all agents in the same moment"
    assert 360 <= polls(at, 3600) <= 480
    at.batch.stretch(60.0)
    polls(at, 60)
    assert 60 <= polls(at, 3600) <= 80


def test_a_stretched_poll_looks_ahead_and_comes_again_when_a_task_is_due(at: Setting) -> None:
    put(at.store, "soon", created_at=at.clock.now() + 40.0)
    put(at.store, "foreign", created_at=at.clock.now() + 20.0, job="test.other")
    at.batch.stretch(60.0)
    at.batch._pace._last_s = 60.0
    at.batch.took([], [], at.batch.look())
    assert at.batch.due - at.clock.monotonic() == pytest.approx(40.0)
    at.clock.advance(40.001)
    assert [one.candidate.task_id for one in at.batch.look()] == ["soon"]


def test_of_several_agents_the_agent_whose_share_it_is_comes_first(at: Setting) -> None:
    put(at.store, "soon", created_at=at.clock.now() + 30.0)
    at.batch.stretch(60.0)
    waits = []
    for rank in range(4):
        at.batch.share = (rank, 4)
        at.batch._pace._last_s = 60.0
        at.batch.took([], [], at.batch.look())
        waits.append(at.batch.due - at.clock.monotonic())
    first, *others = sorted(waits)
    assert first == pytest.approx(30.0)
    assert all(30.4 < wait < 31.6 for wait in others)


def test_without_a_stretch_nothing_is_read_that_is_not_due(at: Setting) -> None:
    put(at.store, "soon", created_at=at.clock.now() + 2.0)
    at.batch.took([], [], at.batch.look())
    assert at.batch._seen == 0


# Beats


class Beats(TaskStore):
    """Counts heartbeats, and does something while one is under way."""

    def __init__(self, store: TaskStore) -> None:
        super().__init__(store.engine, monotonic=store.monotonic)
        self.sent: list[list[str]] = []
        self.meanwhile: Callable[[], object] = lambda: None

    def renew(self, beats: Any) -> Any:
        self.sent.append([beat.lease.task_id for beat in beats])
        answer = super().renew(beats)
        self.meanwhile()
        return answer


def a_heart() -> tuple[FakeClock, Beats, Heartbeat]:
    clock = FakeClock()
    store = Beats(memory_store(clock))
    heart = Heartbeat(store, EventBus(), tick_s=1.0, monotonic=clock.monotonic)
    for name in "ab":
        heart.watch(running(claimed(store, name), started=clock.monotonic()))
    return clock, store, heart


def test_a_beat_that_is_rung_for_is_sent_at_once_and_at_most_once_a_second() -> None:
    clock, store, heart = a_heart()
    for _ in range(50):
        heart.hurry("a")
        heart.hurry("nobody")
        heart.round()
        clock.advance(0.1)
    assert store.sent == [["a"]] * 5
    clock.advance(BEAT_AGAIN_S)
    heart.round()
    heart.round()
    assert len(store.sent) == 6, "what was asked for within the second is done after it"


def test_a_beat_that_is_rung_for_while_another_is_under_way_is_not_lost() -> None:
    clock, store, heart = a_heart()
    clock.advance(60)
    store.meanwhile = lambda: heart.hurry("a")
    heart.round()
    store.meanwhile = lambda: None
    clock.advance(BEAT_AGAIN_S)
    heart.round()
    assert store.sent == [["a", "b"], ["a"]]


def test_a_lease_that_is_to_end_is_not_renewed_for_a_message() -> None:
    clock, store, heart = a_heart()
    one = heart._held["a"]
    heart.watch_until(one, clock.monotonic() + 20)
    heart.hurry("a")
    heart.round()
    assert store.sent == []


# Listening


class Bell:
    """A doorbell that answers what the test tells it to."""

    is_local = False
    is_healthy = True

    def __init__(self) -> None:
        self.sent: list[DoorbellMessage] = []
        self.problem: BaseException | None = None
        self.listens = threading.Semaphore(0)
        self.goes_on = threading.Event()
        self.closed = threading.Event()

    def ring(self, messages: Sequence[DoorbellMessage]) -> None:
        self.sent += messages

    def listen(self, timeout_s: float, accepts: Accepts) -> list[DoorbellMessage]:
        self.listens.release()
        if self.problem is not None:
            raise self.problem
        self.goes_on.wait(0.01)
        return []

    def close(self) -> None:
        self.closed.set()

    def listened(self, times: int) -> None:
        for _ in range(times):
            assert self.listens.acquire(timeout=LONG_S)


class Listening:
    """A listener and what it does to the pollers."""

    def __init__(self, bell: Any, *, stretch_s: float = 60.0) -> None:
        self.at = Setting()
        self.record = Recorder(self.at.bus)
        self.bell = bell
        self.heart = Heartbeat(self.at.store, self.at.bus, tick_s=1.0)
        core = a_core(self.at.store, bus=self.at.bus, poll_wake_s=stretch_s)
        self.woken = core.inbox.queue
        self.listener = DoorbellListener(core, bell, self.at.inbox, self.heart)

    def stretched(self) -> list[float]:
        self.listener.look_after()
        return [poller._pace.stretched_s for poller in self.at.pollers.values()]

    def until(self, stretched: list[float]) -> None:
        eventually(lambda: self.stretched() == stretched)


USUAL: Final = [0.0, 0.0, 0.0]
RARE: Final = [60.0, 0.0, 60.0]
"""Streams are looked for as before: handing one over must not take a minute."""


@pytest.fixture
def listening() -> Iterator[Listening]:
    one = Listening(Bell())
    yield one
    one.listener.close()
    if one.listener._thread is not None:
        one.listener._thread.join(LONG_S)
        assert not one.listener._thread.is_alive()


@pytest.mark.slow
def test_polls_are_stretched_once_the_doorbell_answers(listening: Listening) -> None:
    assert listening.stretched() == USUAL
    listening.bell.problem = DoorbellError("not yet")
    listening.listener.start()
    listening.bell.listened(1)
    assert listening.stretched() == USUAL
    listening.bell.problem = None
    listening.until(RARE)
    assert not listening.woken.empty()


@pytest.mark.slow
def test_a_doorbell_that_breaks_puts_polls_back_and_stretches_them_again_when_it_recovers(
    listening: Listening,
) -> None:
    listening.listener.start()
    listening.until(RARE)
    listening.bell.problem = DoorbellError("out of order")
    [failed] = listening.record.wait(events.DoorbellFailed)
    assert failed.error == "out of order"
    assert 0 < failed.next_try_s <= 0.5
    listening.until(USUAL)
    listening.bell.problem = None
    listening.record.wait(events.DoorbellRecovered)
    listening.until(RARE)
    assert len(listening.record.of(events.DoorbellRecovered)) == 1


def test_attempts_to_listen_come_ever_more_rarely_while_it_is_broken(
    listening: Listening, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []

    def wait(seconds: float | None = None) -> bool:
        waits.append(seconds or 0.0)
        return len(waits) > 20

    listening.bell.problem = DoorbellError("out of order")
    monkeypatch.setattr(listening.listener._stop, "wait", wait)
    monkeypatch.setattr(listening.listener._stop, "is_set", lambda: len(waits) > 10)
    listening.listener._run()
    assert waits[-1] > 20
    assert waits == sorted(waits, key=lambda seconds: min(seconds, 20))
    monkeypatch.undo()
    listening.listener._thread = threading.Thread()
    listening.listener.start()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_died_is_reported_and_started_again(listening: Listening) -> None:
    listening.listener.start()
    listening.until(RARE)
    listening.bell.problem = SystemExit()
    first = listening.listener._thread
    assert first is not None
    first.join(LONG_S)
    assert not first.is_alive()
    listening.bell.problem = None
    assert not listening.listener.is_healthy
    assert listening.listener.is_reachable is False
    listening.listener.look_after()
    [died] = listening.record.wait(events.ThreadDied)
    assert (died.thread, died.restarted) == ("doorbell", True)
    listening.until(RARE)


@pytest.mark.slow
def test_a_doorbell_that_was_not_tried_yet_neither_works_nor_fails(listening: Listening) -> None:
    assert listening.listener.is_reachable is None
    listening.bell.problem = DoorbellError("denied")
    listening.listener.start()
    eventually(lambda: listening.listener.is_reachable is False)
    listening.bell.problem = None
    eventually(lambda: listening.listener.is_reachable is True)


def test_a_doorbell_of_one_machine_leaves_the_pace_of_polls_as_it_is() -> None:
    listening = Listening(MemoryDoorbell())
    listening.listener.start()
    eventually(lambda: listening.listener.is_healthy)
    assert listening.stretched() == USUAL
    listening.listener.close()


def test_a_beat_for_another_agent_is_not_ours(listening: Listening) -> None:
    assert listening.listener._wants(DoorbellMessage.beat("a", "me"))
    assert not listening.listener._wants(DoorbellMessage.beat("a", "another"))


def test_what_comes_after_the_stop_is_for_others(listening: Listening) -> None:
    listening.listener.start()
    listening.listener.stop()
    assert not listening.listener._wants(DoorbellMessage.beat("a", "me"))
    assert not listening.listener._wants(listening.at.due())


ABOUT: Final[dict[str, Any]] = {"task_id": "a", "job": "test.job", "queue": "default", "fence": 3, "attempt": 2}


def test_a_retry_and_a_snooze_are_looked_for_when_they_are_due() -> None:
    listening = Listening(None)
    listening.at.bus.emit(events.TaskRetried(**ABOUT, error="", delay_s=7.0))
    listening.at.bus.emit(events.TaskSnoozed(**{**ABOUT, "queue": "other"}, delay_s=11.0))
    listening.at.round()
    assert listening.at.woken() == []
    listening.at.clock.advance(7.01)
    listening.at.round()
    assert listening.at.woken() == ["default batch", "default stream"]
    listening.at.clock.advance(4.0)
    listening.at.round()
    assert "other batch" in listening.at.woken()
    listening.listener.start()
    listening.listener.close()


def test_tasks_that_are_given_back_are_passed_on(listening: Listening) -> None:
    listening.listener.start()
    for queue in ("default", "other", "default"):
        listening.at.bus.emit(events.TaskReleased(**{**ABOUT, "queue": queue}))
    listening.listener.close()
    assert listening.bell.sent == [DoorbellMessage.look("default"), DoorbellMessage.look("other")]
    assert listening.bell.closed.is_set()


def test_a_child_for_which_there_is_no_room_here_is_passed_on_once_a_second(listening: Listening) -> None:
    listening.listener.start()
    child = queue_events.ChildUnparked(task_id="b", parent_id="a", queue="other")
    listening.at.bus.emit(child)
    assert listening.bell.sent == [], "here is room"
    poller = listening.at.pollers["other", BATCH]
    poller.share = (0, 2)
    for _ in range(SLOTS):
        poller.began()
    for _ in range(5):
        listening.at.bus.emit(child)
    assert listening.bell.sent == [DoorbellMessage.look("other")]
    listening.at.clock.advance(1.1)
    listening.at.bus.emit(queue_events.ChildUnparked(task_id="b", parent_id="a", queue="nobody serves it here"))
    assert len(listening.bell.sent) == 2


# What sends messages


class Sending:
    """A client, and what it sends."""

    def __init__(self, *, is_local: bool = False) -> None:
        self.clock = FakeClock()
        self.store = memory_store(self.clock)
        self.bell = Bell()
        self.bell.is_local = is_local
        self.client = Client(self.store, settings(), doorbell=self.bell)

    def take(self) -> list[DoorbellMessage]:
        sent_now, self.bell.sent = self.bell.sent, []
        return sent_now

    def run(self, task: Task, owner: str = "agent-1") -> None:
        assert self.store.claim([Wanted(DoorbellMessage.task(task).candidate, 60.0)], owner=owner)


@pytest.fixture
def sent() -> Sending:
    return Sending()


def test_an_enqueue_sends_what_a_claim_needs(sent: Sending) -> None:
    task = sent.client.enqueue("test.job", {"a": 1}, delay_s=5.0, queue="reports")
    assert sent.take() == [DoorbellMessage.task(task)]


def test_a_task_that_waits_for_others_has_no_message_until_it_is_free(sent: Sending) -> None:
    parent = sent.client.enqueue("test.job")
    sent.client.enqueue("test.job", depends_on=[parent], on_parent_failure="run", queue="reports")
    sent.take()
    sent.client.cancel(parent)
    assert sent.take() == [DoorbellMessage.look("reports")]


def test_few_tasks_are_sent_by_id_and_more_by_a_few_looks(sent: Sending) -> None:
    sent.client.enqueue_many("test.job", [{}] * 3)
    assert [message.verb for message in sent.take()] == [Verb.TASK] * 3
    sent.client.enqueue_many("test.job", [{}] * 60, delay_s=30.0)
    sent_now = sent.take()
    assert sent_now == [DoorbellMessage.look("default", sent_now[0].at)] * 6
    assert sent_now[0].at == pytest.approx(sent.clock.now() + 30.0)
    sent.client.enqueue_many("test.job", [{}] * 400)
    assert len(sent.take()) == 10


def test_where_all_receive_a_message_one_look_is_enough() -> None:
    sent = Sending(is_local=True)
    sent.client.enqueue_many("test.job", [{}] * 60)
    assert len(sent.take()) == 1


def test_a_cancel_and_a_stop_notify_the_agent_that_runs_the_task_each_time(sent: Sending) -> None:
    task = sent.client.enqueue("test.job")
    sent.run(task)
    sent.take()
    sent.client.cancel(task)
    sent.client.cancel(task)
    assert sent.take() == [DoorbellMessage.beat(task.id, "agent-1")] * 2
    following = sent.client.enqueue(stream("test.stream")(follow), {})
    sent.run(following, "agent-2")
    sent.take()
    sent.client.streams.stop(following)
    sent.client.streams.stop(following)
    assert sent.take() == [DoorbellMessage.beat(following.id, "agent-2")] * 2


def test_a_cancel_of_a_task_that_waits_notifies_no_agent(sent: Sending) -> None:
    task = sent.client.enqueue("test.job")
    sent.take()
    sent.client.cancel(task)
    assert sent.take() == []


def test_a_retry_and_a_start_notify(sent: Sending) -> None:
    task = sent.client.enqueue("test.job")
    sent.client.cancel(task)
    sent.take()
    again = sent.client.retry(task)
    assert sent.take() == [DoorbellMessage.task(again)]
    following = sent.client.enqueue(stream("test.stream")(follow), {})
    sent.client.streams.stop(following)
    sent.take()
    again = sent.client.streams.start(following)
    assert sent.take() == [DoorbellMessage.task(again)]


def test_the_end_of_a_pause_notifies_the_agents_that_serve_the_queue(sent: Sending) -> None:
    sent.store.announce("agent-1", {"queues": {"reports": 3}, "jobs": ["test.job"]}, lives_s=60.0)
    sent.client.pauses.pause(queue="reports")
    sent.take()
    sent.client.pauses.resume(queue="reports")
    assert sent.take() == [DoorbellMessage.look("reports")]


def test_without_a_doorbell_nothing_is_sent() -> None:
    sender = DoorbellSender(None)
    sender.tasks([])
    sender.looks(["a"])
    sender.close()
