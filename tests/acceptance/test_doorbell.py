"""Real processes and their doorbells: sockets beside a SQLite file, and a queue of the local engine's SQS."""

from __future__ import annotations

import socket
import statistics
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3
import pytest

from tests.acceptance.conftest import Measured, Place, Start
from tests.acceptance.processes import LONG_S, until
from tests.support.stands import patience
from thunderagent.client import Client
from thunderagent.model.task import Status
from thunderagent.queue.doorbell.unix import FOLDER

SELDOM: dict[str, Any] = {
    "poll_min_s": 30,
    "poll_max_s": 30,
    "poll_idle_s": 30,
    "lease_s": 300,
    "heartbeat_s": 60,
    "sweep_s": 5,
    "log_level": "INFO",
}
"""Polls and heartbeats as good as never: what is fast here was rung for."""

JOBS = """
import time
from thunderagent.jobs.job import job

@job("bell.moment")
def moment(ctx, payload: dict) -> float:
    return time.time()

@job("bell.hold")
def hold(ctx, payload: dict) -> None:
    while True:
        ctx.check()
        time.sleep(0.005)
"""
FOREIGN = """
from thunderagent.jobs.job import job

@job("foreign.job")
def foreign(ctx, payload: dict) -> None: ...
"""


@dataclass(slots=True)
class Bells:
    """A place with its doorbell: a client that rings, and the settings with which an agent listens."""

    place: Place
    client: Client
    settings: dict[str, Any]
    aws: Any = None

    def at_once(self, task: Any, status: Status, within_s: float) -> None:
        self.place.wait(task.id, status, within_s)


@pytest.fixture(params=["sqlite", pytest.param("sqs", marks=pytest.mark.ministack)])
def bells(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bells]:
    """Each kind of doorbell in turn."""
    yield request.getfixturevalue(f"{request.param}_bells")


