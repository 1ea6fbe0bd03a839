"""What an agent does beside its tasks: sweeps, its row in the table, counters. All on one private scheduler."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final
from zlib import crc32

import schedule

from thunderagent.agent.core import Core
from thunderagent.agent.health.judgement import ANNOUNCE_S
from thunderagent.agent.health.outage import Marks, Outage
from thunderagent.agent.health.vitals import Vitals
from thunderagent.agent.in_flight import InFlight
from thunderagent.agent.pauses import PAUSES_LOOK_S
from thunderagent.agent.poller import QueuePoller, Served
from thunderagent.agent.queues import slots_of
from thunderagent.agent.recycling import Tally, units_of
from thunderagent.agent.stream_balance import is_paused
from thunderagent.agent.streams import Streams
from thunderagent.agent.sweep import Rescuer, TextSweep
from thunderagent.model import events
from thunderagent.model.clock import process_start
from thunderagent.model.errors import StoreError, StoreRejected
from thunderagent.model.memory import resident_mib
from thunderagent.model.task import BATCH, STREAM, Lane, Task
from thunderagent.model.version import __version__
from thunderagent.queue.schedules.scheduler import TICK_LOOK_S, TickScheduler
from thunderagent.stores.tasks import TaskStore

STREAM_LOOK_S: Final = 0.5
"""Time between two looks at streams that are being handed over."""

LOST_LOOK_S: Final = 1.0
"""Time between two looks at streams whose lease should be over; the index is read less often."""

COUNT_S: Final = 60.0
EXPIRE_S: Final = 10.0
EXPIRE_AGAIN_S: Final = 0.5
"""Time between two looks for expired rows, and the same while there are more."""
COMMITS_A_LOOK: Final = 5
"""Small commits of one look that delete expired rows: with their pauses, a thousand rows a second."""
SET_BACK_S: Final = 600.0
"""Some piece is always due sooner, unless the clock of the host was set back."""
JOURNAL_S: Final = 5.0
GAUGE_S: Final = 30.0
NEW_STREAMS_S: Final = 5.0
"""Time between two readings of the index for streams of other agents; under the shortest lease in use."""
SHARES_SWEEPS: Final = 20
"""Sweeps between two readings of the rows of all agents, by an agent without streams. Lost claims make it read at
once."""
LEFT: Final = 0.9
"""Share of a sweep for which a lost task is left to another agent: the next sweep takes it."""
SHARES_S: Final = 0.25
"""Shortest time between two readings of the rows of all agents."""
WRITING: Final = frozenset(
    {"sweep", "lines", "texts", "ticks", "expiry", "lost streams", "handoff", "journals", "balance"}
)
"""Pieces that write to the table, and wait while the agent's region has no grant."""


class Expiry:
    """Deletes expired rows, a few at a time, between the polls of an agent."""

    def __init__(self, store: TaskStore) -> None:
        self._store = store
        self.due = store.monotonic() + EXPIRE_S
        """Monotonic second of the next look."""

    def look(self) -> None:
        """Delete some expired rows.

        Raises:
            StoreError: the store did not answer.
        """
        self.due = self._store.monotonic() + EXPIRE_S
        if sum(self._store.engine.expire(self._store.clock.now()) for _ in range(COMMITS_A_LOOK)):
            self.due = self._store.monotonic() + EXPIRE_AGAIN_S


