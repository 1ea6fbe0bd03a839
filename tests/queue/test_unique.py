"""Unique keys: one open task for each, whoever comes, dies or retries between any two calls of anybody."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final, cast

import pytest

from tests.support.engine import a_job, seen, serving, settings
from tests.support.turns import EveryOrder, Killed, Turns, TurnsEngine
from thunderagent.agent.admission import Admission
from thunderagent.agent.sweep import LostLeases, Rescuer
from thunderagent.client import Client
from thunderagent.jobs.context import Context
from thunderagent.jobs.job import job
from thunderagent.jobs.registry import Registry
from thunderagent.model import events
from thunderagent.model.bus import EventBus
from thunderagent.model.conditions import Write
from thunderagent.model.errors import (
    ConfigurationError,
    DuplicateTask,
    NotAllowed,
    ParentNotFound,
    PayloadTooLarge,
    StoreError,
    StoreRejected,
    StoreUnavailable,
    TaskNotFound,
    TaskUnreadable,
)
from thunderagent.model.task import TERMINAL, Lane, Lease, Row, Status, Task
from thunderagent.model.writes import tasks as writes
from thunderagent.model.writes import unique as unique_writes
from thunderagent.model.writes.unique import KEY_SETTLES_S, key_id
from thunderagent.queue.dependents import Dependents
from thunderagent.queue.unique import OWED, UniqueKeys
from thunderagent.stores.engine import Applied, Engine
from thunderagent.stores.sqlite.engine import MEMORY, SqliteEngine
from thunderagent.stores.tasks import Enqueued, TaskStore, Wanted
from thunderagent.testing import FakeClock, memory_client
from thunderagent.testing.faulty_engine import ANY, Fault, FaultyEngine

JOB: Final = "test.job"
KEY: Final = "customer-42"
ROW_ID: Final = key_id(JOB, KEY)
LEASE_S: Final = 6.0
DAY_S: Final = 86400.0
SCOPES: Final = ("until_done", "until_start")

scopes = pytest.mark.parametrize("scope", SCOPES)


class Site:
    """A store in memory on a clock set by hand, and clients and agents of it, which may have engines of their own."""

    def __init__(self, scope: str = "until_done") -> None:
        self.scope = scope
        self.clock = FakeClock()
        self.engine = SqliteEngine(MEMORY, clock=self.clock)
        self.store = self.open(self.engine)
        self.client = Client(self.store, settings())

    def open(self, engine: Any) -> TaskStore:
        return TaskStore(cast(Engine, engine), monotonic=self.clock.monotonic)

    def enqueue(self, n: int = 1, *, client: Client | None = None, **options: Any) -> Task:
        values = {"unique_key": KEY, "unique_scope": self.scope} | options
        return (client or self.client).enqueue(JOB, {"n": n}, **values)

    def empty(self) -> None:
        """Take all rows away; much faster than a new site."""
        with self.engine._transaction() as cursor:
            cursor.execute("DELETE FROM tasks")

    def row(self) -> Row | None:
        """The row of the key."""
        return self.engine.get([ROW_ID]).get(ROW_ID)

    def tasks(self) -> list[Task]:
        return list(self.client.list(limit=None))

    def holders(self) -> list[Task]:
        """The tasks that hold the key by what was promised, told from the rows alone."""
        values = [status for status in Status if status not in TERMINAL]
        entries = [entry for value in values for entry in self.engine.page(value, limit=1000).entries]
        rows = self.engine.get([entry.task_id for entry in entries]).values()
        return [
            Task.from_row(row)
            for row in rows
            if row.get("uniqueKey") == KEY and (row["uniqueScope"] == "until_done" or "startedAt" not in row)
        ]

    def check_next(self) -> None:
        """The next enqueue works at once: it finds the open task, or puts its own."""
        before = {task.task_id for task in self.holders()}
        known = {task.task_id for task in self.tasks()}
        if any(task.is_stopping for task in self.holders()):
            with pytest.raises(NotAllowed, match="was asked to stop"):
                self.enqueue(99)
            return
        task = self.enqueue(99)
        assert self.engine.get([task.task_id])
        if before:
            assert {task.task_id} == before
        else:
            assert task.task_id not in known
            assert task.payload == {"n": 99} or task.task_id.startswith("mine")  # put for a client that died
        assert [one.task_id for one in self.holders()] == [task.task_id]


class Hand:
    """An agent by its verbs: it claims, settles, and then frees keys as agents do."""

    def __init__(self, site: Site, store: TaskStore, name: str = "agent-1") -> None:
        self.site, self.store, self.name = site, store, name
        self._admission = Admission(store, Registry(a_job(JOB)), settings(), EventBus(), rng=random.Random(0))

    def claim(self) -> Lease | None:
        entries = self.store.ready(Lane(), limit=10).entries
        for entry in entries:
            for lease in self.store.claim([Wanted(entry, LEASE_S)], owner=self.name):
                self.start(lease)
                return lease
        return None

    def start(self, lease: Lease) -> None:
        self._admission.started(lease.task)
        self._admission.release()

    def end(self, lease: Lease, how: str = "succeed") -> bool:
        now = self.site.clock.now()
        write = {
            "succeed": lambda: writes.succeed(lease, now=now, expire_at=now + DAY_S),
            "fail": lambda: writes.fail(lease, error="boom", now=now, expire_at=now + DAY_S),
            "close": lambda: writes.close(lease, reason="enough", now=now, expire_at=now + DAY_S),
            "retry": lambda: writes.retry(lease, due=now, error="boom", now=now),
            "snooze": lambda: writes.snooze(lease, due=now, now=now),
            "release": lambda: writes.release(lease, now=now),
        }[how]()
        [settled] = self.store.settle([write])
        if settled.accepted and "finishedAt" in write.set:
            self._admission.ended(lease.task)
            self._admission.release()
        return settled.accepted

    def run(self, how: str = "succeed") -> Task | None:
        lease = self.claim()
        if lease is not None:
            self.end(lease, how)
        return lease.task if lease else None


@pytest.fixture(params=SCOPES)
def site(request: pytest.FixtureRequest) -> Iterator[Site]:
    site = Site(request.param)
    yield site
    site.engine.close()


# Every order of two, from every state that a crash can leave

Start = Callable[[Site], str]
"""Brings a site into a state; the answer is the id of the task that is retried, cancelled and freed in it."""


def nothing(site: Site) -> str:
    return "none"


def waits(site: Site) -> str:
    return site.enqueue(0).task_id


def runs(site: Site) -> str:
    task = site.enqueue(0)
    assert Hand(site, site.store, "agent-0").claim() is not None
    return task.task_id


def has_failed(site: Site) -> str:
    task = site.enqueue(0)
    Hand(site, site.store).run("fail")
    assert site.row() is None
    return task.task_id


def has_failed_and_its_agent_died(site: Site) -> str:
    task = site.enqueue(0)
    [lease] = site.store.claim([Wanted(seen(task), LEASE_S)], owner="agent-0")
    now = site.clock.now()
    site.store.settle([writes.fail(lease, error="boom", now=now, expire_at=now + DAY_S)])
    return task.task_id


def is_to_live_again_and_its_client_died(site: Site) -> str:
    task_id = has_failed_and_its_agent_died(site)
    UniqueKeys(site.store).retake(site.client.get(task_id))
    return task_id


def was_never_put(site: Site) -> str:
    assert site.store.insert_row(unique_writes.key_row(ROW_ID, "lost", now=site.clock.now()))[0]
    return "lost"


def was_never_put_under_its_own_id(site: Site) -> str:
    """The client dies before the put of its task."""
    broken = FaultyEngine(site.engine)
    broken.fail("put", Fault.STALE, Fault.LOST_REQUEST)
    with pytest.raises(StoreError):
        site.enqueue(0, client=Client(site.open(broken), settings()), task_id="mine")
    assert site.row() is not None
    assert site.tasks() == []
    return "mine"


def was_never_put_under_its_own_id_long_ago(site: Site) -> str:
    task_id = was_never_put_under_its_own_id(site)
    site.clock.advance(KEY_SETTLES_S + 1)
    return task_id


STARTS: Final[tuple[Start, ...]] = (
    nothing,
    waits,
    runs,
    has_failed,
    has_failed_and_its_agent_died,
    is_to_live_again_and_its_client_died,
    was_never_put,
    was_never_put_under_its_own_id,
    was_never_put_under_its_own_id_long_ago,
)

Act = Callable[[Site, TaskStore, str], Any]


def enqueues(site: Site, store: TaskStore, _: str) -> Task:
    return site.enqueue(1, client=Client(store, settings()))


def enqueues_under_its_own_id(site: Site, store: TaskStore, _: str) -> Task:
    return site.enqueue(2, client=Client(store, settings()), task_id="mine")


def retries(site: Site, store: TaskStore, task_id: str) -> Any:
    task = site.store.peek([task_id]).get(task_id)
    if task is None or task.status not in (Status.FAILED, Status.DONE):
        return None
    try:
        return Client(store, settings()).retry(task_id)
    except NotAllowed as error:
        return error


def cancels(site: Site, store: TaskStore, task_id: str) -> Any:
    if task_id not in site.store.peek([task_id]):
        return None
    try:
        return Client(store, settings()).cancel(task_id)
    except NotAllowed as error:
        return error


def runs_what_is_there(site: Site, store: TaskStore, _: str) -> Any:
    return Hand(site, store, "agent-2").run("fail")


def ends_what_runs(site: Site, store: TaskStore, task_id: str) -> Any:
    row = site.engine.get([task_id]).get(task_id, {})
    if row.get("leaseOwner") != "agent-0":
        return None
    task = Task.from_row(row)
    lease = Lease(task=task, owner="agent-0", fence=task.fence, lease_s=LEASE_S, held_from=0.0)
    return Hand(site, store, "agent-0").end(lease, "fail")


def frees_late(site: Site, store: TaskStore, task_id: str) -> Any:
    """The agent that settled the end frees the key, after a while."""
    row = site.engine.get([task_id]).get(task_id, {})
    if "finishedAt" in row:
        UniqueKeys(store).release([Task.from_row(row)])
    return None


ACTS: Final[tuple[Act, ...]] = (
    enqueues,
    enqueues_under_its_own_id,
    retries,
    cancels,
    runs_what_is_there,
    ends_what_runs,
    frees_late,
)
TAKING: Final[tuple[Act, ...]] = (enqueues, enqueues_under_its_own_id, retries)
PAIRS: Final = [(one, other) for n, one in enumerate(TAKING) for other in ACTS[n:]]


def every_order(start: Start, acts: Sequence[Act], scope: str, *, mortal: bool) -> int:
    """Try every order of the calls of some acts, each order on a fresh site.

    At no time is more than one task open, each enqueue answers with one that was open meanwhile, and the next enqueue
    works at once.

    Returns:
        how many orders there are.
    """
    names = [f"{number} {act.__name__}" for number, act in enumerate(acts)]
    orders = EveryOrder(1, frozenset(names)) if mortal else EveryOrder(2)
    restless = 0
    site = Site(scope)
    while orders.next():
        site.empty()
        task_id = start(site)
        site.clock.advance(1)
        held: set[str] = set()
        story: list[str] = []

        def look(held: set[str] = held, story: list[str] = story) -> None:
            site.clock.advance(0.001)
            holders = site.holders()
            assert len(holders) <= 1, (start.__name__, story, holders)
            held.update(task.task_id for task in holders)

        def choose(waiting: Sequence[str], story: list[str] = story) -> str:
            story.append(orders.choose(waiting))
            return story[-1]

        turns = Turns(choose, look)
        stores = [site.open(TurnsEngine(site.engine, turns)) for _ in acts]
        answers = turns.run(
            {name: partial(act, site, store, task_id) for name, act, store in zip(names, acts, stores, strict=True)}
        )
        for name, answer in answers.items():
            if isinstance(answer, Killed):
                continue
            assert not isinstance(answer, BaseException) or isinstance(answer, NotAllowed), (name, story, answer)
            if isinstance(answer, NotAllowed) and "changes hands" in str(answer):
                restless += 1  # somebody else got on in each of ten tries
            elif isinstance(answer, NotAllowed) and "was asked to stop" in str(answer):
                assert cancels in acts, (name, story, answer)
            elif "enqueues" in name:
                assert isinstance(answer, Task), (name, story, answer)
                assert not answer.is_stopping, "the new work would never run"
                assert answer.task_id in held or answer.task_id == "mine", (name, story, answer)
        site.check_next()
    site.engine.close()
    assert restless <= orders.tried / 100
    return orders.tried


@pytest.mark.slow
@pytest.mark.parametrize("start", STARTS)
@scopes
def test_in_every_order_of_two_that_come_together_one_task_is_open(start: Start, scope: str) -> None:
    tried = sum(every_order(start, pair, scope, mortal=False) for pair in PAIRS)
    assert tried > len(PAIRS)


@pytest.mark.slow
@pytest.mark.parametrize("start", STARTS)
def test_whoever_dies_before_any_of_his_calls_holds_nothing_up(start: Start) -> None:
    pairs = [pair for pair in PAIRS if enqueues in pair]
    assert sum(every_order(start, pair, "until_done", mortal=True) for pair in pairs) > 2 * len(pairs)


# A walk at random


class Walk:
    """Clients and agents that do at random what they can, interrupted anywhere, and die at times."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.site = Site()
        self.steps = self.deaths = self.rescues = 0
        self.held: list[str] = []
        """Ids of the holders, as they followed each other."""
        self._waits: dict[str, int] = {}
        self._answers: list[tuple[str, int]] = []
        """To enqueues: a task, and the number of the holder when it was asked for."""

    def round(self) -> None:
        """Four of them do five things each, all at once."""
        turns = Turns(self._choose, self._look)
        self._waits.clear()
        actors = {f"actor-{n}": self._actor(f"agent-{self.steps}-{n}", turns) for n in range(4)}
        for name, answer in turns.run(actors).items():
            assert answer is None or isinstance(answer, Killed), (name, answer)
            self.deaths += answer is not None
        assert all(task_id in self.held[since:] for task_id, since in self._answers)
        self._answers.clear()

    def _choose(self, waiting: Sequence[str]) -> str:
        self._waits = {name: self._waits.get(name, 0) + 1 for name in waiting}
        name = max(waiting, key=lambda one: self._waits[one])
        if self._waits[name] < 12:  # else its process would stand still for longer than is promised
            name = self.rng.choice(waiting)
        del self._waits[name]
        return f"-{name}" if self.rng.random() < 0.02 else name

    def _look(self) -> None:
        self.steps += 1
        self.site.clock.advance(0.001)
        holders = self.site.holders()
        assert len(holders) <= 1, holders
        if holders and self.held[-1:] != [holders[0].task_id]:
            self.held.append(holders[0].task_id)

    def _actor(self, name: str, turns: Turns) -> Callable[[], None]:
        rng, store = random.Random(self.rng.random()), self.site.open(TurnsEngine(self.site.engine, turns))
        client, hand, leases = Client(store, settings()), Hand(self.site, store, name), list[Lease]()
        rescuer = Rescuer(
            store,
            EventBus(),
            Dependents(store, EventBus(), keep_success_s=DAY_S, keep_failed_s=DAY_S),
            LostLeases(store, owner=name, guard_s=1.0),
            owner=name,
            max_crashes=1,
            sweep_s=15.0,
        )

        def enqueue() -> None:
            since = max(0, len(self.held) - 1)
            own = f"mine-{rng.randrange(4)}" if rng.random() < 0.3 else None
            task = self.site.enqueue(1, client=client, unique_scope=rng.choice(SCOPES), task_id=own)
            if task.task_id != own:
                self._answers.append((task.task_id, since))

        def claim() -> None:
            if (lease := hand.claim()) is not None:
                leases.append(lease)

        def end() -> None:
            if leases:
                how = rng.choice(("succeed", "fail", "fail", "close", "retry", "snooze", "release"))
                hand.end(leases.pop(), how)

        def some() -> str | None:
            entries = [one for value in Status for one in store.engine.page(value, limit=5, newest_first=True).entries]
            return rng.choice(entries).task_id if entries else None

        def cancel() -> None:
            if task_id := some():
                client.cancel(task_id)

        def retry() -> None:
            if task_id := some():
                client.retry(task_id)

        def rescue() -> None:
            self.site.clock.advance(LEASE_S + 2)
            for lease in rescuer.take_over([Lane()], lambda task: LEASE_S):
                self.rescues += 1
                hand.start(lease)
                leases.append(lease)

        def act() -> None:
            for _ in range(5):
                one = rng.choice((enqueue, enqueue, enqueue, claim, claim, end, end, cancel, retry, retry, rescue))
                try:
                    one()
                except (NotAllowed, TaskNotFound) as error:
                    assert one is not enqueue or "was asked to stop" in str(error), error

        return act


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_on_a_walk_at_random_no_two_hold_the_key_and_none_who_has_ended_holds_it(seed: int) -> None:
    walk = Walk(seed)
    for number in range(30):
        walk.round()
        if number % 3 == 2:
            walk.site.check_next()
            walk.held.append(walk.site.holders()[0].task_id)
    walk.site.engine.close()
    assert walk.steps > 1000
    assert len(set(walk.held)) > 5
    assert walk.deaths > 5
    assert walk.rescues > 0


