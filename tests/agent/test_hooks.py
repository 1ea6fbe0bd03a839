"""Hooks in an agent: told and run as they should be, and never able to hurt a task."""

from __future__ import annotations

import asyncio
import os
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.support import process_jobs
from tests.support.engine import LONG_S, Recorder, Stage, a_job, a_lease, running, settings
from tests.support.stands import eventually
from tests.telemetry.test_logs import ABOUT
from thunderagent import JobRun, Registry, around, on
from thunderagent.agent.loop import Agent
from thunderagent.agent.scopes import HOOK_AGAIN_S, HOOKS_END_S, MOST_WAITING, HookDispatcher, HookFailures, scope_of
from thunderagent.client import Client
from thunderagent.jobs.context import Cancel, Context, Fail, Snooze
from thunderagent.jobs.hooks import Hook
from thunderagent.jobs.job import Job, job
from thunderagent.jobs.outcome import Outcome, Returned
from thunderagent.jobs.running import Scope, no_scope
from thunderagent.model import events, fleet_events
from thunderagent.model.bus import Event, EventBus
from thunderagent.model.errors import ConfigurationError
from thunderagent.model.events import TaskEvent, TaskFailed, TaskSucceeded
from thunderagent.stores.tasks import TaskStore
from thunderagent.streams.context import StreamContext
from thunderagent.streams.job import stream
from thunderagent.testing import FakeClock


@contextmanager
def hooked(*things: Job[Any] | Hook, store: TaskStore | None = None, scope: Scope = no_scope) -> Iterator[Stage]:
    """An agent with jobs and hooks, until the end of the block."""
    stage = Stage(())
    stage.store = store or stage.store
    stage.agent = Agent(
        stage.store,
        Registry(*things),
        stage.settings,
        bus=stage.bus,
        scope=scope,
        rng=random.Random(7),
        first_poll_s=0.0,
    )
    stage.client = Client(stage.store, stage.settings, on_enqueue=stage.agent.wake)
    stage.start()
    try:
        yield stage
    finally:
        if stage.is_running:
            stage.stop()
        stage.store.engine.close()


@job("hooked.sync", max_retry=0)
def sync(ctx: Context, payload: dict[str, Any]) -> Any:
    return answer(payload)


@job("hooked.async", max_retry=0)
async def coroutine(ctx: Context, payload: dict[str, Any]) -> Any:
    await asyncio.sleep(0)
    return answer(payload)


def answer(payload: dict[str, Any]) -> Any:
    match payload.get("do"):
        case "raise":
            raise ValueError("no such month")
        case "snooze":
            return Snooze(3600)
        case "cancel":
            return Cancel("not needed")
        case "fail":
            return Fail("hopeless")
    return payload


class Seen:
    """What an `around` hook saw, by task."""

    def __init__(self) -> None:
        self.before: dict[str, tuple[str, str, int, str | None]] = {}
        self.after: dict[str, tuple[str | None, str | None]] = {}
        self.threads: dict[str, tuple[int, int]] = {}

        @around
        def watch(run: JobRun) -> Iterator[None]:
            self.before[run.task_id] = (run.job, run.queue, run.attempt, run.outcome)
            begun_in = threading.get_ident()
            yield
            self.after[run.task_id] = (run.outcome, run.error and run.error.partition("\n")[0])
            self.threads[run.task_id] = (begun_in, threading.get_ident())

        self.hook = watch


@pytest.mark.parametrize("one", [sync, coroutine], ids=["thread", "coroutine"])
@pytest.mark.parametrize(
    ("do", "seen"),
    [
        (None, ("returned", None)),
        ("raise", ("raised", "ValueError: no such month")),
        ("snooze", ("snoozed", None)),
        ("cancel", ("cancelled", "not needed")),
        ("fail", ("failed", "hopeless")),
    ],
)
def test_a_hook_sees_a_run_before_it_begins_and_what_came_of_it(
    one: Job[Any], do: str | None, seen: tuple[str, str | None]
) -> None:
    watch = Seen()
    with hooked(one, watch.hook) as stage:
        task = stage.client.enqueue(one, {"do": do})
        stage.record.wait(TaskEvent, where=lambda event: not isinstance(event, events.TaskStarted))
    assert watch.before == {task.id: (one.name, "default", 1, None)}
    assert watch.after == {task.id: seen}
    [(begun, ended)] = watch.threads.values()
    assert begun == ended != threading.get_ident()


