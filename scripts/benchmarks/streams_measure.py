"""The phases: connections that are held, lost and found again, agents that are ended, a server that flaps, units."""

from __future__ import annotations

import os
import random
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any, Final

from benchmarks.places import Place
from benchmarks.processes import BenchFailed
from benchmarks.streams_children import Child, Children, children, raise_open_files
from benchmarks.streams_figures import HOLDING, Figures, Flap, Holding, Plan, Side, Takeover, Units, Variation
from benchmarks.streams_jobs import BEAT_S, LEASE_S, Nothing, Source, follow, timer
from benchmarks.streams_probe import MODES
from benchmarks.streams_units import stream_units
from thunderagent.client import Client
from thunderagent.model.task import Status
from thunderagent.settings import load_settings
from thunderagent.stores.opening import open_store

BATCH: Final = 20
SIZE: Final = 200
NAIVE_FLAP_S: Final = 2.0
NAIVE_RECONNECT_S: Final = 60.0

Progress = Callable[[str], None]


class Stage:
    """A store, a feed and agents for one part of the run."""

    def __init__(self, place: Place, started: Children, number: int, *, tls: bool) -> None:
        self.feed = started.start("benchmarks.streams_feed", {"tls": tls})
        self.url: str = self.feed.hello["url"]
        self.queue = f"{place.queue}-{number}"
        self._place = place
        self.started = started
        self._store = place.fresh()
        self._environment = {"SSL_CERT_FILE": str(_authorities(place.folder, self.feed))} if tls else {}
        settings = load_settings(store=self._store)
        self.client = Client(open_store(settings), settings)
        self.client.store.engine.check()
        self._agents: list[Child] = []

    def agent(self, **overrides: Any) -> Child:
        """A new agent, once it looks for streams."""
        wanted = {"store": self._store, "queues": {self.queue: 10}, **overrides}
        agent = self.started.start("benchmarks.streams_launcher", wanted, self._environment)
        self._agents.append(agent)
        agent.until("polling", lambda state: state["polled"] >= 2, 30.0)
        return agent

    def naive(self, loop: str) -> Child:
        """The naive loop, for the same server."""
        return self.started.start("benchmarks.streams_naive", {"loop": loop, "url": f"{self.url}/"}, self._environment)

    def enqueue(self, number: int, path: str = "") -> None:
        """So many streams."""
        payloads = (Source(url=f"{self.url}/{path}{index}") for index in range(number))
        for answer in self.client.enqueue_many(follow, payloads, queue=self.queue):
            if answer.error:
                raise answer.error

    def close(self) -> None:
        """Leave nothing in a store that is not ours."""
        for agent in self._agents:
            agent.end(politely=bool(self._place.given))
        if self._place.given:
            self._clean()
        self.client.close()

    def _clean(self) -> None:
        for status in (Status.PENDING, Status.RUNNING):
            for task in list(self.client.list(status=status, queue=self.queue, limit=None)):
                self.client.cancel(task.task_id)
        for status in (Status.SUCCESS, Status.FAILED, Status.DONE):
            self.client.purge(status, queue=self.queue)


def measure_streams(place: Place, plan: Plan, progress: Progress) -> Figures:
    """Everything that the plan asks for.

    Raises:
        BenchFailed: something did not come about in time; with the end of a log.
    """
    files = raise_open_files()
    largest = max(plan.connections)
    if plan.only & HOLDING and files < largest + 200:
        raise BenchFailed(f"{largest} connections need as many open files, and {files} are allowed: see ulimit -n")
    figures = Figures()
    number = 0

    @contextmanager
    def stage(tls: bool = False) -> Iterator[Stage]:
        nonlocal number
        number += 1
        folder = Path(place.folder) / f"stage-{number}"
        folder.mkdir()
        with children(folder) as started:
            made = Stage(place, started, number, tls=tls)
            try:
                yield made
            finally:
                made.close()

    if plan.only & HOLDING:
        for one in _variations(plan):
            progress(f"{one.name}: the agent")
            before = _load()
            with stage(one.tls) as made:
                holding = Holding(variation=one, load_before=before, ours=_hold(made, one, plan, progress))
            if plan.naive:
                progress(f"{one.name}: the naive loop")
                with stage(one.tls) as made:
                    holding.naive = _hold_naive(made, one, plan, progress)
            holding.load_after = _load()
            figures.holdings.append(holding)
    loop = plan.loops[0]
    if "takeover" in plan.only:
        for signal, rounds in (("SIGTERM", plan.rounds), ("SIGKILL", plan.kills)):
            if rounds:
                with stage() as made:
                    figures.takeovers.append(_take_over(made, signal, rounds, loop, plan, progress))
    if "flap" in plan.only:
        with stage() as made:
            figures.flap = _flap(made, loop, plan, progress)
    if "units" in plan.only:
        with stage() as made:
            figures.units = _units(made, loop, plan, progress)
    return figures


# Connections that are held


