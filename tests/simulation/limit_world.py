"""A fleet of agents with limited jobs, a store and callers in one thread, and everything that can happen to them.

The agents and the clients are the real ones; handlers are entries in a ledger, which knows at each moment how many
really run. Every call to the store is a place where another may go on first, and where a process may be killed.
"""

from __future__ import annotations

import datetime
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, Final, TypeVar
from unittest.mock import patch

import schedule

from tests.simulation.stream_agents import Killed, SimHeartbeat, Turn, named
from thunderagent.agent import assembly
from thunderagent.agent.loop import Agent
from thunderagent.client import Client
from thunderagent.jobs.context import Context, Fail, Snooze
from thunderagent.jobs.job import Job, Limit, job
from thunderagent.jobs.outcome import Outcome, Raised, Returned, Stopped
from thunderagent.jobs.registry import Registry
from thunderagent.jobs.running import Running
from thunderagent.model.clock import HostClock
from thunderagent.model.conditions import Write
from thunderagent.model.errors import AgentDraining, StoreError, StoreRejected, TaskStopped, ThunderAgentError
from thunderagent.model.rows import LEASE_ATTRIBUTES
from thunderagent.model.task import Page, Row, Status, Task
from thunderagent.model.writes.limits import WAITLIST_STATUS, holder, limit_id, release_permit, take_permit
from thunderagent.queue.limits.permits import holders_of, limit_of, number_of
from thunderagent.queue.limits.waitlist import keep_waitlist_open, waitlist_of
from thunderagent.settings import Settings
from thunderagent.stores.engine import Applied, Engine, KeptText
from thunderagent.stores.sqlite.engine import MEMORY, SqliteEngine
from thunderagent.stores.tasks import TaskStore
from thunderagent.testing import FakeClock
from thunderagent.testing.faulty_engine import ANY, Fault, FaultyEngine

T = TypeVar("T")

LEASE_S: Final = 12.0
GUARD_S: Final = 2.0
SWEEP_S: Final = 5.0
BOUND_S: Final = LEASE_S + GUARD_S + 4 * SWEEP_S + 3.0
"""How long a slot or a task may be stuck at worst: a lease, a sweep whose turn was taken by an agent that died, and two
for which a lost task is left to an agent that is idle, or whose share it was and that died too."""

LATENCY_S: Final = 0.003
OBEYS_S: Final = 0.05
"""How long a handler takes to end that was told to stop."""
WAKES_S: Final = 1.0 + OBEYS_S + 0.2
"""How long after a machine woke up its heartbeat may not have looked at its leases."""
LAG_S: Final = 1.5
"""How old the index may be."""
LOOK_S: Final = 0.7
ENOUGH: Final = 50_000
BOMB: Final = "bomb"
"""The ids of tasks begin so that kill their agent."""
FUSES_S: Final = (0.05, 0.5, 4.0, LEASE_S)
"""After how long, to choose from."""
NEWER: Final = "newer-"
"""The ids of tasks begin so that a newer version has put."""
LASTS_S: Final = 0.02
"""What runs side by side for so long is counted again."""
INLINE_BYTES: Final = 300
"""Longer texts are kept outside of their rows."""
A_PART: Final = 8
"""Entries that one sweep reads of a lane, instead of 10,000."""
LINES_A_PART: Final = 3
"""Limits whose lines one sweep looks at, instead of 10,000."""
PLACE: Final = ("status", "createdAt", "updatedAt", "startedAt", "fence", "lastAgent", *LEASE_ATTRIBUTES)
"""What agents may change of a task that they cannot read: they let it out of its line, or claim it in vain."""
SETTLING: Final = ("succeed", "retry", "snooze", "fail", "put back", "wait for permit")
REFUSED: Final = (
    *("claim", "take over", "give up", "renew", *SETTLING),
    *("take permit", "replace holders", "release permit"),
    *("open waitlist", "keep waitlist", "close waitlist", "join waitlist", "leave waitlist"),
)
"""The verbs that the store may not take, now or later."""

