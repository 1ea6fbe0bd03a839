"""Handlers in threads, on the event loop and in children: each ends as exactly one outcome."""

from __future__ import annotations

import asyncio
import os
import queue
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support import process_jobs
from tests.support.engine import LONG_S, a_lease, running
from tests.support.stands import eventually
from thunderagent.agent.executors import Executors
from thunderagent.agent.executors.loop import LoopExecutor
from thunderagent.agent.executors.process import ProcessExecutor
from thunderagent.agent.executors.threads import Executor, ThreadExecutor
from thunderagent.jobs.context import Cancel, Context, Fail, ParentFailure, ParentResults, Snooze
from thunderagent.jobs.job import Job, job
from thunderagent.jobs.outcome import Outcome, Raised, Returned, Stopped
from thunderagent.jobs.registry import Registry
from thunderagent.jobs.running import Running
from thunderagent.model.errors import (
    AgentDraining,
    LeaseLost,
    ParentResultLost,
    StoreUnavailable,
    TaskCancelled,
    ThunderAgentError,
    TimeLimitExceeded,
)
from thunderagent.model.jsondata import Unstorable, dump_json
from thunderagent.testing import make_lease


class Bench:
    """Executors of each kind, and the outcomes that they hand over."""

    def __init__(self) -> None:
        self.outcomes: queue.SimpleQueue[tuple[Running, Outcome]] = queue.SimpleQueue()
        self.threads = ThreadExecutor(4, self._done)
        self.loop = LoopExecutor(self._done)
        self.processes = ProcessExecutor(4, self._done)
        self.executors = Executors(threads=self.threads, loop=self.loop, processes=self.processes)
        self.executors.open()

    def _done(self, one: Running, outcome: Outcome) -> None:
        self.outcomes.put((one, outcome))

    def start(self, made: Job[Any], payload: Any = None, **changes: Any) -> Running:
        text = dump_json({} if payload is None else payload, "it")
        lease = a_lease(job=made.name, payload_text=text, **changes)
        one = running(lease, made)
        self.executors.start(one)
        return one

    def end(self, one: Running) -> Outcome:
        """The outcome, which must be the only one."""
        ended, outcome = self.outcomes.get(timeout=LONG_S * 2)
        assert ended is one
        assert self.outcomes.empty()
        return outcome

    def run(self, made: Job[Any], payload: Any = None, **changes: Any) -> Outcome:
        return self.end(self.start(made, payload, **changes))


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.executors.close()


Handler = Callable[[Context, dict[str, Any]], Any]


def in_thread(handler: Handler, **options: Any) -> Job[dict[str, Any]]:
    def plain(ctx: Context, payload: dict[str, Any]) -> Any:
        return handler(ctx, payload)

    return job("test.thread", **options)(plain)


def on_loop(handler: Handler, **options: Any) -> Job[dict[str, Any]]:
    async def coroutine(ctx: Context, payload: dict[str, Any]) -> Any:
        await asyncio.sleep(0)
        return handler(ctx, payload)

    return job("test.loop", **options)(coroutine)


both = pytest.mark.parametrize("kind", [in_thread, on_loop])


def throwing(error: BaseException) -> Handler:
    def handler(ctx: Context, payload: dict[str, Any]) -> None:
        raise error

    return handler


# In a thread and on the loop


@both
@pytest.mark.parametrize("value", [None, 7, {"a": 1}, Snooze(60), Cancel("x"), Fail("x")], ids=repr)
def test_a_value_is_handed_over_as_it_is(bench: Bench, kind: Any, value: Any) -> None:
    assert bench.run(kind(lambda ctx, payload: value)) == Returned(value)


@both
def test_a_handler_is_given_its_payload_and_its_context(bench: Bench, kind: Any) -> None:
    made = kind(lambda ctx, payload: (ctx.task_id, ctx.fence, payload))
    assert bench.run(made, {"n": 1}) == Returned(("a", 1, {"n": 1}))


