"""Signals to the process group of an agent, as a terminal and `stopasgroup` send them, do not end its children."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests.agent.executors.test_executors import Bench, bench
from tests.support import process_jobs
from thunderagent.jobs.outcome import Returned

__all__ = ["bench"]

ROOT = Path(__file__).parents[3]
NUMBER = 100


SPY = """
import os, signal, sys
open(sys.argv[0] + ".born", "w").write(repr(sorted(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, ())))))
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""
"""Writes down which signals it was born deaf to, and goes on as Python."""


def program(path: Path, text: str, shell: str = "/bin/sh") -> str:
    """A program that takes the place of Python."""
    path.write_text(f"#!{shell}\n{text}\n")
    path.chmod(0o700)
    return str(path)


@pytest.mark.processes
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_group_does_not_end_a_child_that_is_being_born(tmp_path: Path, number: signal.Signals) -> None:
    command = [
        sys.executable,
        "-m",
        "tests.support.group_of_signals",
        program(tmp_path / "child", "exit 7"),
        f"{NUMBER}",
    ]
    parent = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert parent.stdout is not None
    over = threading.Event()

    def signal_the_group() -> None:
        until = time.monotonic() + 30.0
        while not over.is_set() and time.monotonic() < until:
            with suppress(ProcessLookupError):
                os.killpg(parent.pid, number)
            time.sleep(0.0003)

    try:
        assert parent.stdout.readline() == "ready\n"
        sender = threading.Thread(target=signal_the_group)
        sender.start()
        told = parent.stdout.readline()
        over.set()
        sender.join()
        assert json.loads(told) == {"the child process ended without an answer (exit code 7)": NUMBER}
        assert parent.wait(10) in (0, -number)  # its own end is not what this is about
    finally:
        over.set()
        parent.kill()
        parent.wait()
        parent.stdout.close()


@pytest.mark.slow
def test_a_child_is_born_deaf_to_the_signals_of_the_group_and_its_handler_is_not(
    bench: Bench,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "executable", program(tmp_path / "spy", SPY, sys.executable))
    assert bench.run(process_jobs.blocked_signals) == Returned([]), "what a handler starts would inherit it"
    assert (tmp_path / "spy.born").read_text() == repr([int(signal.SIGINT), int(signal.SIGTERM)])
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ()), "the agent itself hears as before"
