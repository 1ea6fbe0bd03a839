"""Random kills, drains, cancels, retries, clocks and faults of the store, against the rules of limits.

Everything runs in one thread on a clock that moves by hand (`limit_world.py`): real agents and real clients, of which
any may go on at each call to the store. Machines sleep, texts cannot be read, writes are refused for good, rows are of
newer versions, and lines and lanes are longer than what one sweep reads. Forks are left to the model of the queue: of
limits an agent keeps nothing that outlives its process, so a fork concerns its connections alone.

The rules are checked at each start of a handler and after each step:

* never more handlers of one limit run than its number, counted where they run and not in rows, at each start and
  while they go on;
* no slot of a limit for which somebody waits is held for longer than a lease and a sweep by what does not run;
* nobody stands in line for longer than that while a slot is free and an agent has room for it;
* no task is given up for an agent that another task may have killed;
* when the faults end, every task comes to its end, and the lines are empty.

`THUNDER_TEST_LIMITS=500` plays so many random examples instead of the few that are the same in every run. What random
examples meet too rarely has a test of its own at the end.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, Final
from unittest.mock import patch

import pytest

from tests.simulation.limit_world import (
    A_PART,
    BOMB,
    BOUND_S,
    GUARD_S,
    INLINE_BYTES,
    LEASE_S,
    LINES_A_PART,
    REFUSED,
    SETTLING,
    SWEEP_S,
    World,
    limited_jobs,
)
from thunderagent.client import Client
from thunderagent.jobs.job import Limit
from thunderagent.jobs.outcome import Returned
from thunderagent.model.errors import StoreUnavailable
from thunderagent.model.task import Lane, Status
from thunderagent.model.writes.tasks import join_waitlist
from thunderagent.queue.limits.waitlist import candidate_of, keep_waitlist_open, waitlist_value

RANDOM: Final = int(os.environ.get("THUNDER_TEST_LIMITS", "0"))
EXAMPLES: Final = RANDOM or 7
STEPS: Final = 100
HOURS_S: Final = 7200.0
SLEEPS_S: Final = (2.0, 8.0, LEASE_S + 2 * GUARD_S, 60.0)
MOST_AGENTS: Final = 4
AGENTS: Final = ((), (), ("own", "free"), ("left",), ("right", "free"), ("left", "right"))
"""What agents have: all jobs, or a few."""


class Play:
    """One random example."""

    def __init__(self, seed: int) -> None:
        self.on_one_machine = seed % 2 == 1
        self.world = World(seed, on_one_machine=self.on_one_machine, is_crowded=True)
        self.rng = random.Random(seed * 7919)
        self.jobs = limited_jobs()
        self.number = 2
        self.names = 0
        self.stepped_at = -100.0
        self.seen = self.world.seen

    def run(self) -> None:
        for _ in range(self.rng.randint(1, 3)):
            self.join()
        steps: list[tuple[int, Callable[[], None]]] = [
            (14, self.enqueue),
            (4, self.enqueue_many),
            (1, self.enqueue_bomb),
            (4, self.cancel),
            (4, self.retry),
            (3, self.kill),
            (2, self.kill_caller),
            (2, self.leave),
            (4, self.join),
            (4, self.store_is_bad),
            (2, self.store_refuses),
            (1, self.outcome_is_never_taken),
            (2, self.text_cannot_be_read),
            (2, self.change_number),
            (2, self.newer_version_writes),
            (2, self.step_clock),
            (6, self.world.expire_limits),
            (3, self.sleep),
            (3, self.sleep_in_a_call),
            (18, self.moment),
            (3, self.while_),
        ]
        weights = [weight for weight, _ in steps]
        for _ in range(STEPS):
            [(_, step)] = self.rng.choices(steps, weights)
            self.seen[step.__name__] += 1
            step()
            self.world.pass_time(self.rng.choice([0.0, 0.003, 0.05]))
        self.settle()

    def enqueue(self) -> None:
        self.names += 1
        name, what = (
            f"t{self.names}",
            self.rng.choice(["own", "own", "left", "right", "free", "cust", "pair", "by name"]),
        )
        options: dict[str, Any] = {"task_id": name}
        payload = {"text": "x" * INLINE_BYTES} if self.rng.random() < 0.25 else {}
        if self.rng.random() < 0.15:
            options["delay_s"] = self.rng.choice([0.5, 3.0])
        if self.rng.random() < 0.15 and (open_tasks := self.world.tasks(Status.PENDING, Status.BLOCKED)):
            options |= {"depends_on": [self.rng.choice(open_tasks)], "on_parent_failure": "run"}
        if what == "cust":
            options |= {"limit_key": "cust", "limit": 1}
        if what == "pair":
            options |= {"limit_key": "pair", "limit": 2}
        target = "own" if what == "by name" else self.jobs["free" if what in ("cust", "pair") else what]
        self.world.call(lambda client: client.enqueue(target, payload, **options))

    def enqueue_many(self) -> None:
        job = self.jobs[self.rng.choice(["own", "left", "right"])]
        payloads = [{"n": number} for number in range(self.rng.randint(2, 8))]
        names = [f"t{self.names + number}" for number in range(1, len(payloads) + 1)]
        self.names += len(payloads)
        self.world.call(lambda client: client.enqueue_many(job, payloads, task_ids=names))

    def enqueue_bomb(self) -> None:
        """Its handler kills the agent that runs it, and whatever runs beside it."""
        self.names += 1
        name, job = f"{BOMB}{self.names}", self.jobs[self.rng.choice(["own", "left", "free"])]
        self.world.call(lambda client: client.enqueue(job, {}, task_id=name))

    def _on_some_task(self, do: Callable[[Client, str], object], *statuses: Status) -> None:
        if tasks := self.world.tasks(*statuses):
            task = self.rng.choice(tasks)
            self.world.call(lambda client: do(client, task.task_id))

    def cancel(self) -> None:
        self._on_some_task(lambda client, name: client.cancel(name), Status.BLOCKED, Status.PENDING, Status.RUNNING)

    def retry(self) -> None:
        self._on_some_task(lambda client, name: client.retry(name), Status.FAILED, Status.DONE)

    def kill(self) -> None:
        if living := self.world.living:
            self.rng.choice(living).kill()

    def kill_caller(self) -> None:
        if self.world.callers:
            self.rng.choice(self.world.callers).kill()

    def leave(self) -> None:
        if living := [one for one in self.world.living if not one.is_leaving]:
            self.rng.choice(living).leave()

    def join(self) -> None:
        if len(self.world.living) < MOST_AGENTS:
            self.world.join(*self.rng.choice(AGENTS), number=self.number)

    def store_is_bad(self) -> None:
        if living := self.world.living:
            kinds = ["throttled", "lost request", "lost reply", "broken call", "repeated", "no answer", "late index"]
            seconds = self.rng.choice([0.5, 2.0, 6.0, 14.0])
            self.world.store_fault(self.rng.choice(living), self.rng.choice([*kinds, "late index"]), seconds)

    def store_refuses(self) -> None:
        """It does not take some writes of an agent, now or later, as of a row that is too large."""
        if living := self.world.living:
            self.world.refuse(self.rng.choice(living), self.rng.choice(REFUSED), self.rng.choice([2.0, 6.0, 14.0]))

    def outcome_is_never_taken(self) -> None:
        """Of one task; a bare failure is, or is not either."""
        if tasks := self.world.tasks(Status.PENDING, Status.RUNNING, Status.BLOCKED):
            verbs = self.rng.choice([SETTLING, tuple(verb for verb in SETTLING if verb != "fail")])
            name = self.rng.choice(tasks).task_id
            self.world.never |= {(name, verb) for verb in verbs}

    def text_cannot_be_read(self) -> None:
        """The payload of a task, for a while, or it is gone."""
        if tasks := [task for task in self.world.tasks(Status.BLOCKED, Status.PENDING) if task.payload_ref]:
            why = self.rng.choice([None, StoreUnavailable("not now"), StoreUnavailable("not now")])
            self.world.hide_text(self.rng.choice(tasks).task_id, why, self.rng.choice([1.0, 5.0, 20.0]))
            self.seen["unread"] += 1

    def change_number(self) -> None:
        """A deploy: agents that join from now on, and clients, have another number."""
        self.number = self.rng.choice([1, 2, 3])
        self.jobs = limited_jobs(self.number)

    def newer_version_writes(self) -> None:
        """In a rolling upgrade: rows that the agents here cannot read."""
        key = self.rng.choice(["own", "shared"])
        status = self.rng.choice(["BLOCKED", "RUNNING", "SLEEPING", waitlist_value(Lane(), key)])
        odd = self.rng.choice([{"kind": "oracle"}, {"onParentFailure": "ask"}, {"errors": "none"}])
        self.world.newer_version_writes(status, key, odd)

    def step_clock(self) -> None:
        """The clock that all share is set, by less than what leases allow for; that of one machine, by hours."""
        if self.on_one_machine:
            self.world.set_host_clock(self.rng.choice([-HOURS_S, 0.0, HOURS_S]))
        elif self.world.clock.monotonic() - self.stepped_at > 15.0:
            self.stepped_at = self.world.clock.monotonic()
            self.world.step_clock(self.rng.choice([-25.0, -1.5, 1.5]))

    def sleep(self) -> None:
        """A machine is suspended; its clock that nobody sets goes on. Its network may come back later than it."""
        if living := self.world.living:
            process, seconds = self.rng.choice(living), self.rng.choice(SLEEPS_S)
            process.sleep(seconds)
            if self.rng.random() < 0.5:
                self.world.store_fault(process, "no answer", seconds + self.rng.choice([2.0, 6.0, LEASE_S]))

    def sleep_in_a_call(self) -> None:
        if living := self.world.living:
            when = self.rng.choice(["before", "after"])
            self.rng.choice(living).store.sleeps[when] = self.rng.choice(SLEEPS_S)

    def moment(self) -> None:
        self.world.pass_time(self.rng.choice([0.01, 0.1, 0.3, 1.0, 2.0]))

    def while_(self) -> None:
        self.world.pass_time(self.rng.choice([6.0, 15.0]))

    def settle(self) -> None:
        """Without faults everything comes to its end."""
        for process in self.world.living:
            self.world.calm(process)
            process.store.sleeps.clear()
        self.world.unread.clear()
        self.world.never.clear()
        if self.on_one_machine:
            self.world.set_host_clock(HOURS_S)  # what was put when it was ahead is due at last
        self.world.is_supervised = True
        self.world.join(number=self.number)
        self.world.pass_time_until(lambda: self.world.is_done, 60 * BOUND_S)


def test_the_rules_of_limits_hold_whatever_happens() -> None:
    seen: Counter[str] = Counter()
    begin = random.randrange(1 << 20) if RANDOM else 0
    for seed in range(begin, begin + EXAMPLES):
        play = Play(seed)
        try:
            with patch.multiple("thunderagent.queue.limits.waitlist", PAGE=2, PAGES=2, SPARE=1):  # longer than a look
                play.run()
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
        finally:
            play.world.close()
        seen += play.seen
    if RANDOM:
        return  # a few of them may lack what is rare
    assert seen["runs"] > 20 * EXAMPLES, "nothing was tried"
    missing = [name for name in ("enqueue_bomb", "expire_limits", "newer", "unread") if not seen[name]]
    assert not missing, f"what is tried lacks {missing}: {seen}"
    assert sum(seen[name] for name in ("kill", "leave", "store_is_bad", "cancel", "retry")) > 5 * EXAMPLES


Worlds = Callable[..., World]


@pytest.fixture
def worlds() -> Iterator[Worlds]:
    """Makes worlds in which each handler of a task "long…" runs until it is told to stop, and any other a moment."""
    made: list[World] = []

    def make(**options: Any) -> World:
        made.append(world := World(1, **options))
        world.ends = lambda task: (1e6 if task.task_id.startswith("long") else 0.1, Returned("done"))
        return world

    yield make
    for world in made:
        world.close()


def sleep_past_a_lease(world: World) -> None:
    """A machine sleeps, its slot is given to another, and its network comes back later than it."""
    world.client.enqueue(limited_jobs()["left"], {}, task_id="long")
    sleeper = world.join("left")
    world.pass_time_until(lambda: len(world.runs) == 1, 5.0)
    world.join("left")
    world.store_fault(sleeper, "no answer", BOUND_S + LEASE_S)
    sleeper.sleep(BOUND_S)
    world.pass_time_until(lambda: len(world.started) == 2, BOUND_S)
    world.pass_time(sleeper.asleep_s + LEASE_S)


def test_a_machine_that_wakes_after_its_lease_without_a_network_goes_on_with_nothing(worlds: Worlds) -> None:
    world = worlds()
    sleep_past_a_lease(world)
    assert [run.running.lease.fence for run in world.runs] == [2]


def test_on_a_clock_that_stands_still_while_a_machine_sleeps_more_would_go_on_than_may(worlds: Worlds) -> None:
    """As on `time.monotonic`: these worlds must be able to show it."""
    with pytest.raises(AssertionError, match="2 of 1 go on with the limit shared"):
        sleep_past_a_lease(worlds(counts_sleep=False))


def test_a_sweep_comes_to_the_lines_behind_those_that_it_reads_at_once(worlds: Worlds) -> None:
    world, names = worlds(is_crowded=True), [f"customer-{number}" for number in range(3 * LINES_A_PART)]
    for name in names:  # an agent died between two writes: nobody runs, and somebody waits
        world.client.enqueue(limited_jobs()["free"], {}, task_id=name, limit_key=name, limit=1)
        [task] = world.store.peek([name]).values()
        keep_waitlist_open(world.store, Limit(name, 1), None)
        world.store.write_tasks([join_waitlist(candidate_of(task), limit_key=name, now=world.clock.now())])
    assert sorted(str(task.waitlist) for task in world.tasks()) == names
    world.join("free")
    world.pass_time_until(lambda: world.is_done, 6 * SWEEP_S)


def test_a_sweep_comes_to_the_lost_tasks_behind_those_that_it_reads_at_once(worlds: Worlds) -> None:
    world, slots = worlds(is_crowded=True), {"default": 2 * A_PART}
    free = limited_jobs()["free"]
    for number in range(A_PART + 1):
        world.client.enqueue(free, {}, task_id=f"long-{number}")
    world.join("free", queues=slots)
    world.pass_time_until(lambda: len(world.runs) == A_PART + 1, 5.0)
    world.client.enqueue(limited_jobs()["own"], {}, task_id="long-last")
    lost = world.join("own")
    world.pass_time_until(lambda: "long-last" in world.started, 5.0)
    lost.kill()
    world.join("own", queues=slots)
    world.pass_time_until(lambda: world.started.count("long-last") == 2, BOUND_S + 2 * SWEEP_S)


def test_a_slot_whose_task_nobody_here_can_read_is_taken(worlds: Worlds) -> None:
    world = worlds()
    world.elsewhere_s = (3 * LEASE_S,)
    keep_waitlist_open(world.store, Limit("shared", 1), None)
    world.newer_version_writes("RUNNING", "shared", {"kind": "oracle"})
    assert list(world.elsewhere.values()) == ["shared"]
    world.client.enqueue(limited_jobs()["left"], {}, task_id="next")
    world.join("left")
    world.pass_time_until(lambda: not world.elsewhere, 4 * LEASE_S)
    assert not world.started
    world.pass_time_until(lambda: world.started == ["next"], BOUND_S)


def test_a_settlement_that_the_store_never_takes_ends_the_run_and_frees_its_slot_at_once(worlds: Worlds) -> None:
    world = worlds()
    world.never |= {("refused", verb) for verb in SETTLING if verb != "fail"}
    for name in ("refused", "next"):
        world.client.enqueue(limited_jobs()["left"], {}, task_id=name)
    world.join("left")
    world.pass_time_until(lambda: world.is_done, LEASE_S / 2)
    assert {task.task_id: task.status for task in world.tasks()} == {
        "refused": Status.FAILED,
        "next": Status.SUCCESS,
    }


if __name__ == "__main__":
    pytest.main([__file__, "-x", "-q", "-s"])