@both
@pytest.mark.parametrize("error", [ValueError("x"), SystemExit(3), KeyboardInterrupt(), GeneratorExit()], ids=repr)
def test_whatever_a_handler_raises_is_an_error_and_its_executor_lives_on(
    bench: Bench, kind: Any, error: BaseException
) -> None:
    outcome = bench.run(kind(throwing(error)))
    assert isinstance(outcome, Raised)
    assert outcome.error.startswith(type(error).__name__)
    assert not outcome.fatal
    assert bench.run(kind(lambda ctx, payload: "next")) == Returned("next")
    assert not bench.loop.is_dead


@both
def test_a_fatal_exception_is_marked(bench: Bench, kind: Any) -> None:
    outcome = bench.run(kind(throwing(KeyError("x")), fatal=(LookupError,)))
    assert isinstance(outcome, Raised)
    assert outcome.fatal


@both
def test_a_payload_that_does_not_fit_never_reaches_the_handler(bench: Bench, kind: Any) -> None:
    called: list[int] = []
    outcome = bench.run(kind(lambda ctx, payload: called.append(1)), [1, 2])
    assert isinstance(outcome, Raised)
    assert outcome.fatal
    assert "does not fit the job" in outcome.error
    assert called == []


@both
def test_who_checks_after_a_stop_is_stopped_for_that_reason(bench: Bench, kind: Any) -> None:
    why = TaskCancelled("by hand")

    def handler(ctx: Context, payload: dict[str, Any]) -> None:
        ctx.stop(why)
        ctx.check()

    assert bench.run(kind(handler)) == Stopped(why)


@both
def test_an_error_while_stopping_is_the_stop_and_not_an_error(bench: Bench, kind: Any) -> None:
    why = AgentDraining()

    def handler(ctx: Context, payload: dict[str, Any]) -> None:
        ctx.stop(why)
        raise ConnectionError("closed under it")

    assert bench.run(kind(handler)) == Stopped(why)


@both
def test_a_fatal_error_while_stopping_stays_fatal(bench: Bench, kind: Any) -> None:
    def handler(ctx: Context, payload: dict[str, Any]) -> None:
        ctx.stop(AgentDraining())
        raise KeyError("x")

    outcome = bench.run(kind(handler, fatal=(KeyError,)))
    assert isinstance(outcome, Raised)
    assert outcome.fatal


@both
def test_a_value_that_comes_in_spite_of_a_stop_is_still_a_value(bench: Bench, kind: Any) -> None:
    def handler(ctx: Context, payload: dict[str, Any]) -> str:
        ctx.stop(TaskCancelled())
        return "done"

    assert bench.run(kind(handler)) == Returned("done")


@both
def test_an_exception_that_cannot_be_printed_does_not_keep_its_slot(bench: Bench, kind: Any) -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    assert isinstance(bench.run(kind(throwing(Mute()))), Raised)


def test_a_scope_surrounds_each_handler_in_its_own_thread_and_coroutine() -> None:
    seen: list[str] = []

    @contextmanager
    def scope(one: Running) -> Iterator[None]:
        seen.append(f"in {one.lease.task_id}")
        yield
        seen.append(f"out {one.lease.task_id} {one.outcome}")

    outcomes: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
    for executor, made in (
        (ThreadExecutor(1, lambda _, outcome: outcomes.put(outcome), scope), in_thread(lambda ctx, payload: 1)),
        (LoopExecutor(lambda _, outcome: outcomes.put(outcome), scope), on_loop(lambda ctx, payload: 1)),
    ):
        assert isinstance(executor, ThreadExecutor | LoopExecutor)
        if isinstance(executor, LoopExecutor):
            executor.open()
        executor.start(running(a_lease(), made))
        assert outcomes.get(timeout=LONG_S) == Returned(1)
        executor.close()
    assert seen == ["in a", f"out a {Returned(1)}"] * 2


def test_a_plain_function_that_answers_with_a_coroutine_has_not_run_and_says_so(bench: Bench) -> None:
    async def inner() -> None: ...

    outcome = bench.run(in_thread(lambda ctx, payload: inner()))
    assert isinstance(outcome, Raised)
    assert outcome.fatal
    assert "answered with a coroutine" in outcome.error


