"""The child process of an isolated handler: `python -m thunderagent.agent.executors.child FD`. See `process.py`."""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict
from functools import partial
from typing import IO, Any, Final

from thunderagent.agent.executors.threads import run_handler
from thunderagent.agent.scopes import HookScope
from thunderagent.jobs.context import Cancel, Context, Fail, ParentFailure, ParentResults, Snooze
from thunderagent.jobs.extension import extension
from thunderagent.jobs.hooks import RunHook
from thunderagent.jobs.job import Job
from thunderagent.jobs.outcome import Outcome, Raised, Returned, Stopped, raised
from thunderagent.jobs.running import OnFailure, Running
from thunderagent.model import errors
from thunderagent.model.jsondata import dump_result
from thunderagent.model.outlet import end_lines, open_outlets
from thunderagent.model.task import Lease, Task
from thunderagent.telemetry.traces import in_child

OTHER_CODE_S: Final = 60.0
"""Delay of a task whose child process found other code on the disk than its agent has."""


def _child(descriptor: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT, signal.SIGTERM))  # they came blocked
    open_outlets()
    reports = os.fdopen(descriptor, "w", encoding="utf-8")
    guard = threading.Lock()

    def tell(message: Mapping[str, Any]) -> None:
        with guard:
            reports.write(json.dumps(message) + "\n")
            reports.flush()

    inbox = os.fdopen(os.dup(0), encoding="utf-8")
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)  # the handler and what it starts must not read the orders
    orders = json.loads(inbox.readline())
    row = {name: value for name, value in orders["row"].items() if value is not None}
    task = Task.from_row(row)
    lease = Lease(task=task, owner=orders["owner"], fence=task.fence, lease_s=orders["lease_s"], held_from=0.0)
    unread = {name: getattr(errors, kind, errors.StoreError)(text) for name, (kind, text) in orders["unread"].items()}
    failed = {name: ParentFailure(**failure) for name, failure in orders["failed"].items()}
    context = _ChildContext(lease, ParentResults(orders["parents"], unread, failed), tell)
    if place := orders.get("push"):
        context.use_push(partial(_push, place), tuple(place))
    threading.Thread(target=_obey, args=(inbox, context), name="orders", daemon=True).start()
    tell(_answer(_run(orders, context, lambda name, error: tell({"hook": name, "error": error}))))
    reports.close()
    end_lines()
    os._exit(0)  # threads that the handler left must not keep the slot


def _run(orders: Mapping[str, Any], context: Context, on_failure: OnFailure) -> Outcome:
    try:
        for package in orders["packages"]:  # its set-up serves handlers of other packages too
            importlib.import_module(package)
        job = _find(orders["module"], orders["job"])
        hooks = list(_hooks(orders["hooks"], on_failure))
    except Exception as error:
        return raised(error)
    # in the middle of a deploy the disk may have other code than the agent
    if context.lease.task.job_value not in job.job_values:
        return Returned(Snooze(OTHER_CODE_S))
    running = Running(context.lease, job, context, lease_margin=0.0, beat_s=0.0)
    try:
        with (
            in_child(orders.get("traceparent"), traces=orders.get("traces", False)),
            HookScope(running, (), hooks, on_failure, in_child=True),
        ):
            running.outcome = run_handler(job, context)
    except BaseException as error:
        running.outcome = running.outcome_of_scope(error)
    return running.outcome


class _ChildContext(Context):
    __slots__ = ("_tell",)

    def __init__(self, lease: Lease, parents: Mapping[str, Any], tell: Callable[[Mapping[str, Any]], None]) -> None:
        super().__init__(lease, lambda: parents)
        self._tell = tell

    def progress(self, value: Any) -> None:
        super().progress(value)
        self._tell({"progress": value})


def _push(place: tuple[str, str], user_id: str, message: Any) -> int:
    """Push from this process; only handlers that push import boto3."""
    pusher = extension("push")(*place)
    try:
        return int(pusher.push(user_id, message))
    finally:
        pusher.close()


def _obey(inbox: IO[str], context: Context) -> None:
    """Pass requests to stop to the handler; end its process group when the agent has ended."""
    for line in inbox:
        order = json.loads(line)
        context.stop(getattr(errors, order["stop"])(order["text"]))
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def _find(module: str, name: str) -> Job[Any]:
    for value in vars(importlib.import_module(module)).values():
        if isinstance(value, Job) and value.name == name:
            return value
    raise errors.UnknownJob(f"the module {module} has no job {name!r}: keep the job at the top level of the module")


def _hooks(named: Iterable[tuple[str, str, bool]], on_failure: OnFailure) -> Iterator[RunHook]:
    for module, name, is_required in named:
        here = vars(importlib.import_module(module)).values()
        found = next((value for value in here if isinstance(value, RunHook) and value.name == name), None)
        if found is not None:
            yield found
        elif is_required:
            raise errors.ConfigurationError(f"the module {module} has no hook {name}, which the run needs")
        else:
            on_failure(name, f"the module {module} does not have it in the child process")


def _answer(outcome: Outcome) -> dict[str, Any]:
    match outcome:
        case Returned(value=Snooze() | Cancel() | Fail() as answer):
            return {"answer": type(answer).__name__, "fields": asdict(answer)}
        case Returned(value=value):
            try:
                text = dump_result(value)
            except ValueError as error:
                return {"unstorable": str(error)}
            return {"returned": None if text is None else json.loads(text)}
        case Raised(error=error_text, fatal=fatal):
            return {"raised": error_text, "fatal": fatal}
        case Stopped(why=why):
            return {"stopped": type(why).__name__}
        case _:
            return {"raised": f"a handler cannot end so: {outcome}", "fatal": True}


if __name__ == "__main__":
    _child(int(sys.argv[1]))
