"""An agent with everything on: its page, what it sends at its end, and what its units were for."""

from __future__ import annotations

import http.client
import threading
import time
from typing import Any
from urllib.parse import urlsplit

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.engine import LONG_S, Recorder, a_job, settings
from tests.support.stands import Stand, eventually, open_stand
from thunderagent.agent.assembly import equip
from thunderagent.agent.loop import Agent
from thunderagent.client import Client
from thunderagent.jobs.registry import Registry
from thunderagent.model import events, fleet_events
from thunderagent.model.bus import EventBus
from thunderagent.ops.overview import Cost, overview
from thunderagent.stores import open_store
from thunderagent.stores.purposes import RequestPurpose
from thunderagent.telemetry.cloudwatch import CloudWatch

pytestmark = pytest.mark.slow


def whole_cost(stand: Stand, tasks: int) -> Cost | None:
    """What the fleet's rows tell of its cost, once they tell of so many tasks."""
    cost = overview(stand.store).cost
    return cost if cost is not None and cost.tasks >= tasks else None


def page(url: str) -> dict[tuple[str, str], float]:
    """The samples of an agent's page by name and label."""
    connection = http.client.HTTPConnection(str(urlsplit(url).netloc), timeout=LONG_S)
    connection.request("GET", "/metrics")
    reply = connection.getresponse()
    text = reply.read().decode()
    connection.close()
    assert reply.status == 200, text
    return {
        (sample.name, ",".join(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


@pytest.mark.ministack
def test_what_ran_is_on_the_page_and_in_cloudwatch(ministack_endpoint: str, tmp_path: Any) -> None:
    with open_stand("ministack", tmp_path, ministack_endpoint) as stand:
        _run(stand, ministack_endpoint)


def _run(stand: Stand, endpoint: str) -> None:
    namespace = f"Test-{stand.mark}"
    url = f"dynamodb://{stand.dynamo.table}?region=us-east-1&endpoint={endpoint}"
    wanted = settings(store=url, http_port=19464, cloudwatch_namespace=namespace)
    bus = EventBus()
    record = Recorder(bus)
    agent = Agent(
        open_store(wanted, for_agent=True), Registry(a_job()), wanted, bus=bus, first_poll_s=0.0, threads=equip
    )
    client = Client(stand.store, wanted, on_enqueue=agent.wake)
    thread = threading.Thread(target=agent.run)
    thread.start()
    try:
        client.enqueue_many("test.job", [{"number": number} for number in range(12)])
        record.wait(events.TaskSucceeded, 12)
        record.wait(fleet_events.QueueMeasured)
        [started] = record.of(events.AgentStarted)
        assert started.http is not None
        told = page(started.http)
        cost = eventually(lambda: whole_cost(stand, 12), LONG_S)
        assert cost.write_units > 24
        assert cost.read_units > 0
        assert 0 < (cost.dollars_per_1000 or 0.0) < 1.0
    finally:
        agent.stop()
        thread.join(LONG_S)
    assert not thread.is_alive()
    assert told["thunderagent_tasks_succeeded_total", "default"] == 12
    assert told["thunderagent_tasks_claimed_total", "default"] == 12
    assert told["thunderagent_claim_latency_seconds_count", "default"] == 12
    assert ("thunderagent_queue_depth", "default") in told
    purposes = {label for name, label in told if name == "thunderagent_write_units_total"}
    assert {RequestPurpose.CLAIM, RequestPurpose.SETTLE, RequestPurpose.REGISTRY} <= purposes
    assert RequestPurpose.OTHER not in purposes
    assert {label for name, label in told if name == "thunderagent_read_units_total"} >= {RequestPurpose.POLL}
    assert record.of(fleet_events.ExportFailed) == []
    to = CloudWatch(namespace, endpoint=endpoint, now=time.time)
    now = time.time()
    reply = to._client(False).get_metric_statistics(
        Namespace=namespace,
        MetricName="TasksSucceeded",
        Dimensions=[{"Name": "Queue", "Value": "default"}],
        StartTime=now - 600,
        EndTime=now + 600,
        Period=3600,
        Statistics=["Sum"],
    )
    to.close()
    assert [point["Sum"] for point in reply["Datapoints"]] == [12.0]
