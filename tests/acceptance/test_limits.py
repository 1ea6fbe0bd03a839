"""Limits over real processes, of which one is killed while it has all slots."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.acceptance.conftest import GUARD_S, LEASE_S, SWEEP_S, Measured, Place, Start
from tests.acceptance.processes import Marks, until
from thunderagent.model.task import Status

pytestmark = pytest.mark.processes

SLACK_S = 2.0
"""What a busy machine may add to a promise of ours."""


def most_at_once(folder: Path) -> int:
    """How many runs went on at one time at most, by what they said themselves."""
    moments = [(float(path.read_text()), 1) for path in folder.glob("*.began")]
    moments += [(float(path.read_text()), -1) for path in folder.glob("*.ended")]
    now = most = 0
    for _, by in sorted(moments):
        now += by
        most = max(most, now)
    return most


def test_agents_of_a_fleet_run_no_more_than_the_limit_whatever_the_kind_of_job(
    place: Place, start: Start, marks: Marks
) -> None:
    for _ in range(3):
        start(place).line("agent started")
    payload = {"folder": str(marks.folder)}
    queues = {"limited.async": "reports"}
    tasks = [
        place.client.enqueue(name, payload, queue=queues.get(name), limit_key="api", limit=2)
        for _ in range(4)
        for name in ("limited.sync", "limited.async", "limited.isolated")
    ]
    for task in tasks:
        place.wait(task.id, Status.SUCCESS, within_s=60.0)
    assert 1 <= most_at_once(marks.folder) <= 2


def test_when_the_agent_is_killed_that_has_all_slots_the_others_go_on_within_lease_and_sweep(
    place: Place, start: Start, marks: Marks, measured: Measured
) -> None:
    victim = start(place)
    held = [place.client.enqueue("limited.hold", marks.payload, limit_key="api", limit=2) for _ in range(2)]
    for task in held:
        marks.read(task.id, 1, "started")
    waiting = [place.client.enqueue("limited.hold", marks.payload, limit_key="api", limit=2) for _ in range(3)]
    assert [task.status_value for task in waiting] == ["BLOCKED@api"] * 3
    heir = start(place)
    heir.line("agent started")

    killed = victim.kill()
    marks_of_heir = until(
        lambda: [name for name in marks.names() if name.endswith(".started")][2:3],
        LEASE_S + GUARD_S + 2 * SWEEP_S + place.clock_width_s + SLACK_S,
        "a run of the agent that is left",
    )
    measured("went_on_s", round(time.time() - killed, 2))
    assert marks_of_heir
    started = until(lambda: _two(marks), LEASE_S + 2 * SWEEP_S + SLACK_S, "a second run of the agent that is left")
    time.sleep(3 * SWEEP_S)  # more would start now if they could
    assert len([name for name in marks.names() if name.endswith(".started")]) == len(started) == 4

    marks.release()
    for task in (*held, *waiting):
        place.wait(task.id, Status.SUCCESS, within_s=30.0)
    row = until(lambda: _free_row(place), 10.0, "the slots to be free")
    assert row["taskId"] == "limit:api"
    assert heir.stop() == 0


def _two(marks: Marks) -> list[str]:
    started = [name for name in marks.names() if name.endswith(".started")]
    return started if len(started) >= 4 else []


def _free_row(place: Place) -> dict[str, object]:
    row = place.client.store.engine.get(["limit:api"])["limit:api"]
    return row if "holders" not in row else {}
