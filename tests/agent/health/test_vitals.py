"""The health of real agents: red when something is really wrong, green again by itself, and no thread dies unseen."""

from __future__ import annotations

import json
import sqlite3
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest

from tests.support.engine import LONG_S, Stage, a_job, settings
from tests.support.stands import eventually
from thunderagent.agent.assembly import equip
from thunderagent.agent.health import probes
from thunderagent.agent.health.judgement import Limits
from thunderagent.agent.health.monitor import Monitor
from thunderagent.agent.health.vitals import STORES, is_in, place_of
from thunderagent.agent.heartbeat import Heartbeat
from thunderagent.agent.housekeeping import Housekeeping
from thunderagent.agent.loop import Agent
from thunderagent.agent.poller import QueuePoller
from thunderagent.agent.threads import BackgroundThread, RepeatingThread
from thunderagent.agent.view import AgentView
from thunderagent.client import Client
from thunderagent.jobs.context import Context
from thunderagent.jobs.job import Job, job
from thunderagent.jobs.registry import Registry
from thunderagent.model import events, fleet_events
from thunderagent.model.bus import Event
from thunderagent.model.conditions import Write
from thunderagent.model.errors import StoreThrottled, StoreUnavailable
from thunderagent.model.task import Page, Status
from thunderagent.queue.doorbell.memory import MemoryDoorbell, MemoryHub
from thunderagent.queue.doorbell.message import DoorbellMessage
from thunderagent.stores.engine import Applied, Engine
from thunderagent.stores.sqlite import access as sqlite_access
from thunderagent.stores.sqlite.engine import MEMORY, SqliteEngine
from thunderagent.stores.tasks import TaskStore

pytestmark = pytest.mark.slow

SOON: Final = Limits(progress_s=0.4, pause_s=0.2, wedged_s=2.0)
"""Everything a hundred times quicker than in production."""

ignoring_deaths = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")


@job("test.quick")
def quick(ctx: Context, payload: dict[str, Any]) -> str:
    return "done"


class Ward(Stage):
    """An agent with its equipment, judged quickly."""

    def __init__(
        self,
        *jobs: Job[Any],
        engine: Engine | None = None,
        threads: Callable[[AgentView], Sequence[BackgroundThread]] = equip,
        doorbell: MemoryDoorbell | None = None,
        **changes: Any,
    ) -> None:
        super().__init__((quick, *jobs), store=TaskStore(engine or SqliteEngine(MEMORY)), **changes)
        self.agent = Agent(
            self.store,
            Registry(quick, *jobs),
            self.settings,
            bus=self.bus,
            doorbell=doorbell,
            threads=threads,
            first_poll_s=0.0,
        )
        self.agent.vitals.limits = SOON
        self.client = Client(self.store, self.settings, on_enqueue=self.agent.wake)
        self.error: BaseException | None = None

    def _run(self) -> None:
        try:
            super()._run()
        except Exception as error:
            self.error = error

    def reasons(self) -> list[str]:
        """The names of what is wrong now."""
        return [reason.name for reason in self.agent.vitals.health().reasons]

    def turns(self, *names: str) -> str:
        """Wait until exactly this is wrong; the answer is what is said of it."""
        eventually(lambda: self.reasons() == list(names))
        return "; ".join(map(str, self.agent.vitals.health().reasons))

    def works(self) -> None:
        """The agent runs what is enqueued now."""
        assert self.end_of(self.client.enqueue(quick, {})).result == "done"


@contextmanager
def ward(*jobs: Job[Any], **options: Any) -> Iterator[Ward]:
    """An agent, until the end of the block."""
    stage = Ward(*jobs, **options)
    stage.start()
    stage.record.wait(events.AgentStarted)
    try:
        yield stage
    finally:
        if stage.is_running:
            stage.agent.stop()
            stage.stop()
        stage.store.engine.close()


