"""Starts children while its process group is signalled: `python -m tests.support.group_of_signals PROGRAM NUMBER`.

The program takes the place of Python in each child. Says `ready`, and at the end how often each error was answered.
"""

from __future__ import annotations

import json
import queue
import signal
import sys
from collections import Counter

from tests.support import process_jobs
from tests.support.engine import a_lease, running
from thunderagent.agent.executors.process import ProcessExecutor
from thunderagent.jobs.outcome import Raised


def say(text: str) -> None:
    """To whoever asks."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main(program: str, number: int) -> None:
    """Run so many isolated tasks."""
    for one in (signal.SIGTERM, signal.SIGINT):
        signal.signal(one, lambda *_: None)
    sys.executable = program
    outcomes: queue.SimpleQueue[object] = queue.SimpleQueue()
    executor = ProcessExecutor(4, lambda _, outcome: outcomes.put(outcome))
    say("ready")
    for _ in range(number):
        executor.start(running(a_lease(job=process_jobs.echo.name, payload_text="{}"), process_jobs.echo))
    ends = [outcomes.get(timeout=30.0) for _ in range(number)]
    say(json.dumps(Counter(end.error if isinstance(end, Raised) else repr(end) for end in ends)))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
