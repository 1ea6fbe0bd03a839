"""The parts in their order: telemetry, listing, reads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from benchmarks.fleet_figures import Figures, Plan
from benchmarks.fleet_listing import measure_listing, measure_reads
from benchmarks.fleet_telemetry import measure_telemetry
from benchmarks.places import opened


def measure_fleet(folder: Path, plan: Plan, progress: Callable[[str], None]) -> Figures:
    """Everything that the plan asks for.

    Raises:
        BenchFailed: a part did not come to its end in time; where a process has a log, with its end.
    """
    figures = Figures()
    if "telemetry" in plan.only:
        with opened("sqlite", folder, None) as place:
            figures.costs, figures.scrape_ms = measure_telemetry(place, plan, progress)
    if "listing" in plan.only:
        with opened("sqlite", folder, None) as place:
            figures.listings = measure_listing(place, plan, progress)
    if "reads" in plan.only:
        with opened("ministack", folder, None) as place:
            figures.reads = measure_reads(place, plan, progress)
    return figures