@pytest.mark.slow
def test_a_hook_around_an_isolated_job_runs_in_the_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Seen()
    with hooked(process_jobs.echo, process_jobs.raises, watch.hook) as stage:
        good = stage.client.enqueue(process_jobs.echo, {})
        bad = stage.client.enqueue(process_jobs.raises, {"what": "killed"}, max_retry=0)
        assert stage.end_of(good).status == "SUCCESS"
        assert stage.end_of(bad).status == "FAILED"
    assert watch.after[good.id] == ("returned", None)
    assert watch.after[bad.id][0] == "raised"


def test_hooks_are_nested_in_the_order_in_which_they_were_found_and_limited_to_their_jobs() -> None:
    steps: list[str] = []

    def noting(name: str, jobs: tuple[str, ...] | None = None) -> Hook:
        @around(jobs=jobs)
        def hook(run: JobRun) -> Iterator[None]:
            steps.append(f"{name} begins")
            yield
            steps.append(f"{name} ends")

        return hook

    with hooked(
        sync,
        a_job("other.job"),
        noting("outer"),
        noting("never", jobs=("other.job",)),
        noting("inner", jobs=(sync.name,)),
    ) as stage:
        stage.end_of(stage.client.enqueue(sync, {}))
    assert steps == ["outer begins", "inner begins", "inner ends", "outer ends"]


def failing(when: str, error: BaseException) -> Hook:
    @around
    def bad(run: JobRun) -> Iterator[None]:
        if when == "before":
            raise error
        yield
        if when == "after":
            raise error
        if when == "twice":
            yield

    @around
    def never(run: JobRun) -> Iterator[None]:
        if when == "never":
            return
        yield

    return never if when == "never" else bad


@pytest.mark.slow
@pytest.mark.parametrize("one", [sync, coroutine], ids=["thread", "coroutine"])
@pytest.mark.parametrize("when", ["before", "after", "twice", "never"])
@pytest.mark.parametrize(
    "error",
    [ValueError("of the hook"), SystemExit(3), asyncio.CancelledError(), GeneratorExit(), StopIteration()],
    ids=repr,
)
def test_a_hook_that_fails_is_told_and_changes_nothing_for_its_task_and_the_other_hooks(
    one: Job[Any], when: str, error: BaseException
) -> None:
    outer, inner = Seen(), Seen()
    with hooked(one, outer.hook, failing(when, error), inner.hook) as stage:
        tasks = [stage.client.enqueue(one, {"n": number}) for number in range(3)]
        for task in tasks:
            done = stage.end_of(task)
            assert (done.status, done.attempt, done.result) == ("SUCCESS", 1, task.payload)
        [told] = stage.record.wait(fleet_events.HookFailed)
    assert told.hook.endswith("never" if when == "never" else "bad")
    assert stage.stuck == 0
    for seen in (outer, inner):
        assert set(seen.after.values()) == {("returned", None)}
    rest = stage.record.of(fleet_events.HookFailed)[1:]
    assert len(rest) == 1, "one at once, and one at the end for the others"
    assert rest[0].error.endswith("(and 1 times before)")


@pytest.mark.parametrize("when", ["before", "after"])
def test_the_scope_of_log_lines_and_spans_is_guarded_as_a_hook_is(when: str) -> None:
    @contextmanager
    def logs(run: Any) -> Iterator[None]:
        if when == "before":
            raise OSError("no log")
        yield
        raise OSError("no log")

    seen = Seen()
    with hooked(sync, seen.hook, scope=logs) as stage:
        assert stage.end_of(stage.client.enqueue(sync, {"a": 1})).result == {"a": 1}
        [told] = stage.record.wait(fleet_events.HookFailed)
    assert (told.hook, told.error.partition("\n")[0]) == ("logs", "OSError: no log")


