"""A fleet of agents, a store and the peers of some streams in one thread, and everything that can happen to them."""

from __future__ import annotations

import asyncio
import datetime
import json
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Final
from unittest.mock import patch

import schedule

from tests.simulation.stream_agents import SimProcess
from tests.simulation.stream_ledger import SETTLES, Ledger, Place, Watch, place_of
from tests.simulation.stream_network import HOST, Network, SimLoop, SimServer, Wire
from thunderagent.client import Client
from thunderagent.jobs.job import Job
from thunderagent.jobs.registry import Registry
from thunderagent.model.clock import HostClock
from thunderagent.model.conditions import Present, Write
from thunderagent.model.errors import (
    AccessDenied,
    StoreError,
    StoreUnavailable,
    StreamHandedOff,
    TaskUnreadable,
    ThunderAgentError,
)
from thunderagent.model.task import Row, Status, Task
from thunderagent.model.writes.agents import AGENT_STATUS
from thunderagent.settings import Settings
from thunderagent.stores.engine import KeptText
from thunderagent.stores.sqlite.engine import MEMORY, SqliteEngine
from thunderagent.stores.tasks import TaskStore
from thunderagent.streams.connection.connection import Connection
from thunderagent.streams.connection.options import StreamOptions
from thunderagent.streams.context import StreamContext
from thunderagent.streams.cursor import Cursor, Gap, GapAction
from thunderagent.streams.job import stream
from thunderagent.testing import FakeClock
from thunderagent.testing.chaos import Behaviour, Close, Feed
from thunderagent.testing.faulty_engine import ANY, Fault

LEASE_S: Final = 6.0
HEARTBEAT_S: Final = 2.0
HANDLER_TIMEOUT_S: Final = 8.0
SLOW_S: Final = 0.4
HOURS_S: Final = 7200.0
CLOSE_S: Final = 1.0
ENOUGH: Final = 50_000
"""Things that may happen at one moment before it is clear that something turns for ever."""

PAYLOADS: Final[dict[str, dict[str, Any]]] = {
    "plain": {"exclusive": True, "on_gap": "continue"},
    "asking": {"exclusive": True, "on_gap": "reconnect", "keys": ("mirror", "main")},
    "overlapping": {"exclusive": False, "on_gap": "continue", "keys": ("mirror", "main")},
    "reading": {"exclusive": False, "on_gap": "snapshot"},
}
"""The streams: by name whether two connections are fine, what is done about a gap, and the keys of their cursors.

Messages have the last key; the cursor of the other one is moved with it, and must be wherever that is.
"""

LARGE: Final = ("plain", "reading")
"""The streams whose payloads are kept in a bucket."""
TEXT_BYTES: Final = 500
"""Largest text in a row, instead of 350 KB."""

NEWER_WISH: Final = "PAUSED"
"""A value of `desiredState` that only newer versions know."""
NEWER: Final[dict[str, Any]] = {
    "kind": "oracle",
    "desiredState": NEWER_WISH,
    "handoffState": "HALF",
    "errors": "none",
    "lockTime": "soon",
}
"""What a newer version may write, by attribute."""
NEWER_AGENTS: Final[tuple[dict[str, Any], ...]] = (
    {"queues": "all"},
    {"queues": {}, "jobs": {"model.exclusive": 2}},
    {"queues": {}, "jobs": ["model.exclusive"], "streams": {"held": "few", "max": [9]}},
    {"queues": {}, "jobs": ["model.exclusive"], "streams": 3, "health": "fine", "region": 1},
)
"""What agents of a newer version may tell of themselves."""
LEFT_ALONE_S: Final = 10.0
"""How long a row is left alone that could not be read, instead of ten minutes."""

REFUSED: Final = (*SETTLES, "renew", "claim", "take over", "offer", "ready", "hand over", "end handoff", "journal")
"""Writes that the store may refuse for good."""

OPTIONS: Final = StreamOptions(
    open_timeout_s=2.0,
    subscribe_timeout_s=2.0,
    close_timeout_s=CLOSE_S,
    proxy=False,
    backoff_cap_s=4.0,
    stable_after_s=10.0,
    stable_after_messages=20,
    ping_interval_s=4.0,
    max_pending=8,
    handler_timeout_s=HANDLER_TIMEOUT_S,
)

