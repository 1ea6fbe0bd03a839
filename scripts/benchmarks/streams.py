"""Agents that hold WebSocket streams, beside the loop that everybody writes first, against a feed on this machine.

The phases: connections are held, idle and flooded, all are lost and found again; an agent with streams is ended while
another one stands by; a server closes what it has accepted.
"""

from __future__ import annotations

import math
import random
import signal
import ssl
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any, Final

from benchmarks import harness
from benchmarks.agent import BEAT_S, LEASE_S, Number, Source, follow, timer
from benchmarks.harness import BenchFailed, Child, Numbers, Place, Plan, Progress, Section
from benchmarks.measured import raise_open_files

PHASES: Final = ("memory", "cpu", "reconnect", "takeover", "flap")
HOLDING: Final = frozenset(PHASES[:3])
"""Phases that need many connections."""
MODES: Final[Mapping[str, str]] = {"raw": "not decoded", "json": "JSON decoded", "checkpoint": "JSON and checkpoint"}
BATCH: Final = 20
MESSAGE_BYTES: Final = 200
RATE: Final = 20_000.0
"""Messages a second in a flood, over all connections."""
NAIVE_FLAP_S: Final = 2.0
NAIVE_RETURN_S: Final = 60.0

MEMORY: Final = "memory, KiB a connection"
GOALS: Final[Mapping[str, tuple[float, float]]] = {
    MEMORY: (-math.inf, 20.0),
    # The rate of the governor, and those that had their turns already when the loop stood still: see `connect_rate`
    # and `connect_concurrency`.
    "all cut: most attempts in a second": (-math.inf, 40 + 16),
    "all cut: latest heartbeat, s late": (-math.inf, LEASE_S / 2),
    "all cut: leases lost": (0.0, 0.0),
    "SIGTERM to the next message: worst, s": (-math.inf, 4.0),
    "SIGKILL to the next message: worst, s": (-math.inf, LEASE_S + 5.0),
    "attempts a minute, most of all streams": (-math.inf, 12.0),
}


class Stage:
    """A store, a feed and agents for one part of the run."""

    def __init__(self, place: Place, start: harness.Start, *, tls: bool) -> None:
        self.feed = start("feed", {"tls": tls})
        self.url: str = self.feed.hello["url"]
        self.start = start
        self._store = place.fresh()
        self._environment = {"SSL_CERT_FILE": str(_authorities(place, self.feed))} if tls else {}
        self.client = harness.client_of(self._store)

    def agent(self, **overrides: Any) -> Child:
        """A new agent, once it looks for streams."""
        settings = {"store": self._store, **overrides}
        agent = self.start("agent", {"settings": settings}, self._environment)
        agent.ask("go")
        agent.until("polling", lambda state: bool(state["polled"]), 30.0)
        return agent

    def naive(self, loop: str, path: str = "") -> Child:
        """The naive loop, for the same server."""
        return self.start("naive", {"loop": loop, "url": f"{self.url}/{path}"}, self._environment)

    def enqueue(self, number: int, path: str = "") -> None:
        """So many streams."""
        payloads = (Source(url=f"{self.url}/{path}{index}") for index in range(number))
        for answer in self.client.enqueue_many(follow, payloads):
            if answer.error:
                raise answer.error


def measure_streams(place: Place, plan: Plan, progress: Progress) -> list[Section]:
    """All phases of the plan.

    Raises:
        BenchFailed: something did not come about in time; with the end of a log.
    """
    phases = frozenset(plan.phases or PHASES)
    files, largest = raise_open_files(), max(plan.connections)
    if phases & HOLDING and files < largest + 200:
        raise BenchFailed(f"{largest} connections need as many open files, and {files} are allowed: see ulimit -n")
    sections = []

    @contextmanager
    def stage(tls: bool = False) -> Iterator[Stage]:
        with harness.children(place.folder) as start:
            made = Stage(place, start, tls=tls)
            yield made
            made.client.close()

    if phases & HOLDING:
        for connections, tls, loop in product(plan.connections, plan.tls, plan.loops):
            title = f"{connections:,} connections, {'wss' if tls else 'ws'}, {loop}"
            before, sides = harness.load_now(), list[Numbers]()
            for naive in (False, True) if plan.naive else (False,):
                progress(f"{title}: the {'naive loop' if naive else 'agent'}")
                with stage(tls) as made:
                    sides.append(_hold(made, connections, loop, plan, phases, naive=naive))
            sides[0] |= {"load of the machine before": before, "load after": harness.load_now()}
            goals = {name: goal for name, goal in GOALS.items() if name != MEMORY or not tls}
            sections.append(harness.section(title, sides[0], sides[1] if plan.naive else None, goals))
    for end, rounds in ((signal.SIGTERM, plan.terms), (signal.SIGKILL, plan.kills)):
        if "takeover" in phases and rounds:
            progress(f"{end.name} {rounds} times")
            with stage() as made:
                ours = _take_over(made, end, rounds, plan)
            title = f"an agent with {plan.streams} streams is ended while another one stands by, {rounds} rounds"
            sections.append(harness.section(title, ours, goals=GOALS))
    if "flap" in phases:
        progress(f"a server that flaps, for {plan.flap_s:g} s")
        with stage() as made:
            sections.append(harness.section("a server that closes what it has accepted", *_flap(made, plan), GOALS))
    return sections