# On the loop


def test_a_coroutine_is_cancelled_when_it_should_stop(bench: Bench) -> None:
    entered, cleaned = threading.Event(), threading.Event()

    @job("test.waits")
    async def waits(ctx: Context, payload: dict[str, Any]) -> None:
        entered.set()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            cleaned.set()

    one = bench.start(waits)
    assert entered.wait(LONG_S)
    why = LeaseLost("held by another")
    one.context.stop(why)
    assert bench.end(one) == Stopped(why)
    assert cleaned.is_set()


def test_a_coroutine_that_was_stopped_before_its_first_step_is_stopped_too(bench: Bench) -> None:
    ran: list[int] = []

    @job("test.never")
    async def never(ctx: Context, payload: dict[str, Any]) -> None:
        ran.append(1)
        await asyncio.Event().wait()

    one = running(a_lease(), never)
    why = TaskCancelled()
    one.context.stop(why)
    bench.loop.start(one)
    assert bench.end(one) == Stopped(why)


def test_a_coroutine_that_cancels_itself_has_failed(bench: Bench) -> None:
    @job("test.cancels")
    async def cancels(ctx: Context, payload: dict[str, Any]) -> None:
        raise asyncio.CancelledError

    outcome = bench.run(cancels)
    assert isinstance(outcome, Raised)
    assert outcome.error.startswith("CancelledError")
    assert bench.run(on_loop(lambda ctx, payload: 1)) == Returned(1)


def test_a_timeout_inside_of_a_coroutine_is_its_own_affair(bench: Bench) -> None:
    @job("test.impatient")
    async def impatient(ctx: Context, payload: dict[str, Any]) -> str:
        try:
            async with asyncio.timeout(0.01):
                await asyncio.Event().wait()
        except TimeoutError:
            return "went on"
        return "never"

    assert bench.run(impatient) == Returned("went on")


def test_coroutines_share_the_loop(bench: Bench) -> None:
    meeting = asyncio.Barrier(3)

    @job("test.meets")
    async def meets(ctx: Context, payload: dict[str, Any]) -> str:
        await meeting.wait()
        return "met"

    for _ in range(3):
        bench.start(meets)
    assert [bench.outcomes.get(timeout=LONG_S)[1] for _ in range(3)] == [Returned("met")] * 3


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_loop_that_was_made_before_a_fork_is_alive_in_the_child() -> None:
    loop = LoopExecutor(lambda _, outcome: None)
    pid = os.fork()
    if not pid:
        loop.open()
        os._exit(loop.is_dead)
    assert os.waitpid(pid, 0)[1] == 0


def test_closing_the_loop_ends_what_still_runs() -> None:
    outcomes: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
    loop, entered = LoopExecutor(lambda _, outcome: outcomes.put(outcome)), threading.Event()

    @job("test.endless")
    async def endless(ctx: Context, payload: dict[str, Any]) -> None:
        entered.set()
        await asyncio.Event().wait()

    loop.open()
    loop.start(running(a_lease(), endless))
    assert entered.wait(LONG_S)
    loop.close()
    assert loop.is_dead
    outcome = outcomes.get(timeout=LONG_S)
    assert isinstance(outcome, Raised)
    loop.close()


# Which executor


def test_a_job_runs_where_it_belongs() -> None:
    started: list[str] = []

    class Named:
        def __init__(self, name: str) -> None:
            self.name = name

        def start(self, one: Running) -> None:
            started.append(self.name)

        def close(self) -> None:
            started.append(f"{self.name} closed")

    threads: Executor = Named("threads")
    loop: Any = Named("loop")
    executors = Executors(threads=threads, loop=loop, processes=Named("processes"))
    for made in (in_thread(lambda c, p: 1), on_loop(lambda c, p: 1), process_jobs.echo):
        executors.start(running(a_lease(), made))
    executors.close()
    assert started == ["threads", "loop", "processes", "threads closed", "processes closed", "loop closed"]
    with pytest.raises(LookupError, match="no executor for"):
        Executors(threads=threads, loop=None, processes=None).start(running(a_lease(), on_loop(lambda c, p: 1)))


