"""What the tests of the engine have in common: time set by hand, events that are awaited, an agent in a thread."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final, TypeVar

from thunderagent.agent.core import Core, Inbox, StopRequests
from thunderagent.agent.loop import Agent
from thunderagent.agent.settle import Policy
from thunderagent.client import Client
from thunderagent.jobs.context import Context
from thunderagent.jobs.job import Job, job
from thunderagent.jobs.registry import Registry
from thunderagent.jobs.running import Running, Scope, no_scope
from thunderagent.model.bus import Event, EventBus
from thunderagent.model.conditions import Write
from thunderagent.model.errors import StoreRejected
from thunderagent.model.pacing import Backoff
from thunderagent.model.task import Candidate, Lease, Status, Task
from thunderagent.regions.gate import Gate
from thunderagent.settings import LEASE_MARGIN, Settings
from thunderagent.stores.engine import Applied, Engine
from thunderagent.stores.sqlite.engine import MEMORY
from thunderagent.stores.tasks import TaskStore, Wanted
from thunderagent.testing import memory_store
from thunderagent.testing.faulty_engine import FaultyEngine

LONG_S: Final = 30.0
"""No wait of a test is longer; none takes more than a fraction of it on a machine that is not overloaded."""

EPOCH: Final = 1_800_000_000.0

E = TypeVar("E", bound=Event)


class Recorder:
    """Keeps every event of a bus and lets a test wait for one."""

    def __init__(self, bus: EventBus) -> None:
        self.events: list[Event] = []
        self._changed = threading.Condition()
        bus.subscribe(self._listen)

    def _listen(self, event: Event) -> None:
        with self._changed:
            self.events.append(event)
            self._changed.notify_all()

    def of(self, kind: type[E]) -> list[E]:
        """The events of a kind so far."""
        return [event for event in list(self.events) if isinstance(event, kind)]

    def wait(self, kind: type[E], number: int = 1, *, where: Callable[[E], bool] = lambda _: True) -> list[E]:
        """The first `number` events of a kind, once they have come."""

        def found() -> list[E]:
            return [event for event in self.events if isinstance(event, kind) and where(event)]

        with self._changed:
            assert self._changed.wait_for(lambda: len(found()) >= number, LONG_S), (
                f"{number} {kind.__name__} did not come, only:\n" + "\n".join(map(repr, self.events[-20:]))
            )
            return found()[:number]


def plain(ctx: Context, payload: dict[str, Any]) -> None:
    """A handler that does nothing."""


def a_job(name: str = "test.job", **options: Any) -> Job[dict[str, Any]]:
    """A job that does nothing."""
    return job(name, **options)(plain)


def put(store: TaskStore, name: str = "a", **changes: Any) -> Task:
    """Put a task that is due now."""
    now = store.clock.now()
    values: dict[str, Any] = {
        "task_id": name,
        "status": Status.PENDING,
        "created_at": now,
        "submitted_at": now,
        "job": "test.job",
        "payload_text": "{}",
    }
    [answer] = store.enqueue([Task(**{**values, **changes})])
    assert answer.error is None
    return answer.task


def seen(task: Task) -> Candidate:
    """What a fresh index entry tells of a task."""
    return Candidate(task.task_id, task.status_value, task.created_at, task.job_value, task.kind)


def claimed(store: TaskStore, name: str = "a", *, owner: str = "me", lease_s: float = 300.0, **changes: Any) -> Lease:
    """The lease of a new task."""
    [lease] = store.claim([Wanted(seen(put(store, name, **changes)), lease_s)], owner=owner)
    return lease


def a_lease(**changes: Any) -> Lease:
    """A lease of a task that no store knows."""
    task = Task(
        task_id="a",
        status=Status.RUNNING,
        created_at=EPOCH,
        submitted_at=EPOCH,
        job="test.job",
        payload_text="{}",
        fence=1,
        lock_time=EPOCH + 300,
        lease_owner="me",
        lease_sec=300.0,
        hb=0,
        last_agent="me",
    )
    return Lease(task=replace(task, **changes), owner="me", fence=1, lease_s=300.0, held_from=1000.0)


def running(lease: Lease, one: Job[Any] | None = None, *, beat_s: float = 60.0, started: float = 1000.0) -> Running:
    """A task in a slot."""
    return Running(lease, one or a_job(), Context(lease), LEASE_MARGIN, beat_s, started=started)


POLICY: Final = Policy(backoff=Backoff(), max_retry=3, keep_success_s=14 * 86400.0, keep_failed_s=90 * 86400.0)


def settings(**changes: Any) -> Settings:
    """Settings with which nothing makes a test wait."""
    values: dict[str, Any] = {
        "store": f"sqlite://{MEMORY}",
        "lease_s": 6.0,
        "heartbeat_s": 0.2,
        "poll_min_s": 0.01,
        "poll_max_s": 0.05,
        "poll_idle_s": 0.05,
        "backoff_base_s": 0.01,
        "backoff_cap_s": 0.05,
        "sweep_s": 0.2,
        "drain_s": 10.0,
    }
    return Settings(**{**values, **changes})


def a_core(
    store: TaskStore | None = None,
    *jobs: Job[Any],
    name: str = "me",
    bus: EventBus | None = None,
    gate: Gate | None = None,
    seed: int = 1,
    **changes: Any,
) -> Core:
    """What the parts of an agent share."""
    bus, inbox = bus or EventBus(), Inbox()
    return Core(
        name=name,
        store=store or memory_store(),
        jobs=Registry(*jobs),
        settings=settings(**changes),
        bus=bus,
        rng=random.Random(seed),
        gate=gate or Gate(),
        inbox=inbox,
        stop=StopRequests(bus, inbox.wake),
    )


class Writing(FaultyEngine):
    """Knows what was written to rows that were there."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.verbs: list[str] = []

    def apply(self, batch: Sequence[Write]) -> list[Applied]:
        self.verbs += [write.verb for write in batch]
        return super().apply(batch)


