"""Looks at an agent each second from a thread of its own, and says how it is: to the log, to a file, to systemd.

It asks nothing of the loop, so it goes on while the loop stands still.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol

from thunderagent.agent.health.file import HealthFile
from thunderagent.agent.health.judgement import Health
from thunderagent.agent.health.systemd import Systemd
from thunderagent.agent.threads import RepeatingThread
from thunderagent.model import events, fleet_events
from thunderagent.model.bus import EventBus

MONITOR_S: Final = 1.0
"""Time between two looks; less when systemd wants to hear of it more often."""


class Looked(Protocol):
    """What the monitor looks at."""

    @property
    def is_ready(self) -> bool:
        """True once the agent looks for work."""

    def health(self) -> Health:
        """How it is now."""

    def dead(self) -> tuple[str, ...]:
        """The threads that have ended before their time."""


class Monitor:
    """The work of the thread `monitor`."""

    def __init__(
        self,
        agent: str,
        vitals: Looked,
        bus: EventBus,
        *,
        file: HealthFile | None = None,
        systemd: Systemd | None = None,
        http: str | None = None,
        wake: Callable[[], object] = lambda: None,
    ) -> None:
        """Make one.

        Args:
            agent: its name.
            vitals: what is looked at.
            bus: told when the health changes.
            file: written at each look.
            systemd: told that the agent is ready, how it is, and while it is alive.
            http: the address at which the agent answers, for the file.
            wake: wakes the loop, which starts threads again that have died.
        """
        self._agent = agent
        self._vitals = vitals
        self._bus = bus
        self._file = file
        self._systemd = systemd or Systemd({})
        self._http = http
        self._wake = wake
        self._known: tuple[bool, tuple[str, ...]] = (True, ())
        self._is_ready = self._is_stopping = self._cannot_write = False
        self._status = ""
        self.every_s = min(MONITOR_S, (self._systemd.watchdog_s or MONITOR_S * 2) / 2)
        """Time between two looks: half of what the watchdog waits, at most."""
        bus.subscribe(self._listen)

    def thread(self) -> RepeatingThread:
        """The thread that looks again and again."""
        return RepeatingThread("monitor", self.every_s, self.look, last=self.end)

    def look(self) -> Health:
        """Judge, and say it."""
        health = self._vitals.health()
        names = tuple(reason.name for reason in health.reasons)
        if (health.healthy, names) != self._known:
            self._known = (health.healthy, names)
            self._bus.emit(fleet_events.HealthChanged(healthy=health.healthy, reasons=tuple(map(str, health.reasons))))
        if self._vitals.dead():
            self._wake()
        self._write(health)
        self._tell(health)
        return health

    def end(self) -> None:
        """The agent has ended well."""
        if self._file is not None:
            self._file.remove()

    def _write(self, health: Health) -> None:
        if self._file is None:
            return
        facts = {"agent": self._agent, "ready": self._vitals.is_ready, **health.entry(), "http": self._http}
        try:
            self._file.write(facts, every_s=self.every_s)
            self._cannot_write = False
        except OSError as error:
            if not self._cannot_write:
                self._bus.emit(fleet_events.ExportFailed(to=str(self._file.path), error=str(error)))
            self._cannot_write = True

    def _tell(self, health: Health) -> None:
        facts: dict[str, object] = {}
        if self._vitals.is_ready and not self._is_ready:
            self._is_ready, facts["READY"] = True, 1
        status = "; ".join((health.state, *map(str, health.reasons), *health.notes))
        if status != self._status:
            self._status = facts["STATUS"] = status
        if health.alive and self._systemd.watchdog_s is not None:
            facts["WATCHDOG"] = 1
        if facts:
            self._systemd.tell(**facts)

    def _listen(self, event: events.Event) -> None:
        if isinstance(event, events.AgentDraining) and not self._is_stopping:
            self._is_stopping = True
            self._systemd.tell(STOPPING=1)