class Moody(SqliteEngine):
    """An embedded engine that fails as a test says."""

    mood = ""

    def apply(self, batch: Sequence[Write]) -> list[Applied]:
        self._perhaps_away()
        if self.mood == "claims throttled" and any(write.verb == "claim" for write in batch):
            return [Applied(won=False, error=StoreThrottled("throttled")) for _ in batch]
        if self.mood == "claims refused" and any(write.verb == "claim" for write in batch):
            return [Applied(won=False, row=self.get([write.task_id])[write.task_id]) for write in batch]
        return super().apply(batch)

    def page(self, *arguments: Any, **options: Any) -> Page:
        self._perhaps_away()
        return super().page(*arguments, **options)

    def get(self, task_ids: Sequence[str]) -> dict[str, Any]:
        self._perhaps_away()
        return super().get(task_ids)

    def _perhaps_away(self) -> None:
        if self.mood == "away":
            raise StoreUnavailable("no route to host")


# Red, with a reason, and green again


def test_an_agent_that_works_is_healthy_and_its_row_says_so() -> None:
    with ward() as at:
        at.works()
        assert at.agent.vitals.health().healthy
        assert at.agent.vitals.is_ready
        [row] = at.client.agents.list()
        entry = row.info["health"]
        assert (entry["healthy"], entry["alive"], entry["state"], entry["reasons"]) == (True, True, "ok", [])
        assert entry["heartbeat_alive"], "what older versions read is still there"


def test_a_store_that_is_away_is_reported_with_its_error_and_forgotten_when_it_answers() -> None:
    engine = Moody(MEMORY)
    with ward(engine=engine) as at:
        at.works()
        engine.mood = "away"
        said = at.turns("store")
        assert "(last error: no route to host)" in said
        assert at.agent.vitals.health().alive, "a fresh process would not reach it either"
        at.agent.vitals.limits = Limits(progress_s=0.4, pause_s=0.2, wedged_s=60.0)
        engine.mood = ""
        at.agent.wake()
        at.turns()
        at.works()


def test_secrets_in_an_error_of_the_store_are_hidden_wherever_health_is_reported() -> None:
    class Telling(Moody):
        def _perhaps_away(self) -> None:
            if self.mood == "away":
                raise StoreUnavailable("no answer from https://user:hunter2@proxy:8080, pin=4711, token=abc123")

    engine = Telling(MEMORY)

    @job("test.held")
    def held(ctx: Context, payload: dict[str, Any]) -> None:
        while ctx.stop_reason is None:
            threading.Event().wait(0.02)

    with ward(held, engine=engine, log_redact="pin", lease_s=60.0, heartbeat_s=0.1) as at:
        at.client.enqueue(held, {})
        at.record.wait(events.TaskStarted)
        engine.mood = "away"
        eventually(lambda: {"store", "beats"} <= set(at.reasons()))
        entry = json.dumps(at.agent.vitals.entry()) + repr(at.agent.vitals.health())
        engine.mood = ""
    assert entry.count("no answer from https://***@proxy:8080, pin=***") >= 4, entry
    assert not {word for word in ("hunter2", "4711", "abc123") if word in entry}


def test_a_file_that_is_replaced_under_an_agent_turns_it_red_and_it_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite_access, "LOOK_S", 0.05)
    path = tmp_path / "tasks.db"
    with ward(engine=SqliteEngine(str(path))) as at:
        at.works()
        path.rename(tmp_path / "away.db")
        said = at.turns("store")
        assert f"the file {path} was deleted while it was open: restart the agents" in said
        client = Client(TaskStore(SqliteEngine(str(path))), at.settings)
        task = client.enqueue(quick, {})
        threading.Event().wait(0.3)
        assert at.reasons() == ["store"], "it does not go on with what may be another queue"
        assert client.get(task.task_id).status is Status.PENDING
        client.close()
    with ward(engine=SqliteEngine(str(path))) as at:
        assert at.end_of(task).status is Status.SUCCESS, "that is what a restart is for"


def test_an_idle_agent_stays_green_though_it_polls_rarely() -> None:
    with ward(poll_min_s=3600.0, poll_max_s=3600.0, poll_idle_s=3600.0, sweep_s=0.2) as at:
        at.agent.vitals.limits = Limits(progress_s=2.5, pause_s=3600.0)
        at.works()
        begun = at.store.monotonic()
        reds = []
        while at.store.monotonic() - begun < 4.0:
            reds += at.reasons()
            threading.Event().wait(0.05)
        assert reds == [], "its row is written each second, which the store answers"


