"""The report on what a fleet costs to watch: one table with the goals beside it, and everything as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from statistics import median
from typing import Any, Final

from rich.table import Table

from benchmarks.fleet_figures import NOTHING, Cost, Figures, Listing, Plan, Reads
from benchmarks.sections import Line, goals, number_text, section_table

TELEMETRY_RATIO: Final = 1.10
LISTING_S: Final = 1.0


def sections(figures: Figures) -> Iterator[tuple[str, list[Line]]]:
    """Everything that was measured, by what it belongs to."""
    if figures.costs:
        lines = [_cost(cost) for cost in figures.costs]
        if figures.scrape_ms:
            lines.append(Line("one answer to /metrics, CPU ms", _range(figures.scrape_ms)))
        yield "CPU of an agent, µs a task (beside the silent one of the same round)", lines
    for listing in figures.listings:
        yield f"{listing.rows:,} {'agents' if listing.command == 'agents' else 'tasks'} on SQLite", _listed(listing)
    if figures.reads:
        yield (
            f"reads on a local DynamoDB, as it tells them; counts stop at {figures.reads[0].cap:,}",
            [_read(reads) for reads in figures.reads],
        )


def _cost(cost: Cost) -> Line:
    shown = _range(cost.cpu_us)
    if cost.name == NOTHING:
        return Line(cost.name, shown)
    text = f"{shown}   × {cost.ratio:.2f} ({min(cost.ratios):.2f} to {max(cost.ratios):.2f})"
    goal = (f"≤ × {TELEMETRY_RATIO:.2f}", cost.ratio <= TELEMETRY_RATIO) if cost.has_goal else ("", None)
    return Line(cost.name, text, "", *goal)


def _listed(listing: Listing) -> list[Line]:
    goal = f"≤ {LISTING_S:g} s"
    name = f"thunderagent {listing.command}"
    return [
        Line(f"{name}, s", _range(listing.command_s), "", goal, median(listing.command_s) <= LISTING_S),
        Line("  the call alone, s", _range(listing.call_s)),
        Line("  thunderagent --version, s", _range(listing.start_s)),
    ]


def _read(reads: Reads) -> Line:
    capped = ", capped" if reads.is_capped else ""
    text = f"{reads.requests:,} requests, {number_text(reads.read_units)} read units{capped}"
    return Line(f"{reads.call} of {reads.rows:,} rows", text)


def _range(values: Sequence[float]) -> str:
    """The median, and the least and the largest."""
    return f"{number_text(median(values))} ({number_text(min(values))} to {number_text(max(values))})"


def table(figures: Figures) -> Table:
    """Everything in one table."""
    return section_table("watching a fleet: median (range)", sections(figures))


def as_json(figures: Figures, plan: Plan, machine: dict[str, Any]) -> dict[str, Any]:
    """Everything as JSON data."""
    told = asdict(figures)
    told["costs"] = [data | {"ratio": cost.ratio} for data, cost in zip(told["costs"], figures.costs, strict=True)]
    return {
        **machine,
        "plan": asdict(plan) | {"only": sorted(plan.only)},
        **told,
        "goals": goals(sections(figures)),
    }