# What is asked, and what is answered


def test_enqueue_again_answers_with_the_open_task_and_the_payload_of_the_first(site: Site) -> None:
    first = site.enqueue(1)
    again = site.enqueue(2)
    assert again == first
    assert again.payload == {"n": 1}
    assert [task.task_id for task in site.tasks()] == [first.task_id]


def test_until_done_answers_with_the_running_task_and_until_start_puts_the_next() -> None:
    for scope, is_same in (("until_done", True), ("until_start", False)):
        site = Site(scope)
        first = site.enqueue(1)
        assert Hand(site, site.store).claim() is not None
        assert (site.row() is not None) == is_same
        second = site.enqueue(2)
        assert (second.task_id == first.task_id) == is_same
        assert second.status is (Status.RUNNING if is_same else Status.PENDING)
        site.engine.close()


def test_a_key_until_start_is_free_when_the_agent_dies_before_it_frees_it() -> None:
    site = Site("until_start")
    for ends in (False, True):
        first = site.enqueue(1)
        [lease] = site.store.claim([Wanted(seen(first), LEASE_S)], owner="agent-0")
        if ends:  # it is in its queue again, but it was started
            site.store.settle([writes.release(lease, now=site.clock.now())])
        assert site.row() is not None
        second = site.enqueue(2)
        assert second.task_id != first.task_id
        site.client.cancel(second)
    site.engine.close()


