"""Sweeps for the whole fleet: take over tasks of lost agents, repair what a crash left between two writes, and keep
large payloads as long as their tasks."""

from __future__ import annotations

import math
import socket
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Final

from thunderagent.jobs.job import Limit
from thunderagent.jobs.outcome import about
from thunderagent.model import events
from thunderagent.model.bus import EventBus
from thunderagent.model.clock import on_host, process_start
from thunderagent.model.conditions import Write
from thunderagent.model.dependencies import most_dependents
from thunderagent.model.losses import Loss, is_to_blame, lived, lost_agents, runs_alone, verdict
from thunderagent.model.rows import as_map, is_number
from thunderagent.model.task import Candidate, Lane, Lease, Row, Status, Task
from thunderagent.model.writes import tasks as writes
from thunderagent.model.writes.limits import holder
from thunderagent.queue.dependents import Dependents, Ended, statuses_of
from thunderagent.queue.limits.permits import Permit, limit_of, release_permits
from thunderagent.queue.limits.waitlist import open_waitlists, waitlist_value
from thunderagent.queue.sweeps import ENTRIES_A_SWEEP, Rounds, fleet_rounds
from thunderagent.queue.unique import UniqueKeys
from thunderagent.stores.engine import MAX_TEXT_BYTES
from thunderagent.stores.large_texts import DAY_S
from thunderagent.stores.tasks import Doubt, TaskStore

RECHECKED: Final = 500
"""Most rows that one look at leases which should be over reads."""

REMEMBERED: Final = 50_000
"""Running tasks whose beats one agent remembers; others are judged by the shared clock alone."""

LONGEST_NAME: Final = 400
"""Characters of an agent's name: a longer one was written by hand, and is the key of no row."""

UNREAD_S: Final = 60.0
"""Time between two looks at a running task whose row cannot be read."""


@dataclass(slots=True)
class _Sighting:
    """When `(fence, hb)` of a running task was first seen as it is, and when to look again."""

    fence: int
    hb: int | None
    since: float
    look_again: float
    lap: int = 0
    """The lap of its lane in which the index showed it last."""
    lane: str = ""
    is_overwritten: bool = False
    """The row is that of an earlier epoch with a smaller fence: a late write of a lost region."""


