"""Judges an agent each second and writes its health to the log, to a file and to systemd.

The thread asks nothing of the loop, so it goes on while the loop stands still.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Final, Protocol

from thunderagent.agent.health.file import HealthFile
from thunderagent.agent.health.judgement import Health
from thunderagent.agent.threads import RepeatingThread
from thunderagent.model import events, fleet_events
from thunderagent.model.bus import Event, EventBus


class Systemd:
    """Messages to systemd about a process that it started as `Type=notify`; without systemd they do nothing.

    Args:
        environ: of the process: `NOTIFY_SOCKET`, `WATCHDOG_USEC` and `WATCHDOG_PID`.
    """

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        address = environ.get("NOTIFY_SOCKET", "")
        if address.startswith("@"):  # the abstract namespace of Linux
            address = f"\0{address[1:]}"
        self._address = address if address.startswith(("/", "\0")) else ""
        self.watchdog_s = _watchdog_s(environ) if self._address else None
        """Seconds without a `WATCHDOG=1` after which the process is killed; None: no watchdog looks at it."""

    def notify(self, **facts: object) -> None:
        """Send facts such as `READY=1` in one datagram, which may be lost."""
        if not self._address:
            return
        text = "\n".join(f"{name}={' '.join(str(value).split())}" for name, value in facts.items())
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as one:
            one.setblocking(False)
            one.sendto(text.encode(), self._address)


def _watchdog_s(environ: Mapping[str, str]) -> float | None:
    """None when the watchdog is off, or watches our parent."""
    seconds, of = environ.get("WATCHDOG_USEC", ""), environ.get("WATCHDOG_PID", "")
    if not seconds.isdecimal() or int(seconds) == 0 or of not in ("", str(os.getpid())):
        return None
    return int(seconds) / 1e6


MONITOR_S: Final = 1.0
"""Time between two looks; less when the watchdog of systemd waits for less than twice that."""


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
    """The work of the thread `monitor`.

    Args:
        bus: gets an event when the health changes.
        file: written at each look.
        systemd: notified that the agent is ready, how it is, and that it is alive.
        http: the address at which the agent answers, for the file.
        wake: wakes the loop, which starts threads again that have died.
    """

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
        health = self._vitals.health()
        names = tuple(reason.name for reason in health.reasons)
        if (health.healthy, names) != self._known:
            self._known = (health.healthy, names)
            self._bus.emit(fleet_events.HealthChanged(healthy=health.healthy, reasons=tuple(map(str, health.reasons))))
        if self._vitals.dead():
            self._wake()
        self._write(health)
        self._notify(health)
        return health

    def end(self) -> None:
        """The agent has ended: no file is left."""
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

    def _notify(self, health: Health) -> None:
        facts: dict[str, object] = {}
        if self._vitals.is_ready and not self._is_ready:
            self._is_ready, facts["READY"] = True, 1
        status = "; ".join((health.state, *map(str, health.reasons), *health.notes))
        if status != self._status:
            self._status = facts["STATUS"] = status
        if health.alive and self._systemd.watchdog_s is not None:
            facts["WATCHDOG"] = 1
        if facts:
            self._systemd.notify(**facts)

    def _listen(self, event: Event) -> None:
        if isinstance(event, events.AgentDraining) and not self._is_stopping:
            self._is_stopping = True
            self._systemd.notify(STOPPING=1)
