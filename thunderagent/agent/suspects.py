"""Suspects: tasks that have lost agents, and run apart from others, so that a job which kills its agent kills no task.

The first loss spreads the tasks of an agent over the others. From the second on (`losses.must_run_apart`) a batch task
has its agent for itself: the agent claims nothing until the others have ended, then runs it, and claims again when it
has ended or has lived for the length of its lease. Where the others take longer than that, it runs beside them.

While nothing that could be to blame runs beside it, its row says so. That is the evidence if the agent is lost again.
A stream does not wait, as an agent has hundreds; its row says so while it is the only suspect here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from thunderagent.agent.admission import UNDECIDED_S
from thunderagent.agent.poller import SlotPool
from thunderagent.jobs.outcome import Outcome, Stopped, Undecided, about
from thunderagent.jobs.running import Running
from thunderagent.model import events
from thunderagent.model.bus import EventBus
from thunderagent.model.errors import AgentDraining, StoreError
from thunderagent.model.losses import must_run_apart
from thunderagent.model.task import Lease, Task
from thunderagent.model.writes import tasks as writes
from thunderagent.stores.tasks import TaskStore, passed_over


class Suspects:
    """The suspects of one agent. Called in the agent's loop."""

    def __init__(
        self,
        store: TaskStore,
        bus: EventBus,
        *,
        held: Mapping[str, Running],
        pools: Iterable[SlotPool],
        max_crashes: int,
        run: Callable[[Running], None],
        done: Callable[[Running, Outcome], None],
    ) -> None:
        """Make one.

        Args:
            store: where the tasks are.
            bus: told of a task that is to run apart.
            held: what the agent holds, by task.
            pools: the slots of the agent.
            max_crashes: takeovers of one task.
            run: runs a handler.
            done: told how a handler ended that was not run.
        """
        self._store = store
        self._bus = bus
        self._held = held
        self._pools = tuple(pools)
        self._max_crashes = max_crashes
        self._run = run
        self._done = done
        self._apart: Running | None = None
        """The task for which the agent claims nothing."""
        self._until = 0.0
        """Monotonic second at which it waits, or runs alone, no longer."""
        self._marked: Running | None = None
        """The task whose row says that it runs alone."""

    def is_one(self, task: Task, *, lost: bool = False) -> bool:
        """True for a task that is to run apart; `lost`: once it is taken over."""
        return must_run_apart(task.crash_count + lost, self._max_crashes)

    def refusals(self, leases: Sequence[Lease]) -> dict[str, Outcome]:
        """The batch tasks beyond the one that may run apart here: each goes back to its queue, for another agent."""
        ours = [lease.task_id for lease in leases if self.is_one(lease.task) and not lease.task.is_stream]
        return {task_id: Undecided(UNDECIDED_S) for task_id in (ours[1:] if self._apart is None else ours)}

    def start(self, begun: Sequence[Running]) -> None:
        """Run the handlers of tasks that this agent holds now; one that is to run apart when its time has come."""
        for running in begun:
            if self._apart is None and self.is_one(running.lease.task) and not running.job.is_stream:
                self._apart, running.waits = running, True
                self._until = self._store.monotonic() + running.lease.lease_s
                for pool in self._pools:
                    pool.close()
                beside = len(self._others(running))
                lost = running.lease.task.crash_count
                self._bus.emit(events.TaskSetApart(**about(running.lease), lost_agents=lost, beside=beside))
        ready = [running for running in begun if not running.waits]
        self._look_at_mark(ready)
        for running in ready:
            if running.job.is_stream and self.is_one(running.lease.task) and self._is_only_suspect(running):
                self._mark(running)
            self._run(running)
        if begun:
            self.look()

    def look(self, *, is_closing: bool = False) -> None:
        """Do what has become due: run what waits, let others in again.

        Args:
            is_closing: the agent drains: what waits is given back.
        """
        self._look_at_mark(())
        running = self._apart
        if running is None:
            return
        if self._held.get(running.lease.task_id) is not running:
            self._let_others_in()
        elif running.waits:
            self._look_at_waiting(running, is_closing=is_closing)
        elif self._store.monotonic() >= self._until and self._marked is not running:
            self._let_others_in()

    def _look_at_waiting(self, running: Running, *, is_closing: bool) -> None:
        why = AgentDraining() if is_closing else running.context.stop_reason
        if why is not None:
            running.waits = False
            self._done(running, Stopped(why))
            return
        is_alone, now = not self._others(running), self._store.monotonic()
        if (not is_alone and now < self._until) or now >= running.deadline:  # of that the heartbeat tells the handler
            return
        running.waits, self._until = False, now + running.lease.lease_s * is_alone
        if is_alone and self._is_only_suspect(running):
            self._mark(running)
        self._run(running)

    def _look_at_mark(self, newcomers: Sequence[Running]) -> None:
        """Take the evidence back before it becomes wrong, or when nobody needs it any more."""
        running = self._marked
        if running is None:
            return
        if self._held.get(running.lease.task_id) is not running or running.settling:
            self._marked = None
            return
        if running is self._apart:
            is_over = self._store.monotonic() >= self._until or bool(newcomers)
        else:
            is_over = not self._is_only_suspect(running)
        if is_over and self._note(running, is_alone=False):
            self._marked = None

    def _mark(self, running: Running) -> None:
        if running.lease.task.errors:
            self._marked = running  # before: the reply may be lost
            self._note(running, is_alone=True)

    def _note(self, running: Running, *, is_alone: bool) -> bool:
        """False when the store did not answer. A refusal is an answer: the lease is lost, or the row takes no more."""
        write = writes.set_apart(running.lease, is_alone=is_alone, now=self._store.clock.now())
        try:
            self._store.write_tasks([write], rejected=passed_over)
        except StoreError:
            return False
        return True

    def _others(self, running: Running) -> list[Running]:
        """The batch tasks beside this one whose handlers run."""
        return [one for one in self._held.values() if one is not running and not (one.job.is_stream or one.settling)]

    def _is_only_suspect(self, running: Running) -> bool:
        beside = (one for one in self._held.values() if one is not running and not one.settling)
        return not any(one.lease.task.crash_count for one in beside)

    def _let_others_in(self) -> None:
        self._apart = None
        for pool in self._pools:
            pool.open()