class LostLeases:
    """Finds RUNNING tasks whose agents are gone.

    A lease is over when one of these holds:

    * its expiry and the guard are past on the shared clock, if that is usable;
    * its beats stood still for a lease and the guard on our monotonic clock, counted from after the read that first saw
      them;
    * it is of an earlier epoch of the regions;
    * it is ours, and we let it go when the grant of our region ended, or gave up the claim that it came from.
    """

    def __init__(
        self,
        store: TaskStore,
        *,
        guard_s: float,
        is_held: Callable[[str], bool] = lambda task_id: False,
        epoch: Callable[[], int] = lambda: 0,
        owner: str = "",
        is_stray: Callable[[Task], bool] = lambda task: False,
        most: int = ENTRIES_A_SWEEP,
        remembered: int = REMEMBERED,
    ) -> None:
        self.most = most
        self._rounds = Rounds(store, most=most)
        self._remembered = remembered
        self._laps: Counter[str] = Counter()
        self._store = store
        self._is_stray = is_stray
        self._epoch = epoch
        self._owner = owner
        self._is_held = is_held
        self._guard_s = guard_s
        self._monotonic = store.monotonic
        self._sightings: dict[str, _Sighting] = {}

    def find(self, lanes: Sequence[Lane]) -> list[Task]:
        """Lost tasks of these lanes. Reads only rows that are new or should have expired."""
        lost: list[Task] = []
        ended: dict[str, int] = {}
        for value in [lane.value(Status.RUNNING) for lane in lanes]:
            for entries in self._rounds.pages(value):
                lost += self._look_at([entry.task_id for entry in entries], value)
            if value not in self._rounds.places:
                ended[value] = self._laps[value]
                self._laps[value] += 1
        self._sightings = {
            task_id: known for task_id, known in self._sightings.items() if known.lap >= ended.get(known.lane, 0)
        }
        return lost

    def _look_at(self, task_ids: Sequence[str], value: str) -> list[Task]:
        """The lost tasks among those that the index shows as running."""
        now, due = self._monotonic(), []
        for task_id in task_ids:
            if (known := self._sightings.get(task_id)) is not None:
                known.lap = self._laps[value]
            # the heartbeat looks after our own
            if (known is None or known.look_again <= now) and not self._is_held(task_id):
                due.append(task_id)
        lost = []
        for name, task in (self._store.read(due) if due else {}).items():
            now = self._monotonic()
            if isinstance(task, Task):
                lost += [task] if self._is_lost(task, now) else []
            else:  # left to agents that can read it
                self._remember(name, value, _Sighting(-1, None, now, now + UNREAD_S))
        return lost

    def recheck(self) -> list[Task]:
        """Lost tasks among the known ones that should have expired by now. Reads no index."""
        now = self._monotonic()
        due = [
            task_id
            for task_id, known in self._sightings.items()
            if known.look_again <= now and not self._is_held(task_id)
        ][:RECHECKED]
        rows = self._store.peek(due) if due else {}
        for task_id in due:
            known = self._sightings.pop(task_id)
            if task_id in rows and rows[task_id].status is Status.RUNNING:
                self._sightings[task_id] = known  # behind the others
        return [task for task in rows.values() if self._is_lost(task, self._monotonic())]

    def _is_lost(self, task: Task, now: float) -> bool:
        if task.status is not Status.RUNNING or task.lock_time is None or task.lease_sec is None:
            return False
        known = self._sightings.get(task.task_id)
        if self.has_strayed(task) or self.was_let_go(task):
            return True
        if self.has_moved(task):
            return self._has_no_holder(task, known, now)
        if known is None or (known.fence, known.hb) != (task.fence, task.hb):
            known = self._remember(
                task.task_id, task.lane.value(Status.RUNNING), _Sighting(task.fence, task.hb, now, now)
            )
        clock = self._store.clock.leases
        still_for = now - known.since
        if still_for > task.lease_sec + self._guard_s:
            return True
        known.look_again = now + task.lease_sec + self._guard_s - still_for
        if not clock.is_usable:
            return False
        left = task.lock_time + self._guard_s - clock.earliest()
        known.look_again = min(known.look_again, now + left)
        return left < 0

    def _has_no_holder(self, task: Task, known: _Sighting | None, now: float) -> bool:
        """Whether the row of an earlier epoch is the last, and not a late write over the row of a holder that we saw.

        Such a holder writes its row again with its next heartbeat, and has the time of a lease for that.
        """
        if known is None or known.fence <= task.fence:  # for `recheck`, if it is left to another agent now
            self._remember(task.task_id, task.lane.value(Status.RUNNING), _Sighting(task.fence, task.hb, now, now))
            return True
        if known.hb != task.hb or not known.is_overwritten:
            known.hb, known.since, known.look_again, known.is_overwritten = task.hb, now, now, True
        return now - known.since > (task.lease_sec or 0.0) + self._guard_s

    def has_strayed(self, task: Task) -> bool:
        """Whether it came from a claim of ours that we gave up, and can be put back under our grant."""
        return self._is_stray(task) and not self.has_moved(task)

    def _remember(self, task_id: str, value: str, sighting: _Sighting) -> _Sighting:
        """Keep a sighting while there is room."""
        sighting.lane, sighting.lap = value, self._laps[value]
        was_known = self._sightings.pop(task_id, None) is not None
        if len(self._sightings) < self._remembered - was_known:
            self._sightings[task_id] = sighting
        return sighting

    def was_let_go(self, task: Task) -> bool:
        """Whether we held it and let it go when a grant ended that our region has again."""
        return task.lease_owner == self._owner and task.region_epoch is not None and task.region_epoch == self._epoch()

    def has_moved(self, task: Task) -> bool:
        """Whether its holder's region has lost the grant: the holder was stopped, whatever the lease says."""
        return task.region_epoch is not None and task.region_epoch < self._epoch()


