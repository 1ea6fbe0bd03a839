"""Who waits for a slot: crashes between any two requests, lost replies, late indexes, lines that close.

On the fleet of `tests/simulation/limit_world.py`: real agents and clients on a clock that moves by hand, in one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import pytest

from tests.simulation.limit_world import BOUND_S, SWEEP_S, Killed, Process, World, limited_jobs
from thunderagent.jobs.context import Snooze
from thunderagent.jobs.job import Limit, job
from thunderagent.jobs.outcome import Outcome, Raised, Returned
from thunderagent.model.conditions import Present, Write
from thunderagent.model.errors import StoreRejected
from thunderagent.model.task import Lane, Page, Status, Task
from thunderagent.model.writes import limits as limit_writes
from thunderagent.model.writes import tasks as writes
from thunderagent.model.writes.limits import WAITLIST_STATUS, close_waitlist, limit_row
from thunderagent.queue.limits.permits import Permits, holders_of
from thunderagent.queue.limits.waitlist import (
    CLOSES_S,
    LONGEST_SWEEP_S,
    WaitlistSweep,
    candidate_of,
    keep_waitlist_open,
    let_out,
    waitlist_value,
)
from thunderagent.stores.engine import Applied
from thunderagent.stores.tasks import TaskStore, Wanted
from thunderagent.testing import FakeClock, memory_store
from thunderagent.testing.faulty_engine import ANY, Fault, FaultyEngine

JOBS: Final = limited_jobs()
RARE: Final[dict[str, Any]] = {"poll_min_s": 100.0, "poll_max_s": 100.0, "poll_idle_s": 100.0}
"""Polls that do not help."""

Worlds = Callable[..., World]


@pytest.fixture
def world() -> Iterator[World]:
    world = World(1)
    world.ends = lambda task: (1.0, Returned("done"))
    yield world
    world.close()


class Refusing(FaultyEngine):
    """A store that takes no write of one limit with these verbs, now or later, as of a row that is too large."""

    verbs: tuple[str, ...] = ()

    def apply(self, batch: Sequence[Write]) -> list[Applied]:
        never = [one.task_id == "limit:shared" and one.verb in self.verbs for one in batch]
        answers = iter(super().apply([one for one, is_never in zip(batch, never, strict=True) if not is_never]))
        refusal = Applied(won=False, error=StoreRejected("the row is too large"))
        return [refusal if is_never else next(answers) for is_never in never]


def put(world: World, *names: str, job: str = "left", **options: Any) -> list[Task]:
    """Put tasks, one after the other; each a moment later, so that their order is known."""
    tasks = []
    for name in names:
        tasks.append(world.client.enqueue(JOBS[job], {}, task_id=name, **options))
        world.clock.advance(0.01)
    return tasks


def status(world: World, name: str) -> str:
    return world.client.get(name).status_value


def row(world: World, key: str = "shared") -> dict[str, Any]:
    return world.store.engine.get([f"limit:{key}"]).get(f"limit:{key}", {})


def all_end(world: World, limit_s: float) -> float:
    return world.pass_time_until(lambda: world.is_done, limit_s)


# Crashes between any two requests


Happens = Callable[[Process, int, str], None]
"""What happens to the first agent at each of its requests, before and after it is done."""


def scenario(world: World, happens: Happens = lambda process, number, when: None) -> Process:
    """One agent that claims, admits, runs, refuses and frees; and another, that joins later."""
    put(world, "a", "b", "c")  # all on the ready page: nobody runs yet
    victim = world.join("left", "free")
    victim.store.at_call = lambda number, when: happens(victim, number, when)
    world.pass_time(1.5)
    world.join("left", "right")
    world.call(lambda client: client.enqueue(JOBS["left"], {}, task_id="d"))
    world.call(lambda client: client.enqueue(JOBS["right"], {}, task_id="e"))
    return victim


def watched(seed: int) -> World:
    world = World(seed)
    outcomes: dict[str, list[Outcome]] = {"a": [Returned(Snooze(0.5))], "b": [Raised("boom")]}
    world.ends = lambda task: (0.4, outcomes.get(task.task_id, []).pop() if outcomes.get(task.task_id) else Returned(1))
    return world


def calls_of_the_scenario() -> int:
    """How many requests the first agent makes until everything has ended."""
    world = watched(5)
    try:
        victim = scenario(world)
        all_end(world, 60.0)
        return victim.store.calls
    finally:
        world.close()


CALLS: Final = calls_of_the_scenario()
LATEST_S: Final = BOUND_S + 8.0
"""The scenario takes 7 s when nothing happens."""


def played(number: int, happens: Happens) -> bool:
    """The scenario to its end, in which something happens at one of the requests; whether the first agent is there."""
    world = watched(5)
    try:
        victim = scenario(world, happens)
        all_end(world, LATEST_S)
        assert [world.client.get(name).status for name in "abcde"] == [Status.SUCCESS] * 5
        return not victim.is_gone
    except AssertionError as error:
        error.add_note(f"at request {number} of {CALLS}")
        raise
    finally:
        world.close()


@pytest.mark.slow
@pytest.mark.parametrize("when", ["before", "after"])
def test_an_agent_that_is_killed_at_any_request_strands_no_slot_and_no_task(when: str) -> None:
    assert CALLS > 40
    deaths = 0
    for number in range(CALLS):

        def dies(victim: Process, call: int, at: str, number: int = number) -> None:
            if (call, at) == (number, when):
                victim.die()

        deaths += not played(number, dies)
    assert deaths > 0.8 * CALLS  # the last requests are not the same each time


@pytest.mark.slow
@pytest.mark.parametrize("fault", [Fault.LOST_REPLY, Fault.LOST_REQUEST, Fault.BROKEN_CALL, Fault.REPEATED])
def test_a_reply_that_is_lost_at_any_request_strands_no_slot_and_no_task(fault: Fault) -> None:
    for number in range(CALLS):

        def fails(victim: Process, call: int, at: str, number: int = number) -> None:
            if (call, at) == (number, "before"):
                victim.store.fail(ANY, fault)

        assert played(number, fails)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_client_that_is_killed_at_any_request_strands_nobody(when: str) -> None:
    for number in range(8):
        world = watched(3)
        try:
            put(world, "a", "b")
            world.join("left")
            world.pass_time(1.3)
            caller = world.call(lambda client: client.enqueue(JOBS["left"], {}, task_id="late"))

            def at_call(call: int, at: str, caller: Any = caller, number: int = number) -> None:
                if (call, at) == (number, when):
                    caller.is_alive = False
                    raise Killed

            caller.store.at_call = at_call
            all_end(world, LATEST_S)
        finally:
            world.close()


# At once, and in order


def test_who_frees_a_slot_starts_the_next_at_once_and_the_oldest_first(world: World) -> None:
    put(world, "a")
    agent = world.join("left", **RARE, sweep_s=90.0)
    world.pass_time_until(lambda: world.started == ["a"], 2.0)
    put(world, "b", "c", "d", "e")
    assert all_end(world, 10.0) < 6.0
    assert world.started == ["a", "b", "c", "d", "e"]
    assert agent.store.log.count("take permit") == 5
    assert "wait for permit" not in agent.store.log


def test_the_order_is_kept_over_queues(world: World) -> None:
    put(world, "a")
    world.join("left", "right", **RARE, sweep_s=90.0)
    world.pass_time_until(lambda: world.started == ["a"], 2.0)
    for number, name in enumerate("bcdefg"):
        put(world, name, job="right" if number % 3 else "left")
    all_end(world, 10.0)
    assert world.started == list("abcdefg")


def test_several_slots_that_become_free_together_are_all_given_away(world: World) -> None:
    world.join("own", **RARE, sweep_s=90.0, number=3)
    jobs = limited_jobs(3)
    for name in "abcdefghi":
        world.client.enqueue(jobs["own"], {}, task_id=name)
    assert all_end(world, 10.0) < 5.0
    assert world.seen["at once own"] == 3


@pytest.mark.parametrize(("job", "verb"), [("free", "wait for permit"), ("left", "join waitlist")])
def test_a_task_that_ends_while_another_is_refused_does_not_leave_it_waiting(world: World, job: str, verb: str) -> None:
    """The slot is freed between the refusal and the moment from which the other stands in line."""
    put(world, "a", "b", job=job, limit_key="shared", limit=1)
    first = world.join(job, **RARE, sweep_s=90.0)
    world.ends = lambda task: (0.001, Returned("done"))
    world.pass_time_until(lambda: "b" in world.started, 3.0)
    assert verb in first.store.log
    all_end(world, 2.0)


def test_the_last_slot_of_an_agent_that_stops_goes_to_another_agent_at_once(world: World) -> None:
    put(world, "a")
    leaving = world.join("left", **RARE)
    world.pass_time_until(lambda: world.started == ["a"], 2.0)
    put(world, "b")
    world.join("left", sweep_s=90.0)
    leaving.leave()
    world.pass_time_until(lambda: world.started == ["a", "b"], 2 + 1.0)
    assert status(world, "a") == "SUCCESS"


def test_a_slot_goes_to_a_queue_that_the_freeing_agent_does_not_serve(world: World) -> None:
    put(world, "a")
    world.join("right", sweep_s=90.0)
    world.pass_time(0.1)
    world.join("left", sweep_s=90.0)
    world.pass_time_until(lambda: world.started == ["a"], 2.0)
    put(world, "b", job="right")
    put(world, "c")
    assert status(world, "b") == "BLOCKED#reports@shared"
    all_end(world, 3 * 2.0 + 3.0)
    assert sorted(world.started) == ["a", "b", "c"]


def test_tasks_that_nobody_can_start_hold_up_nobody_behind_them_in_line(world: World) -> None:
    put(world, "a")
    agent = world.join("left")
    world.pass_time_until(lambda: world.started == ["a"], 2.0)
    for number in range(150):
        world.client.enqueue("gone", {}, task_id=f"gone-{number}", limit_key="shared", limit=1)
    world.clock.advance(0.1)
    put(world, "b", "c")
    world.pass_time_until(lambda: "b" in world.started and "c" in world.started, 4 * SWEEP_S)
    assert agent.store.log.count("leave waitlist") < 20


def test_a_paused_job_holds_up_nobody_behind_it_in_line(world: World) -> None:
    put(world, "a", job="own", limit_key="shared", limit=1)
    world.join("left", "own", **{**RARE, "poll_min_s": 0.3}, sweep_s=90.0)
    world.pass_time_until(lambda: world.started == ["a"], 2.0)
    put(world, *(f"own-{number}" for number in range(30)), job="own", limit_key="shared", limit=1)
    put(world, "b", "c")
    world.client.pauses.pause(job="own")
    world.pass_time_until(lambda: world.started == ["a", "b", "c"], 5.0)
    assert status(world, "own-0") == "BLOCKED@shared"


# Late indexes


def test_a_line_whose_index_is_late_is_found_without_the_sweep_or_with_it(world: World) -> None:
    put(world, "a", "b", "c", "d", "e", "f")
    agent = world.join("left", **RARE, sweep_s=90.0)
    agent.store.stale = 0.6
    world.ends = lambda task: (0.02, Returned("done"))
    world.pass_time_until(lambda: len(set(world.started)) == 6, 95.0)
    all_end(world, 10.0)


def test_a_task_that_the_index_does_not_show_at_first_is_looked_for_again(world: World) -> None:
    put(world, "a")
    agent = world.join("left", **RARE, sweep_s=90.0)
    world.pass_time_until(lambda: world.started == ["a"], 2.0)
    put(world, "b")
    lagging: list[str] = []
    page = agent.store._late

    def late(status_value: str, options: dict[str, Any]) -> Any:
        found = page(status_value, options)
        if status_value == "BLOCKED@shared" and not lagging:
            lagging.append(status_value)
            return type(found)(())
        return found

    agent.store._late = late  # type: ignore[method-assign]
    assert all_end(world, 10.0) < 3.0
    assert lagging


# Lines that close


def open_line_of(world: World) -> None:
    put(world, "a", "b")
    world.join("left")
    all_end(world, 10.0)
    assert row(world)["status"] == WAITLIST_STATUS


@pytest.mark.slow
def test_a_line_that_is_empty_for_long_closes_and_opens_again(world: World) -> None:
    open_line_of(world)
    world.pass_time(CLOSES_S - 20.0)
    assert row(world)["status"] == WAITLIST_STATUS
    world.pass_time(20.0 + 2 * SWEEP_S)
    assert "status" not in row(world)
    assert row(world)["expireAt"] > world.clock.now(), "nobody uses the limit"
    assert list(world.client.list(status="BLOCKED")) == []
    put(world, "c", "d")
    all_end(world, 10.0)
    assert len(world.started) == 4


@pytest.mark.slow
def test_a_line_in_which_somebody_stands_does_not_close(world: World) -> None:
    world.ends = lambda task: (3 * CLOSES_S, Returned("done"))
    put(world, "a", "b")
    world.join("left")
    world.pass_time(2 * CLOSES_S)
    assert (status(world, "b"), row(world)["status"]) == ("BLOCKED@shared", WAITLIST_STATUS)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(6))
def test_a_task_that_comes_at_the_moment_at_which_the_line_closes_is_not_stranded(world: World, number: int) -> None:
    """The sweep has seen an empty line and closes it, between any two requests of an enqueue."""
    open_line_of(world)
    put(world, "long")
    world.ends = lambda task: (CLOSES_S + 8.0 if task.task_id == "long" else 1.0, Returned("done"))
    world.pass_time_until(lambda: "long" in world.started, 5.0)
    world.pass_time(CLOSES_S + 1.0)
    caller = world.call(lambda client: client.enqueue(JOBS["left"], {}, task_id="late"))
    closed: list[bool] = []

    def at_call(call: int, when: str) -> None:
        if (call, when) == (number, "before"):
            seen_at = row(world)["updatedAt"]
            is_empty = not world.engine.page(waitlist_value(Lane(), "shared"), limit=1).entries
            old = world.clock.now() - seen_at >= CLOSES_S
            if is_empty and old:
                [(won, _)] = world.store.write_rows([_closing(row(world))])
                closed.append(won)

    caller.store.at_call = at_call
    world.pass_time_until(lambda: "late" in world.started, BOUND_S)
    assert any(closed) == (number < 2), "who speaks for the line keeps it open"
    all_end(world, 30.0)


def _closing(seen: dict[str, Any]) -> Any:
    return close_waitlist("shared", seen_at=seen["updatedAt"], is_used="holders" in seen, now=1.0)


def test_a_line_that_is_closed_between_the_look_and_the_word_is_opened_again(world: World) -> None:
    """Staged: a client has read that the line is open; it is closed before the client speaks for it."""
    keep_waitlist_open(world.store, Limit("shared", 1), None)
    world.clock.advance(CLOSES_S + 1)
    seen = row(world)
    assert world.store.write_rows([_closing(seen)])[0][0]
    keep_waitlist_open(world.store, Limit("shared", 1), seen)
    assert row(world)["status"] == WAITLIST_STATUS


# Numbers


def test_a_number_that_is_raised_under_way_counts_for_those_that_wait(world: World) -> None:
    world.ends = lambda task: (60.0, Returned("done"))
    for name in "abcdef":
        world.client.enqueue(limited_jobs(1)["own"], {}, task_id=name)
    old = world.join("own", number=1)
    world.pass_time(10.0)
    assert world.started == ["a"]
    old.leave()
    world.join("own", number=3)
    world.pass_time(2 * SWEEP_S + 4.0)
    assert sorted(one.running.lease.task_id for one in world.runs) == ["a", "b", "c"]


def test_a_number_that_is_raised_fills_the_new_slots_beside_those_that_are_taken_for_long(world: World) -> None:
    world.ends = lambda task: (300.0, Returned("done"))
    for name in "abcdef":
        world.client.enqueue(limited_jobs(1)["own"], {}, task_id=name)
    world.join("own", number=1, sweep_s=280.0)
    world.pass_time(10.0)
    assert world.started == ["a"]
    world.join("own", number=3)
    world.pass_time(2 * SWEEP_S + 4.0)
    assert sorted(one.running.lease.task_id for one in world.runs) == ["a", "b", "c"]


def test_a_number_that_is_lowered_under_way_counts_for_those_that_wait(world: World) -> None:
    world.ends = lambda task: (20.0 if task.task_id in "abc" else 1.0, Returned("done"))
    for name in "abcdef":
        world.client.enqueue(limited_jobs(3)["own"], {}, task_id=name)
    world.join("own", number=3)
    world.pass_time(3.0)
    assert world.seen["at once own"] == 3
    world.seen["at once own"] = 0
    world.processes[0].leave()
    world.join("own", number=1)
    all_end(world, 90.0)
    assert len(world.started) > 6, "nothing was handed over"
    assert world.seen["at once own"] == 1


def test_a_limit_that_is_taken_away_from_its_job_holds_nobody_up(world: World) -> None:
    put(world, *"abcd")
    world.join("left")
    world.pass_time(2.0)
    world.processes[0].kill()
    unlimited = job("left")(JOBS["left"].handler)
    world.ends = lambda task: (6.0, Returned("done"))
    with_patch = world.join("left")
    with_patch.agent.jobs._jobs["left"] = unlimited
    world.pass_time_until(lambda: {"b", "c", "d"} <= {one.running.lease.task_id for one in world.runs}, 2 * BOUND_S)


# Children


def test_a_parent_that_stands_in_line_tells_its_child(world: World) -> None:
    put(world, "a")
    world.join("left", "free", sweep_s=90.0)
    world.pass_time_until(lambda: world.started == ["a"], 2.0)
    put(world, "parent")
    assert status(world, "parent") == "BLOCKED@shared"
    put(world, "child", job="free", depends_on=["parent"])
    assert world.client.get("parent").dependents == {"child"}
    all_end(world, 5.0)
    assert world.started == ["a", "parent", "child"]


def test_a_task_that_was_refused_and_is_let_out_is_new_to_those_who_refused_it(world: World) -> None:
    """Pollers leave entries alone for a while that they have claimed before: the index is late."""
    put(world, "a", "b", job="free", limit_key="shared", limit=1)
    agent = world.join("free", sweep_s=90.0)
    agent.agent._in_flight.admission.freed.note = lambda *_: None  # type: ignore[method-assign]
    world.pass_time_until(lambda: world.started == ["a"], 2.0)
    world.pass_time_until(lambda: status(world, "b") == "BLOCKED@shared", 2.0)
    world.pass_time_until(lambda: not holders_of(row(world)), 2.0)
    assert [task.task_id for task in let_out(world.store, [candidate_of(world.client.get("b"))])] == ["b"]
    world.pass_time_until(lambda: world.started == ["a", "b"], 2.0 + 0.5)


# Between two requests of others


def held_by_somebody(world: World) -> Callable[[], None]:
    """The only slot is another agent's, which is not in this world; the answer lets it end and free its slot."""
    put(world, "held")
    [lease] = world.store.claim([Wanted(candidate_of(world.client.get("held")), 600.0)], owner="elsewhere")
    slots = Permits(world.store, guard_s=2.0, examine_s=15.0)
    assert slots.acquire([(lease, Limit("shared", 1))]) == [None]

    def end() -> None:
        now = world.clock.now()
        done = writes.succeed(lease, now=now, expire_at=now + 1000.0)
        assert world.store.settle([done])[0].accepted
        assert slots.release([lease])

    return end