@pytest.mark.parametrize(
    ("mood", "reason", "words"),
    [
        ("claims refused", "starved:default", "10 of 10 slots are free, and no claim was won for "),
        ("claims throttled", "work", "(last error: throttled), although the store answers other requests"),
    ],
)
def test_claims_that_never_win_turn_an_agent_red_though_the_store_answers(mood: str, reason: str, words: str) -> None:
    engine = Moody(MEMORY)
    with ward(engine=engine) as at:
        at.agent.vitals.limits = Limits(progress_s=1.5, pause_s=0.2)
        engine.mood = mood
        task = at.client.enqueue(quick, {})
        assert words in at.turns(reason)
        for _ in range(50):
            threading.Event().wait(0.02)
            assert at.reasons() == [reason], "it stays red while nothing changes"
        engine.mood = ""
        assert at.end_of(task).status is Status.SUCCESS
        at.turns()


def test_a_queue_that_is_looked_at_no_more_turns_an_agent_red(monkeypatch: pytest.MonkeyPatch) -> None:
    with ward() as at:
        at.works()
        monkeypatch.setattr(QueuePoller, "look", lambda self: [])  # as if its time never came
        said = at.turns("unlooked:default")
        assert "although 10 of 10 slots are free" in said
        monkeypatch.undo()
        at.turns()


def test_a_queue_that_was_full_for_long_is_not_taken_for_forgotten() -> None:
    stage = Ward(slots=1)
    [poller] = stage.agent._pollers.values()
    poller.began()
    poller.looked_at -= 3600.0
    assert stage.reasons() == [], "there was no slot to look for"
    poller.freed()
    assert stage.reasons() == [], "the slot has become free a moment ago"
    poller.looked_at -= 3600.0
    assert stage.reasons() == ["unlooked:default"]
    stage.store.engine.close()


def test_slots_that_handlers_keep_after_they_were_asked_to_stop_turn_an_agent_red() -> None:
    go_on = threading.Event()

    @job("test.deaf")
    def deaf(ctx: Context, payload: dict[str, Any]) -> None:
        go_on.wait(LONG_S)

    with ward(deaf, slots=1) as at:
        task = at.client.enqueue(deaf, {})
        at.record.wait(events.TaskStarted)
        assert at.reasons() == []
        at.client.cancel(task)
        said = at.turns("leaked:default")
        assert "all 1 slots of the queue default are held by handlers that were told to stop" in said
        assert "(test.deaf)" in said
        go_on.set()
        at.turns()
        at.works()


def test_a_handler_that_goes_on_after_it_was_asked_to_stop_is_noted_while_slots_are_left() -> None:
    go_on = threading.Event()

    @job("test.deaf")
    def deaf(ctx: Context, payload: dict[str, Any]) -> None:
        go_on.wait(LONG_S)

    with ward(deaf, slots=2) as at:
        task = at.client.enqueue(deaf, {})
        at.record.wait(events.TaskStarted)
        at.client.cancel(task)
        eventually(lambda: any(one.stop_seen_at for one in at.agent._in_flight.held.values()))
        [running] = at.agent._in_flight.held.values()
        assert at.agent.vitals.health().notes == (), "it may take its time"
        running.stop_seen_at -= 6.0
        [note] = at.agent.vitals.entry()["notes"]
        assert note.startswith("1 handler goes on although it was told to stop (test.deaf): ")
        go_on.set()
        at.works()


def test_a_doorbell_that_was_not_tried_yet_is_not_reported_as_failed() -> None:
    stage = Ward(doorbell=MemoryDoorbell(MemoryHub()))
    stage.agent._housekeeping._announce()
    [row] = stage.client.agents.list()
    assert row.info["health"]["notes"] == []
    assert stage.agent.vitals.facts().doorbell is None
    stage.start()
    eventually(lambda: stage.agent.vitals.facts().doorbell is True)
    stage.agent.stop()
    stage.stop()
    stage.store.engine.close()