class Rescuer:
    """What an agent does for the fleet every `sweep_s`.

    Args:
        dependents: notifies the children of tasks that are given up.
        lost: finds the tasks of lost agents.
        max_crashes: takeovers of one task; see `losses`.
        sweep_s: time between two sweeps.
        limit: of a task that is given up.
        freed: called for a permit that was released, with the row of its limit.
    """

    def __init__(
        self,
        store: TaskStore,
        bus: EventBus,
        dependents: Dependents,
        lost: LostLeases,
        *,
        owner: str,
        max_crashes: int,
        sweep_s: float,
        limit: Callable[[Task], Limit | None] = lambda task: limit_of(task, None),
        freed: Callable[[Limit, Row], None] = lambda limit, row: None,
    ) -> None:
        self.lost = lost
        self._store = store
        self._bus = bus
        self._limit = limit
        self._freed = freed
        self._dependents = dependents
        self._owner = owner
        self._max_crashes = max_crashes
        self._sweep_s = sweep_s
        self._keys = UniqueKeys(store)

    def take_over(
        self,
        lanes: Sequence[Lane] | None,
        wanted: Callable[[Task], float | None],
        doubt: Callable[[Sequence[Doubt]], None] = lambda doubts: None,
    ) -> list[Lease]:
        """Take tasks of lost agents.

        Args:
            lanes: where to look; None: only at known leases that should be over.
            wanted: length of the lease for a task; None: this agent has no job or no slot for it.
            doubt: called for takeovers without an answer.

        Returns:
            the leases won; their tasks stay RUNNING.
        """
        mine: list[tuple[Task, float]] = []
        strays: list[Task] = []
        lost = self.lost.recheck() if lanes is None else self.lost.find(lanes)
        losses = self._losses(lost)
        for task in lost:
            has_moved = self.lost.has_moved(task) or self.lost.was_let_go(task)
            if self.lost.has_strayed(task):
                strays.append(task)
            elif is_to_blame(task, self._max_crashes) and not has_moved:
                self._give_up(task, losses[task.task_id])
            elif (lease_s := wanted(task)) is not None:  # a lost region is not the fault of its tasks
                mine.append((replace(task, crash_count=task.crash_count - has_moved), lease_s))
        self._put_back(strays)
        if not mine:
            return []
        before = {task.task_id: task for task, _ in mine}
        exchanged = self._store.take_over(mine, owner=self._owner, losses=losses)
        doubt(exchanged.doubts)
        for lease in exchanged.leases:
            lost_agent = before[lease.task_id].lease_owner or "?"
            self._bus.emit(events.TaskTakenOver(**about(lease), lost_agent=lost_agent))
        for candidate, error in exchanged.rejected:
            why = f"the store does not take it for another agent: {error}"
            self._give_up(before[candidate.task_id], losses[candidate.task_id], why)
        return exchanged.leases

    def _put_back(self, strays: Sequence[Task]) -> None:
        """Undo claims of ours that were carried out late: nothing has run."""
        now = self._store.clock.now()
        leases = [Lease(task=task, owner=self._owner, fence=task.fence, lease_s=0.0, held_from=0.0) for task in strays]
        batch = [writes.put_back(one, due=one.task.created_at + writes.JUST_BEHIND_S, now=now) for one in leases]
        for lease, after in zip(
            leases, self._store.write_tasks(batch, rejected=self._dependents.rejected) if batch else (), strict=True
        ):
            if after is not None:
                self._bus.emit(events.TaskReleased(**about(lease)))

    def _losses(self, lost: Sequence[Task]) -> dict[str, Loss]:
        """Circumstances of each loss, by task id."""
        number = Counter(task.lease_owner for task in lost)
        seen_at = self._seen_at({task.lease_owner for task in lost})
        return {
            task.task_id: Loss(
                task.lease_owner,
                beside=number[task.lease_owner] - 1,
                is_alone=runs_alone(task),
                lives=seen_at.get(str(task.lease_owner), 0.0) > on_host(self._store.clock, task.lock_time or 0.0),
            )
            for task in lost
        }

    def _seen_at(self, agents: Iterable[str | None]) -> dict[str, float]:
        """When the rows of agents were last written; infinity for processes that run on this host."""
        names = (name for name in agents if isinstance(name, str) and 0 < len(name) <= LONGEST_NAME)
        ids = {f"agent:{name}": name for name in names}
        rows = self._store.engine.get(sorted(ids)) if ids else {}
        seen = {ids[row_id]: at for row_id, row in rows.items() if is_number(at := row.get("updatedAt"))}
        return seen | {name: math.inf for row_id, name in ids.items() if _runs_here(name, rows.get(row_id, {}))}

    def _give_up(self, task: Task, loss: Loss, error: str | None = None) -> None:
        now = self._store.clock.now()
        if error is None:
            alive = lived(task, self._seen_at(lost_agents(task))) + loss.lives
            error = verdict(task, loss, max_crashes=self._max_crashes, alive=alive)
        expire_at = now + self._dependents.keep_failed_s
        write = writes.give_up(task, error=error, now=now, expire_at=expire_at, loss=loss)
        rejected = list[Write]()
        [after] = self._store.write_tasks([write], rejected=lambda write, _: rejected.append(write))
        if rejected:
            [after] = self._store.write_tasks([writes.bare(write)], rejected=self._dependents.rejected)
        if after is not None:
            lease = Lease(task=task, owner=self._owner, fence=task.fence, lease_s=0.0, held_from=0.0)
            self._bus.emit(events.TaskGivenUp(**about(lease), lost_agent=task.lease_owner or "?"))
            self._dependents.tell([Ended(after.task_id, after.status, after.dependents)])
            self._keys.release([after])
            self._store.large_texts.outlive_all([after], now=now)
            if limit := self._limit(after) or (Limit(after.limit_key, 1) if after.limit_key else None):
                taken = Permit(limit, holder(task.task_id, task.fence), is_alone=limit.number == 1)
                for freed in release_permits(self._store, [taken]):
                    self._freed(*freed)

    def heal(self, lanes: Sequence[Lane]) -> None:
        """Repair BLOCKED tasks after a crash; one agent of the fleet does so in each `sweep_s`.

        * A parent has ended and its child was not notified: notify it.
        * A parent does not know its child, as the client died between two writes: register the child.
        """
        values = [lane.value(Status.BLOCKED) for lane in lanes]
        if not any(self._store.engine.page(value, limit=1).entries for value in values):
            return  # a turn is a write, ten times the price of this look
        turn_s = self._sweep_s * 0.9
        with fleet_rounds(self._store, "blocked", owner=self._owner, lasts_s=turn_s, most=self.lost.most) as rounds:
            for value in values:
                for entries in rounds.pages(value) if rounds is not None else ():
                    tasks = self._store.peek(entry.task_id for entry in entries).values()
                    self._heal([task for task in tasks if task.status is Status.BLOCKED])

    def _heal(self, children: Sequence[Task]) -> None:
        names = sorted({parent for child in children for parent in child.waiting_for})
        parents = self._store.read(names)
        self._dependents.tell(self._dependents.judge(children, statuses_of(names, parents)))
        unknown: dict[str, tuple[Task, list[str]]] = {}
        for child in children:
            for name in child.waiting_for:
                parent = parents.get(name)
                if isinstance(parent, Task) and not (parent.status.is_terminal or child.task_id in parent.dependents):
                    unknown.setdefault(name, (parent, []))[1].append(child.task_id)
        batch = [
            writes.register_dependent(parent, *names)
            for _, (parent, names) in sorted(unknown.items())
            if most_dependents(parent, names)  # else a sweep notifies them
        ]
        if batch:
            self._store.write_tasks(batch, rejected=self._dependents.rejected)