SETTINGS: Final = Settings(
    store=f"sqlite://{MEMORY}",
    queues={"default": 3},
    lease_s=LEASE_S,
    heartbeat_s=LEASE_S / 4,
    clock_guard_s=GUARD_S,
    sweep_s=SWEEP_S,
    poll_min_s=0.5,
    poll_max_s=2.0,
    poll_idle_s=2.0,
    drain_s=6.0,
    stop_wait_s=20.0,
    backoff_base_s=0.5,
    backoff_cap_s=3.0,
    max_retry=3,
    max_crashes=6,
)


def limited_jobs(number: int = 2) -> dict[str, Job[dict[str, Any]]]:
    """Jobs with limits of their own, with one that they share over two queues, and without any."""

    def handler(ctx: Context, payload: dict[str, Any]) -> None:
        """Never called: the world says when and how handlers end."""

    return {
        "own": job("own", limit=number)(handler),
        "left": job("left", limit=1, limit_key="shared")(handler),
        "right": job("right", limit=1, limit_key="shared", queue="reports")(handler),
        "free": job("free")(handler),
    }


class Way(FaultyEngine):
    """The store as one process reaches it: with faults of its own, an index that is late, and time for others."""

    def __init__(self, engine: Engine, owner: Any, rng: random.Random) -> None:
        super().__init__(engine, seed=rng.randrange(1 << 30))
        self._owner, self._dice = owner, rng
        self.stale = 0.0
        """Chance that a page of the index is one of a moment ago."""
        self.calls = 0
        self.shuffles = True
        self.at_call: Callable[[int, str], None] = lambda number, when: None
        """Told of each call by its number, before and after it is done."""
        self.sleeps: dict[str, float] = {}
        """How long the machine sleeps before, or after, the next call is carried out."""
        self.log: list[str] = []
        self._seen: dict[Any, list[tuple[float, Page]]] = {}

    @property
    def is_bad(self) -> bool:
        """True while requests may fail."""
        return bool(self._chances) or self._down.is_set()

    def apply(self, batch: Sequence[Write]) -> list[Applied]:
        self.log += [write.verb for write in batch]
        return self._on_the_way(partial(self._in_any_order, batch))

    def put(self, rows: Sequence[Row], *, fresh: bool = False) -> list[Applied]:
        return self._on_the_way(partial(super().put, rows, fresh=fresh))

    def get(self, task_ids: Sequence[str]) -> dict[str, Row]:
        return self._on_the_way(partial(super().get, task_ids))

    def page(self, status_value: str, **options: Any) -> Page:
        return self._on_the_way(partial(self._late, status_value, options))

    @property
    def inline_bytes(self) -> int:
        return INLINE_BYTES

    def put_texts(self, texts: Mapping[str, str], *, expire_at: float) -> None:
        kept = {key: KeptText(text, expire_at) for key, text in texts.items()}
        self._on_the_way(lambda: self._once("put_texts", lambda: self._owner.world.large_texts.update(kept)))

    def get_texts(self, keys: Sequence[str]) -> dict[str, KeptText]:
        return self._on_the_way(lambda: self._once("get_texts", lambda: self._owner.world.read_texts(keys)))

    def sibling(self) -> Way:
        return self

    def _in_any_order(self, batch: Sequence[Write]) -> list[Applied]:
        """The requests of one batch go side by side, as to DynamoDB."""
        never = self._owner.world.never
        order = [number for number, write in enumerate(batch) if (write.task_id, write.verb) not in never]
        if self.shuffles:
            self._dice.shuffle(order)
        answers = dict(zip(order, super().apply([batch[number] for number in order]), strict=True))
        refusal = Applied(won=False, error=StoreRejected("the row is too large"))
        return [answers.get(number, refusal) for number in range(len(batch))]

    def _late(self, status_value: str, options: dict[str, Any]) -> Page:
        now = self._owner.clock.monotonic()
        until = options.pop("until", None)
        key = status_value, repr(sorted(options.items()))
        seen = self._seen[key] = [one for one in self._seen.get(key, []) if one[0] >= now - LAG_S]
        page = super().page(status_value, until=until, **options)
        old = seen[0][1] if seen and self._dice.random() < self.stale else None
        seen.append((now, page))
        return page if old is None else old

    def _on_the_way(self, call: Callable[[], T]) -> T:
        turn: Turn | None = self._owner.current_turn()
        number, self.calls = self.calls, self.calls + 1
        if turn is not None:
            turn.wait(LATENCY_S * (0.5 + self._dice.random()))
            self._doze(turn, "before")
        self.at_call(number, "before")
        answer = call()
        self.at_call(number, "after")
        if turn is not None:
            self._doze(turn, "after")
            turn.wait(LATENCY_S * self._dice.random())
        return answer

    def _doze(self, turn: Turn, when: str) -> None:
        if seconds := self.sleeps.pop(when, 0.0):
            self._owner.sleep(seconds)
            turn.wait(0.0)


