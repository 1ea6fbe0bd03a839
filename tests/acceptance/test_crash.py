"""An agent is gone, or thinks it is not: its tasks go on elsewhere, and what it says too late is refused."""

from __future__ import annotations

import signal
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from tests.acceptance.conftest import GUARD_S, LEASE_S, SWEEP_S, Measured, Place, Start
from tests.acceptance.processes import LONG_S, Marks, is_alive, until
from tests.support.stands import patience
from thunderagent.model.task import Status

pytestmark = pytest.mark.processes

SLACK_S = 1.5
"""What a busy machine may add to a promise of ours."""


def test_tasks_of_a_killed_agent_are_taken_over_within_lease_guard_and_sweep(
    place: Place, start: Start, marks: Marks, measured: Measured
) -> None:
    victim = start(place)
    tasks = [place.client.enqueue(f"hold.{kind}", marks.payload) for kind in ("sync", "async", "isolated")]
    child = [marks.read(task.id, 1, "started")["pid"] for task in tasks][2]
    assert {place.task(task.id).lease_owner for task in tasks} == {victim.name}
    heir = start(place)
    assert heir.name != victim.name
    assert is_alive(child)

    killed = victim.kill()
    expiries = [place.task(task.id).lock_time or 0.0 for task in tasks]
    until(lambda: not is_alive(child), 3.0, "the end of the isolated child of the killed agent")
    lines = heir.wait_lines(3, "task taken over from a lost agent", within_s=30)
    taken = [datetime.fromisoformat(line["time"]).timestamp() for line in lines]
    measured("takeover_s", [round(at - killed, 2) for at in taken])

    assert {line["task_id"] for line in lines} == {task.id for task in tasks}
    assert {line["lost_agent"] for line in lines} == {victim.name}
    assert min(taken) > min(expiries) + GUARD_S - 0.01, "a lease was not respected"
    assert max(taken) < killed + LEASE_S + GUARD_S + SWEEP_S + place.clock_width_s + SLACK_S * patience()

    for task in tasks:
        marks.read(task.id, 2, "started")
    marks.release()
    for task in tasks:
        done = place.wait(task.id, Status.SUCCESS)
        assert (done.fence, done.crash_count, done.retry_count) == (2, 1, 0)
        assert [victim.name in str(entry["error"]) for entry in done.errors] == [True]
        assert done.result["fence"] == 2
        assert heir.pid in (done.result["pid"], done.result["parent"])
    assert heir.stop() == 0


def test_a_stopped_agent_that_comes_back_is_refused_and_its_handlers_end(
    place: Place, start: Start, marks: Marks
) -> None:
    sleeper = start(place)
    polite = place.client.enqueue("hold.sync", marks.payload, task_id="polite")
    coroutine = place.client.enqueue("hold.async", marks.payload, task_id="coroutine")
    isolated = place.client.enqueue("hold.isolated", marks.payload, task_id="isolated")
    deaf = place.client.enqueue("deaf.sync", marks.payload, task_id="deaf")
    tasks = [polite, coroutine, isolated, deaf]
    for task in tasks:
        marks.read(task.id, 1, "started")
    child = marks.read(isolated.id, 1, "started")["pid"]
    heir = start(place)
    heir.line("agent started")

    place.pause(sleeper)
    for task in (polite, coroutine, isolated):
        marks.release(f"{task.id}.2")
    first = [place.wait(task.id, Status.SUCCESS, within_s=30) for task in (polite, coroutine, isolated)]
    marks.read(deaf.id, 2, "started")
    assert not sleeper.log.lines("lease lost"), "the agent was not stopped"
    assert is_alive(child), "a stopped agent cannot end its child"
    marks.release(f"{deaf.id}.1")
    sleeper.send(signal.SIGCONT)

    for task in (polite, coroutine, isolated):
        sleeper.line("lease lost", task_id=task.id)
    for task in (polite, coroutine):
        assert marks.read(task.id, 1, "stopped")["why"] == "LeaseLost"
    until(lambda: not is_alive(child), 5.0, "the end of the isolated child")
    refused = sleeper.line("late outcome refused: the task is another agent's", task_id=deaf.id)
    assert refused["verb"] == "succeed"
    held = place.task(deaf.id)
    assert (held.status, held.lease_owner) == (Status.RUNNING, heir.name), "the late outcome was accepted"
    assert [place.task(task.id) for task in first] == first, "a write of the agent that was stopped was accepted"

    marks.release(f"{deaf.id}.2")
    for after in (*first, place.wait(deaf.id, Status.SUCCESS)):
        assert (after.fence, after.crash_count, after.retry_count) == (2, 1, 0)
        assert after.result["fence"] == 2
        assert heir.pid in (after.result["pid"], after.result["parent"])

    assert heir.stop() == 0
    again = place.client.enqueue("quick.add", {"a": 1})
    assert place.wait(again.id, Status.SUCCESS).result == {"sum": 2}, "the agent that came back serves no more"
    assert sleeper.stop() == 0


