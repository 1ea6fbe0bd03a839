"""The report on cron-free work: one table with the goals beside what was reached, and everything as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any, Final

from rich.table import Table

from benchmarks.cronfree_figures import DOORBELL, Figures, Idle, Latency, Plan, Race, Unit
from benchmarks.sections import Line, goals, number_text, section_table

DOORBELL_MS: Final = {"sqlite": (5.0, None), "ministack": (20.0, 150.0)}
"""Median and 99th percentile to reach."""

READ_DOLLARS: Final = 0.10
EXTRA_UNITS: Final = 2.0


def sections(figures: Figures) -> Iterator[tuple[str, list[Line]]]:
    """Everything that was measured, by what it belongs to."""
    if figures.latencies:
        yield "from the enqueue to the handler", [line for one in figures.latencies for line in _waited(one)]
    for idle in figures.idle:
        yield f"an idle agent, a month, {idle.how}", list(_idled(idle))
    for race in figures.races:
        yield f"{race.agents} agents race for {race.ticks:,} ticks, {race.how}", list(_raced(race))
    if figures.units:
        yield "write units by DynamoDB's rules", list(_billed(figures.units))


def _waited(one: Latency) -> Iterator[Line]:
    goals = DOORBELL_MS.get(one.store, (None, None)) if one.how == DOORBELL else (None, None)
    name = f"{one.store}, {one.how}, {one.tasks} tasks"
    for told, value, goal in zip(("p50", "p99"), (one.p50_ms, one.p99_ms), goals, strict=True):
        shown, met = (f"≤ {goal:g} ms", value <= goal) if goal is not None else ("", None)
        yield Line(f"{name}: {told}, ms", number_text(value), "", shown, met)
    if one.how == DOORBELL:
        yield Line("  of that the call of enqueue: p50, ms", number_text(one.enqueue_p50_ms))


def _idled(idle: Idle) -> Iterator[Line]:
    dollars = idle.read_dollars
    goal = (f"≤ ${READ_DOLLARS:.2f}", dollars <= READ_DOLLARS) if idle.how == DOORBELL else ("", None)
    yield Line("reads, $", f"{dollars:.3f}", "", *goal)
    yield Line("writes, $", f"{idle.write_dollars:.3f}")
    yield Line("requests to DynamoDB", number_text(round(idle.sum("requests"))))
    yield Line("read units", number_text(round(idle.sum("read_units"))))
    yield Line("write units", number_text(round(idle.sum("write_units"))))
    for kind, cost in sorted(idle.costs.items(), key=lambda one: -one[1]["requests"]):
        if (requests := cost["requests"] / idle.hours) >= 1:
            units = (("read", cost["read_units"]), ("write", cost["write_units"]))
            shown = ", ".join(f"{number_text(unit / idle.hours)} {name}" for name, unit in units if unit)
            yield Line(f"  {kind}: requests an hour (units)", f"{number_text(requests)} ({shown})")
    if idle.sqs_requests:
        yield Line("requests to SQS", number_text(round(idle.sqs_requests_month)))
        yield Line("SQS, $; if none is free", f"{idle.sqs_dollars():.3f}; {idle.sqs_dollars(0.0):.3f}")


def _raced(race: Race) -> Iterator[Line]:
    exact = race.tasks == race.ticks and not race.missing and not race.strange
    yield Line("tasks a tick", f"{race.tasks / race.ticks:g}", "", "1", exact)
    yield Line("ticks without a task; tasks of no tick", f"{race.missing}; {race.strange}")
    yield Line("lost puts a tick", number_text(race.lost_puts))
    yield Line("lost decisions a tick", number_text(race.lost_decisions))
    yield Line("write units a tick, put included", number_text(race.write_units))
    yield Line("read units a tick", number_text(race.read_units))
    yield Line("looks a tick, all agents", number_text(race.looks))
    yield Line("time a tick, all agents, ms", number_text(race.tick_ms))


def _billed(units: list[Unit]) -> Iterator[Line]:
    for unit in units:
        if unit.extra is None:
            yield Line(unit.name, number_text(unit.write_units))
        else:
            goal = (f"≤ {EXTRA_UNITS:g} more", unit.extra <= EXTRA_UNITS) if unit.is_judged else ("", None)
            yield Line(unit.name, f"{number_text(unit.write_units)} ({unit.extra:+.2f})", "", *goal)


def table(figures: Figures) -> Table:
    """Everything in one table."""
    return section_table("cron-free work", sections(figures))


def as_json(figures: Figures, plan: Plan, machine: dict[str, Any]) -> dict[str, Any]:
    """Everything as JSON data."""
    told = asdict(figures)
    told["idle"] = [data | idle.more() for data, idle in zip(told["idle"], figures.idle, strict=True)]
    return {
        **machine,
        "plan": asdict(plan) | {"only": sorted(plan.only)},
        **told,
        "goals": goals(sections(figures)),
    }