SETTINGS: Final = Settings(
    store=f"sqlite://{MEMORY}",
    queues={"streams": 1},
    poll_min_s=60.0,
    poll_max_s=60.0,
    poll_idle_s=60.0,
    sweep_s=5.0,
    drain_s=9.0,
    stop_wait_s=20.0,
    rebalance_s=20.0,
    backoff_base_s=0.5,
    backoff_cap_s=3.0,
    max_retry=5,
    max_crashes=6,
)


class Boom(Exception):
    """A handler fails."""


@dataclass
class Follow:
    """The payload of a stream: its name, and what makes it large."""

    name: str
    notes: str = ""


class Bucket:
    """Texts that are kept apart from their rows, some of which cannot be read."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}
        self.faults: dict[str, StoreError] = {}
        """By stream: why its payload cannot be read."""

    def put(self, key: str, text: str) -> str:
        self._texts[key] = text
        return f"s3://model/{key}"

    def get(self, ref: str) -> KeptText:
        key = ref.removeprefix("s3://model/")
        if error := self.faults.get(key.partition("#")[0]):
            raise error
        return KeptText(self._texts[key])


class World:
    """Everything, and the clock. `pass_time` lets it live; faults are methods."""

    def __init__(self, seed: int, *, agents: int = 3, on_one_machine: bool = False, counts_sleep: bool = True) -> None:
        self.rng = random.Random(seed)
        self.clock = FakeClock()
        self.ledger = Ledger(self.clock)
        host = HostClock(self.clock.now, boot=self.clock.monotonic, boot_id="the machine")
        self.on_one_machine = on_one_machine
        self.counts_sleep = counts_sleep
        """Whether agents count on a clock that goes on while their machines sleep."""
        self.engine = SqliteEngine(MEMORY, clock=host if on_one_machine else self.clock)
        self.bucket = Bucket()
        self._ahead_s = 0.0
        self.watch = Watch(self.engine, self.ledger)
        self.watch.is_stream = PAYLOADS.__contains__
        self.watch.exclusive = self._is_exclusive
        self.watch.handler_timeout_s = HANDLER_TIMEOUT_S
        self.watch.lease_s, self.watch.newer_wish = LEASE_S, NEWER_WISH
        self.store = TaskStore(self.watch, blobs=self.bucket, monotonic=self.clock.monotonic)
        self.client = Client(self.store, SETTINGS)
        self.network = Network()
        self.network.connecting = self._connecting
        self.outside = SimLoop(self.clock, self.network, "peers")
        self.servers = {
            name: SimServer(self.network, self.outside, 7000 + number) for number, name in enumerate(PAYLOADS)
        }
        self.skipped: dict[str, set[int]] = {name: set() for name in PAYLOADS}
        self.wanted = dict.fromkeys(PAYLOADS, "started")
        self.jobs = {exclusive: self._job(exclusive) for exclusive in (True, False)}
        self.processes: list[SimProcess] = []
        self.names = 0
        self.once: set[tuple[str, Place]] = set()
        self._timers: list[tuple[float, Callable[[], object]]] = []
        self._wishes: dict[str, str | None] = {}
        """What was wanted of a stream before a newer version wanted something else, by stream."""
        self._patched = ExitStack()
        self._patched.enter_context(_schedule_by(self.clock))
        self._patched.enter_context(patch("thunderagent.model.rows.ALONE_S", LEFT_ALONE_S))
        self._patched.enter_context(patch("thunderagent.agent.sweep.UNREAD_S", LEFT_ALONE_S))
        self._patched.enter_context(patch("thunderagent.stores.large_texts.MAX_TEXT_BYTES", TEXT_BYTES))
        self._patched.enter_context(patch.object(SqliteEngine, "inline_bytes", TEXT_BYTES))
        for name in PAYLOADS:
            self.heal_peer(name)
            payload = Follow(name, "x" * 2 * TEXT_BYTES if name in LARGE else "")
            self.client.enqueue(self.jobs[self._is_exclusive(name)], payload, task_id=name)
        for _ in range(agents):
            self.join()

    # What the streams do

    def _job(self, exclusive: bool) -> Job[Follow]:
        @stream(
            f"model.{'exclusive' if exclusive else 'overlapping'}",
            lease_s=LEASE_S,
            heartbeat_s=HEARTBEAT_S,
            exclusive=exclusive,
        )
        async def follow(ctx: StreamContext, payload: Follow) -> None:
            process = self._process(ctx.lease.owner)

            def snapshot(_: Gap) -> Cursor:
                server = self.servers[payload.name]
                at = Cursor(server.last_seq, server.epoch)
                self.ledger.snapshot(process, ctx, place_of(at.to_map()) or (0, 0))
                return at

            feed = ctx.connect(
                f"ws://{HOST}:{self.servers[payload.name].port}/?stream={payload.name}",
                decode=json.loads,
                on_open=_subscribe,
                position=lambda message: Cursor(message["seq"], message["epoch"], key=_keys(payload.name)[-1]),
                on_gap=GapAction(PAYLOADS[payload.name]["on_gap"]),
                snapshot=snapshot,
                options=OPTIONS,
            )
            async for message in feed:
                await self._handle(process, ctx, message)

        return follow

    async def _handle(self, process: SimProcess, ctx: StreamContext, message: dict[str, Any]) -> None:
        place = place_of(message) or (0, 0)
        call = self.ledger.begin(process, ctx, place)
        well = False
        try:
            kind, name = message["data"], ctx.task_id
            if kind == "slow":
                await asyncio.sleep(SLOW_S)
            elif kind in ("hang", "boom") and (name, place) not in self.once:
                self.once.add((name, place))
                if kind == "boom":
                    raise Boom
                await asyncio.sleep(10 * HANDLER_TIMEOUT_S)
            for key in _keys(name):
                ctx.checkpoint(seq=message["seq"], epoch=message["epoch"], key=key)
            if message["seq"] % 3 == 0:  # a careless handler: what is behind is to be ignored
                ctx.checkpoint(seq=message["seq"] - 2, epoch=message["epoch"], key=key)
            well = True
        finally:
            if process.is_alive:
                self.ledger.end(call, well=well)

    def _is_exclusive(self, name: str) -> bool:
        return bool(PAYLOADS[name]["exclusive"])

    def _process(self, owner: str) -> SimProcess:
        return next(one for one in self.processes if one.agent.name == owner)

    def _connecting(self, wire: Wire) -> None:
        """Two connections of an exclusive stream are wrong, but for those of a process that cannot close them."""
        name = next(name for name, server in self.servers.items() if server.port == wire.port)
        if not self._is_exclusive(name):
            return
        for other in self.network.wires:
            if other.port == wire.port and other.is_open:
                holder = next(one for one in self.processes if one.loop is other.loop)
                if not holder.is_paused and holder.stood_at < self.clock.monotonic() - CLOSE_S - 1.0:
                    self.ledger.blame(f"two connections of {name}: {wire.loop.name} beside {other.loop.name}")

    # Time

    def pass_time(self, seconds: float) -> None:
        """Let so many seconds pass, and everything happen that is due in them."""
        until, count = self.clock.monotonic() + seconds, 0
        while True:
            now = self.clock.monotonic()
            due: list[Callable[[], object]] = [do for process in self.processes for do in process.due()]
            if self.outside.is_due():
                due.append(self.outside.step)
            if timers := [one for one in self._timers if one[0] <= now]:
                self._timers = [one for one in self._timers if one[0] > now]
                for _, do in timers:
                    do()
                continue
            if due:
                count += 1
                assert count < ENOUGH, "something turns for ever"
                self.rng.choice(due)()
                self._bury()
                continue
            at = min([self.outside.next_at, *(one.next_at for one in self.processes), *(at for at, _ in self._timers)])
            if at > until:
                self.clock.advance(max(0.0, until - now))
                break
            count = 0
            self.clock.advance(max(0.0, at - now) + 1e-6)
        self.check()

    def pass_time_until(self, predicate: Callable[[], bool], limit_s: float = 20.0) -> None:
        """Let time pass until this holds."""
        until = self.clock.monotonic() + limit_s
        while not predicate():
            assert self.clock.monotonic() < until, "it did not come about"
            self.pass_time(0.02)

    def check(self) -> None:
        """Every rule has held so far."""
        problems = [*self.ledger.violations, *map(repr, (one for s in self.servers.values() for one in s.failures))]
        problems += [text for one in self.processes for text in one.loop.problems if one.is_alive]
        assert not problems, "\n".join(problems[:5])

    def set_host_clock(self, seconds: float) -> None:
        """Set the clock of the one machine to so many seconds from the true time: leases do not count on it."""
        self.clock.jump(seconds - self._ahead_s)
        self._ahead_s = seconds

    def later(self, seconds: float, do: Callable[[], object]) -> None:
        """Do it after so many seconds."""
        self._timers.append((self.clock.monotonic() + seconds, do))

    def _bury(self) -> None:
        for process in self.processes:
            if process.is_alive and process.main.is_over:
                process.is_alive = False
                process.end()
                self.ledger.died(process)

    # Agents

    @property
    def living(self) -> list[SimProcess]:
        """Those whose process has not ended."""
        return [one for one in self.processes if not one.is_gone]

    def holder(self, name: str) -> SimProcess:
        """The process that has the lease of a stream."""
        owner = self.task(name).lease_owner
        return next(one for one in self.living if one.agent.name == owner)

    def connections(self, name: str) -> list[Wire]:
        """Those of agents to the peer of a stream that are open."""
        return [wire for wire in self.network.wires if wire.port == self.servers[name].port and wire.is_open]

    def waiting(self, name: str) -> bool:
        """True while a successor is connected and waits for its predecessor."""
        contexts = [one.agent._in_flight.held[name].context for one in self.living if name in one.agent._in_flight.held]
        return any(isinstance(one, StreamContext) and one.is_on_hold and one.is_connected for one in contexts)

    def join(self) -> SimProcess:
        """One more agent."""
        self.names += 1
        name = f"agent-{self.names}"
        loop = SimLoop(self.clock, self.network, name)
        process = SimProcess(
            name,
            clock=self.clock,
            watch=self.watch,
            loop=loop,
            jobs=Registry(*self.jobs.values()),
            settings=SETTINGS,
            seed=self.rng.randrange(1 << 30),
            blobs=self.bucket,
            counts_sleep=self.counts_sleep,
        )
        process.open_connections = lambda task: self.network.open_of(loop, self.servers[task].port)
        self.processes.append(process)
        return process

    def kill(self, process: SimProcess) -> None:
        """SIGKILL."""
        process.kill()
        self.ledger.died(process)

    def store_fault(self, process: SimProcess, kind: str, seconds: float) -> None:
        """Its way to the store is bad for a while."""
        store = process.store
        if kind == "slow":
            store.slow_s = 2.0
        elif kind == "no answer":
            store.outage()
        elif kind == "refused":
            for verb in REFUSED:
                store.chance(verb, Fault.REJECTED, 0.5)
        else:
            store.chance(ANY, Fault(kind), 0.6)
        self.later(seconds, lambda: self.calm_store(process))

    def calm_store(self, process: SimProcess) -> None:
        """It is good again."""
        process.store.calm()
        process.store.slow_s = 0.0

    def unreadable(self, name: str, seconds: float, *, for_good: bool) -> None:
        """The payload of a stream cannot be read for a while: nobody answers, or a permission is missing."""
        self.bucket.faults[name] = (AccessDenied if for_good else StoreUnavailable)("it cannot be read")
        self.later(seconds, lambda: self.bucket.faults.pop(name, None))

    def write_newer(self, status: str, attribute: str) -> None:
        """A newer version puts a stream that these agents cannot read, at the front of its lane."""
        now, name = self.engine.clock.now(), f"newer-{len(self.watch.newer)}"
        row: Row = {"taskId": name, "status": f"{status}#streams", "job": "model.exclusive", "kind": "stream"}
        row |= {"createdAt": now - 1e6, "submittedAt": now, "payload": "{}", "fence": 1, "maxRetry": 1}
        if status == Status.RUNNING:
            row |= {"lockTime": now - 1e6, "leaseOwner": "newer", "leaseSec": LEASE_S, "hb": 1}
        self.watch.put_newer({**row, attribute: NEWER[attribute]})

    def announce_newer(self, number: int) -> None:
        """An agent of a newer version tells of itself in other words."""
        now = self.engine.clock.now()
        row: Row = {"taskId": f"agent:newer-{number}", "status": AGENT_STATUS, "fence": 0, "info": NEWER_AGENTS[number]}
        self.watch.put_newer(row | {"createdAt": now, "updatedAt": now, "expireAt": now + 1e6})

    def wish_newer(self, name: str, seconds: float) -> None:
        """A newer version wants something of a stream that these agents do not know, for a while."""
        if name not in self._wishes:
            self._wishes[name] = self.engine.get([name])[name].get("desiredState")
            self._set_wish(name, NEWER_WISH)
            self.later(seconds, lambda: self._wish_as_before(name))

    def _wish_as_before(self, name: str) -> None:
        self._set_wish(name, self._wishes.pop(name))

    def _set_wish(self, name: str, wish: str | None) -> None:
        changes, remove = ({"desiredState": wish}, ()) if wish else ({}, ("desiredState",))
        self.engine.apply([Write(verb="newer", task_id=name, set=changes, remove=remove, require=(Present("taskId"),))])

    def hand_off(self, process: SimProcess, name: str) -> None:
        """The agent gives one of its streams to another, as it does when it has too many."""
        running = process.agent._in_flight.held.get(name)
        if running is not None and not process.main.in_store and not process.is_paused and not process.is_leaving:
            process.agent._in_flight.handoffs.leave([running], StreamHandedOff())

    # Peers

    def script(self, name: str, *behaviours: Behaviour) -> None:
        """What the next connections of a stream meet."""
        self.servers[name].script(*behaviours)

    def healthy(self, name: str, **spoiled: Any) -> Feed:
        """A feed that leaves out what is to be skipped."""
        return Feed(skip=self.skipped[name], **spoiled)

    def heal_peer(self, name: str) -> None:
        """Whoever connects from now on is served well."""
        self.servers[name].listen_again()
        self.script(name, self.healthy(name))

    def new_epoch(self, name: str) -> None:
        """The peer loses its history and counts afresh."""
        self.skipped[name].clear()
        self.servers[name].new_epoch()

    def skip(self, name: str, count: int) -> None:
        """The peer loses the next messages."""
        server = self.servers[name]
        self.skipped[name].update(range(server.last_seq + 1, server.last_seq + 1 + count))
        server.publish_many(count + 1)

    # The application

    def command(self, verb: str, name: str) -> None:
        """Stop, start or cancel a stream; it may not be allowed."""
        with suppress(ThunderAgentError):
            if verb == "start":
                self.client.streams.start(name, timeout_s=0.0)
                self.wanted[name] = "started"
            elif verb == "stop":
                self.client.streams.stop(name)
                self.wanted[name] = "stopped"
            else:
                self.client.cancel(name)
                self.wanted[name] = "cancelled"

    def told_to_stop(self, name: str) -> int | None:
        """Stop it; the fence of the one who has to do it, None if nobody is well enough to."""
        self.command("stop", name)
        return None if self.was_disturbed(name, 10.0) else self.task(name).fence

    def was_disturbed(self, name: str, seconds: float) -> bool:
        """True unless one agent holds the stream, calls no handler, and was well for so long."""
        try:
            task = self.task(name)
        except TaskUnreadable:
            return True
        holder = next((one for one in self.living if one.agent.name == task.lease_owner), None)
        if task.status is not Status.RUNNING or holder is None or holder.is_paused or holder.is_leaving:
            return True
        is_busy = any(call.task == name for call in self.ledger.open_calls)
        return is_busy or holder.disturbed_at > self.clock.monotonic() - seconds

    def task(self, name: str) -> Task:
        """The row of a stream."""
        return self.client.get(name)

    # The end

    def calm(self) -> None:
        """All faults end."""
        self._timers.clear()
        self.bucket.faults.clear()
        for name in list(self._wishes):
            self._wish_as_before(name)
        if self.on_one_machine:
            self.set_host_clock(HOURS_S)  # what is due by a clock that was ahead is due at last
        for name in PAYLOADS:
            self.heal_peer(name)
            self.servers[name].drop_all(Close(code=1001))
        for process in self.living:
            self.calm_store(process)
            process.store.sleeps.clear()
            now = self.clock.monotonic()  # what sleeps has put off all that it waits for: it sleeps to its end
            process.resumes_at = max(min(process.resumes_at, now), process.wakes_at)
            process.loop_resumes_at = min(process.loop_resumes_at, self.clock.monotonic())
        if not [one for one in self.living if not one.is_leaving]:
            self.join()

    def settle(self, limit_s: float = 120.0) -> dict[str, str]:
        """Without faults each stream comes to an end or handles what is new; by name what became of it."""
        probes: dict[str, Place] = {}
        found: dict[str, str] = {}
        for _ in range(int(limit_s / 2)):
            self.pass_time(2.0)
            for name, server in self.servers.items():
                task = self.task(name)
                if task.status is Status.DONE and task.done_reason in ("stopped", "cancelled"):
                    found[name] = str(task.done_reason)
                elif task.status is Status.FAILED and task.error:
                    found[name] = f"failed: {task.error}"
                elif self.wanted[name] != "started":
                    continue  # it is still to be stopped
                elif name not in probes and task.status is Status.RUNNING:
                    server.publish("probe")
                    probes[name] = place_of({"epoch": server.epoch, "seq": server.last_seq}) or (0, 0)
                elif name in probes and self.ledger.most.get(name, (0, 0)) >= probes[name]:
                    found[name] = "live"
            if len(found) == len(self.servers):
                return found
        left = {name: self.story(name) for name in self.servers if name not in found}
        raise AssertionError("these streams stopped without a word:\n" + "\n".join(left.values()))

    def story(self, name: str) -> str:
        """What is known of a stream."""
        task = self.task(name)
        held = {one.name: str(one.agent._in_flight.held.keys()) for one in self.living}
        moves = [f"{run.fence} {run.agent} {run.moves[-6:]}" for run in self.client.streams.runs(name, number=3)]
        return f"{name}: {task}\n held {held}\n" + "\n".join(moves)

    def check_journals(self) -> None:
        """What was missed is in the rows, for every run whose agent lived to write it."""
        for (name, fence), run in self.ledger.runs.items():
            if not run.gaps or not run.holder.is_alive or run.holder.disturbed_at > run.began:
                continue
            kept = [
                gap for one in self.client.streams.runs(name, number=1000) if one.fence == fence for gap in one.gaps
            ]
            assert {(gap.cause, str(gap.before)) for gap in run.gaps} <= {
                (gap.cause, str(gap.before)) for gap in kept
            }, f"gaps of {name} under fence {fence} are not in its journal"

    def check_newer(self) -> None:
        """What a newer version wrote is as it was; what can be claimed may have been let go."""
        for name, row in self.engine.get(list(self.watch.newer)).items():
            before = self.watch.newer[name]
            if before["status"] != "PENDING#streams":
                assert row == before, f"a row of a newer version was changed from {before} to {row}"
            else:
                assert [row.get(one) for one in NEWER if one in before] == [
                    before[one] for one in NEWER if one in before
                ]

    def close(self) -> None:
        """End everything that is left, without a look at what it does."""
        try:
            for process in self.living:
                self.kill(process)
            for loop in [*(one.loop for one in self.processes), self.outside]:
                self._end_loop(loop)
        finally:
            self._patched.close()
            self.engine.close()

    def _end_loop(self, loop: SimLoop) -> None:
        for _ in range(200):
            tasks = asyncio.all_tasks(loop)
            for task in tasks:
                task.cancel()
            for _ in range(20):
                if loop.is_due():
                    loop.step()
            if not tasks:
                break
            self.clock.advance(1.0)
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


async def _subscribe(connection: Connection, cursor: Cursor | None) -> None:
    since, epoch = (cursor.seq, cursor.epoch) if cursor is not None else (None, None)
    assert cursor is None or cursor.key != "mirror", "the last sequence that moved comes first"
    await connection.send_json({"op": "subscribe", "since": since, "epoch": epoch})
    await connection.expect(op="subscribed")


def _keys(name: str) -> tuple[str | None, ...]:
    keys: tuple[str | None, ...] = PAYLOADS[name].get("keys", (None,))
    return keys


@contextmanager
def _schedule_by(clock: FakeClock) -> Iterator[None]:
    """The library `schedule` reads this clock."""

    class Moment(datetime.datetime):
        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> Any:
            return datetime.datetime.fromtimestamp(clock.now(), tz)

    shim = SimpleNamespace(
        datetime=Moment, timedelta=datetime.timedelta, time=datetime.time, timezone=datetime.timezone
    )
    with patch.object(schedule, "datetime", shim):
        yield
