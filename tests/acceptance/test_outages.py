"""The store goes away under running agents: they say so, wait, and go on when it is back."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator

import pytest

from tests.acceptance.conftest import Place, Start
from tests.acceptance.processes import LONG_S, AgentProcess, Marks, until
from tests.acceptance.proxy import Proxy, proxy
from thunderagent.model.task import Status
from thunderagent.stores.dynamo.engine import DynamoEngine
from thunderagent.stores.dynamo.table import create_table, delete_table

pytestmark = pytest.mark.processes

PATIENT = {"lease_s": 60, "heartbeat_s": 0.5}
"""A lease that outlives the outage: what runs goes on."""


@pytest.fixture
def gate(ministack_endpoint: str) -> Iterator[Proxy]:
    """The network between an agent and its table."""
    with proxy(ministack_endpoint) as running:
        yield running


def behind(place: Place, gate: Proxy) -> str:
    """The URL of a place through the gate."""
    return f"{place.url.partition('&')[0]}&endpoint={gate.endpoint}"


def serves(place: Place, agent: AgentProcess) -> None:
    """The agent runs what is enqueued now."""
    task = place.client.enqueue("quick.add", {"a": 1})
    assert place.wait(task.id, Status.SUCCESS, within_s=30).result == {"sum": 2}
    assert agent.process.poll() is None


def notices(agent: AgentProcess, during: str, error: str) -> None:
    """The agent tells that the store fails for something, and why."""
    line = agent.line("store does not answer", within_s=30, during=during)
    assert error in line["error"]


@pytest.mark.ministack
def test_an_endpoint_that_is_gone_for_a_while_costs_nothing(
    ministack_place: Place, start: Start, marks: Marks, gate: Proxy
) -> None:
    place = ministack_place
    agent = start(behind(place, gate), **PATIENT)
    ends_meanwhile = place.client.enqueue("hold.sync", marks.payload, task_id="ends-meanwhile")
    goes_on = place.client.enqueue("hold.async", marks.payload, task_id="goes-on")
    for task in (ends_meanwhile, goes_on):
        marks.read(task.id, 1, "started")
    gate.off()
    notices(agent, "heartbeat", gate.endpoint)
    notices(agent, "polling", gate.endpoint)
    marks.release(ends_meanwhile.id)
    failures = len(agent.log.lines("store does not answer", during="polling"))
    agent.wait_lines(failures + 1, "store does not answer", during="polling", within_s=30)
    assert place.task(ends_meanwhile.id).status is Status.RUNNING

    gate.on()
    agent.line("store answers again", within_s=40)
    done = place.wait(ends_meanwhile.id, Status.SUCCESS, within_s=40)
    assert (done.fence, done.retry_count, done.crash_count) == (1, 0, 0), "the outcome was kept over the outage"
    assert place.task(goes_on.id).status is Status.RUNNING
    serves(place, agent)
    marks.release()
    assert place.wait(goes_on.id, Status.SUCCESS).fence == 1
    assert agent.stop() == 0
    assert not agent.log.other


@pytest.mark.ministack
def test_a_network_that_swallows_everything_for_a_while_costs_nothing(
    ministack_place: Place, start: Start, marks: Marks, gate: Proxy
) -> None:
    place = ministack_place
    agent = start(behind(place, gate), **PATIENT)
    task = place.client.enqueue("hold.sync", marks.payload)
    marks.read(task.id, 1, "started")
    gate.hang()
    notices(agent, "heartbeat", "timeout")
    beats = place.task(task.id).hb
    gate.on()
    serves(place, agent)
    until(lambda: place.task(task.id).hb != beats, LONG_S, "the next heartbeat")
    marks.release()
    done = place.wait(task.id, Status.SUCCESS)
    assert (done.fence, done.retry_count, done.crash_count) == (1, 0, 0)
    assert agent.stop() == 0


@pytest.mark.ministack
def test_an_outage_longer_than_a_lease_stops_handlers_and_their_tasks_run_again(
    ministack_place: Place, start: Start, marks: Marks, gate: Proxy
) -> None:
    place = ministack_place
    agent = start(behind(place, gate))
    task = place.client.enqueue("hold.sync", marks.payload)
    marks.read(task.id, 1, "started")
    gate.off()
    reason = agent.line("lease lost", task_id=task.id, within_s=30)["reason"]
    assert reason == "the lease could not be renewed within 3 s"
    assert marks.read(task.id, 1, "stopped")["why"] == "LeaseLost"
    assert place.task(task.id).fence == 1
    gate.on()
    marks.release()
    done = place.wait(task.id, Status.SUCCESS, within_s=40)
    assert (done.fence, done.crash_count, done.retry_count) == (2, 1, 0)
    serves(place, agent)


@pytest.mark.ministack
def test_expired_credentials_are_told_and_waited_for(
    ministack_place: Place, start: Start, marks: Marks, gate: Proxy
) -> None:
    place = ministack_place
    agent = start(behind(place, gate), **PATIENT)
    task = place.client.enqueue("hold.sync", marks.payload)
    marks.read(task.id, 1, "started")
    gate.expire()
    for during in ("heartbeat", "polling"):
        notices(agent, during, "credentials")
        notices(agent, during, "ExpiredTokenException")
    refused = gate.refused
    until(lambda: gate.refused > refused, 20, "another try with expired credentials")
    gate.on()
    agent.line("store answers again", within_s=40)
    serves(place, agent)
    marks.release()
    assert place.wait(task.id, Status.SUCCESS).fence == 1
    assert agent.stop() == 0
    assert not agent.log.other


@pytest.mark.ministack
def test_an_agent_stops_in_time_although_its_store_does_not_answer(
    ministack_place: Place, start: Start, marks: Marks, gate: Proxy
) -> None:
    place = ministack_place
    agent = start(behind(place, gate), drain_s=0.5)
    task = place.client.enqueue("hold.sync", marks.payload)
    marks.read(task.id, 1, "started")
    gate.off()
    agent.line("store does not answer", within_s=40)
    assert agent.stop(0.5 + 5.0) == 0, "a supervisor would have to kill it"
    assert marks.read(task.id, 1, "stopped")["why"] in ("AgentDraining", "LeaseLost")
    assert place.task(task.id).status is Status.RUNNING, "its release cannot have arrived"

    marks.release()
    heir = start(place)
    done = place.wait(task.id, Status.SUCCESS, within_s=30)
    assert (done.fence, done.crash_count, done.retry_count) == (2, 1, 0)
    assert heir.stop() == 0


@pytest.mark.ministack
def test_a_table_that_is_deleted_under_an_agent_and_made_again(
    ministack_place: Place, start: Start, marks: Marks
) -> None:
    place = ministack_place
    engine = place.client.store.engine
    assert isinstance(engine, DynamoEngine)
    agent = start(place, **PATIENT)
    gone = place.client.enqueue("hold.sync", marks.payload)
    marks.read(gone.id, 1, "started")
    delete_table(engine)
    notices(agent, "heartbeat", "thunderagent table create")
    notices(agent, "polling", "thunderagent table create")
    assert agent.process.poll() is None

    create_table(engine)
    agent.line("store answers again", within_s=40)
    serves(place, agent)
    marks.release()
    until(
        lambda: [
            *agent.log.lines("lease lost", task_id=gone.id),
            *agent.log.lines("late outcome refused: the task is another agent's", task_id=gone.id),
        ],
        LONG_S,
        "what became of the task that is gone",
    )
    assert place.client.store.get([gone.id]) == {}, "a task was made out of its outcome"
    until(lambda: [one.name for one in place.client.agents.list()] == [agent.name], LONG_S, "the agent's row")
    assert agent.stop() == 0


def test_a_file_that_is_locked_for_a_while_costs_nothing(sqlite_place: Place, start: Start, marks: Marks) -> None:
    place = sqlite_place
    agent = start(place, **PATIENT)
    task = place.client.enqueue("hold.sync", marks.payload)
    marks.read(task.id, 1, "started")
    connection = sqlite3.connect(place.file, isolation_level=None)
    connection.execute("BEGIN IMMEDIATE")
    try:
        marks.release()  # its outcome cannot be written now
        notices(agent, "polling", "locked")
        assert place.task(task.id).status is Status.RUNNING
    finally:
        connection.execute("ROLLBACK")
        connection.close()
    agent.line("store answers again")
    done = place.wait(task.id, Status.SUCCESS)
    assert (done.fence, done.retry_count, done.crash_count) == (1, 0, 0)
    serves(place, agent)
    assert agent.stop() == 0
    assert not agent.log.other