def test_keys_of_two_jobs_do_not_meet(site: Site) -> None:
    names = [("a", "b c"), ("a%20b", "c"), ("a", "b%20c"), ("a", "c")]
    tasks = [site.client.enqueue(name, {}, unique_key=key, unique_scope=site.scope) for name, key in names]
    assert len({task.task_id for task in tasks}) == len(names)
    assert all(
        site.client.enqueue(name, {}, unique_key=key, unique_scope=site.scope) == task
        for (name, key), task in zip(names, tasks, strict=True)
    )


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"unique_key": ""}, "unique_key is '' with 0 bytes"),
        ({"unique_key": "k" * 257}, "257 bytes"),
        ({"unique_key": "é" * 129}, "258 bytes"),
        ({"unique_key": "two\nlines"}, "printable"),
        ({"unique_key": 42}, "unique_key is 42; use a text"),
        ({"unique_scope": "until_dawn"}, "unique_scope is 'until_dawn'; use 'until_start' or 'until_done'"),
        ({"unique_scope": ["until_done"]}, "use 'until_start' or 'until_done'"),
        ({"unique_scope": None}, "use 'until_start' or 'until_done'"),
    ],
)
def test_a_wrong_key_or_scope_is_one_clear_error_and_nothing_is_written(options: Any, problem: str) -> None:
    site = Site()
    with pytest.raises(ConfigurationError) as caught:
        site.enqueue(**options)
    assert problem in str(caught.value)
    assert site.tasks() == []
    site.engine.close()


