"""Suspects: tasks whose agents were lost. They run apart, so that a job which kills its agent harms no other task.

After the first loss other agents share the tasks of the lost one. From the second loss (`losses.must_run_apart`) a
batch task has an agent to itself. The agent claims nothing until its other tasks have ended, then runs the suspect. It
claims again when the suspect has ended or has lived as long as its lease. If the others take longer than that, the
suspect runs beside them.

The row of a suspect says while nothing else that could be to blame runs: evidence if the agent is lost again. A stream
does not wait, as an agent has hundreds; its row says so while it is the only suspect here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from thunderagent.agent.admission import UNDECIDED_S
from thunderagent.agent.core import Core
from thunderagent.agent.poller import SlotPool
from thunderagent.jobs.outcome import Outcome, Stopped, Undecided, about
from thunderagent.jobs.running import Running
from thunderagent.model import events
from thunderagent.model.errors import AgentDraining, StoreError
from thunderagent.model.losses import must_run_apart
from thunderagent.model.task import Lease, Task
from thunderagent.model.writes import tasks as writes
from thunderagent.stores.tasks import ignore_rejection


class Suspects:
    """The suspects of one agent. Called in the agent's loop."""

    def __init__(
        self,
        core: Core,
        *,
        held: Mapping[str, Running],
        pools: Iterable[SlotPool],
        run: Callable[[Running], None],
    ) -> None:
        """Make one.

        Args:
            core: of the agent.
            held: what the agent holds, by task.
            pools: the slots of the agent.
            run: runs a handler.
        """
        self._store = core.store
        self._bus = core.bus
        self._held = held
        self._pools = tuple(pools)
        self._max_crashes = core.settings.max_crashes
        self._run = run
        self._done = core.inbox.done
        self._apart: Running | None = None
        """The task for which the agent claims nothing."""
        self._until = 0.0
        """Monotonic second until which it waits, or runs alone."""
        self._marked: Running | None = None
        """The task whose row says that it runs alone."""

    def is_one(self, task: Task, *, lost: bool = False) -> bool:
        """Whether a task is to run apart, or will be once it is taken over (`lost`)."""
        return must_run_apart(task.crash_count + lost, self._max_crashes)

    def refusals(self, leases: Sequence[Lease]) -> dict[str, Outcome]:
        """Outcomes of the batch tasks that must run apart beyond one: they return to their queues."""
        ours = [lease.task_id for lease in leases if self.is_one(lease.task) and not lease.task.is_stream]
        return {task_id: Undecided(UNDECIDED_S) for task_id in (ours[1:] if self._apart is None else ours)}

    def start(self, begun: Sequence[Running]) -> None:
        """Run the handlers of tasks that this agent holds now; a suspect waits for its time."""
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
        """Run the suspect that waits, or claim again, once that is due.

        Args:
            is_closing: the agent drains: a suspect that waits is released.
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
        if (not is_alone and now < self._until) or now >= running.deadline:  # the heartbeat stops the handler then
            return
        running.waits, self._until = False, now + running.lease.lease_s * is_alone
        if is_alone and self._is_only_suspect(running):
            self._mark(running)
        self._run(running)

    def _look_at_mark(self, newcomers: Sequence[Running]) -> None:
        """Remove the evidence before it becomes wrong, and when it is over."""
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
            self._marked = running  # before the write: its reply may be lost
            self._note(running, is_alone=True)

    def _note(self, running: Running, *, is_alone: bool) -> bool:
        """Write the evidence; False when the store did not answer. A refusal is an answer."""
        write = writes.set_apart(running.lease, is_alone=is_alone, now=self._store.clock.now())
        try:
            self._store.write_tasks([write], rejected=ignore_rejection)
        except StoreError:
            return False
        return True

    def _others(self, running: Running) -> list[Running]:
        """The other batch tasks whose handlers run."""
        return [one for one in self._held.values() if one is not running and not (one.job.is_stream or one.settling)]

    def _is_only_suspect(self, running: Running) -> bool:
        beside = (one for one in self._held.values() if one is not running and not one.settling)
        return not any(one.lease.task.crash_count for one in beside)

    def _let_others_in(self) -> None:
        self._apart = None
        for pool in self._pools:
            pool.open()