def _runs_here(agent: str, row: Row) -> bool:
    """Whether the agent's process runs on this host; its start time tells it from a later process with its number."""
    host, _, process = agent.partition(":")
    pid = process.partition(":")[0]
    started = as_map(row.get("info")).get("process")
    return host == socket.gethostname() and pid.isdigit() and bool(started) and process_start(int(pid)) == started


TEXTS_EVERY_S: Final = 10 * DAY_S
"""Time between two sweeps of large payloads, each done by one agent of the fleet."""

WAITS_S: Final = 60 * DAY_S
"""How long a task must have been due for its payload to be looked after."""

ASK_S: Final = 3600.0
"""Time between two attempts of one agent to get the turn."""

PAGES_A_LOOK: Final = 5
"""Pages of 100 entries that one look reads; the next look goes on from there."""

OPEN: Final = (Status.PENDING, Status.RUNNING, Status.BLOCKED)


class TextSweep:
    """Keeps payloads that are stored apart from their rows. Called in the agent's loop.

    A claim or a retry looks after the payload of its task. A task that waits or runs for two months is found here: its
    due time is at the head of the index.
    """

    def __init__(self, store: TaskStore, *, owner: str) -> None:
        self._store = store
        self._owner = owner
        self._due = 0.0
        self._walk: Iterator[Sequence[Candidate]] | None = None

    def look(self, lanes: Sequence[Lane]) -> None:
        """Begin a sweep if it is this agent's turn, or go on with it.

        Raises:
            StoreError: the store did not answer; a later turn begins the sweep again.
        """
        if self._walk is None and not self._is_my_turn():
            return
        walk, self._walk = self._walk or self._pages(lanes), None
        pages = list(islice(walk, PAGES_A_LOOK))
        for entries in pages:
            tasks = self._store.get(one.task_id for one in entries).values()
            is_open = (task for task in tasks if not task.status.is_terminal)
            self._store.large_texts.outlive_all(is_open, now=self._store.clock.now())
        if len(pages) == PAGES_A_LOOK:
            self._walk = walk

    def _is_my_turn(self) -> bool:
        has_texts = self._store.engine.inline_bytes < MAX_TEXT_BYTES or self._store.large_texts.blobs is not None
        if not has_texts or self._store.monotonic() < self._due:
            return False
        self._due = self._store.monotonic() + ASK_S
        return self._store.take_turn("texts", owner=self._owner, lasts_s=TEXTS_EVERY_S) is not None

    def _pages(self, lanes: Sequence[Lane]) -> Iterator[Sequence[Candidate]]:
        until = self._store.clock.now() - WAITS_S
        values = [lane.value(status) for lane in lanes for status in OPEN]
        values += [waitlist_value(lane, key) for key in open_waitlists(self._store) for lane in lanes]
        rounds = Rounds(self._store, most=sys.maxsize)
        for value in values:
            yield from rounds.pages(value, until=until)
