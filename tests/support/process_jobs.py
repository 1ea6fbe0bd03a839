"""Jobs that run in child processes: they must be at the top level of a module that a child can import."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from thunderagent.jobs.context import Cancel, Context, Fail, Snooze
from thunderagent.jobs.hooks import JobRun, around
from thunderagent.jobs.job import job


class Hopeless(Exception):
    """Fatal."""


@job("process.echo", isolation="process")
def echo(ctx: Context, payload: dict[str, Any]) -> Any:
    return {"payload": payload, "pid": os.getpid(), "attempt": ctx.attempt, "fence": ctx.fence, "id": ctx.task_id}


@job("process.parents", isolation="process")
def parents(ctx: Context, payload: dict[str, Any]) -> Any:
    return dict(ctx.parent_results())


@job("process.blocked_signals", isolation="process")
def blocked_signals(ctx: Context, payload: dict[str, Any]) -> Any:
    return sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ()))


@job("process.progress", isolation="process")
def progress(ctx: Context, payload: dict[str, Any]) -> None:
    ctx.progress({"half": True})
    ctx.wait(payload.get("wait_s", 0))


@job("process.answers", isolation="process")
def answers(ctx: Context, payload: dict[str, Any]) -> Any:
    return {"snooze": Snooze(30), "cancel": Cancel("why not"), "fail": Fail("no way")}[payload["answer"]]


@job("process.raises", isolation="process", fatal=(Hopeless,))
def raises(ctx: Context, payload: dict[str, Any]) -> None:
    match payload["what"]:
        case "value":
            raise ValueError("no such month")
        case "fatal":
            raise Hopeless("never")
        case "exit":
            sys.exit(5)
        case "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "segfault":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "crash":
            os._exit(3)
        case "mute":
            raise type("Mute", (Exception,), {"__str__": lambda self: 1 / 0})


@job("process.hungry", isolation="process")
def hungry(ctx: Context, payload: dict[str, Any]) -> None:
    """Takes so much memory; then it is killed, or has no more than that."""
    if payload["limited"]:
        resource.setrlimit(resource.RLIMIT_AS, (payload["mib"] << 20, payload["mib"] << 20))
        bytearray(payload["mib"] << 21)
    ballast = bytearray(payload["mib"] << 20)
    ballast[::4096] = b"x" * len(ballast[::4096])
    os.kill(os.getpid(), signal.SIGKILL)


@job("process.strange", isolation="process")
def strange(ctx: Context, payload: dict[str, Any]) -> Any:
    return object()


@job("process.prints", isolation="process")
def prints(ctx: Context, payload: dict[str, Any]) -> str:
    print('{"returned": "from standard output"}', flush=True)  # noqa: T201
    os.write(1, b'{"raised": "from descriptor 1", "fatal": true}\n')
    print("on standard error", file=sys.stderr, flush=True)  # noqa: T201
    return "done"


@job("process.leaves_threads", isolation="process")
def leaves_threads(ctx: Context, payload: dict[str, Any]) -> str:
    threading.Thread(target=threading.Event().wait).start()
    return "done"


@job("process.reads", isolation="process")
def reads(ctx: Context, payload: dict[str, Any]) -> list[str]:
    cat = subprocess.run(["cat"], capture_output=True, text=True, check=True)
    return [sys.stdin.readline(), cat.stdout]


@job("process.leaves_a_process", isolation="process")
def leaves_a_process(ctx: Context, payload: dict[str, Any]) -> str:
    """Forks, as `multiprocessing` does; the grandchild has every descriptor of the child."""
    pid = os.fork()
    if not pid:
        signal.pause()
        os._exit(0)
    Path(payload["file"]).write_text(str(pid), encoding="utf-8")  # the other one may be ended before it can write
    return "done"


@job("process.surrounded", isolation="process")
def surrounded(ctx: Context, payload: dict[str, Any]) -> Any:
    return {"tenant": TENANT.get(), "agent": os.environ.get("SURROUNDED_IN_AGENT")}


TENANT: ContextVar[str | None] = ContextVar("TENANT", default=None)


@around(in_child=True, jobs=("process.surrounded",), required=True)
def in_tenant(run: JobRun) -> Iterator[None]:
    """Has a job run for the tenant that its payload names."""
    tenant = run.context.lease.task.payload["tenant"]
    if tenant is None:
        raise LookupError("no such tenant")
    TENANT.set(f"{tenant} in {os.getpid() != run.context.lease.task.payload['agent']}")
    yield
    if run.context.lease.task.payload.get("cannot_commit"):
        raise ValueError(f"no commit after {run.outcome}")


@around(in_child=True, jobs=("process.surrounded",))
def measures(run: JobRun) -> Iterator[None]:
    """Fails, which is only told."""
    yield
    raise ZeroDivisionError(run.outcome)


@job("process.failed_parents", isolation="process")
def failed_parents(ctx: Context, payload: dict[str, Any]) -> Any:
    return {name: (one.status, one.reason) for name, one in ctx.failed_parents().items()}


@job("process.not_finite", isolation="process", on_bad_result="fail")
def not_finite(ctx: Context, payload: dict[str, Any]) -> Any:
    return float("nan")


@job("process.polite", isolation="process")
def polite(ctx: Context, payload: dict[str, Any]) -> str:
    ready(payload)
    while not ctx.wait(30):
        pass
    Path(payload["file"]).with_suffix(".cleaned").touch()
    ctx.check()
    return "never"


@job("process.stubborn", isolation="process", timeout_s=0.5, grace_s=0.2)
def stubborn(ctx: Context, payload: dict[str, Any]) -> str:
    """Ignores every signal that can be ignored and every request to stop."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    ready(payload)
    until = time.monotonic() + 60
    while time.monotonic() < until:
        time.sleep(0.05)
    return "never"


def ready(payload: dict[str, Any]) -> None:
    """Say that the handler runs, and in which process."""
    path = Path(payload["file"])
    path.with_suffix(".part").write_text(str(os.getpid()), encoding="utf-8")
    path.with_suffix(".part").replace(path)
