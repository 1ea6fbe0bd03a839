"""What telemetry costs an agent: CPU for each task, beside an agent that tells nothing.

Each run is a fresh `thunderagent run` on a fresh file with so many tasks of a job that does nothing. The kinds take
turns, and each run is compared with the silent one of its round, so that whatever else the machine does meets them all.
What an agent does before its first hundreds of tasks is left out.
"""

from __future__ import annotations

import re
import socket
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from benchmarks.fleet_figures import NOTHING, Cost, Kind, Plan
from benchmarks.fleet_jobs import EVERY, metered
from benchmarks.nojobs import Number
from benchmarks.places import HOST, Place
from benchmarks.processes import BenchFailed
from benchmarks.streams_children import Child, children
from thunderagent.client import Client
from thunderagent.settings import PREFIX, load_settings
from thunderagent.stores.opening import open_store
from thunderagent.telemetry.spans import is_installed

WARM_SHARE: Final = 0.15
"""Of the tasks, those that are not measured."""
SCRAPES: Final = 20
_TEXT: Final = {"log_level": "INFO", "log_json": "false"}
_JSON: Final = {"log_level": "INFO", "log_json": "true"}
_METRICS: Final = {"http_port": "PORT"}
_TRACES: Final = {"traces": "true"}


def kinds() -> list[Kind]:
    """What is compared, the silent agent first; metrics and spans only where their libraries are installed."""
    known = [
        Kind(name=NOTHING),
        Kind(name="text logs", settings=_TEXT),
        Kind(name="JSON logs", settings=_JSON),
    ]
    if find_spec("prometheus_client"):
        known.append(Kind(name="metrics", settings=_METRICS))
        known.append(Kind(name="metrics and text logs", settings=_METRICS | _TEXT, has_goal=True))
        known.append(Kind(name="metrics and JSON logs", settings=_METRICS | _JSON, has_goal=True))
    if is_installed():
        known.append(Kind(name="traces", settings=_TRACES))
        known.append(Kind(name="metrics, JSON logs and traces", settings=_METRICS | _JSON | _TRACES))
    return known


def measure_telemetry(place: Place, plan: Plan, progress: Callable[[str], None]) -> tuple[list[Cost], list[float]]:
    """The cost of each kind, and the CPU of each scrape of `/metrics` in milliseconds.

    Raises:
        BenchFailed: an agent did not come to its end in time, with the end of its log.
    """
    costs = {kind.name: Cost(name=kind.name, has_goal=kind.has_goal) for kind in kinds()}
    scrapes: list[float] = []
    with collector() as spans_to:
        for number in range(plan.rounds):
            order = kinds()
            order = order[number % len(order) :] + order[: number % len(order)]
            for kind in order:
                progress(f"round {number + 1} of {plan.rounds}: {kind.name}")
                used = _run(place, plan, kind, spans_to, scrapes if kind.settings == _METRICS else None)
                costs[kind.name].cpu_us.append(used * 1e6)
            silent = costs[NOTHING].cpu_us[-1]
            for cost in costs.values():
                cost.ratios.append(cost.cpu_us[-1] / silent)
    return list(costs.values()), scrapes


def _run(place: Place, plan: Plan, kind: Kind, spans_to: str, scrapes: list[float] | None) -> float:
    """Seconds of CPU for each task."""
    url = place.fresh()
    _fill(url, plan.tasks)
    folder = Path(place.folder) / f"telemetry-{time.monotonic_ns()}"
    folder.mkdir()
    port = _free_port() if "http_port" in kind.settings else 0
    given = {"log_level": "ERROR", **kind.settings, "store": url, "drain_s": "5"}
    given = {name: str(port) if value == "PORT" else value for name, value in given.items()}
    environment = {f"{PREFIX}{name.upper()}": value for name, value in given.items()}
    environment |= {"OTEL_EXPORTER_OTLP_ENDPOINT": spans_to, "OTEL_METRICS_EXPORTER": "none"}
    with children(folder) as started:
        agent = started.start("benchmarks.fleet_launcher", {}, environment)
        last = plan.tasks // EVERY * EVERY
        agent.until("done", lambda state: state["ran"] >= last, plan.deadline_s)
        readings: list[tuple[int, float]] = [(int(n), float(s)) for n, s in agent.ask("readings")["readings"]]
        if scrapes is not None:
            scrapes.append(_scrape(agent, port))
        agent.end(politely=True)
    first = next(reading for reading in readings if reading[0] >= plan.tasks * WARM_SHARE)
    if first == readings[-1]:
        raise BenchFailed(f"{plan.tasks} tasks are too few to measure")
    return (readings[-1][1] - first[1]) / (readings[-1][0] - first[0])


def _fill(url: str, tasks: int) -> None:
    settings = load_settings(store=url)
    client = Client(open_store(settings), settings)
    try:
        for answer in client.enqueue_many(metered, (Number(n=number) for number in range(tasks))):
            if answer.error:
                raise answer.error
    finally:
        client.close()


def _scrape(agent: Child, port: int) -> float:
    """Milliseconds of CPU that an agent takes to tell its metrics once."""
    before = agent.ask("cpu")["cpu_s"]
    for _ in range(SCRAPES):
        with urllib.request.urlopen(f"http://{HOST}:{port}/metrics", timeout=10.0) as reply:
            text = reply.read().decode()
        if not re.search(r"^\w+_claimed_total\S* \d", text, re.MULTILINE):
            raise BenchFailed(f"the agent does not tell its metrics:\n{text[:500]}")
    return float(agent.ask("cpu")["cpu_s"] - before) * 1000.0 / SCRAPES


@contextmanager
def collector() -> Iterator[str]:
    """Takes all spans and keeps none; yields where it is."""

    class Taker(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.send_response(200)
            self.send_header("Content-Type", "application/x-protobuf")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer((HOST, 0), Taker)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, name="collector", daemon=True)
    thread.start()
    try:
        yield f"http://{HOST}:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])