# In a child


@pytest.mark.slow
def test_a_child_is_another_process_with_the_same_context(bench: Bench) -> None:
    outcome = bench.run(process_jobs.echo, {"ü": [1, 2.5, None]}, retry_count=2)
    assert isinstance(outcome, Returned)
    assert outcome.value.pop("pid") != os.getpid()
    assert outcome.value == {"payload": {"ü": [1, 2.5, None]}, "attempt": 3, "fence": 1, "id": "a"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("answer", "value"), [("snooze", Snooze(30)), ("cancel", Cancel("why not")), ("fail", Fail("no way"))]
)
def test_a_child_may_answer_what_any_handler_may(bench: Bench, answer: str, value: Any) -> None:
    assert bench.run(process_jobs.answers, {"answer": answer}) == Returned(value)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "text", "fatal"),
    [
        ("value", "ValueError: no such month", False),
        ("fatal", "Hopeless: never", True),
        ("exit", "SystemExit: 5", False),
        ("mute", "Mute: ", False),
        ("killed", "the child process ended without an answer (SIGKILL, out of memory?)", False),
        ("segfault", "the child process ended without an answer (SIGSEGV)", False),
        ("crash", "the child process ended without an answer (exit code 3)", False),
    ],
)
def test_however_a_child_ends_its_task_learns_how(bench: Bench, what: str, text: str, fatal: bool) -> None:
    outcome = bench.run(process_jobs.raises, {"what": what})
    assert isinstance(outcome, Raised)
    assert outcome.error.startswith(text)
    assert outcome.fatal == fatal
    assert what != "value" or "process_jobs.py:" in outcome.error


@pytest.mark.slow
def test_a_result_that_a_child_cannot_send_is_no_failure(bench: Bench) -> None:
    outcome = bench.run(process_jobs.strange)
    assert isinstance(outcome, Returned)
    assert isinstance(outcome.value, Unstorable)
    assert "object" in outcome.value.why


@pytest.mark.slow
def test_what_a_handler_prints_is_not_taken_for_its_answer(bench: Bench, capfd: pytest.CaptureFixture[str]) -> None:
    assert bench.run(process_jobs.prints) == Returned("done")
    printed = capfd.readouterr()
    assert "from standard output" in printed.out
    assert "from descriptor 1" in printed.out
    assert "on standard error" in printed.err


@pytest.mark.slow
def test_progress_of_a_child_reaches_the_agent(bench: Bench) -> None:
    one = bench.start(process_jobs.progress, {"wait_s": 60})
    assert eventually(one.context.take_progress) == '{"half":true}'
    one.context.stop(TaskCancelled())
    assert isinstance(bench.end(one), Returned)


@pytest.mark.slow
def test_results_of_parents_reach_the_child(bench: Bench) -> None:
    lease = a_lease(job="process.parents", depends_on=("p", "q"))
    one = replace_context(running(lease, process_jobs.parents), {"p": {"rows": 7}, "q": None})
    bench.processes.start(one)
    assert bench.end(one) == Returned({"p": {"rows": 7}, "q": None})


@pytest.mark.slow
def test_why_parents_failed_reaches_the_child(bench: Bench) -> None:
    lease = a_lease(job="process.failed_parents", depends_on=("p", "q"))
    failed = {"q": ParentFailure("FAILED", "ValueError: no such month")}
    one = replace_context(running(lease, process_jobs.failed_parents), ParentResults({"p": 1, "q": None}, {}, failed))
    bench.processes.start(one)
    assert bench.end(one) == Returned({"q": ["FAILED", "ValueError: no such month"]})


class BucketAway(StoreUnavailable):
    """The error of a bucket that an application has written."""