class Handlers:
    """In place of the executors: what runs is an entry in the world's ledger."""

    loop, is_dead = None, False

    def __init__(self, world: World, process: Process) -> None:
        self._world, self._process = world, process

    def start(self, running: Running) -> None:
        self._world.began(self._process, running)

    def open(self) -> None: ...

    def call(self, do: Callable[[], object]) -> None: ...

    def close(self) -> None: ...


class WorldAgent(Agent):
    """The agent, without threads."""

    def __init__(self, process: Process, *args: Any, **options: Any) -> None:
        self._process = process
        heartbeat = lambda *a, **o: SimHeartbeat(*a, rng=random.Random(process.seed), **o)  # noqa: E731
        handlers = lambda *a, **o: Handlers(process.world, process)  # noqa: E731
        with (
            patch.object(assembly, "Heartbeat", heartbeat),
            patch.object(assembly, "make_executors", handlers),
            named(process.name),
        ):
            super().__init__(*args, **options)
        self._receive = self._in_flight.gather
        self._in_flight.gather = self._gather  # type: ignore[method-assign]

    def _gather(self, pause: float) -> None:
        if pause > 0:
            self._process.main.wait(pause, lambda: not self._in_flight._inbox.queue.empty())
        self._in_flight._batch = 0  # no waiting for company: that would be real time
        self._receive(0.0)


class Caller:
    """A client that does one thing, and gives way at each call to the store."""

    def __init__(self, world: World, name: str, do: Callable[[Client], object]) -> None:
        self.world, self.clock, self.name = world, world.clock, name
        self.store = Way(world.engine, self, random.Random(world.rng.random()))
        client = Client(TaskStore(self.store, monotonic=self.clock.monotonic), SETTINGS)
        self.main = Turn(self.clock, name, lambda: self._do(client, do))
        self.is_alive = True

    def _do(self, client: Client, do: Callable[[Client], object]) -> None:
        try:
            do(client)
        except ThunderAgentError:
            self.world.seen["calls refused"] += 1

    def current_turn(self) -> Turn | None:
        return self.main if self.main.is_current else None

    @property
    def is_gone(self) -> bool:
        return not self.is_alive or self.main.is_over

    @property
    def next_at(self) -> float:
        return float("inf") if self.is_gone else self.main.next_at

    def due(self) -> list[Callable[[], None]]:
        return [self.main.take] if self.next_at <= self.clock.monotonic() else []

    def kill(self) -> None:
        self.is_alive = False
        self.main.kill()


