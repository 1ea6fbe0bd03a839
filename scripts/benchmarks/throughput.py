"""How many tasks a second agents drain, beside naive loops: fill a store, and let warm processes empty it together."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from benchmarks import harness, naive
from benchmarks.agent import Number, nothing
from benchmarks.harness import Child, Numbers, Place, Plan, Progress, Section
from benchmarks.units import TASK_UNITS
from thunderagent.stores.dynamo.engine import DynamoEngine

SLOTS: Final = 10
LARGEST_SINGLE: Final = 1000
DEADLINE_S: Final = 300.0
FLAT_TASKS: Final = 20_000
"""Fewer tasks say nothing about the growth of the memory."""
IDLE_S: Final = 1.0
"""Poll interval of an agent that finds nothing."""

States = Sequence[Mapping[str, Any]]


def measure_throughput(place: Place, plan: Plan, progress: Progress) -> list[Section]:
    """Each number of agents.

    Raises:
        BenchFailed: tasks did not end in time, or a process did not start; with the end of its log.
    """
    sections = []
    for number in plan.agents:
        title = f"{number} agent{'s' if number > 1 else ''}, {plan.tasks:,} tasks on {place.name}"
        progress(f"throughput, {title}")
        ours, theirs = _agents(place, plan, number), None
        if plan.naive:
            progress("throughput, naive")
            theirs = _naive(place, plan, number)
        sections.append(harness.section(title, ours, theirs, _goals(plan, number)))
    return sections


def _goals(plan: Plan, agents: int) -> harness.Goals:
    goals = {"tasks run twice": (0.0, 0.0), "not succeeded": (0.0, 0.0)}
    if plan.store == "sqlite":
        goals["enqueue, bulk /s"] = (15_000.0, math.inf)
        if agents == 1:
            goals["drain, tasks/s"] = (4400.0, math.inf)
    if agents > 1:
        goals["failed claims/task"] = (-math.inf, 0.1)
    if plan.tasks >= FLAT_TASKS:
        goals["growth 25 to 100 %, MiB"] = (-math.inf, 2.0)
    return goals


def _agents(place: Place, plan: Plan, number: int) -> Numbers:
    url, before = place.fresh(), harness.load_now()
    client = harness.client_of(url)

    def put_many(numbers: range) -> None:
        for answer in client.enqueue_many(nothing, (Number(n=number) for number in numbers)):
            if answer.error:
                raise answer.error

    consumed = client.store.engine.consumed if isinstance(client.store.engine, DynamoEngine) else None
    settings = {"store": url, "queues": {"default": SLOTS}, "poll_max_s": IDLE_S, "poll_idle_s": IDLE_S}
    filled = _fill(plan, lambda number: client.enqueue(nothing, Number(n=number)), put_many)
    put = (consumed.requests, consumed.write_units + consumed.refused) if consumed else (0, 0.0)
    client.close()
    with harness.children(place.folder) as start:
        agents = [start("agent", {"settings": settings}) for _ in range(number)]
        states = _drained(agents, lambda states: _sum(states, "ended") >= plan.tasks)
        numbers = filled | _numbers(agents, states, plan) | (_requests(states, plan, *put) if consumed else {})
    return numbers | {"load of the machine before": before, "load after": harness.load_now()}


def _naive(place: Place, plan: Plan, number: int) -> Numbers:
    url = place.fresh()
    tasks = naive.open_queue(url)
    filled = _fill(
        plan,
        lambda number: tasks.put(f"task-{number:06}"),
        lambda numbers: tasks.put_many(f"task-{number:06}" for number in numbers),
    )
    with harness.children(place.folder) as start:
        loops = [start("naive", {"store": url}) for _ in range(number)]
        states = _drained(loops, lambda states: all(one["is_done"] for one in states))
        numbers = filled | _numbers(loops, states, plan)
    return numbers | (_requests(states, plan, plan.tasks, 2.0 * plan.tasks) if place.endpoint else {})


def _fill(plan: Plan, put: Callable[[int], object], put_many: Callable[[range], object]) -> Numbers:
    """Put tasks one by one, then the others at once."""
    single = max(1, min(LARGEST_SINGLE, plan.tasks // 10))
    began = time.perf_counter()
    for number in range(single):
        put(number)
    between = time.perf_counter()
    put_many(range(single, plan.tasks))
    ended = time.perf_counter()
    return {
        "enqueue, single /s": single / (between - began),
        "enqueue, bulk /s": (plan.tasks - single) / (ended - between),
    }


def _drained(processes: Sequence[Child], done: Callable[[list[dict[str, Any]]], bool]) -> States:
    """Let all begin at once, and wait; their counts at the end."""
    for process in processes:
        process.ask("go")
    return harness.until(processes, "done with all tasks", done, DEADLINE_S)


def _numbers(processes: Sequence[Child], states: States, plan: Plan) -> Numbers:
    seconds = max(one["last_ended"] for one in states) - min(one["first_started"] for one in states if one["ran"])
    ended = _sum(states, "ended")
    growths = [one["growth_kib"] for one in states if one["growth_kib"] is not None]
    runs = Counter(task_id for process in processes for task_id in process.ask("runs")["runs"])
    return {
        "drain, tasks/s": ended / seconds,
        "CPU, ms/task": _sum(states, "drain_cpu_s") * 1000 / ended,
        "failed claims/task": (_sum(states, "tried") - _sum(states, "won")) / ended,
        "tasks run twice": runs.total() - len(runs),
        "not succeeded": plan.tasks - len(runs) + _sum(states, "failed", "lost", "given_back"),
        "peak memory, MiB": max(one["peak_kib"] for one in states) / 1024,
        "growth 25 to 100 %, MiB": max(growths) / 1024 if growths else None,
    }


def _requests(states: States, plan: Plan, put_requests: float, put_units: float) -> Numbers:
    """Requests and units of a task, its enqueue included; a refused write counts as one unit."""
    lost = _sum(states, "tried") - _sum(states, "won")
    return {
        "requests/task": (put_requests + _sum(states, "requests")) / plan.tasks,
        "write units/task, as the engine says": (put_units + _sum(states, "write_units", "refused")) / plan.tasks,
        "write units/task, by the rules": TASK_UNITS + lost / plan.tasks,
        "read units/task, as the engine says": _sum(states, "read_units") / plan.tasks,
    }


def _sum(states: States, *names: str) -> float:
    return float(sum(one[name] for one in states for name in names))