@pytest.mark.slow
@pytest.mark.parametrize("one", [sync, coroutine, process_jobs.echo], ids=["thread", "coroutine", "process"])
def test_a_scope_given_in_code_that_fails_at_its_end_does_not_undo_what_the_handler_did(one: Job[Any]) -> None:
    @contextmanager
    def logs(run: Any) -> Iterator[None]:
        yield
        raise OSError("no log")

    with hooked(one, scope=logs) as stage:
        done = stage.end_of(stage.client.enqueue(one, {}))
        assert (done.status, done.attempt) == ("SUCCESS", 1)


def test_a_hook_that_catches_everything_does_not_keep_a_coroutine_from_being_cancelled() -> None:
    begun = threading.Event()

    @job("hooked.waits")
    async def waits(ctx: Context, payload: dict[str, Any]) -> None:
        begun.set()
        await asyncio.sleep(60)

    outcomes: list[str | None] = []

    @around
    def swallow(run: JobRun) -> Iterator[None]:
        try:
            yield
        except BaseException:
            raise RuntimeError("replaced") from None
        finally:
            outcomes.append(run.outcome)

    with hooked(waits, swallow) as stage:
        task = stage.client.enqueue(waits, {})
        assert begun.wait(LONG_S)
        stage.client.cancel(task)
        done = stage.end_of(task)
        assert (done.status, done.done_reason) == ("DONE", "cancelled")
    assert outcomes == ["stopped"]
    assert stage.record.of(fleet_events.HookFailed) == []


def test_a_stop_of_the_agent_is_seen_by_hooks_and_burns_no_attempt() -> None:
    begun = threading.Event()

    @job("hooked.waits")
    async def waits(ctx: Context, payload: dict[str, Any]) -> None:
        begun.set()
        await asyncio.sleep(60)

    seen = Seen()
    with hooked(waits, seen.hook) as stage:
        task = stage.client.enqueue(waits, {})
        assert begun.wait(LONG_S)
        stage.agent.stop()
        stage.agent.stop()
        stage.join()
        now = stage.client.get(task)
        assert (now.status, now.attempt) == ("PENDING", 1)
    assert seen.after[task.id][0] == "stopped"


@pytest.mark.slow
def test_the_run_of_a_stream_is_surrounded_from_its_claim_to_its_stop() -> None:
    connected = threading.Event()

    @stream("hooked.stream")
    async def follow(ctx: StreamContext, payload: dict[str, Any]) -> None:
        connected.set()
        await asyncio.Event().wait()

    seen = Seen()
    with hooked(follow, seen.hook, failing("after", ValueError("of the hook"))) as stage:
        task = stage.client.enqueue(follow, {}, task_id="stream")
        assert connected.wait(LONG_S)
        assert (seen.before, seen.after) == ({task.id: ("hooked.stream", "streams", 1, None)}, {})
        stage.client.streams.stop(task)
        assert stage.end_of(task).done_reason == "stopped"
    assert seen.after[task.id][0] == "stopped"


# Events


def test_events_are_told_in_order_in_one_thread_that_is_not_the_engines() -> None:
    told: list[tuple[str, str, int]] = []

    @on(TaskEvent)
    def note(event: TaskEvent) -> None:
        told.append((type(event).__name__, event.task_id, threading.get_ident()))

    with hooked(sync, note) as stage:
        tasks = [stage.client.enqueue(sync, {"n": number}) for number in range(20)]
        stage.record.wait(TaskSucceeded, len(tasks))
    expected = [(type(event).__name__, event.task_id) for event in stage.record.of(TaskEvent)]
    assert sorted(expected) == sorted(pair[:2] for pair in told), "those of the last moment too"
    for task in tasks:
        assert [name for name, task_id, _ in told if task_id == task.id] == ["TaskStarted", "TaskSucceeded"]
    assert len({thread for _, _, thread in told}) == 1


