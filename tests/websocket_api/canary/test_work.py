"""The job that tries everything each minute: a failure is a result, and rows do not pile up."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.websocket_api.canary.support import REGION, Api, an_api
from thunderagent.agent.assembly import equip
from thunderagent.agent.loop import Agent
from thunderagent.agent.queues import BUILT_IN_QUEUE
from thunderagent.client import Client
from thunderagent.jobs.context import Context
from thunderagent.jobs.job import Job, job
from thunderagent.jobs.registry import Registry
from thunderagent.model.bus import EventBus
from thunderagent.model.canary_targets import QUEUE
from thunderagent.model.errors import AgentDraining, ConfigurationError, TaskStopped
from thunderagent.model.events import TaskFailed, TaskRetried, TaskSucceeded
from thunderagent.model.fleet_events import CanaryDown, CanaryProbed, CanaryUp
from thunderagent.model.queue_events import TickPut
from thunderagent.model.schedules import Tick
from thunderagent.model.task import Status
from thunderagent.settings import Settings, load_settings
from thunderagent.stores.tasks import TaskStore
from thunderagent.testing import (
    FakeClock,
    FaultyEngine,
    Recorder,
    make_lease,
    memory_client,
    run_until_idle,
)
from thunderagent.websocket_api.canary import work
from thunderagent.websocket_api.canary.making import canary_jobs, observer_of
from thunderagent.websocket_api.canary.work import JOB, KEPT_S, PROBE_JOB

pytestmark = pytest.mark.slow


@pytest.fixture
def api() -> Iterator[Api]:
    with an_api() as one:
        yield one


def the_jobs(client: Client, bus: EventBus | None = None) -> dict[str, Job[Any]]:
    found = canary_jobs(client.settings, client.store, bus or EventBus(), who="me", doorbell=None)
    return {job.name: job for job in found}


def a_client(api: Api, clock: FakeClock | None = None, **more: Any) -> Client:
    return memory_client(clock, canary_targets={REGION: api.url}, region=REGION, **more)


def call(client: Client, bus: EventBus | None = None, *, ago_s: float = 1.0) -> dict[str, Any]:
    """What the job answers when nobody else runs tasks."""
    one = the_jobs(client, bus)[JOB]
    tick = Tick.model_validate({"at": client.store.clock.now() - ago_s})
    answer = one.handler(Context(make_lease(one, tick)), tick)
    assert isinstance(answer, dict)
    return answer


def test_each_minute_one_agent_tries_the_queue_and_every_target(api: Api) -> None:
    client = a_client(api, FakeClock())
    agent = Agent(client.store, Registry(), client.settings, first_poll_s=0.0)
    recorder = run_until_idle(agent, client, advance=True, for_s=200.0)
    ticks = [one.task_id for one in recorder.of(TickPut)]
    assert len(ticks) == 3
    assert len(recorder.of(TaskSucceeded)) == 2 * len(ticks)
    assert recorder.of(TaskFailed) == []
    assert recorder.of(TaskRetried) == []
    result = client.get(ticks[0]).result
    assert result["healthy"] is True
    assert result["observer"] == REGION
    assert [(one["target"], one["ok"]) for one in result["probes"]] == [(QUEUE, True), (REGION, True)]
    assert list(result["probes"][0]["steps"]) == ["run"]
    assert {one.target for one in recorder.of(CanaryProbed)} == {QUEUE}  # those of regions are the watch's to tell


def test_a_run_leaves_one_row_and_that_for_an_hour(api: Api) -> None:
    clock = FakeClock()
    client = a_client(api, clock)
    agent = Agent(client.store, Registry(), client.settings, first_poll_s=0.0)
    ticks = len(run_until_idle(agent, client, advance=True, for_s=130.0).of(TickPut))
    rows = list(client.list())
    assert [task.job for task in rows] == [JOB] * ticks
    for task in rows:
        assert task.expire_at is not None and task.finished_at is not None
        assert task.expire_at == pytest.approx(task.finished_at + KEPT_S, abs=1.0)


def test_without_targets_an_agent_has_no_canary() -> None:
    client = memory_client()
    registry = Registry()
    agent = Agent(client.store, registry, client.settings, first_poll_s=0.0)
    assert agent.jobs is registry
    assert "canary" not in {one.name for one in equip(agent)}


def test_the_jobs_of_the_user_stay_and_the_queue_of_the_canary_is_served_beside_any_others(api: Api) -> None:
    mine = _mine
    client = a_client(api, queues={"reports": 1})
    agent = Agent(client.store, Registry(mine), client.settings, first_poll_s=0.0)
    assert set(agent.jobs) == {"mine", JOB, PROBE_JOB}
    assert agent.vitals.slots == 1 + 2
    with pytest.raises(ConfigurationError, match="two jobs are named"):
        Agent(client.store, Registry(replace(mine, name=JOB)), client.settings)


@job("mine", queue="reports")
def _mine(ctx: Context, payload: dict[str, Any]) -> None:
    """A job of a user."""


def test_a_broken_api_is_a_result_and_no_failed_task(api: Api) -> None:
    api.status = 502
    client = a_client(api, FakeClock())
    agent = Agent(client.store, Registry(), client.settings, first_poll_s=0.0)
    recorder = run_until_idle(agent, client, advance=True, for_s=70.0)
    [first, *_] = recorder.of(TickPut)
    task = client.get(first.task_id)
    assert (task.status, task.retry_count) == (Status.SUCCESS, 0)
    assert task.result["healthy"] is False
    assert task.result["probes"][1]["step"] == "auth"
    assert "502" in task.result["probes"][1]["reason"]


def test_a_task_that_nobody_runs_is_a_failed_canary_and_leaves_no_row(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, bus = a_client(api), EventBus()
    recorder = Recorder(bus)
    monkeypatch.setattr(work.CanaryWork.__init__, "__kwdefaults__", {"budget_s": 0.3})
    answer = call(client, bus)
    assert answer["healthy"] is False
    [queue, region] = answer["probes"]
    assert queue["reason"] == f"its task is PENDING after 0.3 s: no agent took it from the queue {BUILT_IN_QUEUE}"
    assert region["ok"] is True
    assert list(client.list()) == []
    [down] = recorder.of(CanaryDown)
    assert (down.target, down.step, down.failures) == (QUEUE, "run", 1)
    [probed] = recorder.of(CanaryProbed)
    assert (probed.target, probed.healthy, probed.steps) == (QUEUE, False, ("run",))


def test_a_store_that_does_not_answer_is_a_failed_canary(api: Api) -> None:
    client = a_client(api)
    engine = FaultyEngine(client.store.engine)
    one = the_jobs(Client(TaskStore(engine), client.settings))[JOB]
    engine.outage()
    tick = Tick.model_validate({"at": client.store.clock.now()})
    answer = one.handler(Context(make_lease(one, tick)), tick)
    assert answer["probes"][0]["reason"].startswith("the store: ")
    assert answer["healthy"] is False


def test_a_run_that_begins_late_says_that_the_agents_have_no_time(api: Api) -> None:
    client = a_client(api, FakeClock())
    agent = Agent(client.store, Registry(), client.settings, first_poll_s=0.0)
    late = the_jobs(client)[JOB]
    tick = Tick.model_validate({"at": client.store.clock.now() - 30.0})
    task = client.enqueue(late, tick)
    run_until_idle(agent, client, advance=True)
    [queue, region] = client.get(task).result["probes"]
    assert (queue["ok"], queue["step"]) == (False, "run")
    assert queue["reason"] == "the tick of the canary itself began 30 s late: the agents have no time for it"
    assert region["ok"] is True


def test_a_run_whose_next_is_due_does_nothing(api: Api) -> None:
    answer = call(a_client(api), ago_s=61.0)
    assert answer == {"observer": REGION, "late_s": pytest.approx(61.0, abs=1.0), "skipped": "the next tick is due"}
    assert api.authorizations == []


def test_a_drain_ends_it_at_once_and_takes_its_task_away(api: Api) -> None:
    client = a_client(api)
    one = the_jobs(client)[JOB]
    tick = Tick.model_validate({"at": client.store.clock.now()})
    context = Context(make_lease(one, tick))
    failures: list[BaseException] = []

    def run_it() -> None:
        try:
            one.handler(context, tick)
        except TaskStopped as error:
            failures.append(error)

    thread = threading.Thread(target=run_it)
    thread.start()
    pause = threading.Event()
    for _ in range(1000):
        if list(client.list()):
            break
        pause.wait(0.01)
    context.stop(AgentDraining())
    thread.join(5)
    assert not thread.is_alive()
    assert [type(one) for one in failures] == [AgentDraining]
    assert list(client.list()) == []
    assert api.seen == []


def test_an_agent_of_the_command_line_watches_and_tells_its_row(api: Api) -> None:
    client = a_client(api, canary_s=0.05, sweep_s=0.1)
    agent = Agent(client.store, Registry(), client.settings, threads=equip, first_poll_s=0.0)
    recorder = Recorder(agent.bus)
    thread = threading.Thread(target=agent.run)
    thread.start()
    try:
        recorder.wait_for(CanaryUp)
        told = _told(client)
        assert (told[REGION]["state"], told[REGION]["ok"]) == ("up", True)
    finally:
        agent.stop()
        thread.join(20)
    assert not thread.is_alive()
    assert "canary" not in {one.name for one in threading.enumerate()}


def test_a_region_whose_users_cannot_use_it_gets_no_grant(api: Api, tmp_path: Path) -> None:
    api.status = 503
    client = a_client(
        api, canary_s=0.1, region_arbiter=f"sqlite:///{tmp_path}/arbiter.db", region_lease_s=3.0, region_beat_s=0.2
    )
    agent = Agent(client.store, Registry(), client.settings, threads=equip, first_poll_s=0.0)
    recorder = Recorder(agent.bus)
    thread = threading.Thread(target=agent.run)
    thread.start()
    try:
        recorder.wait_for(CanaryDown)
        assert not agent.gate.is_open  # its table answers all the time
        api.status = None
        recorder.wait_for(CanaryUp)
        pause = threading.Event()
        for _ in range(500):
            if agent.gate.is_open:
                break
            pause.wait(0.02)
        assert agent.gate.is_open
    finally:
        agent.stop()
        thread.join(20)
    assert not thread.is_alive()


def _told(client: Client) -> Any:
    """What the agent's row tells of the canary, once it tells that it is up."""
    pause = threading.Event()
    for _ in range(500):
        for agent in client.agents.list():
            if agent.info.get("canary", {}).get(REGION, {}).get("state") == "up":
                return agent.info["canary"]
        pause.wait(0.02)
    raise AssertionError("no row told it")