class Process:
    """One agent."""

    def __init__(self, world: World, name: str, jobs: Registry, settings: Settings, seed: int) -> None:
        self.world, self.clock, self.name, self.seed = world, world.clock, name, seed
        self._slept_s = 0.0
        rng = random.Random(seed)
        self.store = Way(world.engine, self, rng)
        store = TaskStore(self.store, monotonic=self.monotonic)
        self.agent = WorldAgent(self, store, jobs, settings, rng=rng, first_poll_s=rng.uniform(0.0, 1.0))
        admission, rescuer = self.agent._in_flight.admission, self.agent._housekeeping._rescuer
        admission._sweep._most = 2  # instead of a thousand: a line has several parts
        if world.is_crowded:
            admission._sweep._most_waitlists = LINES_A_PART
            rescuer.lost.most = rescuer.lost._rounds._most = A_PART
        self.is_alive, self.is_leaving = True, False
        self.wakes_at = float("-inf")
        self.main = Turn(self.clock, f"{name} main", self.agent.run)
        self._beat = Turn(self.clock, f"{name} heartbeat", self._beats)

    def current_turn(self) -> Turn | None:
        return next((turn for turn in (self.main, self._beat) if turn.is_current), None)

    @property
    def is_gone(self) -> bool:
        return not self.is_alive or self.main.is_over

    def monotonic(self) -> float:
        """The clock by which it counts its leases."""
        return self.clock.monotonic() - (0.0 if self.world.counts_sleep else self._slept_s)

    @property
    def asleep_s(self) -> float:
        """Seconds until its machine wakes up; 0 or less: it is awake."""
        return self.wakes_at - self.clock.monotonic()

    @property
    def is_drowsy(self) -> bool:
        """True until its heartbeat must have looked at its leases after the machine woke up."""
        return self.asleep_s > -WAKES_S

    @property
    def next_at(self) -> float:
        at = float("inf") if self.is_gone else min(self.main.next_at, self._beat.next_at)
        return max(at, self.wakes_at)

    def due(self) -> list[Callable[[], None]]:
        now = self.clock.monotonic()
        if self.is_gone or self.asleep_s > 0:
            return []
        return [turn.take for turn in (self.main, self._beat) if turn.next_at <= now]

    def sleep(self, seconds: float) -> None:
        """Its machine is suspended: no thread does anything, and what each waits for comes later by so much."""
        before = max(self.wakes_at, self.clock.monotonic())
        self.wakes_at = max(before, self.clock.monotonic() + seconds)
        self._slept_s += self.wakes_at - before
        for turn in (self.main, self._beat):
            turn.put_off(self.wakes_at - before)

    def kill(self) -> None:
        """Nothing of it happens any more."""
        self.is_alive = False
        self.world.died(self)
        for turn in (self.main, self._beat):
            if not turn.is_over:
                turn.kill()

    def die(self) -> None:
        """In its own thread: the process is gone at this point of its code."""
        self.is_alive = False
        self.world.died(self)
        raise Killed

    def leave(self) -> None:
        """SIGTERM."""
        self.is_leaving = True
        self.agent.stop()

    def _beats(self) -> None:
        while True:
            self._beat.wait(1.0)
            self.agent._heartbeat.renew_due()
            self.agent._heartbeat.judge_all()


@dataclass(eq=False)
class Run:
    """A handler that runs."""

    process: Process
    running: Running
    key: str | None
    number: int