def test_the_first_and_the_last_event_of_an_agent_are_told() -> None:
    told: list[type[Event]] = []

    @on(events.AgentStarted, events.AgentDraining, events.AgentStopped)
    def note(event: Event) -> None:
        told.append(type(event))

    with hooked(note) as stage:
        stage.record.wait(events.AgentStarted)
    assert told == [events.AgentStarted, events.AgentDraining, events.AgentStopped]


@pytest.mark.parametrize("error", [KeyError("of the hook"), SystemExit(1), KeyboardInterrupt()], ids=repr)
def test_a_hook_of_events_that_fails_is_told_and_the_others_hear_the_event(error: BaseException) -> None:
    heard = threading.Event()

    @on(TaskSucceeded)
    def bad(event: TaskSucceeded) -> None:
        raise error

    @on(TaskSucceeded)
    def good(event: TaskSucceeded) -> None:
        heard.set()

    with hooked(sync, bad, good) as stage:
        assert stage.end_of(stage.client.enqueue(sync, {})).status == "SUCCESS"
        assert heard.wait(LONG_S)
        [told] = stage.record.wait(fleet_events.HookFailed)
    assert told.hook.endswith("bad")
    assert told.error.startswith(type(error).__name__)


@pytest.mark.slow
def test_a_hook_that_hangs_holds_up_no_task_and_no_stop() -> None:
    hangs, let_go = threading.Event(), threading.Event()

    @on(TaskSucceeded)
    def slow(event: TaskSucceeded) -> None:
        hangs.set()
        let_go.wait(60)

    with hooked(sync, slow) as stage:
        for number in range(5):
            assert stage.end_of(stage.client.enqueue(sync, {"n": number})).status == "SUCCESS"
        assert hangs.wait(LONG_S)
        stage.stop()  # waits for hooks, but not for long
        [told] = stage.record.of(fleet_events.HookFailed)
    let_go.set()
    assert told.hook.endswith("slow")
    assert "4 events more" in told.error


def delivery(*hooks: Any, bus: EventBus, clock: FakeClock | None = None, most: int = MOST_WAITING) -> HookDispatcher:
    failures = HookFailures(bus, monotonic=clock.monotonic) if clock else HookFailures(bus)
    return HookDispatcher(hooks, bus, failures, most=most)


def test_the_queue_of_events_has_a_limit_and_what_is_dropped_is_told_once_a_minute() -> None:
    bus, clock = EventBus(), FakeClock()
    record = Recorder(bus)
    begun, go_on = threading.Event(), threading.Event()
    heard: list[float] = []

    @on(TaskFailed)
    def slow(event: TaskFailed) -> None:
        begun.set()
        go_on.wait(LONG_S)
        heard.append(1)

    one = delivery(slow, bus=bus, clock=clock, most=10)
    one.start()
    bus.emit(TaskFailed(**ABOUT, error="e"))
    assert begun.wait(LONG_S)
    for _ in range(50):
        bus.emit(TaskFailed(**ABOUT, error="e"))
        bus.emit(TaskSucceeded(**ABOUT, seconds=1.0))  # nobody asked for it: it takes no place
    assert len(record.of(fleet_events.HookFailed)) == 1
    clock.advance(HOOK_AGAIN_S)
    bus.emit(TaskFailed(**ABOUT, error="e"))
    told = record.of(fleet_events.HookFailed)
    assert [one.hook.rpartition(".")[2] for one in told] == ["slow", "slow"]
    assert told[1].error.endswith("(and 39 times before)")
    go_on.set()
    one.close()
    assert len(heard) == 11
    assert not one.is_alive


def test_events_about_jobs_that_no_hook_is_about_take_no_place_in_the_queue() -> None:
    bus = EventBus()
    record = Recorder(bus)
    begun, go_on = threading.Event(), threading.Event()

    @on(TaskFailed, jobs=("rare",))
    def slow(event: TaskFailed) -> None:
        begun.set()
        go_on.wait(LONG_S)

    one = delivery(slow, bus=bus, most=1)
    one.start()
    rare = TaskFailed(**{**ABOUT, "job": "rare"}, error="e")
    bus.emit(rare)
    assert begun.wait(LONG_S)
    for _ in range(10):
        bus.emit(TaskFailed(**ABOUT, error="e"))
    bus.emit(rare)
    go_on.set()
    one.close()
    assert record.of(fleet_events.HookFailed) == []