@pytest.mark.parametrize(
    ("settings", "variable", "expected"),
    [
        ({"region": "eu-west-1"}, None, "eu-west-1"),
        ({"store": "dynamodb://T?region=eu-north-1"}, None, "eu-north-1"),
        ({}, "us-east-1", "us-east-1"),
        ({}, None, "local"),
    ],
)
def test_who_looks_is_the_region_that_is_known(
    settings: dict[str, Any], variable: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_DEFAULT_REGION", raising=False)
    monkeypatch.delenv("AWS_REGION", raising=False)
    if variable:
        monkeypatch.setenv("AWS_REGION", variable)
    assert observer_of(load_settings(**settings)) == expected


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"canary_targets": {"queue": "wss://a"}}, "names a target 'queue'"),
        ({"canary_targets": {"a/b": "wss://a"}}, "names a target 'a/b'"),
        ({"canary_targets": {"a": "https://a"}}, "gives 'a' no URL of a WebSocket"),
        ({"canary_targets": {"a": "wss://[a"}}, "gives 'a' no URL of a WebSocket"),
        ({"canary_targets": {"a": "wss://u:p@a/"}}, "with a user, a query or a fragment"),
        ({"canary_targets": {"a": "wss://a/?token=x"}}, "with a user, a query or a fragment"),
        ({"canary_targets": {f"a{n}": "wss://a" for n in range(11)}}, "has 11 targets; use at most 10"),
        ({"canary_targets": "{no"}, "CANARY_TARGETS is not JSON"),
        ({"canary_token_from": "eyJhbGciOi"}, "CANARY_TOKEN_FROM begins with none of"),
        ({"canary_s": 0}, "CANARY_S is 0"),
    ],
)
def test_settings_that_cannot_work_are_told_with_their_variable(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        load_settings(**settings)
    assert problem in str(caught.value)
    assert "u:p@" not in str(caught.value)
    assert "eyJ" not in str(caught.value)


def test_targets_are_json_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THUNDERAGENT_CANARY_TARGETS", '{"eu-central-1": "wss://ws.example.com/prod"}')
    assert Settings().canary_targets == {"eu-central-1": "wss://ws.example.com/prod"}
