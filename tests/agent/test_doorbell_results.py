"""The same tasks run once each with the same results, whatever the doorbell does."""

from __future__ import annotations

import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import pytest

from tests.support.engine import LONG_S, Recorder, settings
from tests.support.stands import eventually
from thunderagent.agent.loop import Agent
from thunderagent.client import Client
from thunderagent.jobs.context import Context, Snooze
from thunderagent.jobs.job import Job, job
from thunderagent.jobs.registry import Registry
from thunderagent.model import events
from thunderagent.model.bus import EventBus
from thunderagent.model.conditions import Write
from thunderagent.model.errors import DoorbellError
from thunderagent.model.task import Candidate, Status, Task
from thunderagent.queue.doorbell.memory import MemoryDoorbell, MemoryHub
from thunderagent.queue.doorbell.message import DoorbellMessage, Verb, pack
from thunderagent.queue.doorbell.port import Accepts
from thunderagent.stores.engine import Applied
from thunderagent.stores.sqlite.engine import SqliteEngine
from thunderagent.stores.tasks import TaskStore

pytestmark = pytest.mark.slow

AGENTS: Final = 2


class Audited(SqliteEngine):
    """Notes each claim that was won: when the task was due, and when it was claimed."""

    claims: list[tuple[str, float, float]]

    def apply(self, batch: Sequence[Write]) -> list[Applied]:
        answers = super().apply(batch)
        for write, answer in zip(batch, answers, strict=True):
            if write.verb == "claim" and answer.won and answer.row:
                self.claims.append((write.task_id, answer.row["createdAt"], self.clock.now()))
        return answers


class Bad(MemoryDoorbell):
    """A doorbell of which rings go wrong."""

    def __init__(self, hub: MemoryHub, tell: Callable[[Bad, Sequence[DoorbellMessage]], None]) -> None:
        super().__init__(hub)
        self._tell = tell
        self.rng = random.Random(3)

    def ring(self, rings: Sequence[DoorbellMessage]) -> None:
        self._tell(self, rings)

    def pass_on(self, rings: Sequence[DoorbellMessage]) -> None:
        super().ring(rings)


class Broken(Bad):
    """Half of the attempts to listen fail."""

    def listen(self, timeout_s: float, accepts: Accepts) -> list[DoorbellMessage]:
        if self.rng.random() < 0.5:
            raise DoorbellError("out of order")
        return super().listen(min(timeout_s, 0.05), accepts)


def good(bell: Bad, rings: Sequence[DoorbellMessage]) -> None:
    bell.pass_on(rings)


def half(bell: Bad, rings: Sequence[DoorbellMessage]) -> None:
    bell.pass_on([ring for ring in rings if bell.rng.random() < 0.5])


def doubled(bell: Bad, rings: Sequence[DoorbellMessage]) -> None:
    for _ in range(3):
        bell.pass_on([*rings, *rings])


def late(bell: Bad, rings: Sequence[DoorbellMessage]) -> None:
    timer = threading.Timer(bell.rng.uniform(0.0, 0.8), bell.pass_on, (rings,))
    timer.daemon = True
    timer.start()


def lost(bell: Bad, rings: Sequence[DoorbellMessage]) -> None:
    """None arrives."""


def forged(bell: Bad, rings: Sequence[DoorbellMessage]) -> None:
    """Each comes in many wrong forms, and the right one not at all."""
    for ring in rings:
        if ring.verb is Verb.TASK:
            values = replace(ring, job="work.plain"), replace(ring, job="nobody.has.it"), replace(ring, at=1.0)
            early = replace(ring, at=time.time() - 1.0)
            elsewhere = DoorbellMessage.task(Candidate(ring.task_id, "PENDING#other", ring.at, ring.job))
            invented = replace(ring, task_id="there-is-none")
            bell.pass_on([*values, early, elsewhere, invented, replace(ring, kind="stream"), replace(ring, at=9e9)])
        bell.pass_on(
            [
                DoorbellMessage.beat(ring.task_id or "x", "another-agent"),
                DoorbellMessage.look("nobody-serves-it"),
                DoorbellMessage.look("other"),
            ]
        )
        for garbage in ("", "{", "\x00" * 100, "x" * 100_000, json.dumps({"thunderagent": 1, "rings": [None]})):
            bell.hub.send(garbage)
        message = json.loads(pack([ring])[0])
        for name in list(message["rings"][0]):
            bell.hub.send(json.dumps({**message, "rings": [{**message["rings"][0], name: [1]}]}))


