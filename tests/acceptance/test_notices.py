"""A machine that EC2 takes away: real agents, asking a metadata service that speaks HTTP on the loopback address."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.acceptance import streamjobs
from tests.acceptance.conftest import Place, Start
from tests.acceptance.feeds import Feeds, feeds
from tests.acceptance.processes import Marks, until
from tests.support.metadata_service import SPOT, STATE, TAKEN_AWAY, MetadataService, metadata_service
from thunderagent.agent.ec2 import VARIABLE
from thunderagent.model.task import Status

pytestmark = pytest.mark.processes

ALL_TOLD_S = 20.0
"""An agent asks each 5 s."""


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[MetadataService]:
    with metadata_service() as one:
        monkeypatch.setenv(VARIABLE, one.url)
        yield one


@pytest.fixture
def peers() -> Iterator[Feeds]:
    with feeds() as running:
        yield running


def test_an_agent_drains_on_a_spot_interruption_and_its_successor_there_claims_nothing(
    sqlite_place: Place, start: Start, marks: Marks, service: MetadataService
) -> None:
    agent = start(sqlite_place, ec2_notices=True)
    tasks = [sqlite_place.client.enqueue(f"hold.{kind}", marks.payload) for kind in ("sync", "async", "isolated")]
    for task in tasks:
        marks.read(task.id, 1, "started")
    service.answers[SPOT] = TAKEN_AWAY
    retires = agent.line("agent retires: it drains, for a fresh one to take its place", within_s=ALL_TOLD_S)
    assert "EC2 takes this spot instance away: terminate at 2026-11-29T08:22:00Z" in retires["reason"]
    late = sqlite_place.client.enqueue("quick.add", {"a": 1})
    marks.release()
    assert agent.wait(15) == 0
    for task in tasks:
        done = sqlite_place.task(task.id)
        assert (done.status, done.fence, done.retry_count, done.crash_count) == (Status.SUCCESS, 1, 0, 0)

    successor = start(sqlite_place, ec2_notices=True)
    paused = successor.line("paused: no task of it starts here")
    assert "spot instance" in paused["reason"]
    asked = service.asked[SPOT]
    until(lambda: service.asked[SPOT] > asked, ALL_TOLD_S, "the successor looks on")
    assert sqlite_place.task(late.id).fence == 0, "it claimed on a machine that goes"
    assert not successor.log.lines("agent draining"), "supervisor would start one agent after the other"

    elsewhere = start(sqlite_place)
    assert sqlite_place.wait(late.id, Status.SUCCESS).fence == 1
    assert elsewhere.stop() == 0
    assert successor.stop() == 0


def test_streams_of_a_machine_that_auto_scaling_ends_go_to_another_agent(
    sqlite_place: Place, start: Start, marks: Marks, service: MetadataService, peers: Feeds
) -> None:
    feed = peers.open(rate=20.0)
    agent = start(sqlite_place, jobs="streamjobs", ec2_notices=True)
    task = sqlite_place.client.enqueue(streamjobs.plain, streamjobs.Peer(url=feed.url, folder=marks.folder))
    agent.line("stream is live", task_id=task.id)
    heir = start(sqlite_place, jobs="streamjobs")
    assert heir.name
    service.answers[STATE] = "Terminated"
    assert agent.wait(ALL_TOLD_S) == 0
    heir.line("stream is live", task_id=task.id)
    row = sqlite_place.task(task.id)
    assert (row.lease_owner, row.crash_count, row.retry_count) == (heir.name, 0, 0), "handed over, not taken over"
    sqlite_place.client.streams.stop(task)
    assert heir.stop() == 0
