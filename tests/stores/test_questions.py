"""What explain and top answer is the same on every engine, at a bounded price."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.stands import Stand
from thunderagent.model.task import Status
from thunderagent.model.writes import tasks as writes
from thunderagent.ops.explain import explain, similar_ids
from thunderagent.ops.overview import overview

AGENT = "host-1:4711:0a1b2c3d"


def announce(stand: Stand, **more: Any) -> None:
    info: dict[str, Any] = {
        "queues": {stand.lane.queue: 4},
        "running": {stand.lane.queue: 1},
        "jobs": ["report.build"],
        "health": {"healthy": True},
    }
    stand.store.announce(AGENT, {**info, **more}, lives_s=60.0)


def test_a_task_is_explained_from_its_row(stand: Stand) -> None:
    announce(stand)
    lease, now = stand.lease("a", owner=AGENT), stand.store.clock.now()
    found = explain(stand.store, stand.now("a"))
    assert found.holding is not None
    assert (found.holding.owner, found.holding.is_over) == (AGENT, False)
    [settled] = stand.store.settle([writes.retry(lease, due=now + 600, error="broken on purpose", now=now)])
    assert settled.accepted
    found = explain(stand.store, stand.now("a"))
    assert found.task.status is Status.PENDING
    assert "it is due again, after an error" in found.why[0]
    assert f"attempt 1 on {AGENT}: broken on purpose" in [one.text for one in found.happened]
    assert similar_ids(stand.store, stand.id("a")[:6])[:1] == [stand.id("a")]


def test_a_view_has_the_queues_and_the_agents(stand: Stand) -> None:
    announce(stand)
    stand.enqueue("a")
    stand.lease("b", owner=AGENT)
    found = overview(stand.store)
    assert [one.state for one in found.agents if one.name == AGENT] == ["ok"]
    [queue] = [one for one in found.queues if one.queue == stand.lane.queue]
    assert queue.ready >= 1
    assert queue.running >= 1
    assert queue.agents >= 1


def test_a_view_takes_few_requests_whatever_the_number_of_tasks(wire_stand: Stand) -> None:
    announce(wire_stand, counts={"succeeded": 10, "read_units": 5.0, "write_units": 30.0})
    wire_stand.store.enqueue([wire_stand.task(f"many-{number}") for number in range(120)], fresh=True)
    before = wire_stand.dynamo.consumed.requests
    found = overview(wire_stand.store)
    assert wire_stand.dynamo.consumed.requests - before <= 20
    assert found.cost is not None
    assert found.cost.dollars_per_1000 == pytest.approx((5 * 0.125 + 30 * 0.625) / 1e6 / 10 * 1000)