class Rejecting(FaultyEngine):
    """An engine that takes no write of which `never` says so, now or later."""

    def __init__(self, engine: Engine, never: Callable[[Write], bool]) -> None:
        super().__init__(engine)
        self.never = never
        self.rejected: list[tuple[str, str]] = []
        """Verb and row of each write that was not taken."""

    def apply(self, batch: Sequence[Write]) -> list[Applied]:
        taken = iter(super().apply([write for write in batch if not self.never(write)]))
        return [self._reject(write) if self.never(write) else next(taken) for write in batch]

    def _reject(self, write: Write) -> Applied:
        self.rejected.append((write.verb, write.task_id))
        return Applied(won=False, error=StoreRejected(f"{write.verb} of {write.task_id} is too large"))


class Stage:
    """An agent in a thread, a client of the same store, and what happened."""

    def __init__(
        self, jobs: tuple[Job[Any], ...], *, store: TaskStore | None = None, scope: Scope = no_scope, **changes: Any
    ) -> None:
        self.bus = EventBus()
        self.record = Recorder(self.bus)
        self.settings = settings(**changes)
        self.store = store or memory_store()
        self.agent = Agent(
            self.store,
            Registry(*jobs),
            self.settings,
            bus=self.bus,
            scope=scope,
            rng=random.Random(7),
            first_poll_s=0.0,
        )
        self.client = Client(self.store, self.settings, on_enqueue=self.agent.wake)
        self.stuck: int | None = None
        self._thread = threading.Thread(target=self._run, name="agent", daemon=True)

    def _run(self) -> None:
        self.stuck = self.agent.run()

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ask the agent to stop and wait for its end."""
        self.agent.stop()
        self.join()

    def join(self) -> None:
        self._thread.join(LONG_S)
        assert not self._thread.is_alive(), "the agent did not stop"

    def end_of(self, task: Task | str) -> Task:
        """The task when it has ended."""
        return self.client.wait(task, timeout_s=LONG_S)

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()


@contextmanager
def serving(
    *jobs: Job[Any], store: TaskStore | None = None, scope: Scope = no_scope, **changes: Any
) -> Iterator[Stage]:
    """An agent that serves these jobs, until the end of the block."""
    stage = Stage(jobs, store=store, scope=scope, **changes)
    stage.start()
    try:
        yield stage
    finally:
        if stage.is_running:
            stage.agent.stop()
            stage.stop()
        stage.store.engine.close()