def test_the_last_spans_are_sent_while_the_hooks_come_to_their_end() -> None:
    bus = EventBus()
    met = threading.Barrier(2)

    @on(TaskFailed)
    def meets(event: TaskFailed) -> None:
        met.wait(LONG_S)

    one = HookDispatcher([meets], bus, HookFailures(bus), last=lambda: met.wait(LONG_S))
    one.start()
    bus.emit(TaskFailed(**ABOUT, error="e"))
    one.close()
    assert met.n_waiting == 0
    assert not met.broken
    assert not one.is_alive


def test_what_failed_within_the_minute_is_told_when_it_is_over() -> None:
    bus, clock = EventBus(), FakeClock()
    record = Recorder(bus)
    failures = HookFailures(bus, monotonic=clock.monotonic)
    for number in range(5):
        failures.report("a", f"error {number}")
    failures.look()
    assert [one.error for one in record.of(fleet_events.HookFailed)] == ["error 0"]
    clock.advance(HOOK_AGAIN_S)
    failures.look()
    failures.look()
    assert [one.error for one in record.of(fleet_events.HookFailed)] == ["error 0", "error 4 (and 3 times before)"]


def test_a_hook_about_failing_hooks_that_fails_itself_goes_in_no_circle() -> None:
    bus = EventBus()
    record = Recorder(bus)

    @on(fleet_events.HookFailed)
    def bad(event: fleet_events.HookFailed) -> None:
        raise ValueError("me too")

    one = delivery(bad, bus=bus)
    one.start()
    bus.emit(fleet_events.HookFailed(hook="other", error="e"))
    record.wait(fleet_events.HookFailed, 2)
    one.close()
    assert len(record.of(fleet_events.HookFailed)) <= 3


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_the_thread_of_the_hooks_is_started_again_when_it_has_died_and_nothing_is_told_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    heard: list[str] = []

    @on(TaskSucceeded)
    def note(event: TaskSucceeded) -> None:
        heard.append(event.task_id)

    call: Callable[..., None] = HookDispatcher._call
    deaths = iter([True])

    def dies(self: HookDispatcher, hook: Any, event: Event) -> None:
        if next(deaths, False):
            raise MemoryError
        call(self, hook, event)

    monkeypatch.setattr(HookDispatcher, "_call", dies)
    monkeypatch.setattr("thunderagent.agent.threads.RESTART_AFTER_S", 0.05)
    with hooked(sync, note) as stage:
        stage.end_of(stage.client.enqueue(sync, {}, task_id="lost"))
        stage.record.wait(events.ThreadDied, where=lambda event: event.thread == "hooks" and event.restarted)
        stage.end_of(stage.client.enqueue(sync, {}, task_id="told"))
        eventually(lambda: heard == ["told"])
    assert heard == ["told"]


def test_an_agent_without_hooks_has_no_thread_for_them_and_adds_nothing_to_a_run() -> None:
    def failed(name: str, error: str) -> None:
        raise AssertionError

    def logs(run: Any) -> Any:
        return run

    scope = scope_of(logs, on_failure=failed)
    one = running(a_lease())
    assert scope(one) is one  # type: ignore[comparison-overlap] # what the logs answered with, and nothing around it
    with hooked(sync):
        assert "hooks" not in {thread.name for thread in threading.enumerate()}


def test_a_run_is_told_as_such_when_its_handler_was_cut_off_within() -> None:
    seen = Seen()
    scope = scope_of(no_scope, hooks=[seen.hook], on_failure=lambda name, error: None)
    one = running(a_lease())
    with pytest.raises(asyncio.CancelledError), scope(one):
        raise asyncio.CancelledError
    assert seen.after == {"a": ("not run", None)}
    outcome: Outcome = Returned(1)
    with scope(one):
        one.outcome = outcome
    assert seen.after == {"a": ("returned", None)}
    assert one.outcome is outcome


