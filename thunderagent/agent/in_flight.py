"""What an agent holds: the tasks in its slots, from the claim until the store has acknowledged their outcome.

Called in the agent's loop. Outcomes that arrive together are written together, with the next claims behind them, in one
exchange with the store (group commit). A slot is free for a claim when its handler has ended. While the store takes no
outcomes nothing is claimed, so that never more outcomes wait than there are slots. An outcome whose large text cannot
be written waits alone: it keeps its slot and its lease, and delays no other outcome and no claim.
"""

from __future__ import annotations

import queue
import random
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from typing import Any, Final

from thunderagent.agent.admission import Admission
from thunderagent.agent.candidates import CandidateSelector, Selection
from thunderagent.agent.core import Core
from thunderagent.agent.doubts import Doubts
from thunderagent.agent.executors import Executors
from thunderagent.agent.heartbeat import CANCELLED, Heartbeat
from thunderagent.agent.pauses import PauseWatcher
from thunderagent.agent.poller import QueuePoller, Served
from thunderagent.agent.queues import policy_of
from thunderagent.agent.settle import Settlement, settle
from thunderagent.agent.stream_balance import Fleet
from thunderagent.agent.stream_handoff import Handoffs, is_open
from thunderagent.agent.suspects import Suspects
from thunderagent.jobs.context import Context, ParentResults
from thunderagent.jobs.job import Job
from thunderagent.jobs.outcome import Outcome, Refused, Stopped, Undecided, about, raised, story
from thunderagent.jobs.running import Running
from thunderagent.model import events, queue_events
from thunderagent.model.bus import Event
from thunderagent.model.errors import (
    AgentDraining,
    StoreError,
    StoreUnavailable,
    StreamFailed,
    StreamStopped,
    TaskCancelled,
)
from thunderagent.model.pacing import jittered
from thunderagent.model.task import Desired, Lease, Status, StatusValue, Task
from thunderagent.model.writes import tasks as writes
from thunderagent.queue.dependents import Dependents, Ended
from thunderagent.settings import LEASE_MARGIN
from thunderagent.stores.large_texts import LEFT_S, LargeTexts
from thunderagent.stores.tasks import Exchanged, Wanted
from thunderagent.streams.context import StreamContext

TEXT_WAITS_S: Final = 600.0
"""How long an outcome waits for its text; then it is written without."""

TEXT_WAITS_CLOSING_S: Final = 1.0
"""Longest pause between two attempts to write such a text while the agent drains."""

TEXTS_FAIL_S: Final = 2.0
"""How long texts that cannot be written may delay one turn of the loop; then the others wait for the next turn."""

GATHER_S: Final = 0.002
"""Longest wait for further outcomes while they arrive fast, so that they are written together."""

HURRY_S: Final = 2.0
"""How long a handler that was asked to stop may take before its task is released."""


def text_delay(times: int, rng: random.Random) -> float:
    """Pause after `times` failed writes of a text: 0.5 s doubling to 30 s, jittered."""
    return jittered(min(30.0, 0.25 * 2.0 ** min(times, 10)), rng)


CLOSED_KEPT: Final = 1000
"""Most ended streams whose last entry of the journal is still to be written."""


@dataclass(frozen=True, slots=True)
class _TextWait:
    """Failed attempts to write the text of an outcome."""

    since: float
    times: int
    tried: float
    pause_s: float
    error: StoreUnavailable

    def due(self, *, is_closing: bool) -> float:
        """Monotonic second of the next attempt."""
        return self.tried + (min(self.pause_s, TEXT_WAITS_CLOSING_S) if is_closing else self.pause_s)


@dataclass(slots=True)
class _Ended:
    """A handler that has ended: its outcome, and the transition once it is decided.

    The transition is kept until the store acknowledges it: the store recognises a repetition of the same write.
    """

    running: Running
    outcome: Outcome
    settlement: Settlement | None = None
    is_bare: bool = False
    """The settlement is a failure without details, as the store rejected the first one."""
    seconds: float = 0.0
    """Run time of the handler."""
    wait: _TextWait | None = None
    """Set while its text cannot be written: it has no settlement, and keeps its slot."""


@dataclass(frozen=True, slots=True)
class Committed:
    """Result of a commit: whether the store was asked, and the error of a part without an answer."""

    asked: bool = True
    error: StoreError | None = None
    answered: bool = True


