"""Runs a handler in a fresh child process, which can be killed: by the time limit, a cancel, or a lost lease.

The child is a session of its own, so that a signal to the agent's process group (Ctrl-C, supervisor's `stopasgroup`)
does not reach it: only its agent decides. Both speak in lines of JSON over the child's standard input and a pipe; when
the agent dies, the input ends and the child ends with it. Whatever the handler prints goes to the agent's streams.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import IO, Any, Final

from thunderagent import errors
from thunderagent.context import Cancel, Context, Fail, Snooze
from thunderagent.errors import TaskStopped
from thunderagent.executor import Done, Running, Scope, no_scope
from thunderagent.jsondata import Unstorable
from thunderagent.pacing import KILL_GRACE_S
from thunderagent.settler import Outcome, Raised, Returned, Stopped, raised

_ANSWERS: Final = {"Snooze": Snooze, "Cancel": Cancel, "Fail": Fail}


class ProcessExecutor:
    """One child process for each task, watched by one thread each."""

    def __init__(self, slots: int, done: Done, scope: Scope = no_scope) -> None:
        self._watchers = ThreadPoolExecutor(slots, thread_name_prefix="child-watcher")
        self._done = done
        self._scope = scope

    def start(self, running: Running) -> None:
        self._watchers.submit(self._run, running)

    def close(self) -> None:
        self._watchers.shutdown(wait=False, cancel_futures=True)

    def _run(self, running: Running) -> None:
        with self._scope(running):
            try:
                outcome = self._watch(running)
            except Exception as error:
                outcome = raised(error)
            running.outcome = outcome
        self._done(running, outcome)

    def _watch(self, running: Running) -> Outcome:
        context = running.context
        reader, writer = os.pipe()
        with os.fdopen(reader, encoding="utf-8") as told:
            try:
                child = subprocess.Popen(
                    [sys.executable, "-m", "thunderagent.child", str(writer)],
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

                def stop(why: TaskStopped) -> None:
                    """Ask the child, then kill it; in a thread, so that a child that does not read holds nobody up."""
                    threading.Thread(target=_end, args=(child, why, send, over), daemon=True).start()

                with send:
                    _send(child.stdin, _instructions(running))
                context.when_stopped(stop)
                outcome = _listen(told, context)
                over.set()
                with suppress(OSError):
                    child.stdin and child.stdin.close()
                try:
                    code = child.wait(KILL_GRACE_S)
                except subprocess.TimeoutExpired:
                    _kill(child)
                    code = child.wait(KILL_GRACE_S)
        if outcome is not None:
            return outcome
        if context.stop_reason is not None:
            return Stopped(context.stop_reason)
        return Raised(f"the child process ended without an answer ({_how(code)})")


def _instructions(running: Running) -> dict[str, Any]:
    lease = running.lease
    parents = running.context.parent_results() if lease.task.depends_on else {}
    return {
        "module": running.job.handler.__module__,
        "job": running.job.name,
        "row": {**lease.task.to_row(), "waitingFor": None, "dependents": None},
        "owner": lease.owner,
        "lease_s": lease.lease_s,
        "parents": dict(parents),
    }


def _listen(told: IO[str], context: Context) -> Outcome | None:
    """The answer of the child, or None when it ended without one. What it forked may keep the pipe open for longer."""
    outcome: Outcome | None = None
    for line in told:
        message = json.loads(line)
        match message:
            case {"progress": value}:
                context.progress(value)
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
    with suppress(OSError, ValueError):  # the child may be gone already: its end tells more
        if stream is not None:
            stream.write(json.dumps(message) + "\n")
            stream.flush()


def _end(child: subprocess.Popen[str], why: TaskStopped, send: threading.Lock, over: threading.Event) -> None:
    if isinstance(why, errors.LeaseLost | errors.TimeLimitExceeded):
        _kill(child)
        return
    with send:
        _send(child.stdin, {"stop": type(why).__name__, "text": str(why)})
    if not over.wait(KILL_GRACE_S):
        _kill(child)


def _kill(child: subprocess.Popen[str]) -> None:
    if child.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)


def _how(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    name = signal.Signals(-code).name
    return f"{name}, out of memory?" if name == "SIGKILL" else name
