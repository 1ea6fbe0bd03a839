"""The parts in their order: latency, an idle agent, the race for ticks, units."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from benchmarks.cronfree_figures import Figures, Plan
from benchmarks.cronfree_idle import measure_idle
from benchmarks.cronfree_latency import measure_latency
from benchmarks.cronfree_race import measure_race
from benchmarks.cronfree_units import measure_units
from benchmarks.places import opened


def measure_cronfree(folder: Path, plan: Plan, progress: Callable[[str], None]) -> Figures:
    """Everything that the plan asks for.

    Raises:
        BenchFailed: a part did not come to its end in time; where a process has a log, with its end.
    """
    figures = Figures()
    if "latency" in plan.only:
        for store in plan.stores:
            with opened(store, folder, None) as place:
                figures.latencies += measure_latency(place, plan.tasks, plan.deadline_s, progress)
    if "idle" in plan.only:
        progress(f"an idle agent, {plan.idle_h:g} hours, simulated")
        figures.idle += measure_idle(plan.idle_h, plan.agents, plan.deadline_s)
    if "race" in plan.only:
        progress(f"{plan.agents} agents race for {plan.ticks:,} ticks")
        figures.races += measure_race(folder, plan.agents, plan.ticks, plan.deadline_s)
    if "units" in plan.only:
        progress("units")
        figures.units = measure_units(plan.deadline_s)
    return figures