def test_the_largest_key_works_and_has_spaces_and_letters_of_any_script(site: Site) -> None:
    for key in ("k" * 256, "Zoë / Straße 5 % #1"):
        first = site.enqueue(unique_key=key)
        assert site.enqueue(unique_key=key).task_id == first.task_id


def test_a_payload_that_cannot_be_kept_takes_no_key() -> None:
    site = Site()
    site.engine.inline_bytes = 10
    with pytest.raises(PayloadTooLarge):
        site.client.enqueue(JOB, {"text": "x" * 400_000}, unique_key=KEY)
    assert site.row() is None
    site.engine.close()


# An id of its own


def test_an_own_id_is_kept_and_enqueued_again_is_the_same_task(site: Site) -> None:
    first = site.enqueue(1, task_id="mine")
    assert first.task_id == "mine"
    assert site.enqueue(1, task_id="mine") == site.enqueue(2, task_id="other") == site.enqueue(3) == first


def test_an_own_id_that_has_ended_stays_what_it_was_and_holds_no_key(site: Site) -> None:
    site.enqueue(1, task_id="mine")
    Hand(site, site.store).run()
    assert site.enqueue(1, task_id="mine").status is Status.SUCCESS
    with pytest.raises(DuplicateTask):
        site.enqueue(2, task_id="mine")
    assert site.row() is None
    site.check_next()


def test_an_own_id_of_a_task_without_the_key_takes_no_key(site: Site) -> None:
    site.client.enqueue(JOB, {"n": 1}, task_id="mine")
    assert site.enqueue(1, task_id="mine").unique_key is None
    with pytest.raises(DuplicateTask):
        site.enqueue(2, task_id="mine")
    site.check_next()


def test_a_key_that_names_an_open_task_of_another_job_is_free(site: Site) -> None:
    """As a client leaves it that dies when it finds its own id taken."""
    site.client.enqueue("other.job", {"n": 1}, task_id="mine")
    assert site.store.insert_row(unique_writes.key_row(ROW_ID, "mine", now=site.clock.now()))[0]
    assert site.enqueue(2).job == JOB
    site.check_next()


def test_the_task_of_a_client_that_died_before_its_put_keeps_its_own_id_and_payload(site: Site) -> None:
    was_never_put_under_its_own_id(site)
    found = site.enqueue(7)
    assert (found.task_id, found.payload) == ("mine", {"n": 0})
    assert site.enqueue(0, task_id="mine") == found


def test_nobody_puts_a_task_again_that_has_run_and_is_gone(site: Site) -> None:
    """Its agent died before it freed the key, and the row of the task has expired since."""
    site.enqueue(1, task_id="mine")
    [lease] = site.store.claim([Wanted(seen(site.client.get("mine")), LEASE_S)], owner="agent-0")
    now = site.clock.now()
    assert site.store.settle([writes.succeed(lease, now=now, expire_at=now + DAY_S)])[0].accepted
    site.clock.advance(DAY_S + 1)
    assert site.engine.expire(site.clock.now()) == 1
    if site.row() is not None:
        assert site.enqueue(2).payload == {"n": 2}
    site.check_next()
    assert "mine" not in {task.task_id for task in site.tasks()}


# With parents, limits and shards


def test_a_blocked_task_holds_its_key_and_is_found_by_it(site: Site) -> None:
    parent = site.client.enqueue("parent.job", {})
    child = site.enqueue(1, depends_on=[parent])
    assert child.status is Status.BLOCKED
    assert site.enqueue(2).task_id == child.task_id
    assert site.client.get(parent).dependents == {child.task_id}


def test_a_parent_that_does_not_exist_takes_no_key(site: Site) -> None:
    with pytest.raises(ParentNotFound):
        site.enqueue(1, depends_on=["none"])
    assert site.row() is None


def test_a_child_of_which_its_client_dies_before_the_put_is_put_with_its_parents(site: Site) -> None:
    parent = site.client.enqueue("parent.job", {})
    broken = FaultyEngine(site.engine)
    broken.fail("put", Fault.STALE, Fault.LOST_REQUEST)
    with pytest.raises(StoreError):
        site.enqueue(0, client=Client(site.open(broken), settings()), task_id="mine", depends_on=[parent])
    found = site.enqueue(7)
    assert (found.task_id, found.status, found.waiting_for) == ("mine", Status.BLOCKED, frozenset({parent.task_id}))
    assert site.client.get(parent).dependents == {"mine"}


def test_a_task_that_its_limit_refused_stands_in_line_and_has_not_started() -> None:
    for scope in SCOPES:
        site = Site(scope)
        task = site.enqueue(1)
        [lease] = site.store.claim([Wanted(seen(task), LEASE_S)], owner="agent-0")
        write = writes.wait_for_permit(lease, limit_key="api", now=site.clock.now())
        assert site.store.settle([write])[0].accepted
        assert site.enqueue(2).task_id == task.task_id
        site.engine.close()