class InFlight:
    """The running tasks of an agent and the outcomes that are still to be written."""

    def __init__(
        self,
        core: Core,
        executors: Executors,
        *,
        pollers: Mapping[Served, QueuePoller],
        heartbeat: Heartbeat,
        dependents: Dependents,
        fleet: Fleet,
        pauses: PauseWatcher,
    ) -> None:
        store, jobs, bus = core.store, core.jobs, core.bus
        self._core = core
        self._gate = core.gate
        self._inbox = core.inbox
        self.held: dict[str, Running] = {}
        self.fleet = fleet
        self.pauses = pauses
        self.executors = executors
        self.handoffs = Handoffs(
            core,
            held=self.held,
            heartbeat=heartbeat,
            fleet=fleet,
            on_offered=self._offered,
            call=executors.call,
        )
        self.closed: list[Running] = []
        """Streams that have ended since the last write of journals."""
        self.is_closing = False
        """True while the agent drains: tasks that turn out to be ours are released."""
        self.is_hurried = False
        """True near the end of a drain: outcomes whose texts cannot be written are written without."""
        self._store = store
        self._jobs = jobs
        self._settings = core.settings
        self._bus = bus
        self._rng = copy(core.rng)  # settlements draw the same numbers, however often the agent polls
        self._pollers = pollers
        self._heartbeat = heartbeat
        self._dependents = dependents
        self._policy = policy_of(core.settings)
        self._backlog: list[_Ended] = []
        self._batch = 0
        self.admission = Admission(store, jobs, core.settings, bus, rng=self._rng)
        self.doubts = Doubts(core, self._rng, pollers=pollers, on_lost=self.admission.freed.lost)
        pools = dict.fromkeys(poller.pool for poller in pollers.values())
        self.suspects = Suspects(core, held=self.held, pools=pools, run=self._run)
        self.selector = CandidateSelector(core, pollers, pauses, self.admission)

    @property
    def is_empty(self) -> bool:
        """True when no task is held or handed over, and no claim is in doubt."""
        return not self.held and not self.doubts.ids and not self.handoffs.offered

    @property
    def here(self) -> set[str]:
        """Ids of the tasks that this agent must not claim: they run here, may still run here, or may be ours."""
        return {*self.held, *self.handoffs.offered, *self.doubts.ids}

    def is_here(self, task_id: str) -> bool:
        """Whether a task is one of `here`."""
        return task_id in self.held or task_id in self.handoffs.offered or task_id in self.doubts.ids

    def is_stray(self, task: Task) -> bool:
        """Whether the store carried out a claim after we gave it up: the task is ours, and never ran here."""
        is_ours = (task.status, task.lease_owner) == (Status.RUNNING, self._core.name)
        return is_ours and not self.doubts.has_run(task) and not self.is_here(task.task_id)

    def idle_s(self) -> float:
        """Seconds until the next question to the store; 0 or less: at once."""
        return min(self.doubts.idle_s(), self.selector.idle_s(), self._texts_idle_s())

    def _texts_idle_s(self) -> float:
        waits = [ended.wait for ended in self._backlog if ended.wait] if self._gate.is_open else []
        due = min((wait.due(is_closing=self.is_closing) for wait in waits), default=inf)
        return due - self._store.monotonic()

    def gather(self, pause: float) -> None:
        """Wait for a handler to end, at most `pause` seconds, and under load shortly for more."""
        found, inbox = 0, self._inbox.queue
        try:
            found += self._receive(inbox.get(timeout=pause) if pause > 0 else inbox.get_nowait())
            while True:
                found += self._receive(inbox.get_nowait())
        except queue.Empty:
            until = self._store.monotonic() + GATHER_S
        if found and self._batch > 1:
            while len(self._backlog) < len(self.held) and (left := until - self._store.monotonic()) > 0:
                try:
                    found += self._receive(inbox.get(timeout=left))
                except queue.Empty:
                    break
        self._batch = found

    def begin_all(self, leases: Sequence[Lease], *, how: str = "claimed") -> None:
        """Run the handlers of tasks that were claimed or taken over, unless one is refused."""
        refused: dict[str, Outcome] = {}
        if not self.is_closing:
            refused = self.suspects.refusals(leases)
            refused |= self.admission.refusals([lease for lease in leases if lease.task_id not in refused])
        begun = [self._hold(lease, how=how, instead=refused.get(lease.task_id)) for lease in leases]
        self.suspects.start([running for running in begun if running is not None])

    def _hold(self, lease: Lease, *, how: str, instead: Outcome | None) -> Running | None:
        """Hold a task that was claimed or taken over; None: it is settled with the outcome `instead`."""
        task, job = lease.task, self._jobs[lease.task.job]
        if self.is_closing:
            instead = Stopped(AgentDraining())
        elif task.cancel_requested:
            instead = Stopped(TaskCancelled(CANCELLED))
        elif task.desired_state == Desired.STOPPED:
            instead = Stopped(StreamStopped())
        elif instead is None and self._store.monotonic() >= lease.deadline(LEASE_MARGIN):
            instead = Stopped(AgentDraining("the lease was over before the handler began, as this machine stood still"))
        try:
            context = self._context(lease, job, how)
        except StreamFailed as error:
            context, instead = Context(lease), instead or raised(error, (StreamFailed,))
        beat_s = job.heartbeat_s or self._settings.heartbeat_s
        running = Running(lease, job, context, LEASE_MARGIN, beat_s, started=self._store.monotonic())
        self.held[task.task_id] = running
        self._began(running)
        self._heartbeat.watch(running)
        if not isinstance(instead, (Refused, Undecided)):  # these do not start
            self.admission.started(task)
        if instead is not None:
            self._inbox.done(running, instead)
            return None
        return running

    def _run(self, running: Running) -> None:
        running.started = self._store.monotonic()
        waited_s = max(0.0, self._store.clock.now() - running.lease.task.created_at)
        self._bus.emit(events.TaskStarted(**about(running.lease), waited_s=waited_s))
        self.executors.start(running)

    def poller_of(self, task: Task) -> QueuePoller:
        """The poller in whose slot a task runs."""
        return self._pollers[task.queue, self._jobs[task.job].kind]

    def _context(self, lease: Lease, job: Job[Any], how: str) -> Context:
        task = lease.task
        parents = partial(self._parent_results, task) if task.depends_on else None
        if not job.is_stream:
            return Context(lease, parents)
        clock = self._store.clock
        context = StreamContext(
            lease,
            parents,
            bus=self._bus,
            exclusive=job.exclusive,
            grace_s=self._settings.drain_s,
            on_hold=is_open(task, lease.owner),
            monotonic=self._store.monotonic,
            now=clock.now,
        )
        context.journal.moved(clock.now(), "leased", how)
        return context

    def end(self, running: Running, outcome: Outcome) -> None:
        """Take the outcome of a handler: its slot is free; its lease lasts until the outcome is written."""
        self._receive((running, outcome))

    def commit(self, *, claim: bool) -> Committed:
        """Write what has ended and claim what comes next, in one exchange with the store.

        Raises:
            StoreError: nothing had an answer; the next call tries again.
        """
        committed = self._exchange(claim=claim)
        self.admission.release()
        if self.is_closing:
            self.admission.leave()
        return committed

    def _exchange(self, *, claim: bool) -> Committed:
        self.begin_all([lease for lease in self.doubts.resolve() if lease.task_id not in self.held])
        self.suspects.look(is_closing=self.is_closing)
        is_open = self._gate.is_open
        claim = claim and not (is_open and any(one.settlement for one in self._backlog))
        settling = self._decide() if is_open else self._wait_for_grant()
        # the handler of a lost or an offered task may still run here: another agent is to claim it
        chosen = self.selector.choose(self.here) if claim else Selection()
        heard = self.pauses.take_answered()
        batch = chosen.all
        if not settling and not batch:
            self._claimed(chosen.looked, Exchanged([], [], [], []))
            return Committed(asked=heard or any(self._pollers[name].free > 0 for name in chosen.looked))
        ends = [one.settlement.write for one in settling if one.settlement]
        exchanged = self._store.exchange(ends, batch, owner=self._core.name)
        self._claimed(chosen.looked, exchanged)
        self._settled(settling, exchanged)
        return Committed(error=exchanged.error, answered=exchanged.answered)

    def _offered(self, running: Running) -> None:
        """Free the slot of a stream that is in its queue again, although it is handled here for a while."""
        del self.held[running.lease.task_id]
        self._freed(running)

    def _began(self, running: Running) -> None:
        self.poller_of(running.lease.task).began()
        self.fleet.held += running.job.is_stream

    def _freed(self, running: Running) -> None:
        self.poller_of(running.lease.task).freed()
        self.fleet.held -= running.job.is_stream

    def _receive(self, message: tuple[Running, Outcome] | None) -> int:
        if message is None:
            return 0
        running, outcome = message
        if self.handoffs.ended(running):
            self.admission.over(running.lease)
            self._close_journal(running, "handed over", outcome)
            return 0
        if running.settling or self.held.get(running.lease.task_id) is not running:
            return 0
        self._heartbeat.ended(running)
        self._backlog.append(_Ended(running, outcome, seconds=self._store.monotonic() - running.started))
        self._freed(running)
        return 1

    def _wait_for_grant(self) -> list[_Ended]:
        """Keep completed work, as the same grant may come back; leave the rest to other agents."""
        self.handoffs.abandon()
        for ended in list(self._backlog):
            lease, was_stopped = ended.running.lease, isinstance(ended.outcome, Stopped)
            if self.is_closing or was_stopped or self._gate.epoch > (lease.task.region_epoch or 0):
                self._backlog.remove(ended)
                self._drop(ended)
                if not was_stopped:
                    self._bus.emit(events.SettleRefused(**about(lease), verb="settle"))
        return []

    def _decide(self) -> list[_Ended]:
        """Turn outcomes into transitions; some need no write, some wait for their texts."""
        settling, waiting = list[_Ended](), list[_Ended]()
        texts, lost_s = self._store.large_texts, 0.0
        for ended in self._backlog:
            begun, waited = self._store.monotonic(), ended.wait is not None
            if not self._is_decided(ended, texts):
                waiting.append(ended)
            elif ended.settlement is None:
                self._drop(ended)
            else:
                settling.append(ended)
            if waited or ended.wait:
                lost_s += self._store.monotonic() - begun
            if lost_s >= TEXTS_FAIL_S:
                late = StoreUnavailable(f"it was not begun, as others could not be written for {lost_s:.1f} s")
                texts = self._store.large_texts.refusing(late)
        self._backlog = [*waiting, *settling]
        return settling

    def _is_decided(self, ended: _Ended, texts: LargeTexts) -> bool:
        """Decide on an outcome; False while its text cannot be written."""
        wait = ended.wait
        if ended.settlement is not None:
            return True
        if wait is not None and self.is_hurried:
            texts = texts.refusing(StoreError(str(wait.error)))
        elif wait is not None and self._store.monotonic() < wait.due(is_closing=self.is_closing):
            return False
        try:
            ended.settlement = self._settlement_of(ended, texts)
        except StoreUnavailable as error:
            waited_s = self._store.monotonic() - wait.since if wait else 0.0
            if not self.is_hurried and (wait is None or waited_s < TEXT_WAITS_S):
                self._wait_for_text(ended, error)
                return False
            refusal = StoreError(f"{error} (it was tried for {waited_s:.0f} s)")
            ended.settlement = self._settlement_of(ended, texts.refusing(refusal))
        self._waits_no_more(ended)
        return True

    def _wait_for_text(self, ended: _Ended, error: StoreUnavailable) -> None:
        """Let an outcome wait for the next attempt, in its slot."""
        now, wait = self._store.monotonic(), ended.wait
        times = wait.times + 1 if wait else 1
        if wait is None:
            self._began(ended.running)
        ended.wait = _TextWait(wait.since if wait else now, times, now, text_delay(times, self._rng), error)
        pause_s = ended.wait.due(is_closing=self.is_closing) - now
        what = f"a text of {ended.running.lease.task_id}: {error}"
        self._bus.emit(events.StoreFailed(during="writing a large text", error=what, next_try_s=pause_s))

    def _waits_no_more(self, ended: _Ended) -> None:
        if ended.wait is not None:
            ended.wait = None
            self._freed(ended.running)

    def _settlement_of(self, ended: _Ended, texts: LargeTexts) -> Settlement | None:
        try:
            return self._settle(ended, ended.outcome, texts)
        except (TypeError, ValueError, ArithmeticError, AttributeError) as error:
            # an answer without a meaning, such as Snooze("soon"), is an error of the handler
            return self._settle(ended, raised(error), texts)

    def _settle(self, ended: _Ended, outcome: Outcome, texts: LargeTexts) -> Settlement | None:
        running, now = ended.running, self._store.clock.now()
        what = f"the result of {running.job.name!r}"
        settlement = settle(
            running.lease,
            running.job,
            outcome,
            policy=self._policy,
            now=now,
            seconds=ended.seconds,
            rng=self._rng,
            keep=lambda key, text, expire_at: texts.keep(key, text, what=what, expire_at=expire_at),
        )
        if settlement is not None:  # a task that waits, or is kept after its end, needs its payload as long
            until = settlement.write.set.get("expireAt") or settlement.write.set["createdAt"] + LEFT_S
            texts.outlive(running.lease.task, until, now=now)
        cursor = running.context.unsaved_cursor()
        if settlement is None or cursor is None:
            return settlement
        return replace(settlement, write=writes.with_cursor(settlement.write, cursor))

    def _drop(self, ended: _Ended) -> None:
        """Forget a task whose lease was lost; its row may be ours for a while."""
        self.doubts.ran(ended.running.lease)
        self._let_go(ended)

    def _let_go(self, ended: _Ended) -> None:
        running = ended.running
        self._waits_no_more(ended)
        self.held.pop(running.lease.task_id, None)
        self._heartbeat.forget(running)
        self.admission.over(running.lease)
        self._close_journal(running, ended.settlement.write.verb if ended.settlement else "lost", ended.outcome)

    def _close_journal(self, running: Running, how: str, outcome: Outcome) -> None:
        context = running.context
        if isinstance(context, StreamContext):
            context.journal.moved(self._store.clock.now(), how, story(outcome))
            self.closed.append(running)
            del self.closed[:-CLOSED_KEPT]

    def _settled(self, settling: list[_Ended], exchanged: Exchanged) -> None:
        parents, happened = list[Ended](), list[Event]()
        self._backlog = [ended for ended in self._backlog if ended.wait] + [
            ended
            for ended, answer in zip(settling, exchanged.settled, strict=True)
            if answer.is_unknown or (answer.is_rejected and self._falls_back(ended, answer.error))
        ]
        for ended, answer in zip(settling, exchanged.settled, strict=True):
            if answer.error or ended.settlement is None:
                continue
            write, event = ended.settlement.write, ended.settlement.event
            self._let_go(ended)
            if not answer.accepted:
                event = events.SettleRefused(**about(ended.running.lease), verb=write.verb)
            elif (status := Status(StatusValue.parse(write.set["status"]).status)).is_terminal:
                self.admission.ended(ended.running.lease.task)
                if answer.dependents:
                    parents.append(Ended(write.task_id, status, answer.dependents))
            elif isinstance(ended.outcome, Refused):
                self.admission.waitlisted(ended.outcome.limit, ended.running.lease.task, write.set["createdAt"])
            happened.append(event)
        self._bus.emit_all(happened)
        if parents:
            self._notify(parents)

    def _falls_back(self, ended: _Ended, error: StoreError | None) -> bool:
        """Fail the task without details, as the store rejected its outcome; False when it rejected that too."""
        lease, settlement = ended.running.lease, ended.settlement
        verb = settlement.write.verb if settlement else "settle"
        if ended.is_bare:
            self._drop(ended)
            self._bus.emit(events.OutcomeRejected(**about(lease), verb=verb, error=str(error)))
            return False
        now, text = self._store.clock.now(), f"the store does not take its outcome ({verb}): {error}"
        write = writes.fail(lease, error=text, now=now, expire_at=now + self._policy.keep_failed_s)
        ended.settlement = Settlement(writes.bare(write), events.TaskFailed(**about(lease), error=text))
        ended.is_bare = True
        self._inbox.wake()
        return True

    def _notify(self, parents: list[Ended]) -> None:
        try:
            self._dependents.tell(parents)
        except StoreError as error:  # the sweep notifies the others
            self._bus.emit(
                events.StoreFailed(during="telling dependents", error=str(error), next_try_s=self._settings.sweep_s)
            )

    def _claimed(self, wanted: Mapping[Served, list[Wanted]], exchanged: Exchanged) -> None:
        self.doubts.add(exchanged.doubts)
        won: dict[Served, list[str]] = {served: [] for served in wanted}
        for lease in exchanged.leases:
            if (served := (lease.task.queue, self._jobs[lease.task.job].kind)) in won:
                won[served].append(lease.task_id)
        self.begin_all(exchanged.leases)
        for candidate, error in exchanged.rejected:
            self._bus.emit(queue_events.WriteRejected(task_id=candidate.task_id, verb="claim", error=str(error)))
        for candidate in exchanged.lost:
            self.admission.freed.lost(candidate)
        for served, tried in wanted.items():
            self._pollers[served].took(won[served], exchanged.lost, tried)

    def _parent_results(self, task: Task) -> ParentResults:
        found = self._store.read(task.depends_on)
        whole = self._store.large_texts.inflate(one for one in found.values() if isinstance(one, Task))
        return ParentResults.of(task.depends_on, {**found, **{one.task_id: one for one in whole}})