KINDS: Final[dict[str, Any]] = {
    "good": (Bad, good),
    "none": None,
    "failing half the time": (Broken, half),
    "doubled": (Bad, doubled),
    "late": (Bad, late),
    "lost": (Bad, lost),
    "forged": (Bad, forged),
}


@dataclass(slots=True)
class Ran:
    """What the handlers did."""

    ends: Counter[str] = field(default_factory=Counter)
    tries: Counter[str] = field(default_factory=Counter)
    guard: threading.Lock = field(default_factory=threading.Lock)

    def tried(self, task_id: str) -> int:
        with self.guard:
            self.tries[task_id] += 1
            return self.tries[task_id]

    def ended(self, task_id: str) -> None:
        with self.guard:
            self.ends[task_id] += 1


def make_jobs(ran: Ran) -> tuple[Job[Any], ...]:
    @job("work.plain")
    def plain(ctx: Context, payload: dict[str, Any]) -> str:
        ran.ended(ctx.task_id)
        return f"plain {payload['n']}"

    @job("work.other", queue="other")
    def other(ctx: Context, payload: dict[str, Any]) -> str:
        ran.ended(ctx.task_id)
        return f"other {payload['n']}"

    @job("work.fails", max_retry=5)
    def fails(ctx: Context, payload: dict[str, Any]) -> str:
        if ran.tried(ctx.task_id) < 3:
            raise OSError("not yet")
        ran.ended(ctx.task_id)
        return f"failed twice {payload['n']}"

    @job("work.snoozes")
    def snoozes(ctx: Context, payload: dict[str, Any]) -> str | Snooze:
        if ran.tried(ctx.task_id) < 2:
            return Snooze(0.2)
        ran.ended(ctx.task_id)
        return f"snoozed {payload['n']}"

    @job("work.hopeless", max_retry=0)
    def hopeless(ctx: Context, payload: dict[str, Any]) -> None:
        ran.ended(ctx.task_id)
        raise ValueError("never")

    @job("work.holds")
    def holds(ctx: Context, payload: dict[str, Any]) -> None:
        while True:
            ctx.check()
            time.sleep(0.01)

    return plain, other, fails, snoozes, hopeless, holds


def enqueue_all(client: Client) -> list[str]:
    """Many tasks of all kinds; some are cancelled, and some made by `enqueue_many`."""
    ids = []
    for n in range(12):
        parent = client.enqueue("work.plain", {"n": n}, task_id=f"plain-{n}")
        client.enqueue("work.other", {"n": n}, task_id=f"other-{n}", queue="other")
        client.enqueue("work.plain", {"n": n}, task_id=f"delayed-{n}", delay_s=0.1 * n)
        client.enqueue("work.fails", {"n": n}, task_id=f"fails-{n}", max_retry=5)
        client.enqueue("work.snoozes", {"n": n}, task_id=f"snoozes-{n}")
        client.enqueue("work.plain", {"n": n}, task_id=f"child-{n}", depends_on=[parent, f"delayed-{n}"])
        client.enqueue("work.plain", {"n": n}, task_id=f"far-{n}", delay_s=3600.0)
        client.enqueue("work.plain", {"n": n}, task_id=f"orphan-{n}", depends_on=[f"far-{n}"], on_parent_failure="run")
        kinds = ("plain", "other", "delayed", "fails", "snoozes", "child", "far", "orphan")
        ids += [f"{kind}-{n}" for kind in kinds]
    client.enqueue("work.hopeless", {}, task_id="hopeless", max_retry=0)
    client.enqueue("work.plain", {"n": 0}, task_id="doomed", depends_on=["hopeless"])
    client.enqueue("work.holds", {}, task_id="holds")
    many = client.enqueue_many("work.plain", [{"n": n} for n in range(60)], task_ids=[f"many-{n}" for n in range(60)])
    for n in range(12):
        client.cancel(f"far-{n}")
    eventually(lambda: client.get("holds").status is Status.RUNNING, LONG_S)
    client.cancel("holds")
    return [*ids, "hopeless", "doomed", "holds", *(one.task.task_id for one in many)]