def test_renewals_that_fail_while_the_loop_is_answered_turn_an_agent_red() -> None:
    class Deaf(Moody):
        def apply(self, batch: Sequence[Write]) -> list[Applied]:
            if self.mood == "no beats" and any(write.verb == "renew" for write in batch):
                raise StoreUnavailable("the pool of the lease client is broken")
            return super().apply(batch)

    engine, go_on = Deaf(MEMORY), threading.Event()

    @job("test.long")
    def long(ctx: Context, payload: dict[str, Any]) -> None:
        go_on.wait(LONG_S)

    with ward(long, engine=engine, lease_s=60.0) as at:
        task = at.client.enqueue(long, {})
        at.record.wait(events.TaskStarted)
        engine.mood = "no beats"
        said = at.turns("beats")
        assert "while 1 are held (last error: the pool of the lease client is broken)" in said
        engine.mood = ""
        at.turns()
        go_on.set()
        assert at.end_of(task).status is Status.SUCCESS


def test_a_coroutine_that_blocks_the_event_loop_is_named() -> None:
    go_on = threading.Event()

    @job("test.blocks")
    async def blocks_the_loop(ctx: Context, payload: dict[str, Any]) -> None:
        go_on.wait(LONG_S)

    with ward(blocks_the_loop) as at:
        assert at.reasons() == []
        task = at.client.enqueue(blocks_the_loop, {})
        eventually(lambda: "event-loop" in at.reasons())
        eventually(lambda: not at.agent.vitals.health().alive)
        loop = at.agent._in_flight.executors
        assert loop is not None
        assert loop.loop is not None
        assert "called by blocks_the_loop (health/test_vitals.py:" in place_of(loop.loop.thread_id)
        go_on.set()
        at.turns()
        assert at.end_of(task).status is Status.SUCCESS


def test_a_thread_that_waits_for_the_store_is_seen_to(tmp_path: Path) -> None:
    path = tmp_path / "tasks.db"
    client = Client(TaskStore(SqliteEngine(str(path))), settings())
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    thread = threading.Thread(target=client.enqueue, args=(quick, {}))
    thread.start()
    try:
        eventually(lambda: is_in(thread.ident, STORES), 5.0)
        assert not is_in(threading.get_ident(), STORES)
    finally:
        other.execute("ROLLBACK")
        other.close()
        thread.join(LONG_S)
        client.close()


def test_a_monitor_goes_on_while_the_loop_stands_still(tmp_path: Path) -> None:
    stuck, go_on = threading.Event(), threading.Event()

    def stand_still(event: Event) -> None:
        if isinstance(event, events.Polled) and not go_on.is_set():
            stuck.set()
            go_on.wait(LONG_S)

    with ward(health_folder=str(tmp_path), http_port=21700) as at:
        [path] = eventually(lambda: list(tmp_path.glob("*.json")))
        at.bus.subscribe(stand_still)
        assert stuck.wait(LONG_S)
        [changed] = at.record.wait(fleet_events.HealthChanged)
        assert not changed.healthy
        assert changed.reasons[0].startswith("the agent's loop has not come round for ")
        eventually(lambda: not at.agent.vitals.health().alive)
        eventually(lambda: json.loads(path.read_text())["alive"] is False)
        with pytest.raises(urllib.error.HTTPError) as asked:
            urllib.request.urlopen(f"{at.agent.facts['http']}/health", timeout=10)
        with asked.value:
            assert json.loads(asked.value.read())["reasons"][0].startswith("the agent's loop has not come round")
        go_on.set()
        at.record.wait(fleet_events.HealthChanged, where=lambda event: event.healthy)
        at.works()
    assert list(tmp_path.iterdir()) == [], "a good end leaves no file"


