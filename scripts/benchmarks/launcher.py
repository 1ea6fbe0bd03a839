"""One agent as `thunderagent run` starts it, which also counts what it does.

    python -m benchmarks.launcher FOLDER NAME '{"store": "sqlite:///tasks.db", "slots": 10}'

Says `ready` when everything is imported and connected, and begins at a line on standard input. Its counts are in
FOLDER/NAME.json, renewed ten times a second; FOLDER/NAME.runs has a line for each run: task, fence, moment.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any, Final

from benchmarks.tally import Tally
from thunderagent.agent.loop import Agent
from thunderagent.jobs.registry import Registry
from thunderagent.model import events
from thunderagent.model.bus import EventBus
from thunderagent.model.events import Event
from thunderagent.settings import load_settings
from thunderagent.stores.dynamo.engine import DynamoEngine
from thunderagent.stores.engine import Engine
from thunderagent.stores.opening import open_store
from thunderagent.telemetry.logs import Telemetry, configure_logging, task_scope

JOBS: Final = "benchmarks.nojobs"
_BAD: Final = (
    events.TaskFailed,
    events.TaskRetried,
    events.TaskReleased,
    events.TaskTakenOver,
    events.SettleRefused,
    events.LeaseLost,
)


class Recorder:
    """Listens to the events of one agent."""

    def __init__(self, folder: Path, name: str, engine: Engine) -> None:
        self.tally = Tally()
        self._path = folder / f"{name}.json"
        self._runs = (folder / f"{name}.runs").open("w", encoding="utf-8")
        self._engine = engine
        self._cpu_s = 0.0
        self._over = threading.Event()

    def begin(self) -> None:
        """The start of what is measured."""
        self._cpu_s = time.process_time()
        threading.Thread(target=self._tell_often, daemon=True).start()

    def listen(self, event: Event) -> None:
        """Count an event."""
        match event:
            case events.TaskStarted():
                now = time.monotonic()
                self.tally.started(now)
                self._runs.write(f"{event.task_id} {event.fence} {now}\n")
            case events.TaskSucceeded():
                self.tally.succeeded(time.monotonic(), time.process_time() - self._cpu_s)
            case events.Polled():
                self.tally.tried += event.tried
                self.tally.won += event.won
            case _ if isinstance(event, _BAD):
                self.tally.otherwise += 1

    def end(self) -> None:
        """Leave the last counts."""
        self._over.set()
        self._tell()

    def _tell_often(self) -> None:
        while not self._over.wait(0.1):
            self._tell()

    def _tell(self) -> None:
        if isinstance(self._engine, DynamoEngine):
            consumed = self._engine.consumed
            self.tally.requests, self.tally.refused = consumed.requests, consumed.refused
            self.tally.write_units, self.tally.read_units = consumed.write_units, consumed.read_units
        self._runs.flush()
        self.tally.write(self._path)


def main(folder: Path, name: str, overrides: dict[str, Any]) -> int:
    """Run the agent until SIGTERM."""
    settings = load_settings(**overrides)
    configure_logging(settings.log_level)
    store = open_store(settings)
    if isinstance(store.engine, DynamoEngine):
        store.engine.consumed.enabled = True
    bus = EventBus()
    Telemetry(bus)
    recorder = Recorder(folder, name, store.engine)
    bus.subscribe(recorder.listen)
    agent = Agent(store, Registry.from_package(JOBS), settings, bus=bus, scope=task_scope, first_poll_s=0.0)
    store.engine.check()
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    if not sys.stdin.readline():
        return 1  # whoever measures is gone
    recorder.begin()
    stuck = agent.run()
    recorder.end()
    sys.stdout.flush()
    os._exit(1 if stuck else 0)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])))