def test_a_limited_task_that_waits_for_its_slot_keeps_a_key_until_start_and_then_frees_it() -> None:
    started: list[str] = []

    @job(JOB, limit=1)
    def handler(ctx: Context, payload: dict[str, Any]) -> None:
        started.append(ctx.task_id)
        while not go_on:
            ctx.check()
            tick.wait(0.01)

    go_on: list[int] = []
    tick = threading.Event()
    with serving(handler, slots=4) as stage:
        blocking = stage.client.enqueue(handler, {})
        stage.record.wait(events.TaskStarted)
        task = stage.client.enqueue(handler, {"n": 1}, unique_key=KEY, unique_scope="until_start")
        assert (
            stage.client.enqueue(handler, {"n": 2}, unique_key=KEY, unique_scope="until_start").task_id == task.task_id
        )
        go_on.append(1)
        assert stage.end_of(blocking).status is stage.end_of(task).status is Status.SUCCESS
        assert stage.client.enqueue(handler, {"n": 3}, unique_key=KEY).task_id != task.task_id


@pytest.mark.slow
def test_a_task_of_which_nobody_could_say_whether_a_slot_is_free_keeps_its_key_until_start() -> None:
    broken = FaultyEngine(SqliteEngine(MEMORY))
    broken.chance("take permit", Fault.LOST_REQUEST, 1.0)
    with serving(a_job(JOB, limit=1), store=TaskStore(broken)) as stage:
        task = stage.client.enqueue(JOB, {}, unique_key=KEY, unique_scope="until_start")
        stage.record.wait(events.TaskSnoozed)
        assert stage.client.enqueue(JOB, {}, unique_key=KEY, unique_scope="until_start").task_id == task.task_id
        broken.calm()
        assert stage.end_of(task).status is Status.SUCCESS
        assert stage.store.engine.get([ROW_ID]) == {}


def test_with_shards_a_task_that_takes_the_id_of_a_lost_one_is_in_the_lane_of_that_id(site: Site) -> None:
    client = Client(site.store, settings(shards=8))
    for number in range(20):
        key = f"key-{number}"
        row = unique_writes.key_row(key_id(JOB, key), f"lost-{number}", now=site.clock.now())
        assert site.store.insert_row(row)[0]
        task = site.enqueue(client=client, unique_key=key)
        assert task.task_id == f"lost-{number}"
        assert task.lane == Lane.of(task.task_id, "default", 8)
    assert len({task.lane for task in site.tasks()}) > 3


# Every end frees


def test_every_end_frees_the_key_and_takes_its_row_away(site: Site) -> None:
    for how in ("succeed", "fail", "close"):
        first = site.enqueue(1)
        assert Hand(site, site.store).run(how) is not None
        assert site.row() is None
        second = site.enqueue(2)
        assert second.task_id != first.task_id
        assert site.client.cancel(second).status is Status.DONE
        assert site.row() is None


def test_an_end_that_is_none_keeps_a_key_until_done_and_not_one_until_start(site: Site) -> None:
    for how in ("retry", "snooze", "release"):
        first = site.enqueue(1)
        assert Hand(site, site.store).run(how) is not None
        second = site.enqueue(2)
        assert (second.task_id == first.task_id) == (site.scope == "until_done"), how
        for task in {first.task_id, second.task_id}:
            site.client.cancel(task)


def test_the_cancel_of_a_blocked_task_and_the_doom_by_its_parent_free_the_key(site: Site) -> None:
    for on_failure in ("fail", "cancel"):
        for ends in ("child", "parent"):
            parent = site.client.enqueue("parent.job", {})
            child = site.enqueue(1, depends_on=[parent], on_parent_failure=on_failure)
            site.client.cancel(child if ends == "child" else parent)
            assert site.client.get(child).status in TERMINAL
            assert site.row() is None
            site.client.cancel(site.enqueue(2))
            if ends == "child":
                site.client.cancel(parent)


@pytest.mark.parametrize("released", [False, True])
def test_new_work_behind_a_task_that_was_asked_to_stop_is_refused_with_the_reason(released: bool) -> None:
    """With the task as the answer, the new work would never run, and the caller would not know."""
    site = Site()
    hand = Hand(site, site.store)
    first = site.enqueue(1)
    lease = hand.claim()
    assert lease is not None
    assert site.client.cancel(first).status is Status.RUNNING
    if released:  # as when its agent is stopped before its handler has ended
        assert hand.end(lease, "release")
    for own in (None, "mine"):
        with pytest.raises(NotAllowed, match=f"by the task '{first.task_id}', which was asked to stop and is still "):
            site.enqueue(2, task_id=own)
    assert [task.task_id for task in site.tasks()] == [first.task_id], "nothing was put"
    assert site.enqueue(1, task_id=first.task_id).task_id == first.task_id, "of that very task it is the answer"
    again = hand.claim() if released else lease
    assert again is not None
    assert hand.end(again, "close")
    assert site.enqueue(2).payload == {"n": 2}
    site.check_next()


def test_new_work_behind_a_stream_that_is_being_stopped_is_refused_with_the_remedies() -> None:
    site = Site()

    def stream() -> Task:
        return site.client.enqueue("test.stream", {}, unique_key=KEY)

    first = stream()
    [lease] = site.store.claim([Wanted(seen(first)._replace(kind="stream"), LEASE_S)], owner="agent-1")
    assert stream().task_id == first.task_id
    site.client.streams.stop(first)
    with pytest.raises(
        NotAllowed, match=f"enqueue then, or start it again: client.streams.start\\('{first.task_id}'\\)$"
    ):
        stream()
    now = site.clock.now()
    site.store.settle([writes.stop(lease, now=now, expire_at=now + DAY_S)])
    assert stream().task_id != first.task_id


def test_the_stop_of_a_waiting_stream_frees_the_key_and_its_start_takes_it_again(site: Site) -> None:
    def stream() -> Task:
        return site.client.enqueue("test.stream", {}, unique_key=KEY, unique_scope=site.scope)

    first = stream()
    site.client.streams.stop(first)
    second = stream()
    assert second.task_id != first.task_id
    with pytest.raises(NotAllowed, match=second.task_id):
        site.client.streams.start(first)
    site.client.cancel(second)
    assert site.client.streams.start(first).status is Status.PENDING
    assert stream().task_id == first.task_id


