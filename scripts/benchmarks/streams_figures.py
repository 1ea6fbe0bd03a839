"""What is asked of a measurement of streams, and what it answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from thunderagent.telemetry.prices import MONTH_S, store_dollars

PHASES: Final = ("memory", "cpu", "reconnect", "takeover", "flap", "units")
HOLDING: Final = frozenset(PHASES[:3])
"""Phases that need many connections."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is measured and for how long."""

    connections: tuple[int, ...]
    tls: tuple[bool, ...]
    loops: tuple[str, ...]
    only: frozenset[str]
    rounds: int
    kills: int
    streams: int
    """Streams that one agent holds when it is ended, and that meet a server that flaps."""
    settle_s: float
    idle_s: float
    push_s: float
    rate: float
    flap_s: float
    naive: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Variation:
    """How connections are held."""

    connections: int
    tls: bool
    loop: str

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.connections:,} connections, {'wss' if self.tls else 'ws'}, {self.loop}"


@dataclass(slots=True, kw_only=True)
class Side:
    """One process that holds connections; None: not measured."""

    connect_s: float
    """Until all were live for the first time."""
    base_mib: float
    """Memory of the process with one connection."""
    connection_kib: float | None = None
    """Growth of the memory for each further connection."""
    idle_share: float | None = None
    """Share of one core with pings and heartbeats alone."""
    per_cpu_s: dict[str, float] = field(default_factory=dict)
    """Messages for each second of CPU, by what is done with them."""
    held_back: dict[str, float] = field(default_factory=dict)
    """Share of the messages for which there was no room on the way when they were due."""
    stall_s: float | None = None
    """Largest lateness of a timer in the event loop while all reconnect."""
    live_s: float | None = None
    """Until all were live again; None: not all within the time."""
    live_after: int | None = None
    """Connections that were live then, or when the time was over."""
    attempts_a_second: int | None = None
    """Largest number within a second, as the server sees it."""
    attempts: int | None = None
    beat_late_s: float | None = None
    """Largest lateness of an acknowledged heartbeat while all reconnect."""
    leases_lost: int | None = None


@dataclass(slots=True, kw_only=True)
class Holding:
    """One number of connections, held in one way, by an agent and by the naive loop."""

    variation: Variation
    load_before: float
    load_after: float = 0.0
    ours: Side
    naive: Side | None = None


@dataclass(slots=True, kw_only=True)
class Takeover:
    """How long streams were without an agent after one was ended."""

    signal: str
    rounds: int
    streams: int
    median_s: float
    worst_s: float
    load_before: float


@dataclass(slots=True, kw_only=True)
class Flap:
    """Attempts against a server that closes what it has accepted, for each stream and minute."""

    streams: int
    seconds: float
    most: int
    """Of one stream, in all of the time."""
    mean: float
    naive_a_minute: float | None = None
    load_before: float


@dataclass(slots=True, kw_only=True)
class Units:
    """Write units by DynamoDB's rules."""

    verbs: Mapping[str, float]
    row_bytes: int
    beats_an_hour: float
    """As the settings ask for."""
    beats_measured: float
    """By an agent, from the rows."""

    @property
    def stream_hour(self) -> float:
        """Of one stream that just runs, at most."""
        return self.beats_an_hour * self.verbs["heartbeat with cursor"]

    @property
    def dollars_100_month(self) -> float:
        """Of a hundred streams in a month of 730 hours."""
        return store_dollars(write_units=self.stream_hour * 100 * MONTH_S / 3600)


@dataclass(slots=True, kw_only=True)
class Figures:
    """Everything that was measured."""

    holdings: list[Holding] = field(default_factory=list)
    takeovers: list[Takeover] = field(default_factory=list)
    flap: Flap | None = None
    units: Units | None = None