def test_a_slot_that_is_freed_while_a_task_steps_back_is_taken_by_it(world: World) -> None:
    end = held_by_somebody(world)
    put(world, "b", job="free")
    world.engine.apply([_with_limit("b")])
    agent = world.join("free", **RARE, sweep_s=90.0)
    ended: list[bool] = []

    def at_call(number: int, when: str) -> None:
        if when == "before" and agent.store.log[-1] == "wait for permit" and not ended:
            ended.append(True)
            end()

    agent.store.at_call = at_call
    world.pass_time_until(lambda: world.started == ["b"], 3.0)
    assert ended


def _with_limit(task_id: str) -> Write:
    limited = {"limitKey": "shared", "limitMax": 1}
    return Write(verb="test", task_id=task_id, set=limited, require=(Present("taskId"),))


def test_a_slot_that_is_freed_while_a_client_puts_a_task_into_the_line_is_taken_by_it(world: World) -> None:
    end = held_by_somebody(world)
    world.join("left", sweep_s=90.0)
    world.pass_time(3.0)
    caller = world.call(lambda client: client.enqueue(JOBS["left"], {}, task_id="b"))
    puts: list[int] = []

    def at_call(number: int, when: str) -> None:
        if when == "before" and not world.store.peek(["b"]):
            puts.append(number)
        if (number, when) == (2, "before"):
            end()

    caller.store.at_call = at_call
    world.pass_time_until(lambda: world.started == ["b"], 3.0)
    assert puts == [0, 1, 2], "the slot was not freed right before the task was put"