@contextmanager
def fleet(folder: Path, kind: str, ran: Ran, records: list[Recorder], engines: list[Audited]) -> Iterator[Client]:
    """Agents in threads, each with a store of its own, and a client."""
    hub = MemoryHub()

    def bell() -> Any:
        if (found := KINDS[kind]) is None:
            return None
        make, tell = found
        return make(hub, tell)

    def store() -> TaskStore:
        engine = Audited(str(folder / "tasks.db"))
        engine.claims = []
        engines.append(engine)
        return TaskStore(engine)

    how = settings(
        poll_min_s=0.05, poll_max_s=0.4, poll_idle_s=0.4, lease_s=30.0, heartbeat_s=0.5, backoff_base_s=0.05, slots=4
    )
    agents, threads = [], []
    for number in range(AGENTS):
        bus = EventBus()
        records.append(Recorder(bus))
        rng = random.Random(number)
        jobs = Registry(*make_jobs(ran))
        agents.append(Agent(store(), jobs, how, bus=bus, doorbell=bell(), rng=rng, first_poll_s=0.0))
        threads.append(threading.Thread(target=agents[-1].run, daemon=True))
        threads[-1].start()
    for record in records:
        record.wait(events.AgentStarted)
    client = Client(store(), how, doorbell=bell())
    try:
        yield client
    finally:
        for agent in agents:
            agent.stop()
        for thread in threads:
            thread.join(LONG_S)
            assert not thread.is_alive()
        client.close()
        for engine in engines:
            engine.close()


def outcome(task: Task) -> tuple[str, Any, str | None]:
    return str(task.status), task.result, task.done_reason


def expected() -> dict[str, tuple[str, Any, str | None]]:
    ends: dict[str, tuple[str, Any, str | None]] = {}
    for n in range(12):
        ends |= {f"{kind}-{n}": ("SUCCESS", f"plain {n}", None) for kind in ("plain", "delayed", "child", "orphan")}
        ends[f"other-{n}"] = ("SUCCESS", f"other {n}", None)
        ends[f"fails-{n}"] = ("SUCCESS", f"failed twice {n}", None)
        ends[f"snoozes-{n}"] = ("SUCCESS", f"snoozed {n}", None)
        ends[f"far-{n}"] = ("DONE", None, "cancelled")
    ends |= {f"many-{n}": ("SUCCESS", f"plain {n}", None) for n in range(60)}
    ends |= {"hopeless": ("FAILED", None, None), "doomed": ("FAILED", None, None), "holds": ("DONE", None, "cancelled")}
    return ends


@pytest.mark.parametrize("kind", KINDS)
def test_whatever_the_doorbell_does_the_same_tasks_run_once_each_with_the_same_results(
    kind: str, tmp_path: Path
) -> None:
    ran, records, engines = Ran(), list[Recorder](), list[Audited]()
    with fleet(tmp_path, kind, ran, records, engines) as client:
        ids = enqueue_all(client)
        ends = {task_id: outcome(client.wait(task_id, timeout_s=LONG_S)) for task_id in ids}
        rows = client.store.get(ids)
    assert ends == expected()
    assert set(ran.ends.values()) == {1}
    assert set(ran.ends) == {name for name, (status, *_) in ends.items() if status == "SUCCESS"} | {"hopeless"}
    assert {name: number for name, number in ran.tries.items() if name.startswith("fails")} == {
        f"fails-{n}": 3 for n in range(12)
    }
    assert {task.fence for name, task in rows.items() if name.startswith(("plain", "other", "many", "child"))} == {1}
    claims = [claim for engine in engines for claim in engine.claims]
    assert len(claims) >= len(ran.ends)
    assert [claim for claim in claims if claim[2] < claim[1]] == [], "claimed before it was due"
    assert not any(record.of(events.SettleRefused) or record.of(events.LeaseLost) for record in records)
    assert not any(record.of(events.StoreFailed) for record in records)
