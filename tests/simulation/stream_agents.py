"""Agents that are processes of the simulation: the real `Agent`, whose threads take turns and can stand still or die.

A `Turn` is a thread that runs only while it is told to: it gives its turn back whenever it waits, and before and after
each call to the store. So there is one order of everything, and whoever deals the turns decides it.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, Final, TypeVar
from unittest.mock import patch

from tests.simulation.stream_ledger import Holder, Watch
from tests.simulation.stream_network import SimLoop
from thunderagent.agent import assembly, executors
from thunderagent.agent.executors.loop import LoopExecutor
from thunderagent.agent.heartbeat import Heartbeat
from thunderagent.agent.loop import Agent
from thunderagent.agent.queues import tick_s
from thunderagent.jobs.registry import Registry
from thunderagent.model.conditions import Write
from thunderagent.settings import Settings
from thunderagent.stores.engine import Applied, Blobs
from thunderagent.stores.tasks import TaskStore
from thunderagent.streams.connection.governor import Governor
from thunderagent.testing import FakeClock
from thunderagent.testing.faulty_engine import FaultyEngine

T = TypeVar("T")

STUCK_S: Final = 60.0
"""Real seconds after which a turn that does not come to its end is a deadlock."""
LATENCY_S: Final = 0.003
"""Seconds that a request to the store takes, and its reply, at least."""


class Killed(BaseException):
    """The process of this thread is dead."""


class Turn:
    """A thread that runs only while `take` waits for it."""

    def __init__(self, clock: FakeClock, name: str, work: Callable[[], object]) -> None:
        self._clock = clock
        self._work = work
        self._go, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._error: BaseException | None = None
        self._killed = False
        self._wakes: Callable[[], bool] = lambda: False
        self._until = 0.0
        self.is_over = False
        self.in_store = False
        """True while it waits for the store."""
        self._thread.start()

    @property
    def next_at(self) -> float:
        """Second at which it wants its turn."""
        if self.is_over:
            return float("inf")
        return self._clock.monotonic() if self._wakes() else self._until

    def take(self) -> None:
        """Let it run until it waits."""
        if self.is_over:
            return
        self._go.release()
        assert self._back.acquire(timeout=STUCK_S), f"{self._thread.name} does not give its turn back"
        if self._error is not None:
            raise self._error

    def wait(self, seconds: float, wakes: Callable[[], bool] = lambda: False) -> None:
        """In its thread: give the turn back for so long, or until `wakes` holds."""
        self._until, self._wakes = self._clock.monotonic() + seconds, wakes
        self._back.release()
        self._go.acquire()
        if self._killed:
            raise Killed

    def put_off(self, seconds: float) -> None:
        """Its clock has stood still for so long: what it waits for comes later."""
        self._until += seconds

    def kill(self) -> None:
        """It never does anything again."""
        self._killed = True
        self.take()
        self._thread.join(STUCK_S)

    @property
    def is_current(self) -> bool:
        """True in its thread."""
        return threading.current_thread() is self._thread

    def _run(self) -> None:
        self._go.acquire()
        try:
            if not self._killed:
                self._work()
        except Killed:
            pass
        except BaseException as error:
            self._error = error
        finally:
            self.is_over = True
            self._back.release()


class SimStore(FaultyEngine):
    """The store as one process reaches it: with its own faults, and with time that each call takes."""

    def __init__(self, watch: Watch, process: SimProcess, rng: random.Random) -> None:
        super().__init__(watch, seed=rng.randrange(1 << 30))
        self._watch, self._process, self._dice = watch, process, rng
        self.slow_s = 0.0
        """Seconds that each request takes beside."""
        self.sleeps: dict[str, float] = {}
        """How long the machine sleeps before, or after, the next request is carried out."""

    def apply(self, batch: Sequence[Write]) -> list[Applied]:
        return self._on_the_way(lambda: super(SimStore, self).apply(batch))

    def put(self, rows: Any, *, fresh: bool = False) -> list[Applied]:
        return self._on_the_way(lambda: super(SimStore, self).put(rows, fresh=fresh))

    def get(self, task_ids: Sequence[str]) -> dict[str, Any]:
        return self._on_the_way(lambda: super(SimStore, self).get(task_ids))

    def page(self, status_value: str, **options: Any) -> Any:
        return self._on_the_way(lambda: super(SimStore, self).page(status_value, **options))

    def _on_the_way(self, call: Callable[[], T]) -> T:
        turn, sent = self._process.current_turn(), self._process.clock.monotonic()
        if turn is not None:
            turn.in_store = True
            turn.wait(LATENCY_S + self.slow_s * self._dice.random())
            self._doze(turn, "before")
        before = self._watch.actor, self._watch.sent
        self._watch.actor, self._watch.sent = self._process, sent
        try:
            answer = call()
        finally:
            self._watch.actor, self._watch.sent = before
        if turn is not None:
            self._doze(turn, "after")
            turn.wait(LATENCY_S * self._dice.random())
            turn.in_store = False
        return answer

    def _doze(self, turn: Turn, when: str) -> None:
        if seconds := self.sleeps.pop(when, 0.0):
            self._process.sleep(seconds)
            turn.wait(0.0)


class SimLoopExecutor(LoopExecutor):
    """The executor of coroutine functions on a loop that the simulation steps."""

    def __init__(self, loop: SimLoop, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{**options, "new_loop": lambda: loop})

    def open(self) -> None:
        super().open()
        assert self._thread is not None
        self._thread.join()

    @property
    def is_dead(self) -> bool:
        return self.is_open and self._loop.is_closed()

    def _serve(self) -> None:
        self._loop.call_soon(self._tick)

    def close(self) -> None:
        for task in self._tasks:
            self._loop.call_soon(task.cancel)


@contextmanager
def named(name: str) -> Iterator[None]:
    """An agent that is made here has this name on every host and in every process."""
    tokens = SimpleNamespace(token_hex=lambda _: name)
    host, process = SimpleNamespace(gethostname=lambda: "simulated"), SimpleNamespace(getpid=lambda: 1)
    with patch.multiple(assembly, secrets=tokens, socket=host, os=process):
        yield


class SimHeartbeat(Heartbeat):
    """The heartbeat without threads: its rounds are turns."""

    @property
    def is_alive(self) -> bool:
        return True

    def start(self) -> None: ...

    def stop(self) -> None: ...


class SimAgent(Agent):
    """The agent, with the doubles of this module in place of what has threads."""

    def __init__(self, process: SimProcess, *args: Any, **options: Any) -> None:
        self._process = process
        heartbeat = lambda *a, **o: SimHeartbeat(*a, rng=random.Random(process.seed), **o)  # noqa: E731
        executor = lambda *a, **o: SimLoopExecutor(process.loop, *a, **o)  # noqa: E731
        governor = lambda **o: Governor(rng=random.Random(process.seed), **o)  # noqa: E731
        with (
            patch.object(assembly, "Heartbeat", heartbeat),
            patch.object(executors, "LoopExecutor", executor),
            patch.object(executors, "Governor", governor),
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


class SimProcess(Holder):
    """One agent with its threads, its event loop and its way to the store."""

    def __init__(
        self,
        name: str,
        *,
        clock: FakeClock,
        watch: Watch,
        loop: SimLoop,
        jobs: Registry,
        settings: Settings,
        seed: int,
        blobs: Blobs | None = None,
        counts_sleep: bool = True,
    ) -> None:
        """Make one.

        Args:
            name, clock, watch, loop, jobs, settings, seed: what it is made of.
            blobs: where its large texts are.
            counts_sleep: whether its leases count on a clock that goes on while its machine sleeps.
        """
        super().__init__(name, loop_ran_at=clock.monotonic())
        self._slept_s = 0.0
        self.clock, self.loop, self.seed = clock, loop, seed
        rng = random.Random(seed)
        self.store = SimStore(watch, self, rng)
        store = TaskStore(self.store, blobs=blobs, monotonic=clock.monotonic if counts_sleep else self._awake)
        self.agent = SimAgent(self, store, jobs, settings, rng=rng, first_poll_s=rng.uniform(0.0, 1.0))
        rescuer = self.agent._housekeeping._rescuer  # a sweep reads three entries instead of ten thousand
        rescuer.lost.most = rescuer.lost._rounds._most = 3
        self.resumes_at = self.loop_resumes_at = self.wakes_at = 0.0
        self.is_leaving = False
        self.beat_s = tick_s(self.agent.jobs, self.agent.settings)
        self._judged_at = clock.monotonic()
        self.main = Turn(clock, f"{name} main", self.agent.run)
        self._beat = Turn(clock, f"{name} heartbeat", self._beats)

    @property
    def is_gone(self) -> bool:
        """True when the process has ended, well or not."""
        return not self.is_alive or self.main.is_over

    @property
    def next_at(self) -> float:
        """Second at which one of its parts has something to do; not before it goes on after a pause."""
        if self.is_gone:
            return float("inf")
        loop_at = max(self.loop.next_at, self.loop_resumes_at)
        at = min(self.main.next_at, self._beat.next_at, self._judged_at + self.beat_s, loop_at)
        return max(at, self.resumes_at)

    def due(self) -> list[Callable[[], None]]:
        """What may be done now."""
        now = self.clock.monotonic()
        if self.is_gone or now < self.resumes_at:
            return []
        if self.is_paused:
            self.is_paused, self.disturbed_at, self.late_at, self.stood_at = False, now, now, now
        if self.store.slow_s or self.store._chances or self.store._down.is_set():
            self.disturbed_at = self.late_at = now
        if now < self.loop_resumes_at:
            self.disturbed_at = self.stood_at = now
        found: list[Callable[[], None]] = []
        found += [turn.take for turn in (self.main, self._beat) if turn.next_at <= now]
        if self._judged_at + self.beat_s <= now:
            found.append(self._judge)
        if now >= self.loop_resumes_at and self.loop.is_due():
            found.append(self._step)
        return found

    def current_turn(self) -> Turn | None:
        """The turn that runs now, if it is one of this process."""
        return next((turn for turn in (self.main, self._beat) if turn.is_current), None)

    # Faults

    def kill(self) -> None:
        """Nothing of it happens any more; the system closes its sockets."""
        self.is_alive, self.disturbed_at = False, self.clock.monotonic()
        self.main.kill()
        self._beat.kill()
        self.loop.network.drop(self.loop)

    def pause(self, seconds: float) -> None:
        """It stands still as a whole, and does not know."""
        self.is_paused, self.disturbed_at = True, self.clock.monotonic()
        self.resumes_at = self.clock.monotonic() + seconds

    def sleep(self, seconds: float) -> None:
        """Its machine is suspended: it stands still, and what each thread waits for comes later by so much."""
        now = self.clock.monotonic()
        before = max(self.resumes_at, now)
        self.pause(max(before - now, seconds))
        self.wakes_at, asleep_s = self.resumes_at, self.resumes_at - before
        for turn in (self.main, self._beat):
            turn.put_off(asleep_s)
        self.loop.sleep(asleep_s)
        self._slept_s += asleep_s
        self._judged_at += asleep_s

    def _awake(self) -> float:
        """What `time.monotonic` says: it stands still while the machine sleeps."""
        return self.clock.monotonic() - self._slept_s

    def block_loop(self, seconds: float) -> None:
        """A handler blocks the event loop; everything else goes on."""
        self.disturbed_at = self.clock.monotonic()
        self.loop_resumes_at = self.clock.monotonic() + seconds

    def leave(self) -> None:
        """SIGTERM."""
        self.is_leaving = True
        self.agent.stop()

    def end(self) -> None:
        """After the process has ended by itself: its sockets are closed, and its threads too."""
        self._beat.kill()
        self.loop.network.drop(self.loop)

    # Parts

    def _beats(self) -> None:
        while True:
            self._beat.wait(self.beat_s)
            self.agent._heartbeat.renew_due()

    def _judge(self) -> None:
        self._judged_at = self.clock.monotonic()
        self.agent._heartbeat.judge_all()

    def _step(self) -> None:
        self.loop_ran_at = self.clock.monotonic()
        self.loop.step()