def test_an_entry_of_the_index_that_is_out_of_date_is_tried_once(world: World) -> None:
    put(world, "a")
    agent = world.join("left", **RARE, sweep_s=90.0)
    world.pass_time_until(lambda: world.started == ["a"], 2.0)
    put(world, "gone", "b")
    gone = candidate_of(world.client.get("gone"))
    world.client.cancel("gone")
    page = agent.store._late

    def late(status_value: str, options: dict[str, Any]) -> Page:
        found = page(status_value, options)
        return Page((gone, *found.entries), found.after) if status_value == gone.status_value else found

    agent.store._late = late  # type: ignore[method-assign]
    world.pass_time_until(lambda: world.started == ["a", "b"], 2.0)
    assert agent.store.log.count("claim") == 3


@pytest.mark.parametrize(
    "verbs",
    [
        ("take permit",),
        ("take permit", "open waitlist", "keep waitlist"),
        ("open waitlist", "keep waitlist"),
        ("replace holders", "keep waitlist", "close waitlist"),
    ],
)
def test_a_limit_whose_row_the_store_does_not_take_holds_up_no_other(verbs: tuple[str, ...]) -> None:
    world = World(1, wrap=Refusing)
    try:
        store = world.engine
        assert isinstance(store, Refusing)
        world.ends = lambda task: (0.5, Returned("done"))
        put(world, *(f"shared-{number}" for number in range(6)), job="left")
        put(world, *(f"own-{number}" for number in range(6)), job="own")
        store.verbs = verbs
        world.join()
        world.pass_time_until(lambda: all(status(world, f"own-{number}") == "SUCCESS" for number in range(6)), 12.0)
        store.verbs = ()
        world.pass_time_until(lambda: world.is_done, BOUND_S)
        assert {task.status for task in world.tasks()} == {Status.SUCCESS}
    finally:
        world.close()