def test_a_rescued_task_keeps_its_key_and_frees_it_at_its_end(site: Site) -> None:
    first = site.enqueue(1)
    assert Hand(site, site.store, "agent-0").claim() is not None  # and it is never seen again
    site.clock.advance(LEASE_S + 1)
    [lease] = site.store.take_over([(site.client.get(first), LEASE_S)], owner="agent-2").leases
    hand = Hand(site, site.store, "agent-2")
    hand.start(lease)
    assert (site.enqueue(2).task_id == first.task_id) == (site.scope == "until_done")
    assert hand.end(lease)
    if site.scope == "until_done":
        assert site.row() is None
    site.check_next()


def test_who_is_given_up_after_lost_agents_frees_the_key(site: Site) -> None:
    first = site.enqueue(1)
    [lease] = site.store.claim([Wanted(seen(first), LEASE_S)], owner="agent-0")
    bus, store = EventBus(), site.store
    dependents = Dependents(store, bus, keep_success_s=DAY_S, keep_failed_s=DAY_S)
    numbers: dict[str, Any] = {"max_crashes": 0, "sweep_s": 15.0}
    rescuer = Rescuer(store, bus, dependents, LostLeases(store, guard_s=1.0), owner="agent-2", **numbers)
    site.clock.advance(LEASE_S + 2)
    rescuer.take_over([Lane()], lambda task: LEASE_S)
    assert site.client.get(first).status is Status.FAILED
    assert site.row() is None
    assert not Hand(site, store).end(lease)
    site.check_next()


def test_a_row_that_is_purged_expired_or_deleted_by_hand_holds_no_key(site: Site) -> None:
    for gone in ("purge", "expire", "delete"):
        task_id = has_failed_and_its_agent_died(site)
        if gone == "purge":
            assert site.client.purge("FAILED") == 0, "somebody may just be about to put one under this id"
            site.clock.advance(KEY_SETTLES_S + 1)
            assert site.client.purge("FAILED") == 1
        elif gone == "expire":
            site.clock.advance(DAY_S + 1)
            assert site.engine.expire(site.clock.now()) == 1
        else:
            assert site.engine.delete([site.client.get(task_id).to_row()]) == [True]
        task = site.enqueue(5)
        assert task.payload == {"n": 5}
        assert [one.task_id for one in site.holders()] == [task.task_id]
        site.client.cancel(task)


def is_of(task_id: str, event: events.TaskStarted) -> bool:
    return event.task_id == task_id


@pytest.mark.slow
def test_real_agents_free_the_key_at_success_failure_cancel_and_stop_of_what_runs() -> None:
    def handler(ctx: Context, payload: dict[str, Any]) -> None:
        if payload["how"] == "fail":
            raise ValueError("boom")
        while payload["how"] == "cancel":
            ctx.check()
            threading.Event().wait(0.01)

    for scope in SCOPES:
        with serving(job(JOB, max_retry=0)(handler)) as stage:
            for how, status in (("go", "SUCCESS"), ("fail", "FAILED"), ("cancel", "DONE")):
                task = stage.client.enqueue(JOB, {"how": how}, unique_key=KEY, unique_scope=scope)
                if how == "cancel":
                    stage.record.wait(events.TaskStarted, where=partial(is_of, task.task_id))
                    stage.client.cancel(task)
                assert stage.end_of(task).status == status
            assert stage.client.enqueue(JOB, {"how": "go"}, unique_key=KEY).task_id != task.task_id
        assert stage.store.engine.get([ROW_ID]) == {}


class Counting(SqliteEngine):
    """Counts the writes to the row of the key."""

    def __init__(self) -> None:
        super().__init__(MEMORY)
        self.writes: list[str] = []

    def put(self, rows: Sequence[Row], *, fresh: bool = False) -> list[Applied]:
        self.writes += ["put" for row in rows if row["taskId"] == ROW_ID]
        return super().put(rows, fresh=fresh)

    def apply(self, batch: Sequence[Write]) -> list[Applied]:
        self.writes += [write.verb for write in batch if write.task_id == ROW_ID]
        return super().apply(batch)


@scopes
def test_with_a_real_agent_a_key_is_written_twice_whatever_becomes_of_the_task(scope: str) -> None:
    def handler(ctx: Context, payload: dict[str, Any]) -> None:
        if payload["how"] == "fail":
            raise ValueError("boom")

    engine = Counting()
    with serving(job(JOB, max_retry=2)(handler), store=TaskStore(engine)) as stage:
        for how in ("go", "fail"):
            stage.end_of(stage.client.enqueue(JOB, {"how": how}, unique_key=KEY, unique_scope=scope))
            stage.end_of(stage.client.enqueue(JOB, {"how": "go"}))  # and what comes behind the end is written
    assert engine.writes == ["put", "free key"] * 2


# Retries by hand


def test_a_retry_by_hand_takes_the_key_again(site: Site) -> None:
    task_id = has_failed(site)
    site.clock.advance(1)
    assert site.client.retry(task_id).status is Status.PENDING
    site.clock.advance(1)
    assert site.enqueue(5).task_id == task_id
    Hand(site, site.store).run()
    assert site.row() is None


def test_a_retry_by_hand_is_refused_with_the_name_of_the_holder(site: Site) -> None:
    task_id = has_failed(site)
    holder = site.enqueue(5)
    with pytest.raises(NotAllowed, match=f"held by the task {holder.task_id!r}: wait for its end, or cancel it"):
        site.client.retry(task_id)
    assert site.client.get(task_id).status is Status.FAILED
    site.client.cancel(holder)
    assert site.client.retry(task_id).status is Status.PENDING


def test_a_retry_by_hand_of_a_client_that_died_is_outdone_by_the_next_enqueue(site: Site) -> None:
    task_id = is_to_live_again_and_its_client_died(site)
    before = site.client.get(task_id)
    holder = site.enqueue(5)
    assert holder.task_id != task_id
    late = writes.revive(before, now=site.clock.now())
    assert site.store.write_tasks([late]) == [None], "the client was only slow"
    assert [task.task_id for task in site.holders()] == [holder.task_id]


def test_nobody_takes_the_id_of_a_task_that_was_to_be_retried_and_is_gone(site: Site) -> None:
    task_id = is_to_live_again_and_its_client_died(site)
    assert site.engine.delete([site.client.get(task_id).to_row()]) == [True]
    assert site.enqueue(5).task_id != task_id
    site.check_next()


