"""What a client may write in a region that has no grant."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from thunderagent.client import Client
from thunderagent.jobs.context import Context
from thunderagent.jobs.job import job
from thunderagent.model.errors import RegionPassive, StoreUnavailable
from thunderagent.model.task import Status
from thunderagent.regions.client_gate import ClientGate
from thunderagent.regions.grant import REGION_LOOK_S, Record, scope_id
from thunderagent.regions.writes import first_row, hand_over, vacate
from thunderagent.stores import open_engine
from thunderagent.stores.sqlite.engine import SqliteEngine
from thunderagent.testing import FakeClock, FaultyEngine

HERE, THERE = "eu-central-1", "eu-west-1"


@job("plain")
def plain(ctx: Context, payload: dict[str, Any]) -> None: ...


@pytest.fixture
def clients(tmp_path: Path) -> Iterator[Callable[[str], Client]]:
    """Clients of both regions of one table; the region here has the grant."""
    arbiter = open_engine(f"sqlite:///{tmp_path}/arbiter.db")
    arbiter.put([first_row("default", HERE, lease_s=30.0, by="a", now=arbiter.clock.now())])
    arbiter.close()
    opened: list[Client] = []

    def make(region: str) -> Client:
        client = Client.from_settings(
            store=f"sqlite:///{tmp_path}/tasks.db", region=region, region_arbiter=f"sqlite:///{tmp_path}/arbiter.db"
        )
        opened.append(client)
        return client

    yield make
    for client in opened:
        client.close()


def test_new_tasks_can_be_put_anywhere(clients: Callable[[str], Client]) -> None:
    there = clients(THERE)
    there.store.engine._asked._open = pytest.fail  # type: ignore[attr-defined] # nobody needs to be asked
    task = there.enqueue(plain, {"text": "x" * 5000})
    many = there.enqueue_many(plain, [{}, {}])
    assert {clients(HERE).get(one.id).status for one in (task, *(one.task for one in many))} == {Status.PENDING}


@pytest.mark.parametrize(
    "order",
    [
        lambda client, task: client.cancel(task.id),
        lambda client, task: client.pauses.pause(queue="default"),
        lambda client, task: client.enqueue(plain, {}, depends_on=[task]),
        lambda client, task: client.enqueue(plain, {}, unique_key="one"),
        lambda client, task: client.enqueue(plain, {}, limit_key="k", limit=1),
    ],
    ids=["cancel", "pause", "depends_on", "unique", "limit"],
)
def test_what_others_change_too_is_refused_with_the_region_where_it_can_be_done(
    clients: Callable[[str], Client], order: Callable[[Client, Any], Any]
) -> None:
    here, there = clients(HERE), clients(THERE)
    task = here.enqueue(plain, {})
    before = here.store.engine.count("PENDING") + here.store.engine.count("BLOCKED")
    with pytest.raises(RegionPassive, match=r"eu-central-1 has the grant and not eu-west-1.*THUNDERAGENT_STORE"):
        order(there, task)
    assert here.store.engine.count("PENDING") + here.store.engine.count("BLOCKED") == before, "nothing was half done"
    order(here, task)


def test_an_answer_of_the_arbiter_is_used_for_some_seconds_and_then_asked_again() -> None:
    clock = FakeClock()
    arbiter = FaultyEngine(SqliteEngine(":memory:", clock=clock))
    gate = ClientGate(HERE, "default", lambda: arbiter, monotonic=clock.monotonic)
    assert gate.check() == 0, "nobody was granted anything: nobody can be in the way"
    arbiter.put([first_row("default", HERE, lease_s=30.0, by="a", now=clock.now())])
    clock.advance(REGION_LOOK_S)
    assert gate.check() == 1
    seen = Record.from_row(arbiter.get([scope_id("default")])[scope_id("default")])
    arbiter.apply([vacate(seen, THERE, by="ops", reason="", now=clock.now())])
    seen = Record.from_row(arbiter.get([scope_id("default")])[scope_id("default")])
    arbiter.apply([hand_over(seen, lease_s=30.0, by="b", now=clock.now())])
    assert gate.check() == 1
    clock.advance(REGION_LOOK_S)
    with pytest.raises(RegionPassive, match=THERE):
        gate.check()
    arbiter.outage()
    clock.advance(REGION_LOOK_S)
    with pytest.raises(StoreUnavailable):
        gate.check()