@pytest.mark.slow
@pytest.mark.parametrize("kind", [ParentResultLost, BucketAway])
def test_a_result_of_a_parent_that_is_lost_is_the_childs_error_only_when_it_asks(
    bench: Bench, kind: type[ThunderAgentError]
) -> None:
    lost = ParentResults({}, {"p": kind("p succeeded, and its result was not stored")})
    for handler in (process_jobs.echo, process_jobs.parents):
        one = replace_context(running(a_lease(job=handler.name, depends_on=("p",)), handler), lost)
        bench.processes.start(one)
        outcome = bench.end(one)
        if handler is process_jobs.echo:
            assert isinstance(outcome, Returned)
        else:
            assert "p succeeded, and its result was not stored" in repr(outcome)


@pytest.mark.slow
def test_a_child_imports_the_package_of_its_agent_before_the_handler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Django refuses to import a model before its apps are set up; the jobs package does that."""
    (tmp_path / "shop_jobs").mkdir()
    (tmp_path / "shop_jobs" / "__init__.py").write_text(
        "import shop_state\nshop_state.ready = True\nfrom shop_tasks import bill\n"
    )
    (tmp_path / "shop_state.py").write_text("ready = False\n")
    (tmp_path / "shop_tasks.py").write_text(
        "import shop_state\n"
        "from thunderagent import Context, job\n"
        "if not shop_state.ready:\n"
        "    raise RuntimeError('apps are not loaded yet')\n"
        "@job('shop.bill', isolation='process')\n"
        "def bill(ctx: Context, payload: dict) -> str:\n"
        "    return 'billed'\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    registry, ended = Registry.from_package("shop_jobs"), queue.SimpleQueue[tuple[Running, Outcome]]()
    executor = ProcessExecutor(1, lambda running, outcome: ended.put((running, outcome)), jobs=registry)
    executor.start(running(a_lease(job="shop.bill"), registry["shop.bill"]))
    assert ended.get(timeout=LONG_S)[1] == Returned("billed")
    executor.close()


def replace_context(one: Running, parents: Mapping[str, Any]) -> Running:
    return replace(one, context=Context(one.lease, lambda: parents))


@pytest.mark.slow
def test_threads_that_a_handler_left_behind_do_not_keep_the_slot(bench: Bench) -> None:
    assert bench.run(process_jobs.leaves_threads) == Returned("done")


@pytest.mark.slow
def test_a_process_that_a_handler_left_behind_does_not_keep_the_slot(bench: Bench, tmp_path: Path) -> None:
    file = tmp_path / "pid"
    assert bench.run(process_jobs.leaves_a_process, {"file": str(file)}) == Returned("done")
    pid = pid_of(file)
    eventually(lambda: not lives(pid) or None, LONG_S)  # nobody else would ever end it


def lives(pid: int) -> bool:
    """True while a process runs; a zombie has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.slow
def test_what_a_handler_reads_from_standard_input_is_nothing_and_not_our_orders(bench: Bench) -> None:
    one = bench.start(process_jobs.reads)
    assert bench.end(one) == Returned(["", ""])


@pytest.mark.slow
def test_a_payload_that_does_not_fit_is_told_by_the_child_too(bench: Bench) -> None:
    outcome = bench.run(process_jobs.echo, ["no", "dict"])
    assert isinstance(outcome, Raised)
    assert outcome.fatal


def pid_of(file: Path) -> int:
    return int(eventually(lambda: file.read_text(encoding="utf-8") if file.exists() else None, LONG_S))


@pytest.mark.slow
def test_a_child_is_asked_to_stop_and_may_clean_up(bench: Bench, tmp_path: Path) -> None:
    one = bench.start(process_jobs.polite, {"file": str(tmp_path / "pid")})
    pid = pid_of(tmp_path / "pid")
    why = TaskCancelled("by hand")
    one.context.stop(why)
    assert bench.end(one) == Stopped(why)
    assert (tmp_path / "pid.cleaned").exists()
    assert is_gone(pid)