def test_who_frees_late_does_not_free_what_was_retried_meanwhile(site: Site) -> None:
    task_id = has_failed_and_its_agent_died(site)
    ended = site.client.get(task_id)
    site.clock.advance(1)
    site.client.retry(task_id)
    UniqueKeys(site.store).release([ended])
    assert site.row() is not None
    assert site.enqueue(5).task_id == task_id


def test_the_cancel_of_a_task_that_does_not_exist_touches_nothing(site: Site) -> None:
    was_never_put(site)
    with pytest.raises(TaskNotFound):
        site.client.cancel("lost")
    assert site.enqueue(1).task_id == "lost"
    site.check_next()


# Slow and broken


def test_who_is_slow_between_key_and_put_finds_the_third_after_another_came_ran_and_ended(site: Site) -> None:
    for is_purged in (False, True):
        slow = SlowPut(site.engine)
        client, told = Client(site.open(slow), settings()), list[Task]()

        def meanwhile(told: list[Task] = told, is_purged: bool = is_purged) -> None:
            site.clock.advance(1)
            second = site.enqueue(2)
            assert Hand(site, site.store).run() is not None
            told.append(second)
            if is_purged:
                site.clock.advance(KEY_SETTLES_S + 1)
                assert site.client.purge("SUCCESS") > 0
                assert site.engine.get([second.task_id]) == {}
            told.append(site.enqueue(3))

        slow.before_key_is_answered = meanwhile
        first = site.enqueue(1, client=client)
        second, third = told
        assert second.task_id != third.task_id
        assert first == third
        assert [task.task_id for task in site.holders()] == [third.task_id]
        site.client.cancel(third)


def test_who_puts_the_task_of_another_late_is_not_given_up(site: Site) -> None:
    was_never_put_under_its_own_id(site)
    site.clock.advance(KEY_SETTLES_S - 1)
    slow, told = SlowPut(site.engine), list[Task]()

    def meanwhile() -> None:
        site.clock.advance(2)
        told.append(site.enqueue(3))

    slow.before_task_is_put = meanwhile
    found = site.enqueue(1, client=Client(site.open(slow), settings()))
    assert [found] == told
    assert [task.task_id for task in site.holders()] == ["mine"]


def test_who_was_slow_for_long_takes_the_key_anew_before_he_puts_his_own_id(site: Site) -> None:
    slow, told = SlowPut(site.engine), list[Task]()

    def meanwhile() -> None:
        site.clock.advance(KEY_SETTLES_S + 1)
        told.append(site.enqueue(3))

    slow.before_key_is_answered = meanwhile
    found = site.enqueue(1, client=Client(site.open(slow), settings()), task_id="mine")
    assert [found] == told
    assert found.payload == {"n": 3}
    assert [task.task_id for task in site.tasks()] == [found.task_id]


class SlowPut(FaultyEngine):
    """An engine whose client stands still once: right after it has taken the key, or before it puts the task."""

    before_key_is_answered: Callable[[], None] | None = None
    before_task_is_put: Callable[[], None] | None = None

    def put(self, rows: Sequence[Row], *, fresh: bool = False) -> Any:
        if self.before_task_is_put is not None and "job" in rows[0]:
            before, self.before_task_is_put = self.before_task_is_put, None
            before()
        answers = super().put(rows, fresh=fresh)
        action, self.before_key_is_answered = self.before_key_is_answered, None
        if action is not None:
            assert rows[0]["taskId"] == ROW_ID
            action()
        return answers


@pytest.mark.slow
@pytest.mark.parametrize("fault", [fault for fault in Fault if fault is not Fault.STALE])
@pytest.mark.parametrize("own_id", [None, "mine"])
def test_whatever_is_lost_of_an_enqueue_the_next_works_at_once_and_one_is_open(
    fault: Fault, own_id: str | None
) -> None:
    for start in STARTS:
        for call in range(8):
            site = Site()
            start(site)
            broken = FaultyEngine(site.engine)
            broken.fail(ANY, *[Fault.STALE] * call, fault)
            task = None
            try:
                task = site.enqueue(1, client=Client(site.open(broken), settings()), task_id=own_id)
            except (StoreUnavailable, StoreRejected):
                assert fault is not Fault.REPEATED
            assert len(site.holders()) <= 1
            assert task is None or task.task_id in {one.task_id for one in site.holders()}
            site.check_next()
            site.engine.close()


@pytest.mark.slow
@pytest.mark.parametrize("fault", [fault for fault in Fault if fault is not Fault.STALE])
def test_whatever_is_lost_of_a_retry_by_hand_one_is_open(fault: Fault) -> None:
    for start in (has_failed, has_failed_and_its_agent_died, is_to_live_again_and_its_client_died):
        for call in range(6):
            site = Site()
            task_id = start(site)
            site.clock.advance(1)
            broken = FaultyEngine(site.engine)
            broken.fail(ANY, *[Fault.STALE] * call, fault)
            try:
                Client(site.open(broken), settings()).retry(task_id)
            except (StoreUnavailable, StoreRejected):
                assert fault is not Fault.REPEATED
            assert len(site.holders()) <= 1
            site.check_next()
            site.engine.close()


def test_a_store_that_does_not_answer_keeps_no_key() -> None:
    site = Site()
    broken = FaultyEngine(site.engine)
    task = site.enqueue(1)
    [lease] = site.store.claim([Wanted(seen(task), LEASE_S)], owner="agent-0")
    broken.fail("free key", Fault.LOST_REQUEST)
    assert Hand(site, site.open(broken), "agent-0").end(lease)
    assert site.row() is not None
    site.check_next()
    site.engine.close()


def test_a_key_that_could_not_be_freed_in_an_outage_is_freed_with_the_next(site: Site) -> None:
    broken = FaultyEngine(site.engine)
    keys = UniqueKeys(site.open(broken))
    ended = site.client.get(has_failed_and_its_agent_died(site))
    broken.outage()
    keys.release([replace(ended, unique_key=f"other-{number}") for number in range(OWED)])
    keys.release([ended])
    assert len(keys._owed) == OWED, "memory is bounded"
    broken.calm()
    assert site.row() is not None
    keys.release([])
    assert (site.row(), keys._owed) == (None, [])


