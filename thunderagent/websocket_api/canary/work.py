"""The periodic job `thunderagent.canary`: each minute one agent of the fleet tries what users do.

It puts a task into its own queue, waits until another slot has run it, and tries each target. A failure is a result and
no error: the task is SUCCESS and is not retried, because the next minute tries again. The queue is the canary's own, so
a backlog of other tasks is no fault; other metrics show their waiting time.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from thunderagent.agent.queues import BUILT_IN_QUEUE
from thunderagent.jobs.context import Context
from thunderagent.jobs.job import Job, make_job
from thunderagent.jobs.periodic import periodic
from thunderagent.model.bus import EventBus
from thunderagent.model.canary_targets import QUEUE
from thunderagent.model.errors import ThunderAgentError
from thunderagent.model.fleet_events import CanaryDown, CanaryProbed
from thunderagent.model.pacing import wait_delays
from thunderagent.model.schedules import Tick
from thunderagent.model.task import Status, Task
from thunderagent.model.ticks import every
from thunderagent.queue.doorbell.sender import DoorbellSender
from thunderagent.queue.enqueue import Enqueuer, NewTask
from thunderagent.stores.tasks import TaskStore
from thunderagent.websocket_api.canary.probe import BUDGET_S, Prober, ProbeResult, Step

JOB: Final = "thunderagent.canary"
PROBE_JOB: Final = "thunderagent.canary.probe"
KEPT_S: Final = 3600.0
"""Life of the row of a run: there are at most 60 rows."""
TOO_LATE_S: Final = 60.0
"""Delay after its tick at which a run leaves the work to the next run."""


class CanaryWork:
    """The two jobs of the canary. Their handlers run in the threads of an agent.

    Args:
        targets: URLs by name.
        prober: tries them; not shared, because it belongs to one event loop at a time.
        store, enqueuer, bus, sender: of the agent.
        budget_s: longest time of the task.
    """

    def __init__(
        self,
        targets: Mapping[str, str],
        prober: Prober,
        *,
        store: TaskStore,
        enqueuer: Enqueuer,
        bus: EventBus,
        sender: DoorbellSender,
        budget_s: float = BUDGET_S,
    ) -> None:
        self._targets = targets
        self._prober = prober
        self._store = store
        self._enqueuer = enqueuer
        self._bus = bus
        self._sender = sender
        self._budget_s = budget_s
        common: dict[str, Any] = {"queue": BUILT_IN_QUEUE, "max_retry": 0, "lease_s": 30.0, "heartbeat_s": 10.0}
        self._probe = make_job(PROBE_JOB, self._arrive, timeout_s=BUDGET_S, **common)
        self._canary = make_job(JOB, self._run, timeout_s=3 * BUDGET_S, **common)

    def jobs(self) -> list[Job[Any]]:
        scheduled = periodic(every(1).minute, catch_up="none", overlap="skip")(self._canary)
        return [replace(job, keep_s=KEPT_S) for job in (scheduled, self._probe)]

    def _run(self, ctx: Context, payload: Tick) -> dict[str, Any]:
        late_s = self._store.clock.now() - payload.at.timestamp()
        if late_s > TOO_LATE_S:
            return {"observer": self._prober.observer, "late_s": round(late_s, 1), "skipped": "the next tick is due"}
        results = [self._try_queue(ctx, late_s)]
        ctx.check()
        results += asyncio.run(self._prober.probe_all(self._targets))
        ctx.check()
        return {
            "observer": self._prober.observer,
            "late_s": round(late_s, 1),
            "healthy": all(result.counts is not False for result in results),
            "probes": [result.as_data() for result in results],
        }

    def _arrive(self, ctx: Context, payload: None) -> None:
        """The task that the canary puts has nothing to do."""

    def _try_queue(self, ctx: Context, late_s: float) -> ProbeResult:
        """Put a task, wait for its end, and delete its row."""
        task: Task | None = None
        seconds, reason = 0.0, ""
        try:
            task = self._enqueuer.put(NewTask.of(self._probe), None)
            self._sender.tasks([task])
            task = self._wait(ctx, task)
            seconds, reason = _judged(task, self._store.clock.now(), self._budget_s)
            self._take_away(task)
        except ThunderAgentError as error:
            ctx.check()
            reason = f"the store: {error}"
        if not reason and late_s > self._budget_s:
            reason = f"the tick of the canary itself began {late_s:.0f} s late: the agents have no time for it"
        result = ProbeResult(
            target=QUEUE, steps={Step.RUN: seconds}, failed=Step.RUN if reason else None, reason=reason
        )
        self._tell(result)
        return result

    def _wait(self, ctx: Context, task: Task) -> Task:
        """The task when it has ended, or when the time is over."""
        until = self._store.monotonic() + self._budget_s
        for delay in wait_delays():
            task = self._store.peek([task.task_id]).get(task.task_id, task)
            left = until - self._store.monotonic()
            if task.status.is_terminal or left <= 0:
                return task
            if ctx.wait(min(delay, left)):
                self._take_away(task)
                ctx.check()
        raise AssertionError("the delays have no end")

    def _take_away(self, task: Task) -> None:
        """Delete the row unless the task runs just now; then it goes by itself an hour after its end."""
        if task.status is not Status.RUNNING:
            self._store.engine.delete([task.to_row()])

    def _tell(self, result: ProbeResult) -> None:
        observer = self._prober.observer
        reason = result.reason or None
        step = None if result.failed is None else str(result.failed)
        self._bus.emit(
            CanaryProbed(
                target=QUEUE,
                observer=observer,
                ok=result.ok,
                healthy=result.ok,
                steps=tuple(map(str, result.steps)),
                seconds=tuple(round(one, 4) for one in result.steps.values()),
                step=step,
                reason=reason,
            )
        )
        if step is not None:
            self._bus.emit(CanaryDown(target=QUEUE, observer=observer, step=step, reason=result.reason, failures=1))


def _judged(task: Task, now: float, budget_s: float) -> tuple[float, str]:
    """How many seconds the task took, and what is wrong with that; nothing: the empty string."""
    if task.status is Status.SUCCESS:
        seconds = max(0.0, (task.finished_at or math.inf) - task.submitted_at)
        return seconds, "" if seconds <= budget_s else f"its task took {seconds:.1f} s, over {budget_s:g} s"
    seconds = max(0.0, now - task.submitted_at)
    if task.status.is_terminal:
        return seconds, f"its task is {task.status}: {task.error or task.done_reason}"
    held = f"; {task.lease_owner} has it" if task.lease_owner else f": no agent took it from the queue {BUILT_IN_QUEUE}"
    return seconds, f"its task is {task.status} after {budget_s:g} s{held}"
