"""The agent: polls, claims, runs, settles, and stops in good order.

Threads: the one that calls `run()` polls, settles and keeps house; the heartbeat renews leases; handlers run in the
executors' threads and hand their outcomes to the loop.
"""

from __future__ import annotations

import os
import random
import secrets
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from thunderagent.agent.assembly import equip
from thunderagent.agent.doorbell import DoorbellListener
from thunderagent.agent.executors import Executors, make_executors
from thunderagent.agent.gatekeeper import Gatekeeper, gated
from thunderagent.agent.health.outage import Marks, Outage
from thunderagent.agent.health.vitals import Vitals
from thunderagent.agent.heartbeat import Heartbeat
from thunderagent.agent.housekeeping import Housekeeping
from thunderagent.agent.in_flight import HURRY_S, InFlight
from thunderagent.agent.pauses import PauseWatcher
from thunderagent.agent.queues import check_leases, in_words, make_pollers, policy_of, tick_s
from thunderagent.agent.scopes import HandlerScope
from thunderagent.agent.stream_balance import Fleet
from thunderagent.agent.sweep import Rescuer
from thunderagent.agent.threads import BackgroundThread, BackgroundThreads, stopping_signals
from thunderagent.jobs.extension import extension
from thunderagent.jobs.outcome import Stopped
from thunderagent.jobs.registry import Registry
from thunderagent.jobs.running import Scope, no_scope
from thunderagent.model import events, fleet_events
from thunderagent.model.bus import EventBus
from thunderagent.model.errors import AgentDraining, StoreError
from thunderagent.model.pacing import first_poll
from thunderagent.model.task import BATCH
from thunderagent.queue.commands import Commands
from thunderagent.queue.dependents import Dependents
from thunderagent.queue.doorbell import open_doorbell
from thunderagent.queue.doorbell.port import Doorbell
from thunderagent.queue.doorbell.sender import DoorbellSender
from thunderagent.queue.schedules.scheduler import Periodic
from thunderagent.regions.gate import Gate
from thunderagent.settings import Settings, load_settings
from thunderagent.stores import open_store
from thunderagent.stores.tasks import TaskStore
from thunderagent.streams.context import StreamContext

LONGEST_WAIT_S: Final = 10.0