# Connections that are held


def _hold(stage: Stage, connections: int, loop: str, plan: Plan, phases: frozenset[str], *, naive: bool) -> Numbers:
    limit_s = 60.0 + connections / 10
    holder = stage.naive(loop) if naive else stage.agent(max_streams=max(700, connections + 1), event_loop=loop)
    if "reconnect" in phases and not naive:
        stage.client.enqueue(timer, Number())
        holder.until("ready with its timer", lambda state: bool(state["has_timer"]), 30.0)

    def open_more(number: int, all_of_them: int) -> float:
        began = time.monotonic()
        if naive:
            holder.ask("begin", number=number)
        else:
            stage.enqueue(number)
        state = holder.until("live with all streams", lambda state: bool(state["live"] >= all_of_them), limit_s)
        return float(state["last_live"]) - began

    open_more(1, 1)  # brings in everything that is needed once
    time.sleep(min(2.0, plan.settle_s))
    before = holder.ask("state")["rss_kib"]
    numbers: Numbers = {"until all were live at first, s": open_more(connections, connections + 1)}
    if "memory" in phases:
        time.sleep(plan.settle_s)
        numbers[MEMORY] = (holder.ask("state")["rss_kib"] - before) / connections
        numbers["memory with one connection, MiB"] = before / 1024
    if "cpu" in phases:
        numbers |= _burn(holder, stage.feed, connections, plan, tuple(MODES)[: 2 if naive else 3])
    if "reconnect" in phases:
        numbers |= _lose_all(holder, stage.feed, connections, plan, naive=naive)
    return numbers


def _burn(child: Child, feed: Child, connections: int, plan: Plan, modes: tuple[str, ...]) -> Numbers:
    """CPU while nothing comes but pongs, and while messages come."""
    before = child.ask("state")
    time.sleep(plan.idle_s)
    after = child.ask("state")
    idle_s = after["now"] - before["now"]
    side: Numbers = {
        "CPU while idle, % of a core": 100 * (after["cpu_s"] - before["cpu_s"]) / idle_s,
        "heartbeats a stream and hour": (after["beats"] - before["beats"]) / connections * 3600 / idle_s or None,
    }
    for mode in modes:
        child.ask("mode", mode=mode)
        before = child.ask("state")
        pushed = feed.ask(
            "push", seconds=plan.push_s, rate=RATE, batch=BATCH, size=MESSAGE_BYTES, deadline_s=plan.push_s + 60.0
        )
        wanted = before["handled"] + pushed["sent"]
        after = child.until("done with all messages", lambda state, wanted=wanted: state["handled"] >= wanted, 60.0)  # type: ignore[misc]
        side[f"messages a CPU second, {MODES[mode]}"] = pushed["sent"] / max(1e-3, after["cpu_s"] - before["cpu_s"])
        side[f"messages held back, {MODES[mode]}, %"] = 100 * pushed["held_back"] / max(1, sum(pushed.values()))
    child.ask("mode", mode="raw")
    return side


