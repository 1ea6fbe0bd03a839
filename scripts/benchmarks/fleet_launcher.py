"""`thunderagent run`, and nothing else, in a process that can be asked what its handlers have cost so far.

    python -m benchmarks.fleet_launcher '{}'

Settings are in the environment, as in production.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any, Final
from unittest.mock import patch

from benchmarks.fleet_jobs import READINGS
from benchmarks.streams_children import say, serve
from thunderagent.cli.fleet import run

JOBS: Final = "benchmarks.fleet_jobs"


def answer(do: str) -> dict[str, Any]:
    """The last reading, or all, or how much CPU time the process took until now."""
    match do:
        case "readings":
            return {"readings": sorted(READINGS.items())}
        case "cpu":
            return {"cpu_s": time.process_time()}
        case _:
            return {"ran": max(READINGS, default=0)}


def main() -> None:
    """Run the agent until SIGTERM."""
    say({"pid": os.getpid()})
    serve(answer)
    with patch("thunderagent.agent.loop.first_poll", return_value=0.0):  # there is no fleet to fall into step with
        run(JOBS)
    sys.stderr.flush()
    os._exit(0)  # the thread that answers waits for its next line


if __name__ == "__main__":
    main()