def test_a_paused_agent_and_one_that_drains_say_so_and_are_healthy() -> None:
    go_on = threading.Event()

    @job("test.long")
    def long(ctx: Context, payload: dict[str, Any]) -> None:
        go_on.wait(LONG_S)

    with ward(long) as at:
        task = at.client.enqueue(long, {})
        at.record.wait(events.TaskStarted)
        at.client.pauses.pause(agent=at.agent.name)
        at.record.wait(events.Paused)
        at.client.enqueue(quick, {})
        threading.Event().wait(1.0)
        health = at.agent.vitals.health()
        assert (health.healthy, health.state) == (True, "paused")
        at.agent.stop()
        at.record.wait(events.AgentDraining)
        threading.Event().wait(0.6)
        health = at.agent.vitals.health()
        assert (health.healthy, health.state, health.notes) == (True, "draining", ("draining: 1 task is still held",))
        go_on.set()
        at.join()
        assert at.client.get(task).status is Status.SUCCESS


def test_the_start_tells_where_the_agent_answers() -> None:
    with ward(http_port=21740) as at:
        [started] = at.record.of(events.AgentStarted)
        assert started.http is not None
        assert started.http.startswith("http://127.0.0.1:217")
        [row] = at.client.agents.list()
        assert row.info["http"] == started.http
        with urllib.request.urlopen(f"{started.http}/health", timeout=10) as reply:
            assert json.loads(reply.read())["agent"] == at.agent.name


# Dead threads