def test_a_task_that_is_seen_in_its_line_and_in_its_queue_at_once_is_claimed_once(world: World) -> None:
    """Another agent has let it out, and the index shows the line as it was before."""
    put(world, "a")
    agent = world.join("left", **RARE, sweep_s=90.0)
    world.pass_time_until(lambda: world.started == ["a"], 2.0)
    put(world, "b")
    before = candidate_of(world.client.get("b"))
    page = agent.store._late

    def late(status_value: str, options: dict[str, Any]) -> Page:
        if status_value == before.status_value:
            let_out(world.store, [before])
            return Page((before,))
        return page(status_value, options)

    def wake(number: int, when: str) -> None:
        if when == "after" and agent.store.log[-1] == "release permit":
            agent.agent.wake()

    agent.store._late = late  # type: ignore[method-assign]
    agent.store.at_call = wake
    agent.store._dice.shuffle = lambda order: order.reverse()  # type: ignore[method-assign, assignment]
    world.pass_time_until(lambda: "b" in world.started, 2.0)
    world.pass_time(2.0)
    assert world.started == ["a", "b"]


def test_tasks_of_a_queue_that_no_agent_serves_do_not_take_the_slot_from_those_behind_them(world: World) -> None:
    put(world, "later", job="right", delay_s=1000.0)  # the lane is known
    put(world, "a")
    world.join("left", **RARE, sweep_s=90.0)
    world.pass_time_until(lambda: world.started == ["a"], 2.0)
    put(world, *(f"right-{number}" for number in range(20)), job="right")
    put(world, "b", "c", "d")
    world.pass_time_until(lambda: world.started == ["a", "b", "c", "d"], 8.0)


