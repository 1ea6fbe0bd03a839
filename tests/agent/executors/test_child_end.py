"""What is told of a child process that was killed, or ran out of memory."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from typing import Any

import pytest

from tests.agent.executors.test_executors import Bench, bench
from tests.support import process_jobs
from thunderagent.agent.executors import child_end
from thunderagent.agent.executors import process as isolation
from thunderagent.agent.executors.child_end import ChildEnd, reap
from thunderagent.jobs.outcome import Raised, raised
from thunderagent.model.memory import peak_mib

pytestmark = pytest.mark.slow

__all__ = ("bench",)


def child(code: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", code], text=True)


def test_a_child_that_was_killed_is_named_with_its_memory(bench: Bench) -> None:
    mib = round(peak_mib()) + 64
    outcome = bench.run(process_jobs.hungry, {"mib": mib, "limited": False})
    assert isinstance(outcome, Raised)
    found = re.fullmatch(
        r"the child process ended without an answer \(SIGKILL, out of memory\?\); "
        r"the process of process.hungry had (\d+) MiB of memory at its peak",
        outcome.error,
    )
    assert found, outcome.error
    assert mib <= int(found[1]) < mib + 200


def test_a_child_that_had_little_is_not_said_to_have_had_what_its_agent_has(bench: Bench) -> None:
    ballast = bytearray(128 << 20)
    ballast[::4096] = b"x" * len(ballast[::4096])
    outcome = bench.run(process_jobs.raises, {"what": "killed"})
    del ballast
    assert isinstance(outcome, Raised)
    assert "; the process of process.raises never had more than " in outcome.error


def test_when_the_kernel_says_that_it_killed_for_memory_there_is_no_doubt(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(isolation, "kernel_kills", lambda: 3)
    monkeypatch.setattr(child_end, "kernel_kills", lambda: 4)
    outcome = bench.run(process_jobs.raises, {"what": "killed"})
    assert isinstance(outcome, Raised)
    assert "(SIGKILL by the kernel's OOM killer: out of memory)" in outcome.error


@pytest.mark.parametrize("after", [3, 2, None])
def test_what_the_kernel_killed_before_is_not_ours(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, after: int | None
) -> None:
    monkeypatch.setattr(isolation, "kernel_kills", lambda: 3)
    monkeypatch.setattr(child_end, "kernel_kills", lambda: after)
    outcome = bench.run(process_jobs.raises, {"what": "killed"})
    assert isinstance(outcome, Raised)
    assert "(SIGKILL, out of memory?)" in outcome.error


def test_a_child_that_has_no_more_memory_says_how_much_it_had(bench: Bench) -> None:
    outcome = bench.run(process_jobs.hungry, {"mib": 1024, "limited": True})
    assert isinstance(outcome, Raised)
    assert re.match(
        r"MemoryError: out of memory: the process had \d+ MiB then, \d+ at its peak\n.*process_jobs.py:",
        outcome.error,
    ), outcome.error


def test_a_handler_in_the_agent_says_the_same() -> None:
    assert re.fullmatch(
        r"MemoryError: no room \(out of memory: the process had \d+ MiB then, \d+ at its peak\)",
        raised(MemoryError("no room")).error,
    )


@pytest.mark.parametrize("is_told", [True, False])
def test_the_end_is_told_whether_or_not_the_kernel_tells_more(monkeypatch: pytest.MonkeyPatch, is_told: bool) -> None:
    if not is_told:
        monkeypatch.delattr("os.pidfd_open", raising=False)
    with child("import sys; sys.exit(7)") as one:
        end = reap(one, 15.0)
    assert (end.code, str(end), end.memory("a.b"), one.returncode) == (7, "exit code 7", "", 7)
    assert (end.peak_mib is not None) == is_told


def test_a_child_that_goes_on_is_waited_for_no_longer_than_that() -> None:
    with child("import signal; signal.pause()") as one:
        with pytest.raises(subprocess.TimeoutExpired):
            reap(one, 0.05)
        one.kill()
        assert reap(one, 15.0).code == -signal.SIGKILL
        assert reap(one, 15.0).code == -signal.SIGKILL, "once more it is known already"


def test_another_thread_that_asks_for_the_end_at_the_same_time_does_no_harm() -> None:
    for _ in range(20):
        with child("import os; os._exit(7)") as one:
            over = threading.Event()

            def ask(one: subprocess.Popen[str] = one, over: threading.Event = over) -> None:
                while not over.wait(0.0005):
                    one.poll()

            thread = threading.Thread(target=ask)
            thread.start()
            try:
                assert reap(one, 15.0).code == 7
            finally:
                over.set()
                thread.join()


def test_one_that_asks_in_between_does_not_change_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """It finds nobody to wait for any more, which `subprocess` takes for an end with code 0."""
    wait4 = os.wait4
    with child("import os; os._exit(7)") as one:

        def waited(pid: int, options: int) -> Any:
            answer = wait4(pid, options)
            one.poll()
            return answer

        monkeypatch.setattr(os, "wait4", waited)
        assert reap(one, 15.0).code == 7


@pytest.mark.parametrize(
    ("end", "text", "memory"),
    [
        (ChildEnd(0), "exit code 0", ""),
        (ChildEnd(-11, 100.0, 50.0), "SIGSEGV", ""),
        (ChildEnd(-64 - 5), "signal 69", ""),
        (ChildEnd(-9), "SIGKILL, out of memory?", ""),
        (
            ChildEnd(-9, 812.4, 50.0, 0),
            "SIGKILL, out of memory?",
            "; the process of a.b had 812 MiB of memory at its peak",
        ),
    ],
)
def test_each_end_in_words(end: ChildEnd, text: str, memory: str) -> None:
    assert (str(end), end.memory("a.b")) == (text, memory)
