"""The report: a table of both sides, their ratios, and the targets with what was reached."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from rich.table import Table

from benchmarks.measurement import TASK_UNITS, Load, Measurement

ROWS: Final[dict[str, str]] = {
    "enqueue_single": "enqueue, single /s",
    "enqueue_bulk": "enqueue, bulk /s",
    "drain": "drain, tasks/s",
    "cpu_ms": "agent CPU, ms/task",
    "requests": "requests/task",
    "write_units": "write units/task, as told",
    "write_units_billed": "write units/task, by the rules",
    "read_units": "read units/task, as told",
    "failed_claims": "failed claims/task",
    "run_twice": "tasks run twice",
    "not_succeeded": "not succeeded",
    "latency_p50_ms": "idle latency p50, ms",
    "latency_p99_ms": "idle latency p99, ms",
    "peak_mib": "peak memory, MiB",
    "row_bytes": "largest row, bytes",
    "growth_mib": "growth 25 to 100 %, MiB",
}
RATIOS: Final = ("enqueue_single", "enqueue_bulk", "drain", "cpu_ms", "requests", "write_units_billed", "read_units")

SQLITE_DRAIN: Final = 4400.0
SQLITE_BULK: Final = 15000.0
FAILED_CLAIMS: Final = 0.1
LATENCY_OVER_POLL_S: Final = 0.5
FLAT_MIB: Final = 2.0
FLAT_TASKS: Final = 20000


@dataclass(frozen=True, slots=True)
class Pair:
    """Agents and naive loops of one number, measured in one run."""

    ours: Measurement
    naive: Measurement | None

    @property
    def ratios(self) -> dict[str, float]:
        """Ours divided by the naive loop's."""
        if self.naive is None:
            return {}
        pairs = ((name, getattr(self.ours, name), getattr(self.naive, name)) for name in RATIOS)
        return {name: round(ours / theirs, 3) for name, ours, theirs in pairs if ours is not None and theirs}


@dataclass(frozen=True, slots=True)
class Target:
    """One number that must be reached."""

    name: str
    wanted: str
    got: float
    met: bool


def targets(pairs: Sequence[Pair], load: Load, store: str) -> Iterator[Target]:
    """The targets that this run can judge."""
    for one in (pair.ours for pair in pairs):
        named = f"{one.agents} agent" + ("s" if one.agents > 1 else "")
        if store == "sqlite" and one.agents == 1 and load.slots == 10:
            yield Target(f"drain, {named}", f"≥ {SQLITE_DRAIN:,.0f} tasks/s", one.drain, one.drain >= SQLITE_DRAIN)
        if store == "sqlite":
            bulk = one.enqueue_bulk
            yield Target(f"bulk enqueue, {named}", f"≥ {SQLITE_BULK:,.0f}/s", bulk, bulk >= SQLITE_BULK)
        if one.verbs:
            units = sum(cost for verb, cost in one.verbs.items() if verb != "heartbeat")
            yield Target(f"write units of a task by DynamoDB's rules, {named}", "8", units, units == TASK_UNITS)
            beat = one.verbs["heartbeat"]
            yield Target(f"write units of a heartbeat by the same, {named}", "1", beat, beat == 1.0)
        if one.agents > 1:
            failed = one.failed_claims
            yield Target(f"failed claims per task, {named}", f"≤ {FAILED_CLAIMS}", failed, failed <= FAILED_CLAIMS)
        yield Target(f"tasks run twice, {named}", "0", one.run_twice, one.run_twice == 0)
        if one.latency_p99_ms is not None:
            limit = (load.poll_s + LATENCY_OVER_POLL_S) * 1000
            wanted = f"< {limit:,.0f} ms (poll {load.poll_s:g} s)"
            yield Target(f"idle latency p99, {named}", wanted, one.latency_p99_ms, one.latency_p99_ms < limit)
        if one.growth_mib is not None and one.tasks >= FLAT_TASKS:
            flat = one.growth_mib <= FLAT_MIB
            yield Target(f"memory growth, {named}", f"≤ {FLAT_MIB:g} MiB", one.growth_mib, flat)


def as_json(pairs: Sequence[Pair], load: Load, store: str, machine: dict[str, Any]) -> dict[str, Any]:
    """Everything as JSON data."""
    return {
        "store": store,
        **machine,
        "load": asdict(load),
        "runs": [
            {"ours": asdict(pair.ours), "naive": asdict(pair.naive) if pair.naive else None, "ratios": pair.ratios}
            for pair in pairs
        ],
        "targets": [asdict(target) for target in targets(pairs, load, store)],
    }


def table(pairs: Sequence[Pair], load: Load, store: str) -> Table:
    """Both sides of each number of agents, and their ratio."""
    shown = Table(
        title=f"{store}, {load.tasks:,} tasks, {load.slots} slots, poll {load.poll_s:g} s, log level {load.log_level}"
    )
    shown.add_column("")
    for pair in pairs:
        shown.add_column(f"agents {pair.ours.agents}", justify="right")
        if pair.naive:
            shown.add_column("naive", justify="right")
            shown.add_column("ratio", justify="right")
    for name, title in ROWS.items():
        cells = [cell for pair in pairs for cell in _cells(pair, name)]
        if any(cells):
            shown.add_row(title, *cells)
    loads = (f"{pair.ours.load_before:g} to {pair.ours.load_after:g}" for pair in pairs)
    shown.add_row(
        "load of the machine",
        *[cell for pair, text in zip(pairs, loads, strict=True) for cell in ([text, "", ""] if pair.naive else [text])],
    )
    return shown


def _cells(pair: Pair, name: str) -> list[str]:
    ours = _number(getattr(pair.ours, name))
    if pair.naive is None:
        return [ours]
    ratio = pair.ratios.get(name)
    return [ours, _number(getattr(pair.naive, name)), "" if ratio is None else f"{ratio:.2f}"]


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if isinstance(value, int) or abs(value) >= 100 else f"{value:.2f}"


def tell(pairs: Sequence[Pair], load: Load, store: str, show: Callable[[Any], None]) -> None:
    """Show the table and the targets."""
    show(table(pairs, load, store))
    for target in targets(pairs, load, store):
        mark, colour = ("✓", "green") if target.met else ("✗", "red")
        show(f"[{colour}]{mark}[/] {target.name}: {_number(target.got)} (wanted: {target.wanted})")
