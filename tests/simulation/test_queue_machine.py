"""Random verbs, crashes, lost replies, stale pages and clocks that are set, against the invariants of the queue.

The audit (`audit.py`) checks each write that is really done, and the whole table after every step. At the end the
faults stop and one agent that is left must bring every task to its end.

`THUNDER_TEST_MODEL=2000` runs so many random examples on SQLite and a tenth of it on DynamoDB, and shrinks what fails;
without it the examples are the same in every run.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
    run_state_machine_as_test,
)
from moto import mock_aws

from tests.simulation.audit import GUARD_S, MAX_CRASHES, Actor, Audit
from thunderagent.agent.admission import Admission
from thunderagent.agent.settle import Policy, Settlement, settle
from thunderagent.agent.sweep import LostLeases, Rescuer
from thunderagent.client import Client
from thunderagent.jobs.context import Cancel, Context, Fail, Snooze
from thunderagent.jobs.job import job
from thunderagent.jobs.outcome import Outcome, Raised, Returned, Stopped
from thunderagent.jobs.registry import Registry
from thunderagent.model.bus import EventBus
from thunderagent.model.clock import DateClock, HostClock
from thunderagent.model.conditions import Write
from thunderagent.model.dependencies import Verdict, verdict
from thunderagent.model.errors import (
    AccessDenied,
    AgentDraining,
    StoreError,
    StoreUnavailable,
    TaskCancelled,
    ThunderAgentError,
)
from thunderagent.model.task import Candidate, Lane, Lease, Row, Status, StatusValue, Task
from thunderagent.model.writes import tasks as writes
from thunderagent.queue.dependents import Dependents, Ended
from thunderagent.settings import Settings
from thunderagent.stores.dynamo.engine import DynamoEngine
from thunderagent.stores.dynamo.table import create_table
from thunderagent.stores.engine import Engine, KeptText
from thunderagent.stores.sqlite.engine import MEMORY, SqliteEngine
from thunderagent.stores.tasks import Beat, Doubt, TaskStore, Wanted
from thunderagent.testing import FakeClock, Fault, FaultyEngine

EXAMPLES: Final = int(os.environ.get("THUNDER_TEST_MODEL", "0"))
LEASE_S: Final = 60.0
SWEEP_S: Final = 15.0
KEEP_S: Final = 86400.0
JUMP_S: Final = 600.0
HOURS_S: Final = 7200.0
LANES: Final = [Lane(), Lane("reports")]
ROUNDS: Final = 40
TABLE_BYTES: Final = 560
"""Largest text that the table keeps, instead of 350 KB."""
SIZES: Final = (530, 600)
"""Letters in a payload that is kept apart from its row, in the table and in the bucket."""
A_PART: Final = 3
"""Entries of one lane that one sweep reads, instead of ten thousand: a whole round takes several."""
PARTS: Final = 10
"""Sweeps until everything was looked at that may be in a lane, whoever has begun the round."""

OUTCOMES: Final[dict[str, Outcome]] = {
    "success": Returned({"rows": 3}),
    "large success": Returned("x" * 600),
    "error": Raised("boom"),
    "fatal": Raised("boom", fatal=True),
    "snooze": Returned(Snooze(5.0)),
    "long snooze": Returned(Snooze(500.0)),
    "cancel": Returned(Cancel("enough")),
    "fail": Returned(Fail("never")),
    "cancelled": Stopped(TaskCancelled("cancelled")),
    "drained": Stopped(AgentDraining()),
}
VERBS: Final = (
    *("put", "claim", "renew", "succeed", "retry", "snooze", "release", "fail", "close", "cancel", "revive", "doom"),
    *("unpark", "take over", "give up", "request cancel", "register dependent", "parent done", "get", "page"),
    *("put back", "get_texts", "put_texts"),
)

SETTLING: Final = ("succeed", "retry", "snooze", "release", "fail", "close")

INTERRUPTED: Final = (
    *("take over", "give up", "cancel", "request cancel", "revive"),
    *("doom", "unpark", "parent done", "register dependent"),
)

NEVER_TAKEN: Final = ("take over", "give up", "claim", "doom", "unpark", "parent done", "register dependent")

NEWER: Final[dict[str, Any]] = {
    "kind": "oracle",
    "onParentFailure": "ask",
    "uniqueScope": "for_ever",
    "errors": "none",
    "desiredState": "PAUSED",
    "handoffState": "HALF",
}
"""What a newer version may write, by attribute."""

POLICY: Final = Policy(backoff=Settings().backoff, max_retry=1, keep_success_s=KEEP_S, keep_failed_s=KEEP_S)


@job("model.job")
def model_job(ctx: Context, payload: dict[str, Any]) -> None:
    """Never called: the machine decides how handlers end."""


class ModelClock(DateClock):
    """The clock of a DynamoDB whose time is set by the machine."""

    is_usable = True

    def __init__(self, time: FakeClock) -> None:
        super().__init__(monotonic=time.monotonic, host=time.now)
        self.now = self.earliest = self.latest = time.now  # type: ignore[method-assign]


class ModelBucket:
    """Texts over the limit of the table; the machine decides which of them cannot be read."""

    def __init__(self) -> None:
        self.large_texts: dict[str, str] = {}
        self.faults: dict[str, StoreError] = {}

    def put(self, key: str, text: str) -> str:
        self.large_texts[key] = text
        return f"s3://model/{key}"

    def get(self, ref: str) -> KeptText:
        key = ref.removeprefix("s3://model/")
        if error := self.faults.get(key.partition("#")[0]):
            raise error
        return KeptText(self.large_texts[key])


@dataclass
class SimAgent:
    """What an agent process knows; a crash forgets it."""

    owner: str
    rescuer: Rescuer
    leases: dict[str, Lease] = field(default_factory=dict)
    decided: dict[tuple[str, int], Settlement] = field(default_factory=dict)
    """Outcomes that are decided and whose writes had no answer."""
    doubts: list[Doubt] = field(default_factory=list)
    page: tuple[Candidate, ...] = ()

    @property
    def doubtful(self) -> set[str]:
        """Ids of the tasks whose claims are in doubt."""
        return {doubt.wanted.candidate.task_id for doubt in self.doubts}


class QueueMachine(RuleBasedStateMachine):
    """The queue on some engine, three agents, and everything that can go wrong."""

    tasks = Bundle("tasks")
    agents = st.integers(0, 2)
    jump_s = HOURS_S
    """By how much the clock of the machine, or of the service, is set."""
    picks = st.integers(0, 5)
    outcomes = st.sampled_from([*sorted(OUTCOMES), "success", "error", "error"])

    def __init__(self) -> None:
        super().__init__()
        self.time = FakeClock()
        self.jumped = 0.0
        self.real = self.open_engine()
        self.audit = Audit(self.real, self.time)
        self.faulty = FaultyEngine(self.audit)
        self.bucket = ModelBucket()
        self.limit = patch("thunderagent.stores.large_texts.MAX_TEXT_BYTES", TABLE_BYTES)
        self.limit.start()
        self.store = TaskStore(self.faulty, blobs=self.bucket, monotonic=self.time.monotonic)
        self.client = Client(self.store, Settings(max_retry=1, sweep_s=SWEEP_S))
        self.dependents = Dependents(self.store, EventBus(), keep_success_s=KEEP_S, keep_failed_s=KEEP_S)
        self.rng = random.Random(0)
        self.names = 0
        self.fleet = [self._new_agent() for _ in range(3)]
        self.late: list[tuple[str, Candidate, Write]] = []
        """Claims on their way, which their agents have given up."""
        self.ghosts: list[tuple[str, Lease]] = []
        self.before: dict[str, Row] = {}
        """What a newer version has put something else in the place of, by the ids of tasks."""
        registry = Registry(model_job)
        self.admission = Admission(self.store, registry, self.client.settings, EventBus(), rng=self.rng)
        self.told_late: list[tuple[list[Task], dict[str, Status | None]]] = []

    def open_engine(self) -> Engine:
        """The engine under test, on the clock of the machine."""
        clock = HostClock(self.time.now, boot=self.time.monotonic, boot_id="the machine")
        return SqliteEngine(MEMORY, clock=clock)

    def close_engine(self) -> None:
        """The end of an example."""
        self.real.close()

    @initialize(
        target=tasks,
        policies=st.lists(st.sampled_from(["", "", "fail", "cancel", "run"]), min_size=2, max_size=6),
        queue=st.sampled_from(["default", "reports"]),
        max_retry=st.integers(0, 2),
    )
    def begin(self, policies: list[str], queue: str, max_retry: int) -> Any:
        """Some tasks; each with a policy waits for the one before it."""
        names: list[str] = []
        for policy in policies:
            parents = names[-1:] if policy else []
            self.client.enqueue(
                model_job,
                {},
                task_id=self._name(),
                queue=queue,
                max_retry=max_retry,
                depends_on=parents,
                on_parent_failure=policy or "fail",
            )
            names.append(f"task-{self.names}")
        return multiple(*names)

    # The application

    @rule(
        target=tasks,
        queue=st.sampled_from(["default", "reports"]),
        delay_s=st.sampled_from([0.0, 0.0, 10.0, 300.0]),
        max_retry=st.integers(0, 2),
        size=st.sampled_from([0, 0, *SIZES]),
    )
    def enqueue(self, queue: str, delay_s: float, max_retry: int, size: int) -> str:
        name = self._name()
        with self._client():
            payload = {"text": "x" * size} if size else {}
            task = self.client.enqueue(
                model_job, payload, task_id=name, queue=queue, delay_s=delay_s, max_retry=max_retry
            )
            assert task.task_id == name
        return name

    @rule(
        target=tasks,
        parents=st.lists(tasks, min_size=1, max_size=3, unique=True),
        policy=st.sampled_from(["fail", "cancel", "run"]),
        queue=st.sampled_from(["default", "reports"]),
        delay_s=st.sampled_from([0.0, 0.0, 100.0]),
        raced=st.booleans(),
    )
    def enqueue_child(self, parents: list[str], policy: str, queue: str, delay_s: float, raced: bool) -> str:
        name = self._name()
        if raced:
            self.somebody_comes_between("register dependent", 2, "success")
        with self._client():
            self.client.enqueue(
                model_job, {}, task_id=name, depends_on=parents, on_parent_failure=policy, queue=queue, delay_s=delay_s
            )
        return name

    @rule(
        target=tasks,
        status=st.sampled_from(["SLEEPING", "BLOCKED", "RUNNING", "FAILED"]),
        queue=st.sampled_from(["", "#reports", "#a.b.c"]),
        parent=tasks,
        odd=st.sampled_from(sorted(NEWER)),
    )
    def a_newer_version_writes(self, status: str, queue: str, parent: str, odd: str) -> str:
        """A row that this version cannot read, also as the child of one that it can, which may know it."""
        name, now = self._name(), self.time.now()
        row: Row = {"taskId": name, "status": status + queue, "createdAt": now, "submittedAt": now, "job": "model.job"}
        row |= {"kind": "batch", "payload": "{}", "fence": 1, "maxRetry": 1, odd: NEWER[odd]}
        if status in ("BLOCKED", "FAILED"):
            row["dependsOn"] = [parent]
        if status == "BLOCKED":
            row["waitingFor"] = frozenset({parent})
        elif status == "RUNNING":
            row |= self._lease_there()
        self.audit.put_newer(row)
        if status == "BLOCKED" and (known := self.audit.rows.get(parent)) is not None:
            self.audit.actor = Actor()
            self.audit.apply([writes.register_dependent(Task.from_row(known), name)])
        return name

    @rule(name=tasks, odd=st.sampled_from(sorted(NEWER)))
    def a_newer_version_changes(self, name: str, odd: str) -> None:
        """A row that this version has read before: one that waits is claimed there, the others stay as they are."""
        row = self.audit.rows.get(name)
        if row is None or (task := Task.from_row(row)).status is Status.RUNNING:
            return
        self.before[name] = {odd: row[odd]} if odd in row else {}
        row = {**row, odd: NEWER[odd]}
        if task.status is Status.PENDING:
            row |= {"status": task.lane.value(Status.RUNNING), "fence": task.fence + 1, **self._lease_there()}
        self.told_late = [one for one in self.told_late if name not in {child.task_id for child in one[0]}]
        self.audit.put_newer(row)

    @precondition(lambda self: self.audit.newer)
    @rule(pick=picks)
    def a_newer_version_is_installed(self, pick: int) -> None:
        """A row becomes one that can be read: it goes on where it was."""
        self._install(sorted(self.audit.newer)[pick % len(self.audit.newer)])

    def _install(self, name: str) -> None:
        now, row = self.time.now(), self.audit.newer[name]
        row = {key: value for key, value in row.items() if value != NEWER.get(key)} | self.before.pop(name, {})
        status, suffix, _ = StatusValue.parse(row["status"])
        row["status"] = status.replace("SLEEPING", "PENDING") + suffix.replace("#a.b.c", "")
        if status == "FAILED":
            row = {"finishedAt": now, "expireAt": int(now + KEEP_S), **row}
        self.audit.put_known(row)

    def _lease_there(self) -> Row:
        """The attributes of a lease that an agent of a newer version has."""
        until = self.real.clock.leases.now() + LEASE_S
        return {"lockTime": until, "leaseOwner": "newer", "leaseSec": LEASE_S, "hb": 1}

    @rule(name=tasks, large=st.booleans())
    def enqueue_again(self, name: str, large: bool) -> None:
        before = self.audit.rows.get(name)
        with self._client():
            task = self.client.enqueue(model_job, {"text": "x" * 600} if large else {}, task_id=name)
            assert task.task_id == name
        if before is not None and Task.from_row(before).status is not Status.BLOCKED:  # which is told what it missed
            assert self.audit.rows[name] == before, "an id that is taken changes nothing"

    @rule(name=tasks, raced=st.booleans())
    def cancel(self, name: str, raced: bool) -> None:
        if raced:
            self.audit.between["cancel"] = lambda: self.cancel(name, False)
        with self._client():
            task = self.client.cancel(name)
            assert task.status is Status.DONE or task.cancel_requested

    @rule(name=tasks)
    def cancel_and_retry(self, name: str) -> None:
        self.cancel(name, False)
        self.retry_by_hand(name)

    @rule(name=tasks, who=agents)
    def delete_and_use_the_id_again(self, name: str, who: int) -> None:
        row = self.audit.rows.get(name)
        if row is not None and Task.from_row(row).status.is_terminal:
            self.audit.delete([row])
            self.enqueue_again(name, False)
            self.claim(who, True, 4)
            for owner, lease in [one for one in self.ghosts if one[1].task_id == name]:
                self._settle(self._new_agent(owner), lease, OUTCOMES["success"], tell=False)

    @rule(name=tasks)
    def retry_by_hand(self, name: str) -> None:
        with self._client():
            self.client.retry(name)

    @precondition(lambda self: any(task.status.is_terminal for task in self.audit.tasks))
    @rule(status=st.sampled_from(["SUCCESS", "FAILED", "DONE", "overdue"]))
    def clean_up(self, status: str) -> None:
        with self._client():
            if status == "overdue":
                self.store.engine.expire(self.time.now() + 2 * KEEP_S)
            else:
                self.client.purge(status, limit=1)

    # Agents

    @rule(who=agents, fresh=st.sampled_from([True, True, True, False]), number=st.integers(1, 4))
    def claim(self, who: int, fresh: bool, number: int) -> None:
        agent = self.fleet[who]
        if fresh:
            self._look(agent)
        self._claim(agent, agent.page[:number])

    @rule(who=agents, number=st.integers(1, 4), fault=st.sampled_from([Fault.LOST_REPLY, Fault.REPEATED]))
    def claim_and_lose_a_reply(self, who: int, number: int, fault: Fault) -> None:
        self.faulty.fail("claim", fault)
        self.claim(who, True, number)

    @rule(who=agents, number=st.integers(1, 3))
    def claim_in_vain_as_it_seems(self, who: int, number: int) -> None:
        """The requests are on their way for long: the agent has looked, and found the tasks unclaimed."""
        agent, now = self.fleet[who], self.time.now()
        self._look(agent)
        for entry in agent.page[:number]:
            write = writes.claim(entry, owner=agent.owner, lease_s=LEASE_S, now=now, until=now + LEASE_S)
            self.late.append((agent.owner, entry, write))

    @precondition(lambda self: self.late)
    @rule(pick=picks)
    def a_claim_is_carried_out_late(self, pick: int) -> None:
        owner, entry, write = self.late.pop(pick % len(self.late))
        self.time.advance(0.002)
        self.audit.won, self.audit.actor = [], Actor(owner, {}, {entry.task_id: entry.created_at})
        self.audit.apply([write])

    @rule(name=tasks, why=st.sampled_from(["now", "for good", "no more"]))
    def a_text_cannot_be_read(self, name: str, why: str) -> None:
        self.bucket.faults.pop(name, None)
        if why != "no more":
            self.bucket.faults[name] = (StoreUnavailable if why == "now" else AccessDenied)(f"not readable {why}")

    @precondition(lambda self: any(agent.doubts for agent in self.fleet))
    @rule(who=agents)
    def resolve_doubts(self, who: int) -> None:
        agent = self.fleet[who]
        mine = {
            doubt.wanted.candidate.task_id
            for doubt in agent.doubts
            if self.audit.rows.get(doubt.wanted.candidate.task_id, {}).get("leaseOwner") == agent.owner
        }
        with suppress(StoreError):
            leases = self.store.resolve(agent.doubts, owner=agent.owner)
            agent.doubts.clear()
            assert {lease.task_id for lease in leases} == mine
            for lease in leases:
                self._begin(agent, lease)

    @precondition(lambda self: any(agent.leases for agent in self.fleet))
    @rule(who=agents)
    def renew(self, who: int) -> None:
        self._renew(self.fleet[who])

    def _renew(self, agent: SimAgent) -> None:
        leases = list(agent.leases.values())
        self._act(agent, leases)
        with suppress(StoreError):
            for lease, renewal in zip(leases, self.store.renew([Beat(one) for one in leases]), strict=True):
                assert not (renewal.lost and self._holds(lease)), "a heartbeat in doubt is not a lost lease"
                if renewal.lease is not None:
                    assert self._holds(lease)
                    agent.leases[lease.task_id] = renewal.lease
                elif renewal.lost:
                    self.ghosts.append((agent.owner, agent.leases.pop(lease.task_id)))

    @precondition(lambda self: any(agent.leases for agent in self.fleet))
    @rule(pick=st.integers(0, 11), outcome=outcomes, tell=st.sampled_from([True, True, False]))
    def settle(self, pick: int, outcome: str, tell: bool) -> None:
        agent, lease = self._held(pick)
        self._settle(agent, lease, OUTCOMES[outcome], tell=tell)

    @precondition(lambda self: any(agent.leases for agent in self.fleet))
    @rule(pick=st.integers(0, 11), outcome=outcomes)
    def settle_without_an_answer(self, pick: int, outcome: str) -> None:
        """The outcome is decided and may be written, but nobody says so: the agent writes it again later."""
        agent, lease = self._held(pick)
        for verb in SETTLING:
            self.faulty.fail(verb, Fault.LOST_REPLY)
        self._settle(agent, lease, OUTCOMES[outcome], tell=True)

    @precondition(lambda self: any(agent.leases for agent in self.fleet))
    @rule(pick=st.integers(0, 11), outcome=outcomes, times=st.integers(1, 2), late=st.booleans())
    def settle_what_the_store_never_takes(self, pick: int, outcome: str, times: int, late: bool) -> None:
        """The outcome is refused for good, and with `times` 2 a bare failure too; `late`: the agent loses a reply."""
        agent, lease = self._held(pick)
        for verb in SETTLING:
            self.faulty.reject(verb, times)
        if late:
            self.faulty.fail("fail", Fault.LOST_REPLY)
        self._settle(agent, lease, OUTCOMES[outcome], tell=True)
        for verb in SETTLING:
            self.faulty.forget(verb, Fault.REJECTED)

    @rule(name=tasks, verb=st.sampled_from(NEVER_TAKEN))
    def a_row_that_the_store_never_takes(self, name: str, verb: str) -> None:
        """What concerns it is refused for good; what is done beside it goes on."""
        self.audit.never.add((name, verb))

    @precondition(lambda self: any(agent.leases for agent in self.fleet))
    @rule(who=agents)
    def drain(self, who: int) -> None:
        agent = self.fleet[who]
        for lease in list(agent.leases.values()):
            self._settle(agent, lease, OUTCOMES["drained"], tell=True)

    @precondition(lambda self: any(agent.leases for agent in self.fleet))
    @rule(who=agents)
    def give_back_claim_again_and_beat_for_the_old_lease(self, who: int) -> None:
        agent = self.fleet[who]
        old = list(agent.leases.values())
        self.drain(who)
        self.claim(who, True, 4)
        self._act(agent, old)
        with suppress(StoreError):
            for lease, renewal in zip(old, self.store.renew([Beat(one) for one in old]), strict=True):
                assert renewal.lease is None or self._holds(lease)

    @precondition(lambda self: any(agent.leases for agent in self.fleet))
    @rule(pick=st.integers(0, 11), is_alone=st.sampled_from([True, True, False]))
    def set_apart(self, pick: int, is_alone: bool) -> None:
        """A holder notes that nothing runs beside a task that has lost agents, or that something does again."""
        agent, lease = self._held(pick)
        if lease.task.errors:
            self._act(agent, [lease])
            with suppress(StoreError):
                self.store.write_tasks([writes.set_apart(lease, is_alone=is_alone, now=self.time.now())])

    @precondition(lambda self: any(agent.leases for agent in self.fleet))
    @rule(who=agents, rounds=st.integers(1, 3))
    def crash_again_and_again(self, who: int, rounds: int) -> None:
        """Something that an agent runs kills it, and the next that takes it over, with all that runs beside it."""
        for _ in range(rounds):
            self.crash(who)
            self.take_over(who, LEASE_S + 2 * GUARD_S)

    @precondition(lambda self: any(agent.leases for agent in self.fleet))
    @rule(who=agents)
    def crash(self, who: int) -> None:
        agent = self.fleet[who]
        self.ghosts += [(agent.owner, lease) for lease in agent.leases.values()]
        self.fleet[who] = self._new_agent()

    @precondition(lambda self: self.ghosts)
    @rule(pick=picks, outcome=outcomes)
    def late_write(self, pick: int, outcome: str) -> None:
        """An agent that was stopped for a while goes on as if nothing had happened."""
        now_running = [one for one in self.ghosts if self.audit.rows.get(one[1].task_id, {}).get("hb") is not None]
        owner, lease = (now_running or self.ghosts)[-1 - pick % len(now_running or self.ghosts)]
        ghost = self._new_agent(owner)
        if outcome == "success":
            self._act(ghost, [lease])
            with suppress(StoreError):
                self.store.renew([Beat(lease)])
        self._settle(ghost, lease, OUTCOMES[outcome], tell=False)

    @rule(who=agents, seconds=st.sampled_from([0.0, 40.0, LEASE_S + 2 * GUARD_S]))
    def take_over(self, who: int, seconds: float) -> None:
        self.time.advance(seconds)
        self._take_over(self.fleet[who])

    @precondition(lambda self: any(agent.leases for agent in self.fleet))
    @rule(who=agents, pick=picks, what=st.sampled_from(["success", "beat"]))
    def take_over_from_an_agent_that_wakes_up(self, who: int, pick: int, what: str) -> None:
        self.somebody_comes_between("take over", pick, what)
        self.take_over(who, LEASE_S + 2 * GUARD_S)

    @rule(who=agents)
    def heal(self, who: int) -> None:
        self._heal(self.fleet[who])

    @rule(name=tasks)
    def look_at_children(self, name: str) -> None:
        """An agent reads who waits for a task that has ended, and is held up."""
        row = self.audit.rows.get(name)
        children = [task for task in self.audit.tasks if name in task.waiting_for]
        if children and row is not None and Task.from_row(row).status.is_terminal:
            self.told_late.append((children, {name: Task.from_row(row).status}))

    @precondition(lambda self: self.told_late)
    @rule()
    def tell_children_late(self) -> None:
        """… and goes on with what it knew."""
        children, parents = self.told_late.pop()
        self.audit.actor = Actor()
        with suppress(StoreError):
            self.dependents.judge(children, parents)

    # The world

    @rule(seconds=st.sampled_from([0.001, 1.0, 10.0, 40.0, 70.0, 300.0]))
    def time_passes(self, seconds: float) -> None:
        self.time.advance(seconds)

    @rule(to=st.sampled_from([-1.0, 0.0, 1.0]))
    def clock_is_set(self, to: float) -> None:
        self.time.jump(to * self.jump_s - self.jumped)
        self.jumped = to * self.jump_s

    @rule(verb=st.sampled_from(VERBS), seconds=st.sampled_from([30.0, LEASE_S + 2 * GUARD_S, 3600.0]))
    def a_machine_sleeps_in_a_call(self, verb: str, seconds: float) -> None:
        """What it has read is old when its write arrives; the clocks of all have gone on."""
        self.audit.between[verb] = lambda: self.time.advance(seconds)

    @rule(verb=st.sampled_from(VERBS), fault=st.sampled_from([*list(Fault)[:4], Fault.REJECTED]))
    def something_gets_lost(self, verb: str, fault: Fault) -> None:
        self.faulty.fail(verb, Fault.STALE if verb == "page" else fault)

    @precondition(lambda self: any(agent.leases for agent in self.fleet))
    @rule(verb=st.sampled_from(INTERRUPTED), pick=st.integers(0, 11), what=st.sampled_from(["success", "fail", "beat"]))
    def somebody_comes_between(self, verb: str, pick: int, what: str) -> None:
        """Between a read and the write that follows it, another agent writes."""

        def come_between() -> None:
            for agent in self.fleet:
                if what == "beat":
                    self._renew(agent)
                    continue
                for lease in list(agent.leases.values())[: 1 + pick % 3]:
                    self._settle(agent, lease, OUTCOMES[what], tell=pick % 2 == 0)

        self.audit.between[verb] = come_between

    # What must hold

    @invariant()
    def the_table_is_sound(self) -> None:
        self.audit.check_table()

    def teardown(self) -> None:
        """Without faults, and with one agent of all left, everything ends."""
        try:
            if sys.exc_info()[0] is None:
                self.faulty.calm()
                self.audit.between.clear()
                self.audit.never.clear()
                self.bucket.faults.clear()
                self._run_dry(self._new_agent())
        finally:
            self.limit.stop()
            self.close_engine()

    def _run_dry(self, agent: SimAgent) -> None:
        for name in sorted(self.audit.newer)[::2]:  # the others stay, and hold up nobody
            self._install(name)
        for _ in range(ROUNDS):
            open_tasks = [task for task in self.audit.tasks if not task.status.is_terminal]
            if not open_tasks:
                return
            awaited = {name for task in open_tasks for name in task.waiting_for}
            for name in sorted(self.audit.newer.keys() & awaited):
                self._install(name)
            for _ in range(PARTS):
                self.time.advance(JUMP_S)
                self._heal(agent)
                self._take_over(agent)
            self._look(agent)
            self._claim(agent, agent.page)
            for lease in list(agent.leases.values()):
                assert self._settle(agent, lease, OUTCOMES["success"], tell=True)
            self.audit.check_table()
        left = {task.task_id: str(task.status) for task in self.audit.tasks if not task.status.is_terminal}
        raise AssertionError(f"these tasks never end: {left}")

    # Steps

    def _name(self) -> str:
        self.names += 1
        return f"task-{self.names}"

    def _new_agent(self, owner: str = "") -> SimAgent:
        if not owner:
            self.names += 1
            owner = f"agent-{self.names}"
        rescuer = Rescuer(
            self.store,
            EventBus(),
            self.dependents,
            LostLeases(self.store, owner=owner, guard_s=GUARD_S, is_stray=partial(self._is_stray, owner), most=A_PART),
            owner=owner,
            max_crashes=MAX_CRASHES,
            sweep_s=SWEEP_S,
        )
        return SimAgent(owner, rescuer)

    def _is_stray(self, owner: str, task: Task) -> bool:
        agent = next((one for one in self.fleet if one.owner == owner), None)
        if agent is None or task.lease_owner != owner or (task.task_id, task.fence) in self.audit.begun:
            return False
        return task.task_id not in agent.leases.keys() | agent.doubtful

    def _act(self, agent: SimAgent, leases: Sequence[Lease] = ()) -> None:
        self.time.advance(0.002)  # a process sends no two requests within the resolution of a timestamp
        self.audit.won = []
        self.audit.actor = Actor(
            agent.owner,
            {lease.task_id: lease.fence for lease in leases},
            {entry.task_id: entry.created_at for entry in agent.page},
        )

    @contextmanager
    def _client(self) -> Iterator[None]:
        """A command of the application: it may not be allowed, and the store may not answer."""
        self.time.advance(0.002)
        self.audit.actor = Actor()
        with suppress(ThunderAgentError):
            yield

    def _holds(self, lease: Lease) -> bool:
        row = self.audit.rows.get(lease.task_id, {})
        as_now = row.get("leaseOwner"), row.get("fence"), row.get("submittedAt"), row.get("status")
        return as_now == (lease.owner, lease.fence, lease.task.submitted_at, lease.task.status_value)

    def _held(self, pick: int) -> tuple[SimAgent, Lease]:
        held = [(agent, lease) for agent in self.fleet for lease in agent.leases.values()]
        return held[pick % len(held)]

    def _look(self, agent: SimAgent) -> None:
        with suppress(StoreError):
            agent.page = tuple(entry for lane in LANES for entry in self.store.ready(lane, limit=10).entries)

    def _claim(self, agent: SimAgent, entries: Sequence[Candidate]) -> None:
        entries = [one for one in entries if one.task_id not in agent.doubtful]
        self._act(agent)
        with suppress(StoreError):
            exchanged = self.store.exchange((), [Wanted(entry, LEASE_S) for entry in entries], owner=agent.owner)
            agent.doubts += exchanged.doubts
            doubtful = {doubt.wanted.candidate.task_id for doubt in exchanged.doubts}
            won = {(lease.task_id, lease.fence) for lease in exchanged.leases}
            assert won == {(name, fence) for name, fence in self.audit.won if name not in doubtful}
            for lease in exchanged.leases:
                if lease.task_id in agent.leases:
                    self.ghosts.append((agent.owner, agent.leases[lease.task_id]))
                self._begin(agent, lease)

    def _begin(self, agent: SimAgent, lease: Lease) -> None:
        """A handler runs, or the task goes back or fails for its payload."""
        agent.leases[lease.task_id] = lease
        if lease.task.payload_error is not None:
            [outcome] = self.admission.refusals([lease]).values()
            self._settle(agent, lease, outcome, tell=True)
            return
        assert (lease.task_id, lease.fence) not in self.audit.begun, "no task runs twice under one fence"
        self.audit.begun.add((lease.task_id, lease.fence))
        assert len(lease.task.payload.get("text", "")) in (0, *SIZES)

    def _settle(self, agent: SimAgent, lease: Lease, outcome: Outcome, *, tell: bool) -> bool:
        """True when there was an answer. A decision without one is kept and written again, as an agent does."""
        key = lease.task_id, lease.fence
        settlement = agent.decided.get(key)
        with suppress(StoreError):
            settlement = settlement or self._decide(lease, outcome)
            agent.decided[key] = settlement
            self._act(agent, [lease])
            [answer] = self.store.settle([settlement.write])
            if answer.is_rejected:
                return self._fall_back(agent, lease, settlement, tell=tell)
            if answer.error:
                return False
            end = self.audit.ends.get(key)
            mine = end is not None and end.write is settlement.write
            assert mine or not answer.accepted, "what is accepted has happened"
            if mine and end is not None and self.audit.rows.get(lease.task_id) == end.left:
                assert answer.accepted, "a settlement whose reply was lost is no lost race"
            agent.decided.pop(key, None)
            if agent.leases.get(lease.task_id) is lease:
                del agent.leases[lease.task_id]
            self.ghosts.append((agent.owner, lease))
            status = Status(settlement.write.set["status"].partition("#")[0])
            if tell and answer.accepted and status.is_terminal:
                self.dependents.tell([Ended(lease.task_id, status, answer.dependents)])
            return True
        return False

    def _fall_back(self, agent: SimAgent, lease: Lease, settlement: Settlement, *, tell: bool) -> bool:
        """What is refused for good becomes a bare failure; when that is refused too the agent lets the lease go."""
        key = lease.task_id, lease.fence
        if settlement.write.verb == "fail" and "errors" not in settlement.write.set:
            del agent.decided[key]
            if agent.leases.get(lease.task_id) is lease:
                del agent.leases[lease.task_id]
            self.ghosts.append((agent.owner, lease))
            return True
        write = writes.bare(writes.fail(lease, error="never", now=self.time.now(), expire_at=self.time.now() + KEEP_S))
        agent.decided[key] = replace(settlement, write=write)
        return self._settle(agent, lease, OUTCOMES["fail"], tell=tell)

    def _decide(self, lease: Lease, outcome: Outcome) -> Settlement:
        settlement = settle(
            lease,
            model_job,
            outcome,
            policy=POLICY,
            now=self.time.now(),
            seconds=1.0,
            rng=self.rng,
            keep=lambda key, text, expire_at: self.store.large_texts.keep(key, text, what="it", expire_at=expire_at),
        )
        assert settlement is not None
        return settlement

    def _take_over(self, agent: SimAgent) -> None:
        self._act(agent)

        def wanted(task: Task) -> float | None:
            return None if task.task_id in agent.leases.keys() | agent.doubtful else LEASE_S

        hits = len(self.faulty.hits)
        with self._sweep():
            leases = agent.rescuer.take_over(LANES, wanted)
            won = {(lease.task_id, lease.fence) for lease in leases}
            assert won <= set(self.audit.won)
            assert won == set(self.audit.won) or len(self.faulty.hits) > hits
            for lease in leases:
                self._begin(agent, lease)

    @contextmanager
    def _sweep(self) -> Iterator[None]:
        """A sweep fails only for lack of an answer: no row stops it that the store does not take."""
        hits = len(self.faulty.hits)
        try:
            yield
        except StoreError:
            assert len(self.faulty.hits) > hits

    def _heal(self, agent: SimAgent) -> None:
        self._act(agent)
        due = {task.task_id for task in self.audit.tasks if task.status is Status.BLOCKED and not self._waits(task)}
        due -= {name for name, _ in self.audit.never}
        turn, hits, interrupted = self._turn(), len(self.faulty.hits), self.audit.interrupted
        has_begun = "info" in turn
        with self._sweep():
            agent.rescuer.heal(LANES)
            if self._turn() == turn or len(self.faulty.hits) > hits or self.audit.interrupted > interrupted:
                return  # not our turn, or not all was done
            if has_begun or "info" in self._turn():
                return  # a part of the round
            for task in self.audit.tasks:
                if task.status is Status.BLOCKED:
                    assert task.task_id not in due, "a sweep leaves nobody BLOCKED whose parents have ended"
                    parents = [self.audit.rows[name] for name in task.waiting_for if name in self.audit.rows]
                    for parent in parents:
                        is_refused = (parent["taskId"], "register dependent") in self.audit.never
                        known = is_refused or task.task_id in parent.get("dependents", ())
                        assert known or Task.from_row(parent).status.is_terminal

    def _waits(self, child: Task) -> bool:
        """False when what is known of its parents decides about a BLOCKED task."""
        rows = {name: self.audit.rows.get(name) for name in child.waiting_for - self.audit.newer.keys()}
        verdicts = [
            verdict(Task.from_row(row).status if row else None, child.on_parent_failure) for row in rows.values()
        ]
        verdicts += [Verdict.WAIT] * (len(child.waiting_for) - len(rows))  # of those, nothing is known
        doomed = Verdict.FAIL in verdicts or Verdict.CANCEL in verdicts
        return Verdict.WAIT in verdicts and not doomed

    def _turn(self) -> Row:
        return self.real.get(["turn:blocked"]).get("turn:blocked", {})


class DynamoMachine(QueueMachine):
    """The same on DynamoDB, simulated in this process; one thread, as its updates are not atomic."""

    jump_s = JUMP_S

    def open_engine(self) -> Engine:
        self.aws = mock_aws()
        self.aws.start()
        clock = ModelClock(self.time)
        engine = DynamoEngine("TaskTable", region="eu-central-1", threads=1, clock=clock, sleep=lambda _: None)
        create_table(engine)
        return engine

    def close_engine(self) -> None:
        self.real.close()
        self.aws.stop()


class ForkingMachine(QueueMachine):
    """The same in a file, in a process that forks at any step; its children write too, then and later."""

    def open_engine(self) -> Engine:
        memory = Path("/dev/shm")
        self.folder = TemporaryDirectory(dir=memory if memory.is_dir() else None)
        self.children: list[tuple[int, int, str]] = []
        self.written: list[str] = []
        engine = SqliteEngine(str(Path(self.folder.name) / "tasks.db"), clock=self.time)
        self.beside = engine.sibling()
        return engine

    def close_engine(self) -> None:
        while self.children:
            self.let_a_child_write_and_end(0)
        self.beside.close()
        self.real.close()
        self.folder.cleanup()

    @rule(number=st.integers(1, 2))
    def fork(self, number: int) -> None:
        """What a child acknowledges is there, and it goes on with its own connection."""
        self.beside.check()
        for _ in range(number):
            name = f"child#{len(self.written)}"  # no task: of those the audit knows each write
            waits, go = os.pipe()
            done, tell = os.pipe()
            pid = os.fork()
            if pid == 0:
                code = 1
                try:
                    os.close(go)
                    assert self.real.put([{"taskId": name, "fence": 0}])[0].won
                    os.write(tell, b".")
                    os.read(waits, 1)
                    assert self.beside.put([{"taskId": f"{name}-2", "fence": 0}])[0].won
                    code = 0
                finally:
                    os._exit(code)
            os.close(waits)
            os.close(tell)
            told = os.read(done, 1)
            os.close(done)
            self.children.append((pid, go, name))
            assert told == b".", "the child has failed"
            self.written.append(name)

    @precondition(lambda self: self.children)
    @rule(pick=st.integers(0, 5))
    def let_a_child_write_and_end(self, pick: int) -> None:
        pid, go, name = self.children.pop(pick % len(self.children))
        os.write(go, b".")
        os.close(go)
        assert os.waitpid(pid, 0)[1] == 0
        self.written.append(f"{name}-2")

    @rule()
    def close_the_connections(self) -> None:
        """The last of this process: the log is taken away unless a child is known to use it."""
        self.real.close()
        self.beside.close()

    @invariant()
    def what_children_have_written_is_there(self) -> None:
        assert set(self.real.get(self.written)) == set(self.written)


def _run(machine: type[QueueMachine], examples: int, steps: int) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            derandomize=not EXAMPLES,
            database=None,
            deadline=None,
            print_blob=True,
            phases=list(Phase) if EXAMPLES else [Phase.generate],  # to shrink takes minutes: not in every build
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_the_invariants_hold_on_sqlite_whatever_happens() -> None:
    _run(QueueMachine, EXAMPLES or 100, 60)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_the_invariants_hold_in_a_file_whose_process_forks_at_any_step() -> None:
    _run(ForkingMachine, EXAMPLES // 10 or 8, 60)


def test_the_invariants_hold_on_dynamodb_whatever_happens() -> None:
    _run(DynamoMachine, EXAMPLES // 10 or 4, 40)


# Rules that a random example meets seldom.


@pytest.fixture
def machine() -> Iterator[QueueMachine]:
    """One whose steps a test chooses."""
    made = QueueMachine()
    yield made
    made.limit.stop()
    made.close_engine()


def running(machine: QueueMachine, who: int, number: int = 1) -> list[str]:
    """Tasks that an agent runs."""
    names = [str(machine.enqueue("default", 0.0, 0, 0)) for _ in range(number)]
    machine.claim(who, True, 10)
    assert machine.fleet[who].leases.keys() >= set(names)
    return names


def status_of(machine: QueueMachine, name: object) -> Status:
    return Task.from_row(machine.audit.rows[str(name)]).status


def test_what_the_store_never_takes_is_a_bare_failure_at_once(machine: QueueMachine) -> None:
    [name] = running(machine, 0)
    machine.faulty.reject("succeed")
    machine.settle(0, "success", True)
    assert status_of(machine, name) is Status.FAILED
    assert not machine.fleet[0].leases


def test_a_child_that_the_store_never_dooms_holds_up_no_other(machine: QueueMachine) -> None:
    [parent] = running(machine, 0)
    stuck, other = (machine.enqueue_child([parent], "fail", "default", 0.0, False) for _ in range(2))
    machine.settle(0, "fatal", False)
    machine.a_row_that_the_store_never_takes(stuck, "doom")
    machine.heal(1)
    assert (status_of(machine, stuck), status_of(machine, other)) == (Status.BLOCKED, Status.FAILED)


def test_a_task_that_the_store_gives_no_other_agent_has_failed(machine: QueueMachine) -> None:
    stuck, other = running(machine, 0, 2)
    machine.crash(0)
    machine.a_row_that_the_store_never_takes(stuck, "take over")
    machine.take_over(1, LEASE_S + 2 * GUARD_S)
    assert (status_of(machine, stuck), status_of(machine, other)) == (Status.FAILED, Status.RUNNING)
    assert machine.fleet[1].leases.keys() == {other}


def test_a_sweep_comes_to_the_children_behind_those_that_it_reads_at_once(machine: QueueMachine) -> None:
    [parent] = running(machine, 0)
    open_parent = machine.enqueue("default", 3600.0, 0, 0)
    for _ in range(A_PART):
        machine.enqueue_child([open_parent], "fail", "default", 0.0, False)
    last = machine.enqueue_child([parent], "fail", "default", 0.0, False)
    machine.settle(0, "fatal", False)
    for who in range(3):  # each goes on where another has ended
        machine.time_passes(10 * SWEEP_S)
        machine.heal(who)
    assert status_of(machine, last) is Status.FAILED


def test_a_sweep_comes_to_the_lost_tasks_behind_those_that_it_reads_at_once(machine: QueueMachine) -> None:
    running(machine, 0, A_PART)
    [last] = running(machine, 1)
    machine.crash(1)
    for _ in range(6):
        machine.time_passes(LEASE_S / 2)
        machine.renew(0)
        machine.take_over(2, 0.0)
    assert machine.fleet[2].leases.keys() == {last}


@pytest.mark.parametrize("to", [-1.0, 1.0])
def test_a_lease_ends_in_its_time_whatever_the_clock_of_the_host_is_set_to(machine: QueueMachine, to: float) -> None:
    [name] = running(machine, 0)
    machine.clock_is_set(to)
    machine.take_over(1, LEASE_S / 2)
    assert not machine.fleet[1].leases
    machine.take_over(1, LEASE_S)
    assert machine.fleet[1].leases.keys() == {name}


@pytest.mark.parametrize("why", ["now", "for good"])
def test_a_text_that_cannot_be_read_holds_up_no_task_claimed_beside_it(machine: QueueMachine, why: str) -> None:
    unread = machine.enqueue("default", 0.0, 0, max(SIZES))
    machine.a_text_cannot_be_read(unread, why)
    running(machine, 0)
    assert status_of(machine, unread) is (Status.FAILED if why == "for good" else Status.PENDING)