class Housekeeping:
    """Runs each piece when it is due, in the agent's loop, between polls."""

    def __init__(
        self,
        core: Core,
        *,
        pollers: Mapping[Served, QueuePoller],
        in_flight: InFlight,
        rescuer: Rescuer,
        ticks: TickScheduler,
        vitals: Vitals,
        marks: Marks,
        outage: Outage,
    ) -> None:
        store, bus = core.store, core.bus
        self._core = core
        self._gate = core.gate
        self._store = store
        self._jobs = core.jobs
        self._settings = core.settings
        self._bus = bus
        self._owner = core.name
        self._pollers = pollers
        self._in_flight = in_flight
        self._rescuer = rescuer
        self._ticks = ticks
        self._streams = Streams(store, core.settings, bus, in_flight=in_flight, rescuer=rescuer)
        self._stream_pollers = [poller for poller in pollers.values() if poller.kind == STREAM]
        self._texts = TextSweep(store, owner=core.name)
        self._vitals = vitals
        self._tally = Tally(bus)
        self._marks = marks
        self._outage = outage
        self._scheduler = schedule.Scheduler()
        self._lanes: list[Lane] = []
        self._serving: dict[str, list[str]] = {}
        self._learnt = -math.inf
        self._expiry = Expiry(store)

    def begin(self) -> None:
        """Learn the lanes, announce the agent, and schedule everything."""
        sweep_s = self._settings.sweep_s
        for seconds, name, work in (
            (min(sweep_s, NEW_STREAMS_S) if self._stream_pollers else sweep_s, "sweep", self._sweep),
            (sweep_s, "sweep", lambda: self._rescuer.heal(self._lanes)),
            (sweep_s, "lines", self._sweep_lines),
            (COUNT_S, "texts", lambda: self._texts.look(self._lanes)),
            (sweep_s if self._stream_pollers else sweep_s * SHARES_SWEEPS, "shares", self._learn_shares),
            (min(ANNOUNCE_S, max(1.0, sweep_s)), "registration", self._announce),
            (PAUSES_LOOK_S / 2, "pauses", self._look_at_pauses),
            (TICK_LOOK_S, "ticks", self._ticks.look),
            (COUNT_S, "counters", self._count),
            *(self._pieces_for_streams() if self._stream_pollers else ()),
        ):
            self._scheduler.every(seconds).seconds.do(  # type: ignore[arg-type] # fractions work
                self._store_permitting, name, work
            )
        self._store_permitting("registration", self._announce)
        self._store_permitting("lanes", self._learn_lanes)
        self._store_permitting("shares", self._learn_shares)
        if self._stream_pollers:
            self._streams.gauge()
        self._look_for_ticks()

    def run_pending(self) -> None:
        """Run what is due, and read the rows of all agents where claims were lost."""
        for piece in sorted(job for job in self._scheduler.get_jobs() if job.should_run):
            if self._core.stop.is_made:
                return
            piece.run()  # type: ignore[no-untyped-call] # the library has no types
        if self._ticks_wait_s() <= 0:  # a tick is due by the shared clock, not by the host's
            self._look_for_ticks()
        if self._expiry_wait_s() <= 0:
            self._store_permitting("expiry", self._expiry.look)
        now = self._store.monotonic()
        if now >= self._learnt + SHARES_S and any(poller.is_contended for poller in self._pollers.values()):
            self._store_permitting("shares", self._learn_shares)

    def idle_s(self, longest_s: float) -> float:
        """Seconds until something is due, at most `longest_s`.

        The library schedules by the host's clock: when that was set back, everything is scheduled afresh.
        """
        idle_s = self._scheduler.idle_seconds or 0.0
        if idle_s > SET_BACK_S:
            for job in self._scheduler.get_jobs():
                job._schedule_next_run()
        return max(0.0, min(idle_s, longest_s, self._ticks_wait_s(), self._expiry_wait_s()))

    def leave_streams(self, *, store_answers: bool) -> None:
        """The agent begins to stop: hand its streams off, and write its row, so that no agent counts on it."""
        announce = partial(self._store_permitting, "registration", self._announce)
        if self._stream_pollers:
            self._streams.leave(announce if store_answers else None)
        elif store_answers and not self._in_flight.is_empty:
            announce()

    def look_at_handoffs(self) -> None:
        """Advance the handoffs of streams."""
        if not self._in_flight.handoffs.is_idle:
            self._store_permitting("handoff", self._in_flight.handoffs.look)

    def end(self) -> None:
        """Write the last journals, and delete what the table has of this agent: its row comes last."""
        pieces = (
            ("journals", self._streams.keep_journals),
            ("pauses", self._end_pauses),
            ("registration", self._sign_off),
        )
        all(self._store_permitting(name, work) for name, work in pieces)

    def _end_pauses(self) -> None:
        if self._gate.is_open:
            self._in_flight.pauses.end()

    def _ticks_wait_s(self) -> float:
        return self._ticks.wait_s() if self._gate.is_open else math.inf

    def _expiry_wait_s(self) -> float:
        return self._expiry.due - self._store.monotonic() if self._gate.is_open else math.inf

    def _look_for_ticks(self) -> None:
        self._store_permitting("ticks", self._ticks.look)

    def _pieces_for_streams(self) -> Sequence[tuple[float, str, Callable[[], object]]]:
        streams, sweep_s = self._streams, self._settings.sweep_s
        return (
            (STREAM_LOOK_S, "handoff", self.look_at_handoffs),
            (min(LOST_LOOK_S, sweep_s), "lost streams", partial(self._take_lost, None)),
            (JOURNAL_S, "journals", streams.keep_journals),
            (GAUGE_S, "connections", streams.gauge),
            (self._settings.rebalance_s, "balance", streams.rebalance),
        )

    def _sweep(self) -> None:
        self._learn_lanes()
        lanes = {lane for poller in self._pollers.values() for lane in poller.lanes}
        self._take_lost(sorted(lanes, key=str))

    def _take_lost(self, lanes: Sequence[Lane] | None) -> None:
        self._streams.take_lost(lanes, self._room(), self._others_s)

    def _others_s(self, task: Task) -> float:
        """How long the batch task of a lost agent is left to others, so that the tasks of one agent are spread.

        A sweep if it is the share of another agent, and one more if it is to run alone and this agent is not idle.
        """
        if self._store.monotonic() >= self._learnt + self._settings.sweep_s:
            self._learn_shares()  # or a task would wait for a dead agent
        serving = [name for name in self._serving.get(task.queue, ()) if name != task.lease_owner]
        is_ours = not serving or serving[crc32(task.task_id.encode()) % len(serving)] == self._owner
        is_late = self._in_flight.suspects.is_one(task, lost=True) and not self._in_flight.is_empty
        return ((not is_ours) + is_late) * self._settings.sweep_s * LEFT

    def _sweep_lines(self) -> None:
        if self._in_flight.admission.sweep(self._owner):
            for poller in self._pollers.values():
                poller.wake()

    def _look_at_pauses(self) -> None:
        """Without a free slot no poll reads what is paused."""
        if not any(poller.free > 0 for poller in self._pollers.values()):
            self._in_flight.pauses.look()

    def _room(self) -> Callable[[Task], float | None]:
        """Length of the lease that a lost agent's task gets here; None: no job, no free slot, or paused."""
        left = {poller.pool: poller.free for poller in self._pollers.values()}
        suspects = self._in_flight.suspects

        def lease_s(task: Task) -> float | None:
            if task.job_value not in self._jobs.by_value or self._in_flight.is_here(task.task_id):
                return None
            job = self._jobs[task.job]
            poller = self._pollers.get((task.queue, job.kind))
            if poller is None or left[poller.pool] <= 0:
                return None
            if self._in_flight.pauses.is_paused(task.queue, task.job):
                return None
            left[poller.pool] -= 1
            if not job.is_stream and suspects.is_one(task, lost=True):
                left.update(dict.fromkeys(left, 0))  # it is to run alone
            return job.lease_s or self._settings.lease_s

        return lease_s

    def _learn_lanes(self) -> None:
        self._lanes = self._store.lanes()
        for (name, _), poller in self._pollers.items():
            lanes = {Lane(name, shard) for shard in range(self._settings.shards)}
            lanes.update(lane for lane in self._lanes if lane.queue == name)
            poller.lanes = sorted(lanes, key=lambda lane: lane.shard)
        served = (lane for poller in self._pollers.values() for lane in poller.lanes)
        self._in_flight.admission.freed.lanes = list(dict.fromkeys((*served, *self._lanes)))

    def _learn_shares(self) -> None:
        """Rank the agents of each queue by their names, so that they claim different tasks."""
        self._learnt = self._store.monotonic()
        agents = self._store.agents()
        self._streams.fleet.learn(agents)
        self._in_flight.selector.learn(agents)
        self._ticks.learn(agents)
        for (name, _), poller in self._pollers.items():
            others = (agent.name for agent in agents if name in agent.info["queues"] and not is_paused(agent))
            serving = self._serving[name] = sorted({self._owner, *others})
            poller.share = (serving.index(self._owner), len(serving))
            poller.is_contended = False

    def _announce(self) -> None:
        self._store.announce(
            self._owner,
            {
                "pid": os.getpid(),
                "process": process_start(os.getpid()),
                "version": __version__,
                "queues": {name: poller.slots for (name, _), poller in self._batch_first()},
                "running": {name: poller.running for (name, _), poller in self._batch_first()},
                "streams": self._streams.entry(),
                "jobs": sorted(self._jobs.by_value),
                "health": dict(self._vitals.entry()),
                "counts": {**self._tally.counts(), **units_of(self._store.engine)},
                "rss_mib": round(resident_mib()),
                **self._tally.facts(getattr(self._store.clock, "skew", None)),
                **self._core.facts,
            },
            lives_s=max(ANNOUNCE_S, self._settings.sweep_s) * 4,
        )

    def _sign_off(self) -> None:
        self._store.sign_off(self._owner)

    def _batch_first(self) -> list[tuple[Served, QueuePoller]]:
        """The pollers, those for batch tasks last: a dict by queue has their numbers."""
        return sorted(self._pollers.items(), key=lambda one: one[0][1] == BATCH)

    def _count(self) -> None:
        self._bus.emit(
            events.Counted(
                running=len(self._in_flight.held),
                slots=slots_of(self._pollers),
                skew_s=getattr(self._store.clock, "skew", None),
            )
        )

    def _store_permitting(self, name: str, work: Callable[[], object]) -> bool:
        """Run a piece. After a failure of the store it comes again at its next time."""
        if name in WRITING and not self._gate.is_open:
            return True
        try:
            work()
            self._marks.moved()
            if name == "registration":  # every 15 s or less, and no end without an answer of the store
                self._marks.answered()
        except StoreError as error:
            self._marks.missed(error)
            self._bus.emit(events.StoreFailed(during=name, error=str(error), next_try_s=self._settings.sweep_s))
            if not isinstance(error, StoreRejected) and self._core.stop.is_made and not self._outage.is_on:
                self._outage.failed(error, answered=False)  # a stopping agent has no time for a second failure
            return False
        return True
