"""The agent: polls, claims, runs, settles, and stops in good order.

The thread that calls `run()` polls, settles and keeps house. The heartbeat renews leases in threads of its own.
Handlers run in the executors' threads, which hand their outcomes to the loop.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, Final

from thunderagent.agent.assembly import equip, make_core, make_parts
from thunderagent.agent.in_flight import HURRY_S
from thunderagent.agent.queues import summary_of
from thunderagent.agent.threads import BackgroundThread, stopping_signals
from thunderagent.agent.view import AgentView
from thunderagent.jobs.outcome import Stopped
from thunderagent.jobs.registry import Registry
from thunderagent.jobs.running import Scope, no_scope
from thunderagent.model import events, fleet_events, queue_events
from thunderagent.model.bus import Event, EventBus
from thunderagent.model.errors import AgentDraining, StoreError
from thunderagent.model.pacing import first_poll
from thunderagent.queue.doorbell import open_doorbell
from thunderagent.queue.doorbell.port import Doorbell
from thunderagent.settings import Settings, load_settings
from thunderagent.stores import open_store
from thunderagent.stores.tasks import TaskStore
from thunderagent.streams.context import StreamContext

LONGEST_WAIT_S: Final = 10.0


class Agent:
    """Serves the jobs of a registry from a store until it is asked to stop."""

    def __init__(
        self,
        store: TaskStore,
        jobs: Registry,
        settings: Settings,
        *,
        bus: EventBus | None = None,
        doorbell: Doorbell | None = None,
        scope: Scope = no_scope,
        threads: Callable[[AgentView], Sequence[BackgroundThread]] = lambda agent: (),
        rng: random.Random | None = None,
        first_poll_s: float | None = None,
    ) -> None:
        """Make an agent; nothing runs before `run()`.

        Args:
            store: where the tasks are.
            jobs: what this agent can run.
            settings: all numbers.
            bus: gets every event; a fresh one if None.
            doorbell: what it listens to, and closes at its end; None: it only polls.
            scope: what surrounds each handler.
            threads: makes the background threads of the agent.
            rng: source of jitter and shuffling.
            first_poll_s: delay of the first poll; None: a random one, so that a fleet does not poll in step.
        """
        core = make_core(store, jobs, settings, bus=bus or EventBus(), doorbell=doorbell, rng=rng or random.Random())
        self.name, self.store, self.jobs, self.settings = core.name, core.store, core.jobs, core.settings
        self.bus, self.gate, self.facts = core.bus, core.gate, core.facts
        self._core, self._stop = core, core.stop
        self._monotonic = core.store.monotonic
        self._first_poll_s = first_poll(core.rng, settings.poll_min_s) if first_poll_s is None else first_poll_s
        self._parts = parts = make_parts(core, doorbell=doorbell, scope=scope)
        self.pauses, self.vitals = parts.pauses, parts.vitals
        self._in_flight, self._pollers, self._outage = parts.in_flight, parts.pollers, parts.outage
        self._housekeeping, self._gatekeeper = parts.housekeeping, parts.gatekeeper
        self._heartbeat, self._listener, self._threads = parts.heartbeat, parts.listener, parts.threads
        self.bus.subscribe(self._look_for_child)
        parts.threads.add(threads(self))

    @classmethod
    def from_settings(cls, jobs: str | Registry, **overrides: Any) -> Agent:
        """Make an agent with the settings of the environment, and with the background threads that they ask for.

        The program that makes it configures the log: see `telemetry`.

        Args:
            jobs: a registry, or the name of the package that has the jobs.
            overrides: settings in place of those of the environment.

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
            number of handlers and threads that still run although they were asked to stop. Their tasks are released:
            end the process at once.

        Raises:
            StoreError: the store cannot be used from the start (a missing table, a missing permission).
            Exception: a bug. The agent has released its tasks, if the store took that: end the process.
        """
        self.store.engine.check()
        self._parts.marks.begin()
        self._in_flight.executors.open()
        stuck = left = 0
        with stopping_signals(self.stop):
            try:
                self._begin()
                while not self._stop.is_made:
                    self._turn()
                stuck = self._drain()
            except Exception as error:
                stuck = self._fall(error)
                raise
            finally:
                left = self._end()
                self.bus.emit(events.AgentStopped(stuck=stuck))
                self._threads.close_hooks()
        return stuck + left

    def stop(self) -> None:
        """Stop claiming, and drain; a second call shortens the drain. Safe in any thread and in a signal handler."""
        self._stop.make()

    def retire(self, reason: str) -> None:
        """Drain, once, for a reason that is logged; the supervisor starts a fresh agent. Safe in any thread."""
        self._stop.retire(reason)

    def wake(self) -> None:
        """Look for work at once, for example after an enqueue in this process."""
        for poller in self._pollers.values():
            poller.wake()
        self._core.inbox.wake()

    @property
    def running(self) -> int:
        """Number of tasks that this agent holds now."""
        return len(self._in_flight.held)

    def _look_for_child(self, event: Event) -> None:
        """Poll at once for a task that has left BLOCKED, and for that of a tick: it is due now."""
        if isinstance(event, (queue_events.ChildUnparked, queue_events.TickPut)):
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
                queues=summary_of(self._pollers),
                jobs=tuple(sorted(self.jobs.by_value)),
                http=self.facts.get("http"),
            )
        )

    def _fall(self, error: Exception) -> int:
        """Try to drain after a bug. Other agents take over what stays held."""
        self.bus.emit(fleet_events.AgentFailed(error=repr(error)))
        self._stop.make()
        try:
            return self._drain()
        except Exception as another:
            self.bus.emit(fleet_events.AgentFailed(error=f"nor can it give its tasks back: {another!r}"))
            return 0

    def _end(self) -> int:
        """End all threads at once, in bounded time; returns how many go on, such as one that waits for a reply."""
        executors = self._in_flight.executors
        left = self._threads.close(
            {"executors": executors.close, "heartbeat": self._heartbeat.stop, "doorbell": self._listener.close}
        )
        if not self._heartbeat.has_ended:
            return len(left) + 1
        if self._heartbeat.store.engine is not self.store.engine:
            self._heartbeat.store.engine.close()
        return len(left)

    def _turn(self) -> None:
        """One round of the loop: wait for something, write what has ended, claim what comes next, keep house."""
        idle_s = max(self._in_flight.idle_s(), self._outage.wait_s)
        idle_s = min(idle_s, self._housekeeping.idle_s(LONGEST_WAIT_S))
        self._in_flight.gather(self._gatekeeper.idle_s(idle_s))
        self._gatekeeper.look()
        if self._outage.wait_s <= 0 or not self.gate.is_open:  # without a grant nothing is asked
            self._commit(claim=not self._stop.is_made)
        else:
            self._parts.marks.moved()
            self._look_after_threads()
        if not self._stop.is_made:
            self._housekeeping.run_pending()

    def _drain(self) -> int:
        """Let tasks end, stop the rest, release what is left, delete the agent's row.

        It takes at most `drain_s`, a few seconds of hurry and one last call, whatever the store does.
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
                continue  # no other agent may connect meanwhile: the lease ends after this process
            self._in_flight.end(running, Stopped(running.context.stop_reason or AgentDraining()))
        self._commit(claim=False)
        if not self._outage.is_on:
            self._in_flight.gather(0.0)  # a claim in doubt that has just turned out to be ours goes back too
            self._commit(claim=False)
            self._housekeeping.end()
        return len(stuck) + len(self._in_flight.handoffs.offered)

    def _wind_down(self, seconds: float, *, may_hurry: bool) -> None:
        """Settle what ends within the time; a further stop signal ends the wait."""
        until = self._monotonic() + seconds
        while not self._in_flight.is_empty and (left := until - self._monotonic()) > 0:
            if may_hurry and self._stop.is_urgent:
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

    def _look_after_threads(self) -> None:
        """Restart threads that have died. Without an event loop, stop: the supervisor starts a fresh agent."""
        if dead := self._heartbeat.dead:
            self._heartbeat.start()
            for name in dead:
                self.bus.emit(events.ThreadDied(thread=name, restarted=True))
        self._listener.look_after()
        self._threads.look_after()
        if self._in_flight.executors.is_dead and not self._stop.is_made:
            self.bus.emit(events.ThreadDied(thread="event-loop", restarted=False))
            self.stop()
