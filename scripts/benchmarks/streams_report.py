"""The report on streams: one table with the goals beside what was reached, and everything as JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any, Final

from rich.table import Table

from benchmarks.sections import Line, goals, number_text, section_table
from benchmarks.streams_figures import Figures, Flap, Holding, Plan, Side, Takeover, Units
from benchmarks.streams_jobs import LEASE_S

PLAIN_KIB: Final = 20.0
BEAT_LATE_S: Final = LEASE_S / 2
ATTEMPTS_A_SECOND: Final = 40 + 16
"""The rate of the governor, and those that had their turns already when the loop stood still: see `connect_rate` and
`connect_concurrency`."""
TERM_S: Final = 4.0
KILL_S: Final = LEASE_S + 5.0
FLAP_A_MINUTE: Final = 12.0


def sections(figures: Figures, plan: Plan) -> Iterator[tuple[str, list[Line]]]:
    """Everything that was measured, by what it belongs to."""
    for holding in figures.holdings:
        yield holding.variation.name, list(_held(holding))
    if figures.takeovers:
        yield (
            "an agent is ended while another one stands by",
            [line for takeover in figures.takeovers for line in _taken(takeover)],
        )
    if figures.flap:
        yield "a server that closes what it has accepted", [_flapped(figures.flap)]
    if figures.units:
        yield "write units by DynamoDB's rules", list(_billed(figures.units))


def _held(holding: Holding) -> Iterator[Line]:
    ours, naive, tls = holding.ours, holding.naive, holding.variation.tls

    def line(
        name: str, show: Callable[[Side], str], goal: str = "", met: bool | None = None, *, alone: bool = False
    ) -> Line:
        return Line(name, show(ours), show(naive) if naive and not alone else "", goal, met)

    if ours.connection_kib is not None:
        goal = {} if tls else {"goal": f"≤ {PLAIN_KIB:g} KiB", "met": ours.connection_kib <= PLAIN_KIB}
        yield line("memory, KiB a connection", lambda side: number_text(side.connection_kib), **goal)  # type: ignore[arg-type]
        yield line("memory with one connection, MiB", lambda side: number_text(side.base_mib))
    yield line("until all were live at first, s", lambda side: number_text(side.connect_s))
    if ours.idle_share is not None:
        yield line("CPU while idle, % of a core", lambda side: number_text(100 * (side.idle_share or 0.0)))
    for mode, name in (("raw", "not decoded"), ("json", "JSON decoded"), ("checkpoint", "JSON and checkpoint")):
        if mode in ours.per_cpu_s:
            yield line(
                f"messages a CPU second, {name}",
                lambda side, mode=mode: number_text(side.per_cpu_s.get(mode)),  # type: ignore[misc]
            )
    if ours.stall_s is not None:
        yield line("all cut: longest stall of the loop, ms", lambda side: number_text(1000 * (side.stall_s or 0.0)))
        yield line("all cut: until all were live again, s", _came_back)
        most = ours.attempts_a_second or 0
        yield line(
            "all cut: most attempts in a second",
            lambda side: number_text(side.attempts_a_second),
            f"≤ {ATTEMPTS_A_SECOND}",
            most <= ATTEMPTS_A_SECOND,
        )
        yield line("all cut: attempts", lambda side: number_text(side.attempts))
        late = ours.beat_late_s or 0.0
        yield line(
            "all cut: latest heartbeat, s late",
            lambda side: number_text(side.beat_late_s),
            f"≤ {BEAT_LATE_S:g} s",
            late <= BEAT_LATE_S,
            alone=True,
        )
        lost = ours.leases_lost
        yield line("all cut: leases lost", lambda side: number_text(side.leases_lost), "0", lost == 0, alone=True)
    yield Line("load of the machine", f"{holding.load_before:g} to {holding.load_after:g}")


def _came_back(side: Side) -> str:
    return number_text(side.live_s) if side.live_s is not None else f"only {number_text(side.live_after)} in a minute"


def _taken(takeover: Takeover) -> Iterator[Line]:
    limit = TERM_S if takeover.signal == "SIGTERM" else KILL_S
    name = f"{takeover.signal} to the next message, {takeover.streams} streams in {takeover.rounds} rounds"
    worst = takeover.worst_s
    yield Line(f"{name}: median, s", number_text(takeover.median_s))
    yield Line(f"{name}: worst, s", number_text(worst), "", f"≤ {limit:g} s", worst <= limit)


def _flapped(flap: Flap) -> Line:
    most = flap.most * 60.0 / flap.seconds
    return Line(
        f"attempts a minute, most of {flap.streams} streams (mean {flap.mean * 60.0 / flap.seconds:.1f})",
        number_text(most),
        number_text(flap.naive_a_minute),
        f"≤ {FLAP_A_MINUTE:g}",
        most <= FLAP_A_MINUTE,
    )


def _billed(units: Units) -> Iterator[Line]:
    for verb, number in units.verbs.items():
        goal = ("1", number == 1.0) if verb.startswith("heartbeat") else ("", None)
        yield Line(verb, number_text(int(number)), "", *goal)
    yield Line("largest row, bytes", number_text(units.row_bytes))
    yield Line("heartbeats a stream and hour, as set", number_text(units.beats_an_hour))
    yield Line("heartbeats a stream and hour, as measured", number_text(units.beats_measured))
    yield Line("units a stream and hour, at most", number_text(units.stream_hour))
    yield Line("100 streams a month, $, at most", number_text(units.dollars_100_month))


def table(figures: Figures, plan: Plan, store: str) -> Table:
    """Everything in one table."""
    return section_table(f"streams on {store}", sections(figures, plan), naive=True)


def as_json(figures: Figures, plan: Plan, store: str, machine: dict[str, Any]) -> dict[str, Any]:
    """Everything as JSON data."""
    units = figures.units
    more = {"stream_hour": units.stream_hour, "dollars_100_month": units.dollars_100_month} if units else {}
    told = asdict(figures)
    return {
        "store": store,
        **machine,
        "plan": asdict(plan) | {"only": sorted(plan.only)},
        **told,
        "units": told["units"] and told["units"] | more,
        "goals": goals(sections(figures, plan)),
    }
