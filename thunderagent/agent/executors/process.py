"""Runs a handler in a fresh child process, which the time limit, a cancel or a lost lease can kill.

The child has a session of its own: a signal to the agent's process group (Ctrl-C, supervisor's `stopasgroup`) does not
reach it. Processes that the handler starts are in its group, and end with it. Agent and child exchange lines of JSON
over the child's standard input and a pipe. When the agent dies, the input ends, and with it the child. The child prints
to the agent's streams.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict
from typing import IO, Any, Final

from thunderagent.agent.executors.child_end import reap
from thunderagent.agent.executors.threads import Done
from thunderagent.jobs.context import Cancel, Fail, Snooze
from thunderagent.jobs.hooks import RunHook
from thunderagent.jobs.outcome import Outcome, Raised, Returned, Stopped, raised
from thunderagent.jobs.registry import Registry
from thunderagent.jobs.running import Running, Scope, no_scope
from thunderagent.model.errors import LeaseLost, TaskStopped
from thunderagent.model.jsondata import Unstorable
from thunderagent.model.memory import kernel_kills
from thunderagent.model.traceparent import CURRENT

KILL_GRACE_S: Final = 5.0
"""How long a child process may take to end after a request, before it is killed."""


GROUP_SIGNALS: Final = frozenset({signal.SIGINT, signal.SIGTERM})
"""Signals of a terminal or a supervisor to an agent and its process group."""
_ANSWERS: Final = {"Snooze": Snooze, "Cancel": Cancel, "Fail": Fail}


class ProcessExecutor:
    """Runs each task in a child process, with a thread that watches it."""

    def __init__(
        self, slots: int, done: Done, scope: Scope = no_scope, *, traces: bool = False, jobs: Registry | None = None
    ) -> None:
        self._watchers = ThreadPoolExecutor(slots, thread_name_prefix="child-watcher")
        self._done = done
        self._scope = scope
        self._traces = traces
        self._packages = jobs.packages if jobs is not None else ()
        hooks = jobs.hooks if jobs is not None else ()
        self._hooks = [hook for hook in hooks if isinstance(hook, RunHook) and hook.in_child]

    def start(self, running: Running) -> None:
        self._watchers.submit(self._run, running)

    def close(self) -> None:
        self._watchers.shutdown(wait=False, cancel_futures=True)

    def _run(self, running: Running) -> None:
        try:
            with self._scope(running):
                try:
                    running.outcome = self._watch(running)
                except Exception as error:
                    running.outcome = raised(error)
        except BaseException as error:  # of the scope: the slot goes on
            running.outcome = running.outcome_of_scope(error)
        self._done(running, running.outcome)

    def _watch(self, running: Running) -> Outcome:
        context, kills = running.context, kernel_kills()
        reader, writer = os.pipe()
        with os.fdopen(reader, encoding="utf-8") as reports:
            try:
                with _signals_blocked():
                    child = subprocess.Popen(
                        [sys.executable, "-m", "thunderagent.agent.executors.child", str(writer)],
                        stdin=subprocess.PIPE,
                        pass_fds=(writer,),
                        start_new_session=True,
                        text=True,
                        encoding="utf-8",
                        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                    )
            finally:
                os.close(writer)
            with child:
                send, over = threading.Lock(), threading.Event()
                grace_s = KILL_GRACE_S if running.job.grace_s is None else running.job.grace_s

                def stop(why: TaskStopped) -> None:
                    """Ask the child to stop, then kill it; in a thread, as a child may not read."""
                    threading.Thread(target=_end, args=(child, why, send, over, grace_s), daemon=True).start()

                with send:
                    _send(child.stdin, self._instructions(running))
                context.when_stopped(stop)
                outcome = _listen(reports, running)
                over.set()
                with suppress(OSError):
                    child.stdin and child.stdin.close()
                try:
                    end = reap(child, KILL_GRACE_S, kills_before=kills)
                except subprocess.TimeoutExpired:
                    _kill(child)
                    end = reap(child, KILL_GRACE_S, kills_before=kills)
        if outcome is not None:
            return outcome
        if context.stop_reason is not None:
            return Stopped(context.stop_reason)
        return Raised(f"the child process ended without an answer ({end}){end.memory(running.job.name)}")

    def _instructions(self, running: Running) -> dict[str, Any]:
        lease, job = running.lease, running.job
        known = running.context.parents()
        hooks = [hook for hook in self._hooks if hook.surrounds(job.name, job.isolation, in_child=True)]
        return {
            "packages": self._packages,
            "module": job.handler.__module__,
            "job": job.name,
            "hooks": [(hook.function.__module__, hook.name, hook.required) for hook in hooks],
            "row": {**lease.task.to_row(), "waitingFor": None, "dependents": None},
            "owner": lease.owner,
            "lease_s": lease.lease_s,
            "parents": {name: known[name] for name in known if name not in known.unread},
            "unread": {name: (type(error).__name__, str(error)) for name, error in known.unread.items()},
            "failed": {name: asdict(failure) for name, failure in known.failed.items()},
            "traceparent": CURRENT.get(),
            "traces": self._traces,
            "push": running.context.push_place,
        }


@contextmanager
def _signals_blocked() -> Iterator[None]:
    """Block the signals of the group for what is started inside.

    A child begins in the agent's group with this thread's mask; the default action of these signals would end it there.
    It unblocks them once it ignores them.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, GROUP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _listen(reports: IO[str], running: Running) -> Outcome | None:
    """The outcome that the child reports; None: it ended without. Its forks may keep the pipe open for longer."""
    context = running.context
    outcome: Outcome | None = None
    for line in reports:
        message = json.loads(line)
        match message:
            case {"progress": value}:
                context.progress(value)
            case {"hook": name, "error": text} if running.on_failure is not None:
                running.on_failure(name, text)
            case {"returned": value}:
                outcome = Returned(value)
            case {"unstorable": text}:
                outcome = Returned(Unstorable(text))
            case {"answer": kind, "fields": fields}:
                outcome = Returned(_ANSWERS[kind](**fields))
            case {"raised": text, "fatal": fatal}:
                outcome = Raised(text, fatal)
            case {"stopped": _} if context.stop_reason is not None:
                outcome = Stopped(context.stop_reason)
        if outcome is not None:
            break
    return outcome


def _send(stream: IO[str] | None, message: Mapping[str, Any]) -> None:
    with suppress(OSError, ValueError):  # the child may have ended: its exit code says more
        if stream is not None:
            stream.write(json.dumps(message) + "\n")
            stream.flush()


def _end(
    child: subprocess.Popen[str], why: TaskStopped, send: threading.Lock, over: threading.Event, grace_s: float
) -> None:
    """Ask the child to stop, and kill it after its grace; at once if another agent may run its task."""
    if not isinstance(why, LeaseLost):
        with send:
            _send(child.stdin, {"stop": type(why).__name__, "text": str(why)})
        if over.wait(grace_s):
            return
    _kill(child)


def _kill(child: subprocess.Popen[str]) -> None:
    if child.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