def _lose_all(holder: Child, feed: Child, connections: int, plan: Plan, *, naive: bool) -> Numbers:
    """Cut everything while the timer runs, and wait until all are back."""
    holder.ask("watch")
    holder.until("watching its loop", lambda state: state["ticks"] > 0, 30.0)
    holder.ask("mark")
    at = float(feed.ask("drop")["at"])
    end = time.monotonic() + (NAIVE_RETURN_S if naive else 60.0 + connections / 10)
    while True:
        seen, state = feed.ask("state"), holder.ask("state", deadline_s=NAIVE_RETURN_S)
        is_back = seen["open"] > connections and state["live"] > connections
        if is_back or time.monotonic() > end:
            break
        time.sleep(harness.LOOK_S)
    if not naive:
        time.sleep(min(BEAT_S + 1.0, plan.settle_s))  # a beat that is late now is seen late
        state = holder.ask("state")
        if state["failed"] or not is_back:  # that a naive loop does not come back is a result
            raise holder.failure(f"has {state['live']} streams, and {state['failed']} ended with an error")
    numbers = {
        "all cut: longest stall of the loop, ms": 1000 * state["stall_s"],
        "all cut: until all were live again, s": state["last_live"] - at if is_back else None,
        "all cut: live in the end": state["live"],
        "all cut: most attempts in a second": seen["attempts_a_second"],
        "all cut: attempts": seen["attempts"],
    }
    if naive:
        return numbers
    return numbers | {
        "all cut: latest heartbeat, s late": max(0.0, state["beat_late_s"]),
        "all cut: leases lost": state["lost"],
    }


# Agents that are ended


def _take_over(stage: Stage, end: signal.Signals, rounds: int, plan: Plan) -> Numbers:
    """End the agent that holds all streams while another one stands by; that one is ended next."""
    rng, before = random.Random(1), harness.load_now()
    overrides = {"event_loop": plan.loops[0], "rebalance_streams": 0, "max_crashes": 1000}
    limit_s = LEASE_S + 30.0

    def holds_all(state: Mapping[str, Any]) -> bool:
        return bool(state["begun"] >= plan.streams)

    holder = stage.agent(**overrides)
    stage.enqueue(plan.streams, "greet/")
    holder.until("holding all streams", holds_all, limit_s)
    times: list[float] = []
    for _ in range(rounds):
        standby = stage.agent(**overrides)
        time.sleep(rng.uniform(1.0, 2.0 if end == signal.SIGTERM else 1.0 + BEAT_S))
        at = holder.signal(end)
        standby.until("holding all streams", holds_all, limit_s)
        taken = [moment - at for moment in standby.ask("first")["first"].values()]
        if min(taken) < 0:
            raise standby.failure(f"held a stream before the {end.name}")
        times += taken
        holder.end(politely=True)
        holder = standby
    return {
        f"{end.name} to the next message: median, s": median(times),
        f"{end.name} to the next message: worst, s": max(times),
        "load of the machine before": before,
    }


# A server that flaps


def _flap(stage: Stage, plan: Plan) -> tuple[Numbers, Numbers]:
    streams, loop = min(plan.streams, 20), plan.loops[0]

    def numbers(seconds: float) -> Numbers:
        attempts = stage.feed.ask("flaps", seconds=seconds)["numbers"]
        return {
            "attempts a minute, most of all streams": max(attempts) * 60.0 / seconds,
            "attempts a minute, mean": sum(attempts) / len(attempts) * 60.0 / seconds,
        }

    agent = stage.agent(event_loop=loop)
    stage.enqueue(streams, "flap/")
    stage.feed.until("met by all streams", lambda state: state["paths"] >= streams, 60.0)
    time.sleep(plan.flap_s)
    ours = numbers(plan.flap_s)
    if agent.ask("state")["failed"]:
        raise agent.failure("had streams that ended with an error")
    if not plan.naive:
        return ours, {}
    agent.signal(signal.SIGKILL)
    naive = stage.naive(loop, "flap/")
    stage.feed.ask("mark")
    naive.ask("begin", number=streams)
    time.sleep(NAIVE_FLAP_S + 0.5)
    naive.signal(signal.SIGKILL)
    return ours, numbers(NAIVE_FLAP_S)


def _authorities(place: Place, feed: Child) -> Path:
    """The authorities of this machine and that of the feed, so that all sides use what is the default."""
    paths = ssl.get_default_verify_paths()
    known = next((Path(one) for one in (paths.cafile, paths.openssl_cafile) if one and Path(one).is_file()), None)
    file = place.folder / "authorities.pem"
    file.write_text(
        (known.read_text(encoding="utf-8", errors="replace") if known else "") + feed.hello["authority"],
        encoding="utf-8",
    )
    return file
