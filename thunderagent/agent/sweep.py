"""Sweeps that any agent may run: find the tasks of lost agents, and heal what a crash left between two writes."""

from __future__ import annotations

import math
import socket
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from thunderagent.jobs.job import Limit
from thunderagent.jobs.outcome import about
from thunderagent.model import events
from thunderagent.model.bus import EventBus
from thunderagent.model.clock import on_host, process_start, since_boot
from thunderagent.model.conditions import Write
from thunderagent.model.dependencies import most_dependents
from thunderagent.model.losses import Loss, is_to_blame, lived, lost_agents, runs_alone, verdict
from thunderagent.model.rows import as_map, is_number
from thunderagent.model.task import Lane, Lease, Row, Status, Task
from thunderagent.model.writes import tasks as writes
from thunderagent.model.writes.limits import holder
from thunderagent.queue.dependents import Dependents, Ended, statuses_of
from thunderagent.queue.limits.permits import Permit, limit_of, release_permits
from thunderagent.queue.sweeps import ENTRIES_A_SWEEP, Rounds, fleet_rounds
from thunderagent.queue.unique import UniqueKeys
from thunderagent.stores.tasks import Doubt, TaskStore

RECHECKED: Final = 500
"""Rows that one look at leases which should be over reads at most."""

REMEMBERED: Final = 50_000
"""Running tasks of which one agent remembers when their beats stood still; of others the shared clock alone tells."""

LONGEST_NAME: Final = 400
"""Characters of the name of an agent: one that is longer was written by hand, and is the key of no row."""


UNREAD_S: Final = 60.0
"""Time between two looks at a running task whose row cannot be read."""


