"""Plays one soak: agents that are killed, a producer, an operator, a feed, and a verdict at the end."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from soaking.ledger import Asked, Ledger, Violation, judge, rows
from soaking.network import Network
from soaking.soakjobs import LARGE, LEDGER, LIMIT
from thunderagent import Client
from thunderagent.model.errors import NotAllowed, StoreError
from thunderagent.ops import local_engine as local
from thunderagent.stores import open_engine
from thunderagent.stores.dynamo.engine import DynamoEngine
from thunderagent.stores.dynamo.table import create_table
from thunderagent.testing.chaos import ChaosServer

SCRIPTS: Final = Path(__file__).resolve().parents[1]
LOOK_S: Final = 1.0
SAY_S: Final = 5.0
ROUND: Final = {"sqlite": 1000, "ministack": 100}
"""Tasks that the producer asks for at once."""
MOST_READY: Final = {"sqlite": 20_000, "ministack": 300}
"""Tasks that wait at most before it goes on. Each query of ministack looks at all of them."""
STREAMS: Final = 4
FEED_S: Final = 0.05
STOP_S: Final = 60.0
OTHER_QUEUE: Final = "purged"

MIX: Final[Mapping[str, int]] = {
    "soak.quick": 770,
    "soak.async": 50,
    "soak.retry": 50,
    "soak.large": 20,
    "soak.fails": 20,
    "soak.snooze": 20,
    "soak.limited": 20,
    "soak.slow": 10,
    "soak.isolated": 1,
}
"""Tasks of each job in a thousand; the rest are children, keys, cancelled ones and those that are purged."""

SETTINGS: Final[Mapping[str, object]] = {
    "LEASE_S": 5.0,
    "HEARTBEAT_S": 0.5,
    "SWEEP_S": 1.0,
    "CLOCK_GUARD_S": 0.5,
    "POLL_MIN_S": 0.05,
    "POLL_MAX_S": 0.3,
    "POLL_IDLE_S": 0.3,
    "BACKOFF_BASE_S": 0.1,
    "DRAIN_S": 5.0,
    "MAX_CRASHES": 20,
    "LOG_LEVEL": "WARNING",
}
"""Everything faster than in production; the proportions stay."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is played: `loss` is the share of requests that something happens to, on DynamoDB alone."""

    store: str
    tasks: int
    agents: int
    kill_every_s: float
    loss: float
    within_s: float
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The figures of a soak, and what broke a promise."""

    store: str
    figures: Mapping[str, Any]
    violations: list[Violation]


class SoakFailed(Exception):
    """There is no verdict, and why."""


@dataclass(slots=True)
class Load:
    """What was asked for so far; the producer and the operator write it."""

    asked: dict[str, Asked] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    is_done: bool = False


class Fleet:
    """Agents of one store, of which one is killed and started again whenever it is asked for."""

    def __init__(self, url: str, folder: Path, number: int, rng: random.Random) -> None:
        self._folder = folder
        self._rng = rng
        self._environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("THUNDERAGENT_")},
            **{f"THUNDERAGENT_{name}": str(value) for name, value in SETTINGS.items()},
            "THUNDERAGENT_STORE": url,
            "PYTHONPATH": str(SCRIPTS / "soaking"),
            LEDGER: str(folder / "ledger"),
        }
        self.killed: dict[int, float] = {}
        self._agents = [self._start() for _ in range(number)]

    def kill_one(self) -> None:
        """SIGKILL one, and start another in its place."""
        index = self._rng.randrange(len(self._agents))
        victim = self._agents[index]
        self._check(victim)
        victim.kill()
        victim.wait()
        self.killed[victim.pid] = time.monotonic()
        self._agents[index] = self._start()

    def stop(self, client: Client) -> list[int]:
        """SIGTERM all, once each has begun to serve; their exit codes."""
        until = time.monotonic() + STOP_S
        while not {agent.pid for agent in self._agents} <= {one.info["pid"] for one in client.agents.list()}:
            if time.monotonic() > until:
                raise SoakFailed(f"not every agent has begun within {STOP_S:g} s")
            time.sleep(LOOK_S / 10)
        for agent in self._agents:
            agent.terminate()
        return [agent.wait(STOP_S) for agent in self._agents]

    def close(self) -> None:
        """Whatever happened, they are gone afterwards."""
        for agent in self._agents:
            if agent.poll() is None:
                agent.kill()
            agent.wait()

    def _check(self, agent: subprocess.Popen[bytes]) -> None:
        if (code := agent.poll()) is not None:
            log = (self._folder / "agents.log").read_text(encoding="utf-8", errors="replace")[-3000:]
            raise SoakFailed(f"an agent ended by itself with {code}:\n{log}")

    def _start(self) -> subprocess.Popen[bytes]:
        with (self._folder / "agents.log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "thunderagent", "run", "soakjobs", "-q", "default:10", "-q", f"{OTHER_QUEUE}:4"],
                env=self._environment,
                cwd=self._folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )


def play(plan: Plan, folder: Path, say: Callable[[str], None]) -> Found:
    """Play a plan in an empty folder.

    Raises:
        SoakFailed: not all tasks have ended in time, or an agent ended by itself.
    """
    (folder / "ledger").mkdir(parents=True)
    with ExitStack() as stack:
        direct, url, network = stack.enter_context(_place(plan, folder))
        feed = stack.enter_context(_feed())
        fleet = Fleet(url, folder, plan.agents, random.Random(plan.seed))
        stack.callback(fleet.close)
        client = stack.enter_context(_client(direct))
        load, begun = Load(), time.monotonic()
        streams = [client.enqueue("soak.stream", {"url": feed}) for _ in range(STREAMS)]
        producer = threading.Thread(target=_produce, args=(plan, url, load), name="producer", daemon=True)
        producer.start()
        _see_through(plan, client, fleet, load, producer, begun, say)
        took_s = time.monotonic() - begun
        for stream in streams:
            client.streams.stop(stream)
            load.asked[stream.id] = Asked(job="soak.stream", end="DONE")
            client.wait(stream, timeout_s=STOP_S)
        codes = fleet.stop(client)
        ledger, table = Ledger.read(folder / "ledger", fleet.killed), rows(direct)
        for stream in streams:
            del load.asked[stream.id]
        violations = judge(load.asked, ledger, table, limit=LIMIT)
        violations += [Violation("an agent did not stop well", "", f"exit code {code}") for code in codes if code]
        size = sum(path.stat().st_size for path in folder.glob("tasks.db*"))
        figures = {
            "tasks acknowledged": len(load.asked),
            "seconds": round(took_s, 1),
            "tasks a second": round(len(load.asked) / took_s),
            "agents killed": len(fleet.killed),
            "runs": sum(map(len, ledger.runs.values())),
            "takeovers": sum(row.get("crashCount") or 0 for row in table.values()),
            "most of one task": max((row.get("crashCount") or 0 for row in table.values()), default=0),
            **dict(sorted(load.counts.items())),
            "purged": sum(one.purged and name not in table for name, one in load.asked.items()),
            "ticks": sum(name.startswith("soak.tick@") for name in table),
            "messages of streams": sum(len({seq for _, _, seq in one}) for one in ledger.messages.values()),
            "handled again": sum(len(one) - len({seq for _, _, seq in one}) for one in ledger.messages.values()),
            **({f"requests {fate}": number for fate, number in network.requests.items()} if network else {}),
            **({"MB of the file": round(size / 1e6, 1)} if size else {}),
        }
    return Found(store=plan.store, figures=figures, violations=violations)


def _see_through(
    plan: Plan,
    client: Client,
    fleet: Fleet,
    load: Load,
    producer: threading.Thread,
    begun: float,
    say: Callable[[str], None],
) -> None:
    """Kill agents and operate the queue until every task has ended."""
    kill_at, say_at = begun + plan.kill_every_s, begun
    while True:
        now = time.monotonic()
        if now - begun > plan.within_s:
            raise SoakFailed(f"not all tasks have ended within {plan.within_s:g} s; {_open(client, load)}")
        if not producer.is_alive() and not load.is_done:
            raise SoakFailed("the producer has failed: see the traceback above")
        if now >= kill_at:
            fleet.kill_one()
            kill_at = now + plan.kill_every_s
        _operate(client, load)
        if load.is_done and not (waiting := _open(client, load)):
            return
        if now >= say_at:
            left = f"{len(waiting)} left" if load.is_done else "still coming"
            say(f"{now - begun:5.0f} s  {len(load.asked):,} asked for, {left}, {len(fleet.killed)} agents killed")
            say_at = now + SAY_S
        time.sleep(min(LOOK_S, max(0.0, kill_at - time.monotonic())))


def _operate(client: Client, load: Load) -> None:
    """Retry by hand what has failed, and purge what has succeeded in its queue."""
    for task in client.list(status="FAILED", limit=200):
        if task.job == "soak.fails":
            with suppress(NotAllowed):
                client.retry(task)
                load.counts["retried by hand"] += 1
    client.purge("SUCCESS", queue=OTHER_QUEUE, older_than_s=1.0, limit=500)


def _open(client: Client, load: Load) -> set[str]:
    """The tasks that were asked for and have not ended."""
    waiting = {
        task.id for status in ("PENDING", "RUNNING", "BLOCKED") for task in client.list(status=status, limit=None)
    }
    failed = {task.id for task in client.list(status="FAILED", limit=None) if task.job == "soak.fails"}
    return (waiting | failed) & load.asked.keys()


def _produce(plan: Plan, url: str, load: Load) -> None:
    """Ask for tasks of all kinds in rounds. What is not acknowledged is not counted."""
    with _client(url) as client:
        while len(load.asked) < plan.tasks:
            share = min(ROUND[plan.store], plan.tasks - len(load.asked)) / 1000
            for job, number in MIX.items():
                _many(client, load, job, max(1, round(number * share)))
            _many(client, load, "soak.quick", max(1, round(20 * share)), queue=OTHER_QUEUE)
            for _ in range(max(1, round(10 * share))):
                with suppress(StoreError):
                    _few(client, load)
            while _is_ahead(client, MOST_READY[plan.store]):
                time.sleep(LOOK_S)
    load.is_done = True


def _is_ahead(client: Client, most: int) -> bool:
    try:
        return sum(one.ready for one in client.stats()) > most
    except StoreError:  # an answer that is lost is asked for again
        return True


def _many(client: Client, load: Load, job: str, number: int, *, queue: str | None = None) -> None:
    payload = {"text": LARGE} if job == "soak.large" else {}
    asked = Asked(job=job, purged=queue is not None, revived=job == "soak.fails")
    for one in client.enqueue_many(job, [payload] * number, queue=queue):
        if one.error is None:
            load.asked[one.task.id] = asked
        else:
            load.counts["not acknowledged"] += 1


def _few(client: Client, load: Load) -> None:
    """A parent with a child, a key that is asked for twice, and one that is cancelled before it is due."""
    parent = client.enqueue("soak.quick", {})
    load.asked[parent.id] = Asked(job="soak.quick")
    child = client.enqueue("soak.child", {}, depends_on=[parent])
    load.asked[child.id] = Asked(job="soak.child", parents=(parent.id,))
    key = f"key-{len(load.asked) % 7}"
    for _ in range(2):
        one = client.enqueue("soak.unique", {}, unique_key=key)
        load.asked[one.id] = Asked(job="soak.unique", key=key)
    later = client.enqueue("soak.quick", {}, delay_s=3600.0)
    load.asked[later.id] = Asked(job="soak.quick", end="DONE")
    while True:  # an answer that is lost is asked for again, as a caller does
        with suppress(StoreError):
            client.cancel(later)
            break
    load.counts["cancelled"] += 1


@contextmanager
def _client(url: str) -> Iterator[Client]:
    client = Client.from_settings(store=url)
    try:
        yield client
    finally:
        client.close()


@contextmanager
def _place(plan: Plan, folder: Path) -> Iterator[tuple[str, str, Network | None]]:
    """The store itself, the way to it for agents and the producer, and the network between."""
    if plan.store == "sqlite":
        url = f"sqlite:///{folder}/tasks.db"
        yield url, url, None
        return
    home = folder / "ministack"
    # The package's own tools and boto3 here ask for some credentials.
    os.environ.setdefault("AWS_ACCESS_KEY_ID", "local")
    os.environ.setdefault("AWS_SECRET_ACCESS_KEY", "local")
    endpoint = local.start(home).endpoint
    network = Network(endpoint, plan.loss, plan.seed)
    try:
        direct, behind = (f"dynamodb://Soak?region=us-east-1&endpoint={one}" for one in (endpoint, network.endpoint))
        engine = open_engine(direct)
        assert isinstance(engine, DynamoEngine)
        create_table(engine)
        engine.close()
        yield direct, behind, network
    finally:
        network.close()
        local.stop(home)


@contextmanager
def _feed() -> Iterator[str]:
    """A feed of numbers in a thread of its own; the answer is its address."""
    ready, stop, urls = threading.Event(), threading.Event(), list[str]()

    async def serve() -> None:
        async with ChaosServer(per_key=True, from_start=True) as server:
            urls.append(server.url)
            ready.set()
            while not stop.is_set():
                server.publish_many(1)
                await asyncio.sleep(FEED_S)

    thread = threading.Thread(target=lambda: asyncio.run(serve()), name="feed", daemon=True)
    thread.start()
    if not ready.wait(STOP_S):
        raise SoakFailed("the feed did not start")
    try:
        yield urls[0]
    finally:
        stop.set()
        thread.join(STOP_S)