def test_the_bound_of_the_end_is_within_that_of_a_background_thread() -> None:
    assert HOOKS_END_S <= 2.0
    assert settings().drain_s + HOOKS_END_S < settings().stop_wait_s


def test_an_agent_refuses_a_hook_of_a_job_that_it_does_not_have() -> None:
    @around(jobs=(f"{sync.name}x",))
    def typed(run: JobRun) -> Iterator[None]:
        yield

    with (
        pytest.raises(ConfigurationError, match=f"{sync.name}x', and no job is named so; did you mean"),
        hooked(sync, typed),
    ):
        pass


# Hooks that a run needs


def broken_before(run: JobRun) -> Iterator[None]:
    raise LookupError("no such tenant")
    yield


def broken_after(run: JobRun) -> Iterator[None]:
    yield
    raise ValueError(f"no commit after {run.outcome}")


def without_a_yield(run: JobRun) -> Iterator[None]:
    if run is None:
        yield


RAN: list[str] = []


@job("hooked.notes", max_retry=0)
def notes(ctx: Context, payload: dict[str, Any]) -> str:
    RAN.append(ctx.task_id)
    return "done"


@job("hooked.notes.async", max_retry=0)
async def notes_async(ctx: Context, payload: dict[str, Any]) -> str:
    RAN.append(ctx.task_id)
    return "done"


@pytest.mark.parametrize("one", [notes, notes_async], ids=["thread", "coroutine"])
@pytest.mark.parametrize(
    ("hook", "runs", "error"),
    [
        (broken_before, False, "LookupError: no such tenant"),
        (without_a_yield, False, "RuntimeError: it ended without a `yield`"),
        (broken_after, True, "ValueError: no commit after returned"),
    ],
    ids=["before", "no yield", "after"],
)
def test_a_required_hook_that_fails_is_an_error_of_the_task(hook: Any, runs: bool, error: str, one: Job[Any]) -> None:
    RAN.clear()
    seen = Seen()
    with hooked(one, seen.hook, around(required=True)(hook)) as stage:
        task = stage.client.enqueue(one, {})
        failed = stage.record.wait(TaskFailed)[0]
        told = stage.record.wait(fleet_events.HookFailed)[0]
    assert failed.error.startswith(error)
    assert error in told.error
    assert (task.id in RAN) is runs
    assert seen.after[task.id][0] == "raised", "a hook around it knows"


def test_a_hook_that_is_not_required_is_told_only() -> None:
    RAN.clear()
    with hooked(notes, around(broken_before), around(broken_after)) as stage:
        task = stage.client.enqueue(notes, {})
        stage.record.wait(TaskSucceeded)
        stage.record.wait(fleet_events.HookFailed, 2)
    assert [task.id] == RAN


# Hooks in the child process


@pytest.mark.slow
def test_a_hook_surrounds_an_isolated_handler_in_its_child_and_its_complaints_reach_the_agent() -> None:
    with hooked(process_jobs.surrounded, process_jobs.in_tenant, process_jobs.measures) as stage:
        task = stage.client.enqueue(process_jobs.surrounded, {"tenant": "north", "agent": os.getpid()})
        stage.record.wait(TaskSucceeded)
        assert stage.client.get(task).result["tenant"] == "north in True"
        told = stage.record.wait(fleet_events.HookFailed)[0]
    assert told.hook == "tests.support.process_jobs.measures"
    assert told.error.startswith("ZeroDivisionError: returned")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("payload", "error"),
    [({"tenant": None}, "LookupError: no such tenant"), ({"tenant": "x", "cannot_commit": 1}, "ValueError: no commit")],
    ids=["before", "after"],
)
def test_a_required_hook_in_the_child_that_fails_is_an_error_of_the_task(payload: dict[str, Any], error: str) -> None:
    with hooked(process_jobs.surrounded, process_jobs.in_tenant) as stage:
        stage.client.enqueue(process_jobs.surrounded, {**payload, "agent": os.getpid()}, max_retry=0)
        assert stage.record.wait(TaskFailed)[0].error.startswith(error)