class Agent:
    """Serves the jobs of a registry from a store until it is told to stop."""

    def __init__(
        self,
        store: TaskStore,
        jobs: Registry,
        settings: Settings,
        *,
        bus: EventBus | None = None,
        doorbell: Doorbell | None = None,
        scope: Scope = no_scope,
        threads: Callable[[Agent], Sequence[BackgroundThread]] = lambda agent: (),
        rng: random.Random | None = None,
        first_poll_s: float | None = None,
    ) -> None:
        """Make an agent; nothing runs before `run()`.

        Args:
            store: where the tasks are.
            jobs: what this agent can run.
            settings: all numbers.
            bus: gets every event; a fresh one if None.
            doorbell: what it listens to, and closes at its end; None: it polls.
            scope: what surrounds each handler.
            threads: makes the threads that run beside the loop, once the agent is made.
            rng: source of jitter and shuffling.
            first_poll_s: delay of the first poll; None takes a random one, so that a fleet does not poll in step.
        """
        self.name = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"
        """Unique per process start: the `leaseOwner` of everything it holds."""
        self.bus = bus or EventBus()
        self.gate = Gate(settings.region if settings.region_arbiter else None, monotonic=store.monotonic)
        """What the agent may write, by the grant of its region; `equip` has it renewed."""
        self.store = store = gated(store, self.gate)
        store.unread.listener = lambda one: self.bus.emit(events.RowUnreadable.of(one))
        if settings.canary_targets:
            jobs = jobs.plus(extension("canary.jobs")(settings, store, self.bus, who=self.name, doorbell=doorbell))
        self.jobs = jobs
        self.settings = settings
        check_leases(jobs, settings)
        self._rng = rng or random.Random()
        self._monotonic = store.monotonic
        self._first_poll_s = first_poll(self._rng, settings.poll_min_s) if first_poll_s is None else first_poll_s
        around = HandlerScope(settings, scope, jobs.hooks, self.bus)
        self._scope = around.scope
        self._stops, self._patience = 0, 1
        self._retires = threading.Lock()  # taken once and for all by the first who asks
        self._marks = Marks(self._monotonic)
        self.told: dict[str, Any] = {}
        """Further facts for the agent's row, by name."""
        policy = policy_of(settings)
        keep = {"keep_success_s": policy.keep_success_s, "keep_failed_s": policy.keep_failed_s}
        dependents = Dependents(store, self.bus, **keep)
        streams = {name for name, job in jobs.by_value.items() if job.is_stream}
        most = settings.max_streams if streams else 0
        self._fleet = Fleet(store, owner=self.name, max_streams=most, jobs=streams, monotonic=self._monotonic)
        self._pollers = make_pollers(store, jobs, settings, fleet=self._fleet, bus=self.bus, rng=self._rng)
        self.pauses = PauseWatcher(
            store,
            self.bus,
            owner=self.name,
            queues={queue for queue, _ in self._pollers},
            jobs=jobs.by_value,
            every_s=settings.poll_min_s,
            monotonic=self._monotonic,
            retire=self.retire,
        )
        self._heart_store = store.sibling()
        self._heartbeat = Heartbeat(
            self._heart_store, self.bus, tick_s=tick_s(jobs, settings), monotonic=self._monotonic, gate=self.gate
        )
        self._in_flight = InFlight(
            store,
            jobs,
            settings,
            self.bus,
            self._rng,
            owner=self.name,
            pollers=self._pollers,
            heartbeat=self._heartbeat,
            dependents=dependents,
            policy=policy,
            fleet=self._fleet,
            pauses=self.pauses,
            gate=self.gate,
        )
        self._outage = Outage(self._in_flight.selector, self._marks, self.bus, self._rng, self._monotonic)
        rescuer = Rescuer(
            store,
            self.bus,
            dependents,
            owner=self.name,
            max_crashes=settings.max_crashes,
            guard_s=settings.clock_guard_s,
            sweep_s=settings.sweep_s,
            keep_failed_s=policy.keep_failed_s,
            is_held=self._in_flight.is_here,
            is_stray=self._in_flight.is_stray,
            monotonic=self._monotonic,
            epoch=lambda: self.gate.epoch,
            limit=self._in_flight.admission.limit_of,
            freed=self._in_flight.admission.freed.note,
        )
        self._housekeeping = Housekeeping(
            store,
            jobs,
            settings,
            self.bus,
            owner=self.name,
            pollers=self._pollers,
            in_flight=self._in_flight,
            rescuer=rescuer,
            periodic=Periodic(
                store,
                jobs,
                settings,
                self.bus,
                owner=self.name,
                cancel=Commands(store, settings, DoorbellSender(doorbell)).cancel,
                ring=DoorbellSender(doorbell).tasks,
                rng=self._rng,
            ),
            health=self.health,
            told=self.told,
            marks=self._marks,
            failed=self._house_failed,
            gate=self.gate,
        )
        self._listener = DoorbellListener(
            doorbell,
            self._in_flight.selector.inbox,
            self._heartbeat,
            self.bus,
            owner=self.name,
            stretch_s=settings.poll_wake_s,
            wake=self._in_flight.wake,
        )
        self._gatekeeper = Gatekeeper(
            self.gate, self.pauses, self._in_flight, self.bus, drain_s=settings.drain_s, monotonic=self._monotonic
        )
        self.bus.subscribe(self._look_for_child)
        self.vitals = Vitals(
            self._marks,
            settings,
            store,
            pollers=self._pollers,
            in_flight=self._in_flight,
            heartbeat=self._heartbeat,
            listener=self._listener,
            pauses=self.pauses,
            is_draining=lambda: self._stops > 0,
        )
        """How the agent is, for any thread."""
        self.vitals.threads = self._threads = BackgroundThreads(threads(self), self.bus, hooks=around.threads)

    @classmethod
    def from_settings(cls, jobs: str | Registry, **overrides: Any) -> Agent:
        """An agent for the jobs of a package, with the settings of the environment and these overrides, and with all
        that runs beside it when they ask for it. Log lines are its program's: see `telemetry`.

        Raises:
            JobImportError: a module of the package does not import.
            ConfigurationError: the settings cannot work.
        """
        settings = load_settings(**overrides)
        registry = jobs if isinstance(jobs, Registry) else Registry.from_package(jobs)
        store, doorbell = open_store(settings, for_agent=True), open_doorbell(settings)
        return cls(store, registry, settings, doorbell=doorbell, threads=equip)

    def run(self) -> int:
        """Serve until `stop()`, SIGTERM or SIGINT, then drain.

        Returns:
            how many handlers and threads of its own still run although they were told to stop. The tasks are released,
            so the process should end at once.

        Raises:
            StoreError: the store cannot be used from the start (a missing table, a missing permission).
            Exception: what nobody expected. What is held goes back first, if the store takes it; end the process.
        """
        self.store.engine.check()
        self._marks.begin()
        self._in_flight.executors = executors = self._executors()
        stuck = left = 0
        with stopping_signals(self.stop):
            try:
                self._begin()
                while not self._stops:
                    self._turn()
                stuck = self._drain()
            except Exception as error:
                stuck = self._fall(error)
                raise
            finally:
                left = self._end(executors)
                self.bus.emit(events.AgentStopped(stuck=stuck))
                self._threads.close_hooks()
        return stuck + left

    def stop(self) -> None:
        """Stop claiming and drain; called twice, it hurries. Safe in any thread and in a signal handler."""
        self._stops += 1
        self._in_flight.wake()

    def retire(self, reason: str) -> None:
        """Drain by itself, once, for a reason that is told; the supervisor starts a fresh agent. Safe in any thread."""
        if not self._stops and self._retires.acquire(blocking=False):
            self._patience = 2  # the first signal that comes then is no second one, and does not hurry
            self.bus.emit(fleet_events.AgentRetires(reason=reason))
            self.stop()

    def wake(self) -> None:
        """Look for work at once, for example after an enqueue in this process."""
        for poller in self._pollers.values():
            poller.wake()
        self._in_flight.wake()

    @property
    def running(self) -> int:
        """Number of tasks that this agent holds now."""
        return len(self._in_flight.held)

    def health(self) -> Mapping[str, Any]:
        """How the agent is, as its row tells: see `Vitals.told`."""
        return self.vitals.told()

    def _look_for_child(self, event: events.Event) -> None:
        """A task that has left BLOCKED, or that of a tick, is due now: do not let it wait for the next poll."""
        if isinstance(event, (events.ChildUnparked, events.TickPut)):
            for poller in self._pollers.values():
                poller.wake()

    def _begin(self) -> None:
        self._gatekeeper.look()
        self._heartbeat.start()
        self._housekeeping.begin()
        for poller in self._pollers.values():
            poller.postpone(self._first_poll_s)
        self._listener.start()
        self._threads.start()
        self.bus.emit(
            events.AgentStarted(
                agent=self.name,
                store=self.store.engine.url,
                queues=in_words(self._pollers),
                jobs=tuple(sorted(self.jobs.by_value)),
                http=self.told.get("http"),
            )
        )

    def _fall(self, error: Exception) -> int:
        """Nobody knows what is broken: say so, and try to stop in good order; what stays held, others take over."""
        self.bus.emit(fleet_events.AgentFailed(error=repr(error)))
        self._stops += 1
        try:
            return self._drain()
        except Exception as another:
            self.bus.emit(fleet_events.AgentFailed(error=f"nor can it give its tasks back: {another!r}"))
            return 0

    def _end(self, executors: Executors) -> int:
        """End all threads at once, in bounded time; the answer is how many go on, such as one that awaits a reply."""
        left = self._threads.close(
            {"executors": executors.close, "heartbeat": self._heartbeat.stop, "doorbell": self._listener.close}
        )
        if not self._heartbeat.has_ended:
            return len(left) + 1
        if self._heart_store.engine is not self.store.engine:
            self._heart_store.engine.close()
        return len(left)

    def _turn(self) -> None:
        """One round of the loop: wait for something, write what has ended, claim what comes next, keep house."""
        idle_s = max(self._in_flight.idle_s(), self._outage.wait_s)
        idle_s = min(idle_s, self._housekeeping.idle_s(LONGEST_WAIT_S))
        self._in_flight.gather(self._gatekeeper.idle_s(idle_s))
        self._gatekeeper.look()
        if self._outage.wait_s <= 0 or not self.gate.is_open:  # without a grant nothing is asked
            self._commit(claim=not self._stops)
        else:
            self._marks.moved()
            self._look_after_threads()
        if not self._stops:
            self._housekeeping.run_pending()

    def _drain(self) -> int:
        """Let tasks end, tell the rest to, release what is left, say good-bye.

        Bounded by `drain_s`, a few seconds of hurry and one last call, whatever the store does.
        """
        self.bus.emit(events.AgentDraining(running=self.running, drain_s=self.settings.drain_s))
        self._in_flight.is_closing = True
        self._listener.stop()
        begun = self._monotonic()
        self._housekeeping.leave_streams(store_answers=not self._outage.is_on)
        self._wind_down(self.settings.drain_s - (self._monotonic() - begun), may_hurry=True)
        self._in_flight.is_hurried = True
        for running in list(self._in_flight.held.values()):
            running.context.stop(AgentDraining())
        self._in_flight.handoffs.finish()
        self._wind_down(HURRY_S, may_hurry=False)
        stuck = [running for running in self._in_flight.held.values() if not running.settling]
        for running in stuck:
            context = running.context
            if running.job.exclusive and isinstance(context, StreamContext) and context.is_connected:
                continue  # nobody may connect while it is: its lease ends after this process
            self._in_flight.end(running, Stopped(running.context.stop_reason or AgentDraining()))
        self._commit(claim=False)
        if not self._outage.is_on:
            self._in_flight.gather(0.0)  # a claim in doubt that has just turned out to be ours goes back too
            self._commit(claim=False)
            self._housekeeping.end()
        return len(stuck) + len(self._in_flight.handoffs.offered)

    def _wind_down(self, seconds: float, *, may_hurry: bool) -> None:
        """Settle what ends within the time; a further stop signal cuts it short."""
        until = self._monotonic() + seconds
        while not self._in_flight.is_empty and (left := until - self._monotonic()) > 0:
            if may_hurry and self._stops > self._patience:
                return
            self._in_flight.gather(min(left, 0.5))
            if not self._outage.is_on or (may_hurry and self._outage.wait_s <= 0):
                self._commit(claim=False)
                self._housekeeping.look_at_handoffs()

    def _commit(self, *, claim: bool) -> None:
        try:
            committed = self._in_flight.commit(claim=claim)
        except StoreError as error:
            self._outage.failed(error, answered=False)
        else:
            if committed.error is not None:
                self._outage.failed(committed.error, answered=committed.answered)
            else:
                self._outage.reached(asked=committed.asked)
        self._look_after_threads()

    def _house_failed(self, error: StoreError) -> None:
        """A piece of housekeeping met a dead store: an agent that stops has no time to find that out again."""
        if self._stops and not self._outage.is_on:
            self._outage.failed(error, answered=False)

    def _look_after_threads(self) -> None:
        """Start a heartbeat that has died again; without an event loop, stop and let the supervisor start us afresh."""
        if dead := self._heartbeat.dead:
            self._heartbeat.start()
            for name in dead:
                self.bus.emit(events.ThreadDied(thread=name, restarted=True))
        self._listener.look_after()
        self._threads.look_after()
        executors = self._in_flight.executors
        if executors and executors.loop and not executors.loop.is_alive and not self._stops:
            self.bus.emit(events.ThreadDied(thread="event-loop", restarted=False))
            self.stop()

    def _executors(self) -> Executors:
        executors = make_executors(
            self.jobs,
            self.settings,
            self._in_flight.done,
            self._scope,
            slots=sum(poller.slots for poller in self._pollers.values() if poller.kind == BATCH),
            agents=lambda: self._fleet.size,
            monotonic=self._monotonic,
        )
        if executors.loop is not None:
            self._in_flight.handoffs.call = executors.loop.call
        return executors
