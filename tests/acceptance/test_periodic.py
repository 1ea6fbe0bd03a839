"""Real agents that are killed at any moment put each tick of a periodic job once."""

from __future__ import annotations

import random
from datetime import datetime, timedelta
from pathlib import Path
from typing import Final

import pytest

from tests.acceptance.conftest import Place, Start
from tests.acceptance.processes import until
from thunderagent.model.schedules import State, schedule_id
from thunderagent.model.task import Status, Task

pytestmark = pytest.mark.processes

NAME: Final = "each.second"
JOBS: Final = f'''
from thunderagent import Context, Tick, every, job, periodic


@periodic(every().second, catch_up="all")
@job("{NAME}")
def each_second(ctx: Context, payload: Tick) -> str:
    return payload.at.isoformat()
'''
KILLS: Final = 4


def ended(place: Place) -> list[Task]:
    return list(place.client.list(status=Status.SUCCESS, limit=None, newest_first=False))


def test_agents_that_are_killed_lose_no_tick_and_double_none(place: Place, start: Start, tmp_path: Path) -> None:
    (tmp_path / "tickjobs.py").write_text(JOBS)
    rng = random.Random(5)
    agents = [start(place, jobs="tickjobs", cwd=tmp_path) for _ in range(2)]
    for agent in agents:
        agent.line("agent started")
    for kill in range(KILLS):
        before = len(ended(place))
        until(lambda before=before: len(ended(place)) > before, 20.0, "a tick")  # type: ignore[misc]
        # Somewhere in the half second around a tick: while it is decided, put, confirmed or run.
        now = place.client.store.clock.now()
        moment = int(now) + 1.0 + rng.uniform(-0.02, 0.08)
        until(lambda moment=moment: place.client.store.clock.now() >= moment, 5.0, "the moment")  # type: ignore[misc]
        agents[kill % 2].kill()
        agents[kill % 2] = start(place, jobs="tickjobs", cwd=tmp_path)
        agents[kill % 2].line("agent started")
    last = len(ended(place))
    until(lambda: len(ended(place)) >= last + 3, 30.0, "the ticks after the last kill")
    for agent in agents:
        assert agent.stop() == 0

    tasks = {task.task_id: task for task in place.client.list(limit=None)}
    moments = sorted(datetime.fromisoformat(task_id.partition("@")[2]) for task_id in tasks)
    assert moments == [moments[0] + timedelta(seconds=number) for number in range(len(moments))]
    assert all(
        task.result == task_id.partition("@")[2].replace("Z", "+00:00")
        for task_id, task in tasks.items()
        if task.status is Status.SUCCESS
    )
    assert all(task.fence == 1 + task.crash_count for task in tasks.values() if task.status is Status.SUCCESS)
    row_id = schedule_id(NAME)
    state = State.of(place.client.store.engine.get([row_id])[row_id])
    assert (state.skipped, state.ticks) == (0, ())
    assert state.last == moments[-1].timestamp()