@pytest.mark.parametrize("how", ["purge", "expire"])
def test_the_row_of_a_key_that_a_crash_left_goes_with_its_task(site: Site, how: str) -> None:
    for start in (has_failed_and_its_agent_died, is_to_live_again_and_its_client_died):
        start(site)
        assert site.row() is not None
        _go(site, how)
        assert site.row() is None


@pytest.mark.parametrize("how", ["purge", "expire"])
def test_the_row_of_a_key_stays_when_its_task_goes_and_another_has_or_takes_it(site: Site, how: str) -> None:
    """The ended task goes between the two writes of an enqueue with its own id, or has passed its key on."""
    task_id = has_failed_and_its_agent_died(site)
    site.clock.advance(DAY_S + 1)
    keys = UniqueKeys(site.store)
    ended = site.client.store.get([task_id])[task_id]

    def put(task: Task) -> Enqueued:
        row = site.row()
        _gone(site, how)
        assert site.row() == row, "a task is just on its way"
        [answer] = site.store.enqueue([task])
        return answer

    fresh = replace(ended, status=Status.PENDING, started_at=None, finished_at=None, expire_at=None, errors=())
    assert keys.put(fresh, put, own_id=True, shards=1).task_id == task_id
    assert [one.task_id for one in site.holders()] == [task_id]
    assert site.row() is not None


def test_the_row_of_a_key_stays_when_its_task_goes_and_an_equal_one_comes_before_the_purge_goes_on(site: Site) -> None:
    """The purge stands still between the task and the row of its key."""
    site.client.cancel(site.enqueue(1, task_id="mine"))
    site.clock.advance(DAY_S)

    class Slow(FaultyEngine):
        def delete(self, tasks: Sequence[Row]) -> list[bool]:
            gone = super().delete(tasks)
            assert site.enqueue(2, task_id="mine").status is Status.PENDING
            site.clock.advance(KEY_SETTLES_S + 1)
            return gone

    assert Client(site.open(Slow(site.engine)), settings()).purge("DONE") == 1
    assert site.row() is not None
    assert site.enqueue(3).task_id == "mine"
    assert len(site.holders()) == 1


def test_a_key_that_was_taken_for_nothing_is_not_dropped_of_the_next_that_has_it(site: Site) -> None:
    """Its client stands still before it drops the key; meanwhile the row goes, and comes back with the same fence."""
    ended = site.client.cancel(site.enqueue(0, task_id="mine"))
    wanted = replace(ended, status=Status.PENDING, finished_at=None, payload_text='{"n":1}')

    def put(task: Task) -> Enqueued:
        [answer] = site.store.enqueue([task])
        site.clock.advance(KEY_SETTLES_S + 1)
        assert site.client.purge("DONE") == 1
        assert site.row() is None
        assert site.enqueue(1, task_id="mine").status is Status.PENDING
        return answer

    with pytest.raises(DuplicateTask):
        UniqueKeys(site.store).put(wanted, put, own_id=True, shards=1)
    assert site.row() is not None
    assert site.enqueue(6).task_id == "mine"
    assert len(site.holders()) == 1


def _go(site: Site, how: str) -> None:
    """All ended tasks are purged, or expire."""
    site.clock.advance(KEY_SETTLES_S + 1 if how == "purge" else DAY_S + 1)
    _gone(site, how)


def _gone(site: Site, how: str) -> None:
    gone = site.client.purge("FAILED") if how == "purge" else site.engine.expire(site.clock.now())
    assert gone == 1


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"heldBy": None}, "heldBy is None, which is no id of a task"),
        ({"heldBy": ""}, "which is no id of a task"),
        ({"heldBy": b"bytes"}, "which is no id of a task"),
        ({"heldBy": "a#payload"}, "which is no id of a task"),
        ({"heldBy": "turn:blocked"}, "whose row is no task"),
        ({"fence": None}, "fence is None, which is no number"),
        ({"fence": "first"}, "fence is 'first', which is no number"),
        ({"heldBy": "none", "payload": "{"}, "its payload is no task"),
        ({"heldBy": "none", "payload": '{"status":"HELLO"}'}, "its payload is no task"),
        ({"heldBy": "none", "payload": "[]"}, "its payload is no task"),
    ],
)
def test_a_row_made_by_hand_is_a_clear_error_for_its_key_and_for_nobody_else(change: Row, problem: str) -> None:
    site = Site()
    task_id = has_failed(site)
    assert site.store.take_turn("blocked", owner="me", lasts_s=1.0)
    row = unique_writes.key_row(ROW_ID, "x", now=site.clock.now()) | change
    site.engine.put([{name: value for name, value in row.items() if value is not None}])
    asks: list[Callable[[], Task]] = [partial(site.enqueue, 1), partial(site.client.retry, task_id)]
    for ask in asks:
        with pytest.raises(StoreError) as caught:
            ask()
        assert problem in str(caught.value)
        assert f"the row {ROW_ID!r} is not one of a unique key" in str(caught.value)
        assert "Delete it" in str(caught.value)
    other = site.enqueue(2, unique_key="another")
    Hand(site, site.store).run()
    assert site.client.get(other).status is Status.SUCCESS
    site.engine.close()


def test_a_key_whose_task_is_of_a_newer_version_is_not_given_to_another(site: Site) -> None:
    site.engine.put([{"taskId": "strange", "status": "SLEEPING", "job": JOB, "createdAt": 1.0, "fence": 1}])
    site.engine.put([unique_writes.key_row(ROW_ID, "strange", now=site.clock.now())])
    with pytest.raises(TaskUnreadable, match=r"is held by 'strange'.* status is 'SLEEPING'; upgrade this"):
        site.enqueue(1)
    row = site.row()
    assert row is not None
    assert row["heldBy"] == "strange"
    assert site.enqueue(2, unique_key="another").status is Status.PENDING


def test_a_row_without_a_usable_time_passes_its_key_on(site: Site) -> None:
    for at in ("yesterday", None):
        row = {"taskId": ROW_ID, "heldBy": "gone", "fence": 7, "updatedAt": at}
        assert site.store.insert_row({name: value for name, value in row.items() if value is not None})[0]
        assert site.enqueue(1, task_id="mine").task_id == "mine"
        left = site.row()
        assert left is not None
        assert (left["heldBy"], left["fence"]) == ("mine", 8)
        site.empty()


def test_a_scope_without_a_key_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="unique_scope is 'until_start' and unique_key is missing"):
        memory_client().enqueue("report.build", {}, unique_scope="until_start")