@pytest.mark.parametrize("hours", [1, -1])
def test_a_step_of_the_clock_of_the_host_neither_ends_a_lease_nor_makes_it_longer(
    sqlite_place: Place, start: Start, marks: Marks, tmp_path: Path, hours: int
) -> None:
    """Of one that the holder of four tasks does not know yet, when others look at its leases."""
    ahead = tmp_path / "ahead"
    options: dict[str, Any] = {"lease_s": 1.5, "heartbeat_s": 0.3}
    within_s = 1.5 + GUARD_S + SWEEP_S

    def set_clock(seconds: float) -> None:
        (new := tmp_path / "new").write_text(str(seconds))
        new.replace(ahead)

    set_clock(0.0)
    holder = start(sqlite_place, **options)
    kinds = ("sync", "sync", "async", "isolated")
    tasks = [
        sqlite_place.client.enqueue(f"hold.{kind}", marks.payload, task_id=f"t{n}") for n, kind in enumerate(kinds)
    ]
    for task in tasks:
        marks.read(task.id, 1, "started")
    heir = start(sqlite_place, ahead=ahead, **options)
    heir.line("agent started")

    set_clock(hours * 3600.0)
    late = start(sqlite_place, ahead=ahead, **options)
    late.line("agent started")
    beats = round(within_s / 0.3) + 2
    before = [sqlite_place.task(task.id).hb or 0 for task in tasks]
    until(
        lambda: all((sqlite_place.task(task.id).hb or 0) > hb + beats for task, hb in zip(tasks, before, strict=True)),
        LONG_S,
        lambda: f"{beats} more beats of {[str(sqlite_place.task(task.id)) for task in tasks]}",
    )
    assert {(one.lease_owner, one.fence) for task in tasks if (one := sqlite_place.task(task.id))} == {(holder.name, 1)}
    assert {name.partition(".")[2] for name in marks.names()} == {"1.started"}
    assert not any(agent.log.lines("lease lost") for agent in (holder, heir, late))

    holder.kill()
    for task in tasks:
        marks.read(task.id, 2, "started", within_s=within_s + 3 * SLACK_S)
    marks.release()
    for task in tasks:
        done = sqlite_place.wait(task.id, Status.SUCCESS)
        assert (done.fence, done.crash_count) == (2, 1)


def test_of_ten_tasks_beside_each_other_only_the_one_that_kills_their_agents_fails(
    sqlite_place: Place, start: Start
) -> None:
    """Three agents of ten slots, which a supervisor starts again."""
    client = sqlite_place.client
    bomb = client.enqueue("deadly.kill", {"seconds": 1.0})
    beside = [client.enqueue("deadly.beside", {"seconds": 2.0}) for _ in range(9)]
    options: dict[str, Any] = {"slots": 10, "lease_s": 1.5, "heartbeat_s": 0.3}
    agents = [start(sqlite_place, **options) for _ in range(3)]

    def has_ended() -> bool:
        agents[:] = [one if one.process.poll() is None else start(sqlite_place, **options) for one in agents]
        return all(sqlite_place.task(task.id).status.is_terminal for task in (bomb, *beside))

    until(has_ended, 90.0, lambda: f"{[str(sqlite_place.task(task.id).status) for task in (bomb, *beside)]}")
    assert {(one.status, one.result) for task in beside if (one := sqlite_place.task(task.id))} == {
        (Status.SUCCESS, "done")
    }
    failed = sqlite_place.task(bomb.id)
    assert (failed.status, failed.crash_count) == (Status.FAILED, 4)
    assert failed.error is not None
    assert failed.error.startswith(
        "4 agents were lost while they ran it (max_crashes is 3), at last with nothing beside it; the last was "
    )
    assert [str(entry["error"]).endswith("which ran only this task") for entry in failed.errors[:-1]][-1]


def test_a_handler_that_holds_the_interpreter_is_not_taken_for_a_lost_agent(sqlite_place: Place, start: Start) -> None:
    task = sqlite_place.client.enqueue("deadly.hold", {"seconds": 6.0})
    for _ in range(3):
        start(sqlite_place, lease_s=1.0, heartbeat_s=0.2, max_crashes=1)
    failed = sqlite_place.wait(task.id, Status.FAILED, within_s=40.0)
    assert str(failed.errors[0]["error"]).startswith("the lease ran out although agent ")
    assert failed.error is not None
    assert failed.error.startswith("its lease ran out 2 times while it ran (max_crashes is 1), at last with nothing ")
    assert "the job deadly.hold may hold the interpreter" in failed.error
    assert "memory" not in failed.error