@pytest.mark.slow
def test_the_time_limit_asks_a_child_first(bench: Bench, tmp_path: Path) -> None:
    one = bench.start(process_jobs.polite, {"file": str(tmp_path / "pid")})
    pid = pid_of(tmp_path / "pid")
    why = TimeLimitExceeded("too long")
    one.context.stop(why)
    assert bench.end(one) == Stopped(why)
    assert (tmp_path / "pid.cleaned").exists()
    assert is_gone(pid)


@pytest.mark.slow
def test_the_time_limit_kills_a_child_that_ignores_every_signal(bench: Bench, tmp_path: Path) -> None:
    one = bench.start(process_jobs.stubborn, {"file": str(tmp_path / "pid")})
    pid = pid_of(tmp_path / "pid")
    os.kill(pid, signal.SIGTERM)
    why = TimeLimitExceeded("too long")
    one.context.stop(why)
    assert bench.end(one) == Stopped(why)
    assert isinstance(why, TimeLimitExceeded)
    assert is_gone(pid)


@pytest.mark.slow
def test_a_lost_lease_kills_a_child_at_once(bench: Bench, tmp_path: Path) -> None:
    one = bench.start(process_jobs.polite, {"file": str(tmp_path / "pid")})
    pid = pid_of(tmp_path / "pid")
    why = LeaseLost("held by another")
    one.context.stop(why)
    assert bench.end(one) == Stopped(why)
    assert not (tmp_path / "pid.cleaned").exists()
    assert is_gone(pid)


@pytest.mark.slow
def test_a_cancel_kills_a_child_that_does_not_listen_after_a_grace(bench: Bench, tmp_path: Path) -> None:
    one = bench.start(process_jobs.stubborn, {"file": str(tmp_path / "pid")})
    pid = pid_of(tmp_path / "pid")
    why = TaskCancelled()
    one.context.stop(why)
    assert bench.end(one) == Stopped(why)
    assert is_gone(pid)


@pytest.mark.slow
def test_a_child_killed_by_the_system_leaves_an_error_that_names_the_signal(bench: Bench, tmp_path: Path) -> None:
    one = bench.start(process_jobs.polite, {"file": str(tmp_path / "pid")})
    os.kill(pid_of(tmp_path / "pid"), signal.SIGKILL)
    outcome = bench.end(one)
    assert isinstance(outcome, Raised)
    assert "SIGKILL" in outcome.error


@pytest.mark.slow
def test_a_child_is_out_of_reach_of_the_signals_of_its_agents_group(bench: Bench, tmp_path: Path) -> None:
    one = bench.start(process_jobs.polite, {"file": str(tmp_path / "pid")})
    pid = pid_of(tmp_path / "pid")
    assert os.getpgid(pid) != os.getpgid(0)
    os.kill(pid, signal.SIGTERM)
    os.kill(pid, signal.SIGINT)
    one.context.stop(TaskCancelled())
    assert isinstance(bench.end(one), Stopped)


def is_gone(pid: int) -> bool:
    """True when the process is no more; the executor has waited for it, so no zombie is left."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.mark.parametrize("is_async", [False, True])
def test_a_scope_that_fails_costs_its_task_an_error_and_no_slot(is_async: bool) -> None:
    def broken(_: Running) -> AbstractContextManager[None]:
        raise RuntimeError("no scope today")

    @job("test.plain")
    def plain(ctx: Context, payload: None) -> None:
        return None

    @job("test.coroutine")
    async def coroutine(ctx: Context, payload: None) -> None:
        return None

    outcomes: queue.SimpleQueue[Outcome] = queue.SimpleQueue()

    def done(one: Running, outcome: Outcome) -> None:
        outcomes.put(outcome)

    executor = LoopExecutor(done, broken) if is_async else ThreadExecutor(1, done, broken)
    if isinstance(executor, LoopExecutor):
        executor.open()
    try:
        for _ in range(2):
            one = coroutine if is_async else plain
            executor.start(Running(make_lease(one), one, Context(make_lease(one)), 0.2, 60.0))
            outcome = outcomes.get(timeout=10)
            assert isinstance(outcome, Raised) and "no scope today" in outcome.error
    finally:
        executor.close()
