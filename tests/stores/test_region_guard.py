"""A write of an agent asks for the grant once more when its bytes are about to leave, at every attempt."""

from __future__ import annotations

import math
from typing import Any, cast

import pytest
from botocore.awsrequest import AWSResponse

from tests.support.stands import Stand
from thunderagent.model.errors import RegionPassive
from thunderagent.model.task import Candidate
from thunderagent.regions.gate import Gate, GatedEngine
from thunderagent.regions.grant import Grant, no_grant
from thunderagent.stores.engine import Engine
from thunderagent.stores.tasks import TaskStore, Wanted


@pytest.fixture
def gate() -> Gate:
    one = Gate("eu-central-1")
    one.grant = Grant(epoch=1, valid_until=math.inf)
    return one


def claim(stand: Stand, gate: Gate) -> tuple[Any, TaskStore, Any]:
    """The outcome of a claim through the gate."""
    stand.store.enqueue([task := stand.task()])
    store = TaskStore(cast(Engine, GatedEngine(stand.dynamo, gate)))
    seen = Candidate(task.task_id, task.status_value, task.created_at, task.job)
    return lambda: store.exchange((), [Wanted(seen, 300.0)], owner="me"), store, task


def test_a_grant_that_ends_while_a_request_is_made_keeps_it_from_leaving(dynamo_stand: Stand, gate: Gate) -> None:
    attempt, store, task = claim(dynamo_stand, gate)
    on = dynamo_stand.dynamo.connection.client.meta.events

    def ends(**_: Any) -> None:
        gate.grant = no_grant("it stood still for a minute")

    on.register("before-sign.dynamodb.UpdateItem", ends)
    exchanged = attempt()
    assert isinstance(exchanged.error, RegionPassive) and not exchanged.leases
    assert "stood still" in str(exchanged.error)
    row = dynamo_stand.store.get([task.task_id])[task.task_id]
    assert (row.status, row.fence) == ("PENDING", 0)
    assert store.get([task.task_id]), "reads go on"
    store.announce("agent-1", {"queues": {}}, lives_s=60.0)  # its own row needs no grant
    store.sign_off("agent-1")


def test_a_second_attempt_of_the_sdk_is_not_sent_when_the_grant_has_ended(dynamo_stand: Stand, gate: Gate) -> None:
    attempt, _, task = claim(dynamo_stand, gate)
    on, sent = dynamo_stand.dynamo.connection.client.meta.events, list[str]()

    def fails(request: Any, **_: Any) -> AWSResponse:
        sent.append(request.url)
        gate.grant = no_grant("the arbiter does not answer")
        return AWSResponse(request.url, 500, {}, _Nothing())

    on.register("before-send.dynamodb.UpdateItem", fails)
    exchanged = attempt()
    assert isinstance(exchanged.error, RegionPassive)
    assert len(sent) == 1
    assert dynamo_stand.store.get([task.task_id])[task.task_id].fence == 0


def test_the_connection_of_the_heartbeat_asks_too(dynamo_stand: Stand, gate: Gate) -> None:
    _, store, _ = claim(dynamo_stand, gate)
    other = store.sibling().engine
    assert other.connection.guard == gate.guard  # type: ignore[attr-defined]
    other.close()


class _Nothing:
    """The body of a reply without one."""

    def stream(self, **_: Any) -> list[bytes]:
        return []