def once(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> threading.Event:
    """Let the next call of a method raise what nobody expects."""
    real, broken = getattr(owner, name), threading.Event()

    def die(*arguments: Any, **options: Any) -> Any:
        if broken.is_set():
            return real(*arguments, **options)
        broken.set()
        raise LookupError("a bug")

    monkeypatch.setattr(owner, name, die)
    return broken


def dying(thread: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name = {
        "heartbeat": (Heartbeat, "renew_due"),
        "lease-watch": (Heartbeat, "judge_all"),
        "doorbell": (MemoryDoorbell, "listen"),
        "monitor": (Monitor, "_write"),
        "http": (probes._Server, "service_actions"),
    }[thread]
    once(monkeypatch, owner, name)


@ignoring_deaths
@pytest.mark.parametrize("thread", ["heartbeat", "lease-watch", "exporter"])
def test_a_dead_thread_is_reported_while_the_loop_that_starts_it_again_stands_still(
    thread: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("thunderagent.agent.threads.RESTART_AFTER_S", 0.0)
    stuck, go_on, export = threading.Event(), threading.Event(), threading.Event()

    def stand_still(event: Event) -> None:
        if isinstance(event, events.Polled) and not go_on.is_set():
            stuck.set()
            go_on.wait(LONG_S)

    def turn() -> None:
        if export.is_set():
            export.clear()
            raise LookupError("a bug")

    with ward(threads=lambda agent: [*equip(agent), RepeatingThread("exporter", 0.05, turn)]) as at:
        at.agent.vitals.limits = Limits(progress_s=60.0, pause_s=60.0)
        at.bus.subscribe(stand_still)
        assert stuck.wait(LONG_S)
        export.set() if thread == "exporter" else dying(thread, monkeypatch)
        assert f"the thread {thread} has died" in at.turns("thread")
        at.record.wait(fleet_events.HealthChanged)
        go_on.set()
        [died] = at.record.wait(events.ThreadDied)
        assert died.thread == thread
        at.turns()


@ignoring_deaths
@pytest.mark.parametrize("thread", ["heartbeat", "lease-watch", "doorbell", "monitor", "http", "exporter"])
def test_a_thread_that_dies_is_noticed_within_seconds_and_started_again(
    thread: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("thunderagent.agent.threads.RESTART_AFTER_S", 0.0)
    export = threading.Event()

    class Exporter:
        def turn(self) -> None:
            export.set()

    def threads(agent: Agent) -> list[BackgroundThread]:
        return [*equip(agent), RepeatingThread("exporter", 0.05, lambda: Exporter().turn())]

    idle = {"poll_max_s": 3600.0, "poll_idle_s": 3600.0, "sweep_s": 3600.0}
    bell = MemoryDoorbell(MemoryHub())
    with ward(threads=threads, doorbell=bell, http_port=21780, heartbeat_s=2.0, **idle) as at:
        at.agent.vitals.limits = Limits(progress_s=60.0, pause_s=3600.0)
        at.works()
        if thread == "exporter":
            once(monkeypatch, Exporter, "turn")
        else:
            dying(thread, monkeypatch)
        if thread == "doorbell":
            bell.ring([DoorbellMessage.look("default")])
        begun = at.store.monotonic()
        [died] = at.record.wait(events.ThreadDied)
        assert (died.thread, died.restarted) == (thread, True)
        assert at.store.monotonic() - begun < LONG_S
        eventually(lambda: at.reasons() == [])
        export.clear()
        assert export.wait(LONG_S)
        with urllib.request.urlopen(f"{at.agent.facts['http']}/health", timeout=10) as reply:
            assert reply.status == 200
        at.works()
    assert len(at.record.of(events.ThreadDied)) == 1


@ignoring_deaths
def test_an_event_loop_that_dies_takes_the_agent_down_and_the_supervisor_starts_a_fresh_one() -> None:
    @job("test.async")
    async def coroutine(ctx: Context, payload: dict[str, Any]) -> None: ...

    with ward(coroutine) as at:
        at.works()
        executors = at.agent._in_flight.executors
        assert executors is not None
        assert executors.loop is not None
        executors.loop._loop.call_soon_threadsafe(executors.loop._loop.stop)
        [died] = at.record.wait(events.ThreadDied)
        assert (died.thread, died.restarted) == ("event-loop", False)
        at.join()


@pytest.mark.parametrize(("piece", "then"), [("run_pending", Agent.wake), ("leave_streams", Agent.stop)])
def test_an_error_out_of_the_loop_or_of_the_drain_is_loud_and_gives_everything_back(
    monkeypatch: pytest.MonkeyPatch, piece: str, then: Callable[[Agent], None]
) -> None:
    @job("test.long")
    def long(ctx: Context, payload: dict[str, Any]) -> None:
        ctx.wait(LONG_S)
        ctx.check()

    with ward(long, drain_s=0.0) as at:
        task = at.client.enqueue(long, {})
        at.record.wait(events.TaskStarted)
        once(monkeypatch, Housekeeping, piece)
        then(at.agent)
        at.join()
        assert repr(at.error) == "LookupError('a bug')"
        assert [event.error for event in at.record.of(fleet_events.AgentFailed)] == ["LookupError('a bug')"]
        row = at.client.get(task)
        assert (row.status, row.fence, row.retry_count, row.crash_count) == (Status.PENDING, 1, 0, 0)
        assert list(at.client.agents.list()) == [], "it has signed off"
        assert not [thread.name for thread in threading.enumerate() if thread.name in ("monitor", "heartbeat")]


def test_several_reasons_to_retire_at_once_are_one_stop_and_hurry_no_task() -> None:
    with ward(a_job()) as at:
        other = threading.Thread(target=at.agent.retire, args=("another",))

        def meanwhile(event: Event) -> None:
            if isinstance(event, fleet_events.AgentRetires) and event.reason == "one":
                other.start()
                other.join(LONG_S)

        at.bus.subscribe(meanwhile)
        at.agent.retire("one")
        at.join()
        assert [event.reason for event in at.record.of(fleet_events.AgentRetires)] == ["one"]
        assert at.agent._stop._number == 1


def test_an_error_that_hits_the_drain_too_leaves_the_leases_to_run_out(monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()

    @job("test.long")
    def long(ctx: Context, payload: dict[str, Any]) -> None:
        go_on.wait(LONG_S)

    def broken(*_: Any, **__: Any) -> None:
        raise LookupError("a bug")

    with ward(long) as at:
        task = at.client.enqueue(long, {})
        at.record.wait(events.TaskStarted)
        monkeypatch.setattr("thunderagent.agent.in_flight.InFlight.commit", broken)
        at.agent.wake()
        at.join()
        assert repr(at.error) == "LookupError('a bug')"
        assert [event.error for event in at.record.of(fleet_events.AgentFailed)] == [
            "LookupError('a bug')",
            "nor can it give its tasks back: LookupError('a bug')",
        ]
        assert at.client.get(task).status is Status.RUNNING
        go_on.set()