def _hold(stage: Stage, one: Variation, plan: Plan, progress: Progress) -> Side:
    agent = stage.agent(max_streams=max(700, one.connections + 1), event_loop=one.loop)
    limit_s = 60.0 + one.connections / 10
    if "reconnect" in plan.only:
        stage.client.enqueue(timer, Nothing(), queue=stage.queue)
        agent.until("ready with its timer", lambda state: bool(state["has_timer"]), 30.0)

    def open_more(number: int, all_of_them: int) -> float:
        began = time.monotonic()
        stage.enqueue(number)
        state = agent.until("all live", lambda state: bool(state["live"] >= all_of_them), limit_s)
        return float(state["last_live"]) - began

    side = _grow(agent, open_more, one, plan)
    if "cpu" in plan.only:
        _burn(agent, stage.feed, side, plan, MODES, progress)
    if "reconnect" in plan.only:
        progress("  all reconnect")
        at = _drop(agent, stage.feed)
        feed = stage.feed.until("all back", lambda state: bool(state["open"] > one.connections), limit_s)
        agent.until("all live again", lambda state: bool(state["live"] > one.connections), limit_s)
        time.sleep(min(BEAT_S + 1.0, plan.settle_s))  # a beat that is late now is seen late
        state = agent.ask("state")
        if state["failed"]:
            raise BenchFailed(f"{state['failed']} handlers of streams ended with an error:\n{agent.tail()}")
        _note_return(side, state, feed, at)
        side.live_s = state["last_live"] - at
        side.beat_late_s, side.leases_lost = max(0.0, state["beat_latest_s"]), state["lost"]
    return side


def _hold_naive(stage: Stage, one: Variation, plan: Plan, progress: Progress) -> Side:
    naive = stage.naive(one.loop)
    limit_s = 60.0 + one.connections / 10

    def open_more(number: int, all_of_them: int) -> float:
        began = time.monotonic()
        naive.ask("begin", number=number)
        state = naive.until("all live", lambda state: bool(state["live"] >= all_of_them), limit_s)
        return float(state["last_live"]) - began

    side = _grow(naive, open_more, one, plan)
    if "cpu" in plan.only:
        _burn(naive, stage.feed, side, plan, MODES[:2], progress)
    if "reconnect" in plan.only:
        progress("  all reconnect")
        at = _drop(naive, stage.feed)
        until = time.monotonic() + NAIVE_RECONNECT_S
        while True:  # that it does not come back is a result
            feed = stage.feed.ask("state")
            state = naive.ask("state", deadline_s=NAIVE_RECONNECT_S)
            is_back = feed["open"] > one.connections and state["live"] > one.connections
            if is_back or time.monotonic() > until:
                break
            time.sleep(0.2)
        _note_return(side, state, feed, at)
        side.live_s = state["last_live"] - at if is_back else None
    return side


def _grow(child: Child, open_more: Callable[[int, int], float], one: Variation, plan: Plan) -> Side:
    """Open one connection, which brings in everything that is needed once, and then the others."""
    open_more(1, 1)
    time.sleep(min(2.0, plan.settle_s))
    before = child.ask("state")
    connect_s = open_more(one.connections, one.connections + 1)
    side = Side(connect_s=connect_s, base_mib=before["rss_kib"] / 1024)
    if "memory" in plan.only:
        time.sleep(plan.settle_s)
        side.connection_kib = (child.ask("state")["rss_kib"] - before["rss_kib"]) / one.connections
    return side


def _burn(child: Child, feed: Child, side: Side, plan: Plan, modes: tuple[str, ...], progress: Progress) -> None:
    """CPU while nothing comes but pongs, and while messages come."""
    progress(f"  idle for {plan.idle_s:g} s")
    before = child.ask("state")
    time.sleep(plan.idle_s)
    after = child.ask("state")
    side.idle_share = (after["cpu_s"] - before["cpu_s"]) / (after["now"] - before["now"])
    for mode in modes:
        progress(f"  messages for {plan.push_s:g} s, {mode}")
        child.ask("mode", mode=mode)
        before = child.ask("state")
        pushed = feed.ask(
            "push", seconds=plan.push_s, rate=plan.rate, batch=BATCH, size=SIZE, deadline_s=plan.push_s + 60.0
        )
        wanted = before["handled"] + pushed["sent"]
        after = child.until("all handled", lambda state, wanted=wanted: state["handled"] >= wanted, 60.0)  # type: ignore[misc]
        side.per_cpu_s[mode] = pushed["sent"] / max(1e-3, after["cpu_s"] - before["cpu_s"])
        side.held_back[mode] = pushed["held_back"] / max(1, pushed["sent"] + pushed["held_back"])
    child.ask("mode", mode="raw")


def _drop(child: Child, feed: Child) -> float:
    """Cut everything while the timer runs; the moment."""
    child.ask("watch")
    child.until("watching its loop", lambda state: state["ticks"] > 0, 30.0)
    child.ask("mark")
    return float(feed.ask("drop")["at"])