@pytest.fixture(autouse=True)
def packages(tmp_path: Path) -> None:
    for name, text in (("belljobs", JOBS), ("foreignjobs", FOREIGN)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(text)


@pytest.fixture
def sqlite_bells(sqlite_place: Place) -> Bells:
    return Bells(sqlite_place, sqlite_place.client, SELDOM)


@pytest.fixture
def sqs_bells(ministack_place: Place, ministack_endpoint: str) -> Iterator[Bells]:
    aws = boto3.client(
        "sqs",
        region_name="us-east-1",
        endpoint_url=ministack_endpoint,
        aws_access_key_id="local",
        aws_secret_access_key="local",
    )
    name = f"wake-{uuid.uuid4().hex[:8]}"
    aws.create_queue(QueueName=name)
    url = f"{ministack_endpoint}/000000000000/{name}"
    client = Client.from_settings(store=ministack_place.url, wake_queue_url=url)
    yield Bells(ministack_place, client, {**SELDOM, "wake_queue_url": url}, aws)
    client.close()
    aws.delete_queue(QueueUrl=url)
    aws.close()


def listening(bells: Bells, start: Start, *, jobs: str = "belljobs", **changes: Any) -> Any:
    """An agent that hears rings: the first that it misses would be found by a poll only after half a minute."""
    agent = start(bells.place, jobs=jobs, **{**bells.settings, **changes})
    agent.line("agent started")
    if bells.place.kind == "sqlite":
        folder = bells.place.file.with_name(bells.place.file.name + FOLDER)
        until(lambda: any(path.name.startswith(f"{agent.pid}-") for path in folder.glob("*.bell")), LONG_S, "a socket")
    return agent


def latencies(bells: Bells, number: int) -> list[float]:
    """Milliseconds from before an enqueue in this process to the first line of the handler in another."""
    found = []
    for _ in range(number):
        begun = time.time()
        task = bells.client.enqueue("bell.moment", {})
        found.append((bells.client.wait(task, timeout_s=20.0).result - begun) * 1000)
    return sorted(found)


def test_an_enqueue_in_another_process_starts_its_task_at_once(bells: Bells, start: Start, measured: Measured) -> None:
    listening(bells, start)
    latencies(bells, 5)
    found = latencies(bells, 200)
    p50, p99 = statistics.median(found), found[-3]
    measured(f"doorbell {bells.place.kind}", f"p50 {p50:.1f} ms, p99 {p99:.1f} ms")
    assert p50 < 250
    assert found[-1] < 5_000, "one that was not rung for would take half a minute"


def test_a_delayed_task_starts_when_it_is_due(bells: Bells, start: Start) -> None:
    listening(bells, start)
    latencies(bells, 1)
    begun = time.time()
    task = bells.client.enqueue("bell.moment", {}, delay_s=1.5)
    started = bells.client.wait(task, timeout_s=20.0).result
    assert begun + 1.5 - bells.place.clock_width_s <= started <= begun + 6.0 + bells.place.clock_width_s


def test_a_cancel_reaches_a_running_task_at_once_and_not_with_the_next_heartbeat(bells: Bells, start: Start) -> None:
    listening(bells, start)
    task = bells.client.enqueue("bell.hold", {})
    bells.at_once(task, Status.RUNNING, 10.0)
    begun = time.monotonic()
    bells.client.cancel(task)
    bells.at_once(task, Status.DONE, 10.0)
    assert time.monotonic() - begun < 5.0 * patience()


def test_many_tasks_at_once_are_all_run(bells: Bells, start: Start) -> None:
    listening(bells, start)
    tasks = [one.task for one in bells.client.enqueue_many("bell.moment", [{}] * 40)]
    for task in tasks:
        assert bells.client.wait(task, timeout_s=20.0).status is Status.SUCCESS


def test_an_agent_that_listens_stops_in_bounded_time(bells: Bells, start: Start) -> None:
    agent = listening(bells, start)
    if bells.aws is not None:
        time.sleep(0.5)  # into a long poll of 20 s
    begun = time.monotonic()
    assert agent.stop(within_s=10.0) == 0
    assert time.monotonic() - begun < 6.0 * patience()


def test_an_agent_takes_the_socket_of_a_killed_one_away_and_leaves_none(sqlite_bells: Bells, start: Start) -> None:
    folder = sqlite_bells.place.file.with_name(sqlite_bells.place.file.name + FOLDER)
    lost = listening(sqlite_bells, start)
    lost.kill()
    assert len(list(folder.iterdir())) == 1
    agent = listening(sqlite_bells, start)
    [path] = folder.iterdir()
    assert path.name.startswith(f"{agent.pid}-")
    assert agent.stop() == 0
    assert list(folder.iterdir()) == []


@pytest.mark.ministack
def test_a_ring_for_a_job_that_one_agent_lacks_reaches_the_one_that_has_it(sqs_bells: Bells, start: Start) -> None:
    for _ in range(2):
        listening(sqs_bells, start, jobs="foreignjobs")
    listening(sqs_bells, start)
    for _ in range(20):
        task = sqs_bells.client.enqueue("bell.moment", {})
        sqs_bells.client.wait(task, timeout_s=10.0)


@pytest.mark.ministack
def test_a_queue_that_goes_and_comes_back_is_told_and_meanwhile_polls_find_the_tasks(
    sqs_bells: Bells, start: Start
) -> None:
    usual: dict[str, Any] = {"poll_min_s": 0.2, "poll_max_s": 0.5, "poll_idle_s": 0.5, "poll_wake_s": 60}
    agent = listening(sqs_bells, start, **usual)
    latencies(sqs_bells, 1)
    url = sqs_bells.settings["wake_queue_url"]
    sqs_bells.aws.delete_queue(QueueUrl=url)
    failed = agent.line("doorbell does not work: polling at the usual pace", within_s=30.0)
    assert "does not exist: create it" in failed["error"]
    assert latencies(sqs_bells, 3)[-1] < 5_000
    sqs_bells.aws.create_queue(QueueName=url.rpartition("/")[2])
    agent.line("doorbell works again", within_s=40.0)


@pytest.mark.ministack
def test_a_dead_queue_costs_an_enqueue_three_seconds_once_and_agents_nothing(sqs_bells: Bells, start: Start) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(20)
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/1/q"
        usual: dict[str, Any] = {"poll_min_s": 0.1, "poll_max_s": 0.3, "poll_idle_s": 0.3, "wake_queue_url": url}
        agent = listening(sqs_bells, start, **usual)
        client = Client.from_settings(store=sqs_bells.place.url, wake_queue_url=url)
        begun = time.monotonic()
        tasks = [client.enqueue("bell.moment", {})]
        first = time.monotonic() - begun
        tasks += [client.enqueue("bell.moment", {}) for _ in range(20)]
        rest = time.monotonic() - begun - first
        for task in tasks:
            assert client.wait(task, timeout_s=LONG_S).status is Status.SUCCESS
        client.close()
        assert first < 5.0
        assert rest < 3.0
        assert agent.stop(within_s=12.0) == 0
