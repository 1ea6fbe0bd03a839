"""Sends the metrics of an agent to CloudWatch: everything once a minute, the open connections in between as well.

What could not be sent is in the next minute's data, as counts only grow. A reply that is lost may have a minute counted
twice; none is left out.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

from thunderagent.model import fleet_events
from thunderagent.model.bus import EventBus
from thunderagent.model.errors import ThunderAgentError
from thunderagent.telemetry import metrics
from thunderagent.telemetry.cloudwatch import CloudWatch, data_of, portions_of
from thunderagent.telemetry.meter import Meter
from thunderagent.telemetry.readings import Reader, Reading

HALF_MINUTE_S: Final = 30.0
FLUSH_S: Final = 2.0
"""Longest that the end of an agent waits for its last data to be sent."""


class Export:
    """What a thread does each half minute; `last` at the end, in any thread."""

    def __init__(self, meter: Meter, to: CloudWatch, bus: EventBus) -> None:
        self._meter = meter
        self._to = to
        self._bus = bus
        self._reader = Reader(meter.read)
        self._sending = threading.Lock()
        self._turns = 0
        self._problem: str | None = None

    def turn(self) -> None:
        """Send what this half minute is for: nothing at first, connections at each half, everything at each whole."""
        turn, self._turns = self._turns, self._turns + 1
        if turn == 0:
            return
        if turn % 2 == 0:
            self._send()
        elif (metrics.STREAMS_HELD, "") in (now := self._meter.read()).gauges:  # else it is 0 in every minute
            series = (metrics.ACTIVE_CONNECTIONS, "")
            only = Reading({}, {series: now.gauges[series]}, {}, now.set_at, now.at)
            self._told(lambda: self._to.put([datum for _, datum in data_of(only)]))

    def last(self) -> None:
        """Send everything once more, for at most `FLUSH_S`: names that nobody resolves hold up no end."""
        thread = threading.Thread(target=lambda: self._send(hurry=True), name="metrics-flush", daemon=True)
        thread.start()
        thread.join(FLUSH_S)

    def _send(self, *, hurry: bool = False) -> None:
        if not self._sending.acquire(timeout=FLUSH_S):
            return  # the minute's data are on their way, for as long as their time limits let them
        try:
            self._told(lambda: self._put_all(hurry))
        finally:
            self._sending.release()

    def _put_all(self, hurry: bool) -> None:
        for portion in portions_of(data_of(self._reader.take())):
            self._to.put([datum for _, datum in portion], hurry=hurry)
            self._reader.kept({series for series, _ in portion})

    def _told(self, send: Callable[[], None]) -> None:
        """Send; a problem is told when it is another than the last time."""
        try:
            send()
        except ThunderAgentError as error:
            kind = type(error).__name__
            if kind != self._problem:
                self._problem = kind
                self._bus.emit(fleet_events.ExportFailed(to="CloudWatch", error=str(error)))
        else:
            self._problem = None