def _note_return(side: Side, state: dict[str, Any], feed: dict[str, Any], at: float) -> None:
    side.stall_s = state["latest_s"]
    side.live_after = state["live"]
    side.attempts_a_second, side.attempts = feed["peak_rate"], feed["attempts"]


# Agents that are ended


def _take_over(stage: Stage, signal: str, rounds: int, loop: str, plan: Plan, progress: Progress) -> Takeover:
    """End the agent that holds all streams while another one stands by; that one is ended next."""
    rng = random.Random(1)
    before = _load()
    overrides = {"event_loop": loop, "rebalance_streams": 0, "max_crashes": 1000}
    limit_s = LEASE_S + 30.0
    holder = stage.agent(**overrides)
    stage.enqueue(plan.streams, "greet/")
    holder.until("all live", lambda state: state["streams"] >= plan.streams, limit_s)
    times: list[float] = []
    for number in range(rounds):
        progress(f"takeover after {signal}: {number + 1} of {rounds}")
        standby = stage.agent(**overrides)
        time.sleep(rng.uniform(0.2, 1.2) if signal == "SIGTERM" else rng.uniform(0.2, BEAT_S))
        at = holder.terminate() if signal == "SIGTERM" else holder.kill()
        standby.until("holding all streams", lambda state: state["streams"] >= plan.streams, limit_s)
        taken = [moment - at for moment in standby.ask("first")["first"].values()]
        if min(taken) < 0:
            raise BenchFailed(f"the agent that stood by held a stream before the {signal}:\n{standby.tail()}")
        times += taken
        holder.end(politely=True)
        holder = standby
    return Takeover(
        signal=signal,
        rounds=rounds,
        streams=len(times),
        median_s=median(times),
        worst_s=max(times),
        load_before=before,
    )


# A server that flaps


def _flap(stage: Stage, loop: str, plan: Plan, progress: Progress) -> Flap:
    streams = min(plan.streams, 20)
    progress(f"a server that flaps, for {plan.flap_s:g} s")
    before = _load()
    agent = stage.agent(event_loop=loop)
    stage.enqueue(streams, "flap/")
    stage.feed.until("met by all streams", lambda state: state["paths"] >= streams, 60.0)
    time.sleep(plan.flap_s)
    flaps = stage.feed.ask("flaps", seconds=plan.flap_s)["numbers"]
    if agent.ask("state")["failed"]:
        raise BenchFailed(f"handlers of streams ended with an error:\n{agent.tail()}")
    flap = Flap(
        streams=streams,
        seconds=plan.flap_s,
        most=max(flaps),
        mean=sum(flaps) / len(flaps),
        load_before=before,
    )
    if plan.naive:
        agent.kill()
        progress(f"the naive loop and a server that flaps, for {NAIVE_FLAP_S:g} s")
        naive = stage.started.start("benchmarks.streams_naive", {"loop": loop, "url": f"{stage.url}/flap/"})
        stage.feed.ask("mark")
        naive.ask("begin", number=streams)
        time.sleep(NAIVE_FLAP_S + 0.5)
        naive.kill()
        numbers = stage.feed.ask("flaps", seconds=NAIVE_FLAP_S)["numbers"]
        flap.naive_a_minute = sum(numbers) / streams * 60.0 / NAIVE_FLAP_S
    return flap


# Units


def _units(stage: Stage, loop: str, plan: Plan, progress: Progress) -> Units:
    progress(f"units, and the heartbeats of {plan.streams} streams for {plan.idle_s:g} s")
    verbs, row_bytes = stream_units(stage.client, f"{stage.queue}-units")
    agent = stage.agent(event_loop=loop)
    stage.enqueue(plan.streams)
    agent.until("all live", lambda state: state["live"] >= plan.streams, 60.0)
    before = agent.ask("state")
    time.sleep(plan.idle_s)
    after = agent.ask("state")
    hours = (after["now"] - before["now"]) / 3600
    return Units(
        verbs=verbs,
        row_bytes=row_bytes,
        beats_an_hour=3600 / BEAT_S,
        beats_measured=(after["beats"] - before["beats"]) / plan.streams / hours,
    )


# Helpers


def _variations(plan: Plan) -> Iterator[Variation]:
    for connections in plan.connections:
        for tls in plan.tls:
            for loop in plan.loops:
                yield Variation(connections=connections, tls=tls, loop=loop)


def _authorities(folder: Path, feed: Child) -> Path:
    """The authorities of this machine and that of the feed, so that everybody uses what is the default."""
    paths = ssl.get_default_verify_paths()
    known = next((Path(one) for one in (paths.cafile, paths.openssl_cafile) if one and Path(one).is_file()), None)
    file = folder / "authorities.pem"
    file.write_text(
        (known.read_text(encoding="utf-8", errors="replace") if known else "") + feed.hello["authority"],
        encoding="utf-8",
    )
    return file


def _load() -> float:
    return round(os.getloadavg()[0], 2)
