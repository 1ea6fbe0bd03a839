"""One agent as `thunderagent run` starts it, which can be asked when its handlers began.

python -m benchmarks.cronfree_launcher '{"doorbell": true, "settings": {"store": "sqlite:///tasks.db"}}'
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any, Final

from benchmarks.cronfree_jobs import STARTED
from benchmarks.streams_children import say, serve
from thunderagent.agent.loop import Agent
from thunderagent.jobs.registry import Registry
from thunderagent.model import events
from thunderagent.model.bus import EventBus
from thunderagent.model.events import Event
from thunderagent.queue.doorbell import open_doorbell
from thunderagent.settings import load_settings
from thunderagent.stores.opening import open_store
from thunderagent.telemetry.logs import Telemetry, configure_logging, task_scope

JOBS: Final = "benchmarks.cronfree_jobs"


def main(given: dict[str, Any]) -> int:
    """Run the agent until SIGTERM."""
    settings = load_settings(**given["settings"])
    configure_logging(settings.log_level)
    bus = EventBus()
    Telemetry(bus)
    polled = failed = 0

    def listen(event: Event) -> None:
        nonlocal polled, failed
        polled += isinstance(event, events.Polled)
        failed += isinstance(event, events.DoorbellFailed | events.StoreFailed | events.TaskFailed | events.TaskRetried)

    bus.subscribe(listen)
    agent = Agent(
        open_store(settings, for_agent=True),
        Registry.from_package(JOBS),
        settings,
        bus=bus,
        scope=task_scope,
        first_poll_s=0.0,
        doorbell=open_doorbell(settings) if given["doorbell"] else None,
    )

    def answer(do: str) -> dict[str, Any]:
        told = {"polled": polled, "failed": failed, "number": len(STARTED)}
        return told | ({"started": dict(STARTED)} if do == "started" else {})

    say({"pid": os.getpid()})
    serve(answer)
    stuck = agent.run()
    sys.stderr.flush()
    os._exit(1 if stuck else 0)


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