def test_a_clock_that_is_set_back_by_an_hour_does_not_keep_the_sweep_from_its_turn(world: World) -> None:
    held_by_somebody(world)
    put(world, "b")
    world.join("left", **RARE)
    world.pass_time(2 * SWEEP_S)
    world.client.cancel("b")
    world.clock.jump(-3600.0)
    world.engine.apply([limit_writes.replace_holders("shared", frozenset({"held#1"}), frozenset({"x#1"}), now=1.0)])
    world.pass_time_until(lambda: not holders_of(row(world)), 2 * SWEEP_S + 1.0)


def test_a_line_stays_open_over_tasks_that_are_not_due_as_the_clock_was_set_back() -> None:
    clock = FakeClock()
    store = memory_store(clock)
    task = Task(
        task_id="a",
        status=Status.BLOCKED,
        waitlist="api",
        limit_key="api",
        created_at=clock.now() + 60.0,
        submitted_at=clock.now(),
        job="report.build",
    )
    store.enqueue([task])
    long_ago = clock.now() - CLOSES_S - 1.0
    store.insert_row({**limit_row("api", number=1, now=long_ago), "status": WAITLIST_STATUS, "createdAt": long_ago})
    sweep = WaitlistSweep(store, Permits(store, guard_s=2.0, examine_s=15.0))
    assert sweep.run([Lane()], {}, owner="me", turn_s=-1.0) == 0
    assert store.engine.get(["limit:api"])["limit:api"].get("status") == WAITLIST_STATUS, "nobody would look for it"
    clock.advance(61.0)
    assert sweep.run([Lane()], {}, owner="me", turn_s=-1.0) == 1
    assert store.get(["a"])["a"].status is Status.PENDING


