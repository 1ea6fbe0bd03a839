"""What it takes to look at a whole fleet: `thunderagent agents` and `thunderagent stats`, timed, and what they read."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from benchmarks.fleet_figures import Listing, Plan, Reads
from benchmarks.nojobs import Number, nothing
from benchmarks.places import Place
from benchmarks.processes import BenchFailed
from thunderagent.agent.loop import Agent
from thunderagent.client import Client
from thunderagent.jobs.registry import Registry
from thunderagent.settings import load_settings
from thunderagent.stores.dynamo.engine import DynamoEngine
from thunderagent.stores.opening import open_store
from thunderagent.stores.sqlite.engine import MEMORY

QUEUES: Final = ("default", "reports", "mail", "import")
LIVES_S: Final = 3600.0
CAPPED: Final = 400
"""Where counts stop in the measurement of reads: rows in tens of thousands would be too slow on a local engine."""


def measure_listing(place: Place, plan: Plan, progress: Callable[[str], None]) -> list[Listing]:
    """Time the commands and the calls behind them.

    Raises:
        BenchFailed: a command failed or took too long.
    """
    url = place.fresh()
    client = _client(url)
    try:
        progress(f"{plan.agents:,} agents and {plan.rows:,} tasks to look at")
        _fill(client, plan.agents, plan.rows, plan.deadline_s)
        listings = []
        for command, rows, call in (("agents", plan.agents, client.agents), ("stats", plan.rows, client.stats)):
            progress(f"thunderagent {command}")
            calls = [_timed(call) for _ in range(plan.calls)]
            show = partial(_run, [command, "--store", url], place.folder, plan.deadline_s)
            commands = [_timed(show) for _ in range(plan.calls)]
            starts = [_timed(partial(_run, ["--version"], place.folder, plan.deadline_s)) for _ in range(plan.calls)]
            listings.append(Listing(command=command, rows=rows, command_s=commands, call_s=calls, start_s=starts))
        return listings
    finally:
        client.close()


def measure_reads(place: Place, plan: Plan, progress: Callable[[str], None]) -> list[Reads]:
    """What the calls read with some rows, and with twice as many.

    Raises:
        BenchFailed: the rows could not be put in time.
    """
    client = _client(place.fresh())
    engine = client.store.engine
    assert isinstance(engine, DynamoEngine)
    engine.consumed.enabled = True
    engine.most_counted = CAPPED
    found: list[Reads] = []
    agents, rows = max(1, plan.agents // 10), 4 * CAPPED
    try:
        for times in (1, 2):
            progress(f"reads of {agents * times:,} agents and {rows * times:,} tasks on {place.name}")
            _fill(client, agents, rows, plan.deadline_s, first=agents * (times - 1))
            for call, number in ((client.agents, agents * times), (client.stats, rows * times)):
                before = engine.consumed.requests, engine.consumed.read_units
                answer: Sequence[Any] = call()
                found.append(
                    Reads(
                        call=f"{call.__name__}()",
                        rows=number,
                        requests=engine.consumed.requests - before[0],
                        read_units=engine.consumed.read_units - before[1],
                        is_capped=any(getattr(one, "is_capped", False) for one in answer),
                        cap=CAPPED,
                    )
                )
        return found
    finally:
        client.close()


def _client(url: str) -> Client:
    settings = load_settings(store=url)
    return Client(open_store(settings), settings)


def _fill(client: Client, agents: int, rows: int, deadline_s: float, first: int = 0) -> None:
    until = time.monotonic() + deadline_s

    def in_time(_: int = 0) -> None:
        if time.monotonic() > until:
            raise BenchFailed(f"the rows could not be put in {deadline_s:g} s")

    info = _announcement()
    for number in range(first, first + agents):
        in_time()
        client.store.announce(f"host-{number}:{1000 + number}:{number:08x}", info, lives_s=LIVES_S)
    share = rows // len(QUEUES)
    for queue in QUEUES:
        for delay_s in (0.0, 3600.0):
            payloads = (Number(n=number) for number in range(share // 2))
            for answer in client.enqueue_many(nothing, payloads, queue=queue, delay_s=delay_s, on_progress=in_time):
                if answer.error:
                    raise answer.error


def _announcement() -> Mapping[str, Any]:
    """What a real agent tells of itself."""
    settings = load_settings(store=f"sqlite://{MEMORY}", queues=dict.fromkeys(QUEUES, 10))
    store = open_store(settings)
    agent = Agent(store, Registry.from_package("benchmarks.nojobs"), settings, first_poll_s=0.0)
    thread = threading.Thread(target=agent.run, name="agent", daemon=True)
    thread.start()
    try:
        until = time.monotonic() + 30.0
        while not (known := store.agents()):
            if time.monotonic() > until:
                raise BenchFailed("an agent did not tell of itself in 30 s")
            time.sleep(0.05)
        return known[0].info
    finally:
        agent.stop()
        thread.join(30.0)


def _timed(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def _run(arguments: list[str], folder: Path, deadline_s: float) -> None:
    root = Path(__file__).resolve().parents[2]
    path = os.pathsep.join(filter(None, (str(root), os.environ.get("PYTHONPATH"))))
    try:
        done = subprocess.run(
            [sys.executable, "-m", "thunderagent", *arguments],
            env={**os.environ, "PYTHONPATH": path},
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=deadline_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise BenchFailed(f"thunderagent {arguments[0]} took more than {deadline_s:g} s") from None
    if done.returncode:
        raise BenchFailed(f"thunderagent {arguments[0]} ended with {done.returncode}:\n{done.stderr[-2000:]}")