class World:
    """Everything, and the clock. `pass_time` lets it live; faults are methods."""

    def __init__(
        self,
        seed: int,
        *,
        wrap: Callable[[Engine], Engine] = lambda engine: engine,
        on_one_machine: bool = False,
        is_crowded: bool = False,
        counts_sleep: bool = True,
    ) -> None:
        """Make one.

        Args:
            seed: of everything that is random.
            wrap: what stands in front of the engine.
            on_one_machine: leases count on its boot clock, and its clock may be set.
            is_crowded: sweeps come to the end of what they read at once, as with more than 10,000 entries.
            counts_sleep: the clock by which agents count their leases goes on while their machine sleeps.
        """
        self.rng = random.Random(seed)
        self.is_crowded = is_crowded
        self.counts_sleep = counts_sleep
        self.never: set[tuple[str, str]] = set()
        """Tasks and verbs: such writes the store does not take, now or later."""
        self.large_texts: dict[str, KeptText] = {}
        self.unread: dict[str, StoreError | None] = {}
        """Why texts cannot be read now, by the ids of their tasks; None: they are gone."""
        self.clock = FakeClock()
        host = HostClock(self.clock.now, boot=self.clock.monotonic, boot_id="the machine")
        self._real = SqliteEngine(MEMORY, clock=host if on_one_machine else self.clock)
        self._eye = TaskStore(self._real, monotonic=self.clock.monotonic)
        self.engine = wrap(self._real)
        self.store = TaskStore(self.engine, monotonic=self.clock.monotonic)
        self.client = Client(self.store, SETTINGS)
        self.processes: list[Process] = []
        self.callers: list[Caller] = []
        self.runs: list[Run] = []
        self.problems: list[str] = []
        self.started: list[str] = []
        self.fences: set[tuple[str, int]] = set()
        self.seen: Counter[str] = Counter()
        self.ends: Callable[[Task], tuple[float, Outcome]] = self._random_end
        self.names = 0
        self.newer: dict[str, Row] = {}
        """Rows of newer versions, which stay as they are."""
        self.elsewhere: dict[str, str] = {}
        """The limits of which tasks of newer versions have a slot, by their ids."""
        self.elsewhere_s: Sequence[float] = (3.0, 3 * LEASE_S)
        """How long they have it, to choose from."""
        self.is_supervised = False
        """Agents that a bomb kills are started again."""
        self.fuses_s: Sequence[float] = FUSES_S
        self.beside: dict[tuple[str, int], int] = {}
        """How many other handlers ended with a run, when their agent was killed."""
        self._timers: list[tuple[float, Callable[[], object]]] = []
        self._stuck: dict[str, float] = {}
        self._patient_until = self._look_at = self._ahead_s = 0.0
        self._clocked = _schedule_by(self.clock)
        self._clocked.__enter__()

    # Handlers

    def began(self, process: Process, running: Running) -> None:
        """A handler starts: how many of its limit run now?"""
        task = running.lease.task
        limit = limit_of(task, running.job)
        mine = (task.task_id, running.lease.fence)
        if mine in self.fences:
            self.problems.append(f"{task.task_id} is run twice under one fence")
        if task.task_id.startswith(NEWER) or task.payload_error is not None:
            self.problems.append(f"{task.task_id} runs, which nobody here can read")
        self.fences.add(mine)
        run = Run(process, running, limit.key if limit else None, limit.number if limit else 0)
        self.runs.append(run)
        self.started.append(task.task_id)
        self.seen["runs"] += 1
        if limit:
            rivals = [one for one in self.runs if one.key == limit.key and (one is run or not one.process.is_drowsy)]
            beside = [one.running.lease.task_id for one in rivals]
            self.seen[f"begun {limit.key}"] += 1
            self.seen[f"at once {limit.key}"] = max(self.seen[f"at once {limit.key}"], len(beside))
            beside += [name for name, key in self.elsewhere.items() if key == limit.key]
            if len(beside) > limit.number:
                self.problems.append(f"{len(beside)} of {limit.number} run with the limit {limit.key}: {beside}")
        lasts_s, outcome = self.ends(task)
        self.later(lasts_s, lambda: self._end(run, outcome))
        running.context.when_stopped(lambda why: self.later(OBEYS_S, lambda: self._end(run, Stopped(why))))
        if task.task_id.startswith(BOMB):
            self.later(self.rng.choice(self.fuses_s), lambda: self._explode(run))

    def _explode(self, run: Run) -> None:
        """A handler kills its agent."""
        if run.process.asleep_s > 0:
            self.later(run.process.asleep_s + OBEYS_S, lambda: self._explode(run))
        elif run in self.runs and not run.process.is_gone:
            self.seen["explosions"] += 1
            run.process.kill()
            if self.is_supervised:
                self.later(1.0, lambda: self.join(*run.process.agent.jobs.by_value))

    def _end(self, run: Run, outcome: Outcome) -> None:
        if run.process.asleep_s > 0:
            self.later(run.process.asleep_s + OBEYS_S, lambda: self._end(run, outcome))
        elif run in self.runs:
            self.runs.remove(run)
            run.process.agent._in_flight._inbox.done(run.running, outcome)

    def died(self, process: Process) -> None:
        """Its handlers are gone with it."""
        gone = [one.running.lease for one in self.runs if one.process is process]
        self.beside |= {(lease.task_id, lease.fence): len(gone) - 1 for lease in gone}
        self.runs = [one for one in self.runs if one.process is not process]

    def _random_end(self, task: Task) -> tuple[float, Outcome]:
        lasts_s = self.rng.choice([0.01, 0.05, 0.3, 1.0, 3.0, 9.0, 20.0])
        outcomes: list[Outcome] = [*[Returned("done")] * 4, Returned("done " * INLINE_BYTES)]
        outcomes += [Raised("boom"), Raised("boom", fatal=True), Returned(Snooze(1.0)), Returned(Fail("no"))]
        return lasts_s, self.rng.choice(outcomes)

    # Agents and callers

    def join(self, *names: str, number: int = 2, **changes: Any) -> Process:
        """One more agent, with these jobs or all."""
        self.names += 1
        jobs = {name: one for name, one in limited_jobs(number).items() if not names or name in names}
        queues = dict.fromkeys((one.queue for one in jobs.values()), 3)
        settings = SETTINGS.model_copy(update={"queues": queues, **changes})
        seed = self.rng.randrange(1 << 30)
        self.processes.append(Process(self, f"agent-{self.names}", Registry(*jobs.values()), settings, seed))
        return self.processes[-1]

    @property
    def living(self) -> list[Process]:
        return [one for one in self.processes if not one.is_gone]

    def call(self, do: Callable[[Client], object]) -> Caller:
        """A client does something, while everything else goes on."""
        self.names += 1
        self.callers.append(Caller(self, f"caller-{self.names}", do))
        return self.callers[-1]

    def store_fault(self, process: Process, kind: str, seconds: float) -> None:
        """Its way to the store is bad for a while."""
        if not process.store.calls:
            return  # it has not begun
        if kind == "no answer":
            process.store.outage()
        elif kind == "late index":
            process.store.stale = 0.7
        else:
            process.store.chance(ANY, Fault(kind), 0.4)
        self.later(seconds, lambda: self.calm(process))

    def refuse(self, process: Process, verb: str, seconds: float) -> None:
        """The store does not take some of its writes with this verb, now or later."""
        if process.store.calls:
            process.store.chance(verb, Fault.REJECTED, 0.5)
            self.later(seconds, lambda: self.calm(process))

    def calm(self, process: Process) -> None:
        process.store.calm()
        process.store.stale = 0.0

    def hide_text(self, task_id: str, why: StoreError | None, seconds: float) -> None:
        """The payload of a task cannot be read for a while."""
        self.unread[task_id] = why
        self.later(seconds, lambda: self.unread.pop(task_id, None))

    def read_texts(self, keys: Sequence[str]) -> dict[str, KeptText]:
        """Texts by key. One that cannot be read now takes those along that are read in the same call.

        Raises:
            StoreError: of the first that cannot be read now.
        """
        tasks = {key: key.partition("#")[0] for key in keys}
        if error := next((why for name in tasks.values() if (why := self.unread.get(name)) is not None), None):
            raise error
        return {key: self.large_texts[key] for key, name in tasks.items() if name not in self.unread}

    # Time

    def expire_limits(self) -> None:
        """The rows of limits that nobody uses are deleted, as if they were overdue."""
        with self._real._transaction() as cursor:
            cursor.execute("""DELETE FROM tasks WHERE "taskId" LIKE 'limit:%' AND "expireAt" IS NOT NULL""")
            self.seen["expired"] += cursor.rowcount

    def newer_version_writes(self, status: str, key: str, odd: Mapping[str, Any]) -> None:
        """A row with a limit that no agent here can read; a running one has a slot if there is one, and runs on."""
        self.names += 1
        now = self.clock.now()
        row: Row = {"taskId": f"{NEWER}{self.names}", "status": status, "createdAt": now - 1, "submittedAt": now - 1}
        row |= {"job": "own", "kind": "batch", "payload": "{}", "fence": 1, "limitKey": key, "limitMax": 1, **odd}
        seen = self._real.get([limit_id(key)]).get(limit_id(key))
        limit = Limit(key, number_of((seen or {}).get("limitMax")) or 1)
        if waitlist_of(status) is not None:
            keep_waitlist_open(self.store, limit, seen)
        if status == "RUNNING":
            row |= {"lockTime": now - 999, "leaseOwner": "newer", "leaseSec": LEASE_S, "hb": 1}
            self._runs_elsewhere(row["taskId"], limit)
        assert self._real.put([row])[0].won
        self.newer |= self._real.get([row["taskId"]])
        self.seen["newer"] += 1

    def _runs_elsewhere(self, name: str, limit: Limit) -> None:
        """It has a slot until its agent gives that back."""
        member = holder(name, 1)
        [answer] = self._real.apply([take_permit(limit.key, member, number=limit.number, now=self.clock.now())])
        if answer.won:
            self.elsewhere[name] = limit.key
            self.seen["elsewhere"] += 1
            self.later(self.rng.choice(self.elsewhere_s), lambda: self._ends_elsewhere(name, member))

    def _ends_elsewhere(self, name: str, member: str) -> None:
        self._real.apply([release_permit(self.elsewhere.pop(name), member)])

    def step_clock(self, seconds: float) -> None:
        """Set the clock that all share: leases last longer on a clock that is set back."""
        self.clock.jump(seconds)
        self._patient_until = self.clock.monotonic() + BOUND_S + abs(seconds)

    def set_host_clock(self, seconds: float) -> None:
        """Set the clock of the one machine to so many seconds from the true time: leases do not count on it."""
        self.clock.jump(seconds - self._ahead_s)
        self._ahead_s = seconds

    def later(self, seconds: float, do: Callable[[], object]) -> None:
        self._timers.append((self.clock.monotonic() + seconds, do))

    def pass_time(self, seconds: float) -> None:
        """Let so many seconds pass, and everything happen that is due in them."""
        until, count = self.clock.monotonic() + seconds, 0
        while True:
            now = self.clock.monotonic()
            parts: list[Process | Caller] = [*self.living, *self.callers]
            due = [do for part in parts for do in part.due()]
            if timers := [one for one in self._timers if one[0] <= now]:
                self._timers = [one for one in self._timers if one[0] > now]
                for _, do in timers:
                    do()
                continue
            if due:
                count += 1
                assert count < ENOUGH, "something turns for ever"
                self.rng.choice(due)()
                self.callers = [one for one in self.callers if not one.is_gone]
                continue
            at = min([until + 1, *(one.next_at for one in parts), *(at for at, _ in self._timers)])
            if min(at, until) - now > LASTS_S:
                self._count()
            if at > until:
                self.clock.advance(max(0.0, until - now))
                break
            count = 0
            self.clock.advance(max(0.0, at - now) + 1e-6)
        self.check()

    def pass_time_until(self, predicate: Callable[[], bool], limit_s: float) -> float:
        """Let time pass until this holds; how long it took."""
        begun = self.clock.monotonic()
        while not predicate():
            assert self.clock.monotonic() < begun + limit_s, f"not within {limit_s:g} s:\n{self.picture()}"
            self.pass_time(0.5)
        return self.clock.monotonic() - begun

    def check(self) -> None:
        """Every rule has held so far; what takes long is looked at once in a while."""
        now = self.clock.monotonic()
        if now < self._look_at and not self.problems:
            return
        self._look_at = now + LOOK_S
        for text in (found := {*self._idle_slots(), *self._dead_slots()}):
            if now - self._stuck.setdefault(text, now) > BOUND_S and now > self._patient_until:
                self.problems.append(f"for more than {BOUND_S:g} s {text}")
        self._stuck = {text: at for text, at in self._stuck.items() if text in found}
        for row in self._rows():
            if "expireAt" in row and (holders_of(row) or row.get("status") == WAITLIST_STATUS):
                self.problems.append(f"{row['taskId']} expires and is in use")
        self.problems += self._blamed_in_company()
        now_there = self._real.get(list(self.newer))
        for name, row in self.newer.items():
            if _kept(now_there.get(name, {}), row) != _kept(row, row):
                self.problems.append(f"{name} was changed, which a newer version wrote")
        assert not self.problems, "\n".join(self.problems[:5]) + "\n" + self.picture()

    def _count(self) -> None:
        """What runs now side by side: a handler whose lease is over may have started before the others."""
        rivals: dict[str, list[Run]] = {}
        for one in self.runs:
            if one.key and not one.process.is_drowsy:
                rivals.setdefault(one.key, []).append(one)
        for key, runs in rivals.items():
            if len(runs) > (number := max(one.number for one in runs)):
                names = [one.running.lease.task_id for one in runs]
                self.problems.append(f"{len(runs)} of {number} go on with the limit {key}: {names}")

    def _blamed_in_company(self) -> Iterator[str]:
        """Tasks that were given up for agents that other tasks may have killed."""
        for task in self.tasks(Status.FAILED):
            is_taken = "the store does not take it" not in (task.error or "")  # else nobody is to blame
            is_given_up = is_taken and bool(task.errors) and task.errors[-1].get("beside") is not None
            beside = self.beside.get((task.task_id, task.fence), 0)
            if is_given_up and beside and task.crash_count <= SETTINGS.max_crashes * 5:
                yield f"{task.task_id} is given up, and {beside} others ended with it"

    def _rows(self) -> list[Row]:
        names = {one.key for one in self.runs if one.key} | {"own", "shared", "cust", "pair"}
        return list(self._real.get([f"limit:{name}" for name in sorted(names)]).values())

    def _dead_slots(self) -> Iterator[str]:
        """Slots of limits with an open line that no handler has which runs."""
        if not any(not one.is_leaving and not one.store.is_bad and not one.is_drowsy for one in self.living):
            return  # nobody is there who could look after them
        held = [*(one.running for one in self.runs), *self._waiting_for_texts()]
        live = {(one.lease.task_id, str(one.lease.fence)) for one in held} | {(name, "1") for name in self.elsewhere}
        for row in self._rows():
            for member in sorted(holders_of(row)) if row.get("status") == WAITLIST_STATUS else ():
                task_id, _, fence = member.rpartition("#")
                if (task_id, fence) not in live:
                    yield f"{member} has a slot of {row['taskId']} and does not run"

    def _waiting_for_texts(self) -> list[Running]:
        """Handlers that have ended with a result that could not be written so far: they keep their leases and slots."""
        return [
            one.running for process in self.living for one in process.agent._in_flight._backlog if one.wait is not None
        ]

    def _idle_slots(self) -> Iterator[str]:
        """Tasks that stand in line though fewer run than may, and an agent is there for them."""
        able = [one for one in self.living if not one.is_leaving and not one.is_drowsy]
        if any(one.store.is_bad for one in self.living):
            return
        taken = Counter([*(one.key for one in self.runs), *self.elsewhere.values()])
        taken += Counter(one.key for run in self._waiting_for_texts() if (one := limit_of(run.lease.task, run.job)))
        for task in self.tasks(Status.BLOCKED):
            key = waitlist_of(task.status_value)
            agents = [one for one in able if task.job in one.agent.jobs]
            if key is None or not agents or task.created_at > self.clock.now():
                continue
            limit = limit_of(task, agents[0].agent.jobs[task.job])
            if limit and taken[key] < min(limit.number, 2) and any(_has_room(one, task) for one in agents):
                begun = self.seen[f"begun {key}"]  # when one has started meanwhile it goes on
                yield f"{task.task_id} stands in the line of {key}, of which {taken[key]} run and {begun} have begun"

    # Looking

    def tasks(self, *statuses: Status) -> list[Task]:
        """All tasks that this version can read with one of these statuses, whatever the index may show to others."""
        with self._real._reading() as cursor:
            found = [str(one) for (one,) in cursor.execute('SELECT "taskId" FROM tasks WHERE "job" IS NOT NULL')]
        tasks = self._eye.peek(found).values()
        return [task for task in tasks if not statuses or task.status in statuses]

    @property
    def is_done(self) -> bool:
        return not self.callers and all(task.status.is_terminal for task in self.tasks())

    def picture(self) -> str:
        """Who does what now."""
        rows = [{name: row[name] for name in ("taskId", "status", "holders") if name in row} for row in self._rows()]
        held = [(one.process.name, one.running.lease.task_id, one.running.lease.fence) for one in self.runs]
        open_tasks = [(one.task_id, one.status_value, one.fence) for one in self.tasks() if not one.status.is_terminal]
        return f"rows {rows}\nruns {held}\nagents {[one.name for one in self.living]}\nopen {open_tasks[:20]}"

    def close(self) -> None:
        """The end of everything."""
        parts: list[Process | Caller] = [*self.living, *self.callers]
        for one in parts:
            one.kill()
        for process in self.processes:
            for turn in (process.main, process._beat):
                if not turn.is_over:
                    turn.kill()
        self._clocked.__exit__(None, None, None)
        self.engine.close()


def _kept(row: Row, before: Row) -> Row:
    """What stays of a row of a newer version: one that stands in a line goes by what the index tells of it."""
    may_go = PLACE if waitlist_of(before["status"]) is not None else ()
    return {name: value for name, value in row.items() if name not in may_go}


def _has_room(process: Process, task: Task) -> bool:
    poller = process.agent._pollers.get((task.queue, process.agent.jobs[task.job].kind))
    return poller is not None and poller.free > 0


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


__all__ = ["REFUSED", "AgentDraining", "Killed", "StoreError", "TaskStopped", "World", "limited_jobs"]