@dataclass(slots=True)
class _Sighting:
    """When `(fence, hb)` of a running task was first seen as it is, and when it is worth another look."""

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

    A lease is over when its expiry and the guard are past on the shared clock, or when its beats stood still for a
    whole lease and the guard on our own monotonic clock (counted from after the read that saw them first). Without a
    usable shared clock only the second counts. A lease of an earlier epoch of the regions is over at once; so is one of
    our own that we let go when the grant of our region ended, or that came of a claim which we had given up.
    """

    def __init__(
        self,
        store: TaskStore,
        *,
        guard_s: float,
        is_held: Callable[[str], bool] = lambda task_id: False,
        monotonic: Callable[[], float] = since_boot,
        epoch: Callable[[], int] = lambda: 0,
        owner: str = "",
        is_stray: Callable[[Task], bool] = lambda task: False,
        most: int = ENTRIES_A_SWEEP,
        remembered: int = REMEMBERED,
    ) -> None:
        self._rounds = Rounds(store, most=most)
        self._remembered = remembered
        self._laps: Counter[str] = Counter()
        self._store = store
        self._is_stray = is_stray
        self._epoch = epoch
        self._owner = owner
        self._is_held = is_held
        self._guard_s = guard_s
        self._monotonic = monotonic
        self._sightings: dict[str, _Sighting] = {}

    def find(self, lanes: Sequence[Lane]) -> list[Task]:
        """The tasks of these lanes that may be taken over. Reads only rows that are new or should have expired."""
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
        """Of tasks that the index shows as running, the lost ones; what is not due yet is not read."""
        now, due = self._monotonic(), []
        for task_id in task_ids:
            if (known := self._sightings.get(task_id)) is not None:
                known.lap = self._laps[value]
            # what we hold ourselves the heartbeat looks after
            if (known is None or known.look_again <= now) and not self._is_held(task_id):
                due.append(task_id)
        lost = []
        for name, task in (self._store.read(due) if due else {}).items():
            now = self._monotonic()
            if isinstance(task, Task):
                lost += [task] if self._is_lost(task, now) else []
            else:  # it is left to agents that can read it
                self._remember(name, value, _Sighting(-1, None, now, now + UNREAD_S))
        return lost

    def recheck(self) -> list[Task]:
        """Those that are known and should have expired by now; reads no index."""
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
                self._sightings[task_id] = known  # behind the others: each has its turn
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
        """Whether the row of an earlier epoch is all there is; or else a late write over that of a holder that we saw.

        Such a holder writes its own row again with its next heartbeat: it has the time of a lease for that.
        """
        if known is None or known.fence <= task.fence:  # if it is left to another agent now, `recheck` finds it again
            self._remember(task.task_id, task.lane.value(Status.RUNNING), _Sighting(task.fence, task.hb, now, now))
            return True
        if known.hb != task.hb or not known.is_overwritten:
            known.hb, known.since, known.look_again, known.is_overwritten = task.hb, now, now, True
        return now - known.since > (task.lease_sec or 0.0) + self._guard_s

    def has_strayed(self, task: Task) -> bool:
        """Whether it came of a claim of ours that we had given up, and can be given back under our grant."""
        return self._is_stray(task) and not self.has_moved(task)

    def _remember(self, task_id: str, value: str, sighting: _Sighting) -> _Sighting:
        """Keep it while there is room. Without room, one whose beats move makes room for one that may stand still."""
        sighting.lane, sighting.lap = value, self._laps[value]
        was_known = self._sightings.pop(task_id, None) is not None
        if len(self._sightings) < self._remembered - was_known:
            self._sightings[task_id] = sighting
        return sighting

    def was_let_go(self, task: Task) -> bool:
        """Whether we have held it and let it go, as a grant ended that our region has again."""
        return task.lease_owner == self._owner and task.region_epoch is not None and task.region_epoch == self._epoch()

    def has_moved(self, task: Task) -> bool:
        """Whether an agent of a region that has lost its grant holds it: it was stopped, whatever the lease says."""
        return task.region_epoch is not None and task.region_epoch < self._epoch()


class Rescuer:
    """What an agent does for the fleet every `sweep_s`."""

    def __init__(
        self,
        store: TaskStore,
        bus: EventBus,
        dependents: Dependents,
        *,
        owner: str,
        max_crashes: int,
        guard_s: float,
        sweep_s: float,
        keep_failed_s: float,
        is_held: Callable[[str], bool] = lambda task_id: False,
        monotonic: Callable[[], float] = since_boot,
        epoch: Callable[[], int] = lambda: 0,
        limit: Callable[[Task], Limit | None] = lambda task: limit_of(task, None),
        freed: Callable[[Limit, Row], None] = lambda limit, row: None,
        is_stray: Callable[[Task], bool] = lambda task: False,
        most: int = ENTRIES_A_SWEEP,
    ) -> None:
        """Make one.

        Args:
            store: where the tasks are.
            bus: told of takeovers and of what is given up.
            dependents: tells the children of what is given up.
            owner: the agent.
            max_crashes: takeovers of one task; see `losses`.
            guard_s: added to a lease before it counts as over.
            sweep_s: time between two sweeps.
            keep_failed_s: how long what is given up is kept.
            is_held: whether this agent holds a task itself.
            monotonic: the clock of beats that stand still.
            epoch: that of the region's grant, 0 where there is one region.
            limit: of a task that is given up.
            freed: told of a slot that was freed, with the row of its limit.
            is_stray: whether a claim of this agent was carried out when the agent had given it up.
            most: index entries of one lane that one sweep reads.
        """
        self._store = store
        self._bus = bus
        self._limit = limit
        self._freed = freed
        self._dependents = dependents
        self._owner = owner
        self._max_crashes = max_crashes
        self._sweep_s = sweep_s
        self._keep_failed_s = keep_failed_s
        self._keys = UniqueKeys(store)
        self.lost = LostLeases(
            store,
            guard_s=guard_s,
            is_held=is_held,
            monotonic=monotonic,
            epoch=epoch,
            owner=owner,
            is_stray=is_stray,
            most=most,
        )
        self._most = most

    def take_over(
        self,
        lanes: Sequence[Lane] | None,
        wanted: Callable[[Task], float | None],
        doubt: Callable[[Sequence[Doubt]], None] = lambda doubts: None,
    ) -> list[Lease]:
        """Take tasks of lost agents.

        Args:
            lanes: where to look; None: only at leases that are known, and should be over.
            wanted: the length of the lease for a task that this agent has the job and a slot for, or None.
            doubt: told of takeovers that had no answer.

        Returns:
            the leases won; each task goes on RUNNING, here.
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
            elif (lease_s := wanted(task)) is not None:  # that a region was lost is not the fault of its tasks
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
        """Undo claims of ours that were carried out late: nothing has run, and no agent was lost."""
        now = self._store.clock.now()
        leases = [Lease(task=task, owner=self._owner, fence=task.fence, lease_s=0.0, held_from=0.0) for task in strays]
        batch = [writes.put_back(one, due=one.task.created_at + writes.JUST_BEHIND_S, now=now) for one in leases]
        for lease, after in zip(
            leases, self._store.write_tasks(batch, rejected=self._dependents.rejected) if batch else (), strict=True
        ):
            if after is not None:
                self._bus.emit(events.TaskReleased(**about(lease)))

    def _losses(self, lost: Sequence[Task]) -> dict[str, Loss]:
        """What is seen of the agents of lost tasks, by the ids of the tasks."""
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
        """When agents told of themselves for the last time; those whose process is on this host and runs do so now."""
        names = (name for name in agents if isinstance(name, str) and 0 < len(name) <= LONGEST_NAME)
        ids = {f"agent:{name}": name for name in names}
        rows = self._store.engine.get(sorted(ids)) if ids else {}
        told = {ids[row_id]: at for row_id, row in rows.items() if is_number(at := row.get("updatedAt"))}
        return told | {name: math.inf for row_id, name in ids.items() if _runs_here(name, rows.get(row_id, {}))}

    def _give_up(self, task: Task, loss: Loss, error: str | None = None) -> None:
        now = self._store.clock.now()
        if error is None:
            alive = lived(task, self._seen_at(lost_agents(task))) + loss.lives
            error = verdict(task, loss, max_crashes=self._max_crashes, alive=alive)
        expire_at = now + self._keep_failed_s
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
        """Look at BLOCKED tasks for what a crash left undone; one agent of the fleet does so in each `sweep_s`.

        * a parent has ended and its child was not told: tell it;
        * a parent does not know its child (the client died between the two writes): make them known to each other.
        """
        values = [lane.value(Status.BLOCKED) for lane in lanes]
        if not any(self._store.engine.page(value, limit=1).entries for value in values):
            return  # a turn is a write, which costs ten times as much as to see that nobody waits
        turn_s = self._sweep_s * 0.9
        with fleet_rounds(self._store, "blocked", owner=self._owner, lasts_s=turn_s, most=self._most) as rounds:
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
            if most_dependents(parent, names)  # else they are told by a sweep, as ever
        ]
        if batch:
            self._store.write_tasks(batch, rejected=self._dependents.rejected)


def _runs_here(agent: str, row: Row) -> bool:
    """True when the agent's process is on this host and runs; what its row says of it tells it from others."""
    host, _, process = agent.partition(":")
    pid = process.partition(":")[0]
    started = as_map(row.get("info")).get("process")
    return host == socket.gethostname() and pid.isdigit() and bool(started) and process_start(int(pid)) == started
