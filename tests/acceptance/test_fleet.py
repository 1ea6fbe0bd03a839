"""Many agents and many tasks while agents die and sleep: nothing is lost and nothing runs twice under one fence."""

from __future__ import annotations

import signal
import time
from collections import Counter

import pytest

from tests.acceptance.conftest import Measured, Place, Start
from tests.acceptance.processes import AgentProcess, Marks, until
from tests.support.stands import patience
from thunderagent.model.task import Status, Task

pytestmark = pytest.mark.processes

AGENTS = 5
SLOTS = 4
LONGEST_S = 90.0
FLIGHT_S = 0.3
"""What an agent sent before it was stopped has arrived by then; only what it holds after that is surely lost."""


def test_every_task_ends_once_although_one_agent_is_killed_and_one_sleeps_past_its_leases(
    place: Place, start: Start, marks: Marks, measured: Measured
) -> None:
    number = 5000 if place.kind == "sqlite" else 500
    pace = {} if place.kind == "sqlite" else {"poll_min_s": 0.2, "poll_max_s": 1, "poll_idle_s": 1}
    agents = [start(place, slots=SLOTS, log_level="INFO", **pace) for _ in range(AGENTS)]
    # Every slot of the fleet is taken before the pile is there, so that all agents begin with it at once.
    holders = place.client.enqueue_many("hold.sync", [marks.payload] * AGENTS * SLOTS)
    for holder in holders:
        marks.read(holder.task.id, 1, "started", within_s=30)
    piled = place.client.enqueue_many("quick.count", [marks.payload] * number)
    assert all(one.created for one in piled)

    def progress(share: float) -> None:
        until(lambda: marks.count() >= number * share, LONGEST_S, lambda: f"{share:.0%}, there are {marks.count()}")

    def held(agent: AgentProcess) -> set[tuple[str, int]]:
        running = place.client.list(status=Status.RUNNING, limit=None)
        return {(task.id, task.fence) for task in running if task.lease_owner == agent.name}

    def holds(agent: AgentProcess) -> bool:
        before = held(agent)
        time.sleep(FLIGHT_S)
        return bool(before & held(agent))

    began = time.monotonic()
    marks.release()
    killed, sleeper, *others = agents
    progress(0.2)
    place.pause(killed, when=lambda: holds(killed))
    killed.kill()
    progress(0.4)
    place.pause(sleeper, when=lambda: holds(sleeper))
    assert marks.count() < number, "the pile was gone before anything could go wrong"

    def was_robbed(agent: AgentProcess) -> bool:
        return any(one.log.lines("task taken over from a lost agent", lost_agent=agent.name) for one in agents)

    until(lambda: was_robbed(sleeper), 30.0, "a takeover from the agent that sleeps")
    sleeper.send(signal.SIGCONT)
    until(lambda: was_robbed(killed), 30.0, "a takeover from the killed agent")

    def ended() -> list[Task] | None:
        tasks = list(place.client.list(status=Status.SUCCESS, limit=None))
        return tasks if len(tasks) >= number + len(holders) else None

    tasks = until(ended, LONGEST_S, lambda: f"the end of all; runs: {marks.count()}")
    seconds = time.monotonic() - began
    measured("seconds", round(seconds, 1))
    assert seconds < LONGEST_S * patience()

    final = {task.id: task for task in tasks}
    assert set(final) == {one.task.id for one in (*piled, *holders)}
    runs = Counter(marks.runs())
    assert {run: times for run, times in runs.items() if times > 1} == {}, "a task ran twice under one fence"
    missing = [one.task.id for one in piled if (one.task.id, final[one.task.id].fence) not in runs]
    assert missing == [], "a task succeeded without a run under its last fence"
    # The agent that slept gives back what nobody has taken from it, if it had not begun it in time.
    released = Counter(line["task_id"] for one in agents for line in one.log.lines("task released"))
    assert {task.id: task.fence for task in tasks} == {
        task.id: 1 + task.crash_count + released[task.id] for task in tasks
    }
    assert not any(task.retry_count for task in tasks)
    taken_over = sum(task.crash_count for task in tasks)
    assert taken_over == sum(len(one.log.lines("task taken over from a lost agent")) for one in agents)
    assert taken_over >= 2
    assert sleeper.log.lines("agent started") and sleeper.process.poll() is None
    for agent in (sleeper, *others):
        assert agent.stop() == 0
        assert not agent.log.other, "a traceback, or a listener that failed"