def line_of_two_jobs(store: TaskStore, first: int) -> None:
    """A line with so many tasks of a job that nobody can start, and one of another job behind them."""
    now = store.clock.now()
    keep_waitlist_open(store, Limit("api", 1), None)
    for number in range(first + 1):
        put_in_line(store, f"t{number:03}", "stuck" if number < first else "other", now - 100.0 + number / 1000)


def put_in_line(store: TaskStore, name: str, job: str, created_at: float, key: str = "api") -> None:
    waiting = {"status": Status.BLOCKED, "waitlist": key, "limit_key": key}
    task: dict[str, Any] = {"task_id": name, "job": job, "created_at": created_at, "submitted_at": created_at}
    store.enqueue([Task(**task, **waiting)])  # type: ignore[arg-type]


def test_a_job_that_stands_far_behind_another_in_line_is_reached() -> None:
    store = memory_store(FakeClock())
    line_of_two_jobs(store, 60)
    sweep = WaitlistSweep(store, Permits(store, guard_s=2.0, examine_s=15.0), most=10)
    for _ in range(6):
        sweep.run([Lane()], {"api": 1}, owner="me", turn_s=-1.0)
    assert store.get(["t060"])["t060"].status is Status.PENDING
    ahead = [name for name, task in store.get(f"t{one:03}" for one in range(60)).items() if task.waitlist is None]
    assert ahead == [f"t{one:03}" for one in range(6)], "of the others those that wait longest"


def test_lines_behind_those_of_one_sweep_are_swept_by_the_next_agent() -> None:
    clock = FakeClock()
    store = memory_store(clock)
    keys = [f"key-{number:03}" for number in range(250)]
    for key in keys:
        keep_waitlist_open(store, Limit(key, 1), None)
        put_in_line(store, f"task-{key}", "other", clock.now(), key)
    slow = clock.monotonic

    def monotonic() -> float:
        clock.advance(LONGEST_SWEEP_S)
        return slow()

    store.monotonic = monotonic
    left = []
    for agent in ("a", "b", "c"):
        sweep = WaitlistSweep(store, Permits(store, guard_s=2.0, examine_s=15.0))
        left.append(sweep.run([Lane()], {}, owner=agent, turn_s=-1.0))
    assert left == [100, 100, 50]
