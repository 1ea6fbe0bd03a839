"""Notices of an EC2 instance that is to be taken away, from a service that speaks real HTTP."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.engine import LONG_S, Stage
from tests.support.metadata_service import REBALANCE, SPOT, STATE, TAKEN_AWAY, MetadataService, metadata_service
from tests.support.stands import eventually
from thunderagent.agent.ec2 import ENDPOINT, RARELY_S, VARIABLE, Metadata, MetadataUnavailable, Notices, Outlook
from thunderagent.agent.loop import Agent
from thunderagent.agent.view import AgentView
from thunderagent.jobs.context import Context
from thunderagent.jobs.job import job
from thunderagent.jobs.registry import Registry
from thunderagent.model import events, fleet_events
from thunderagent.model.bus import EventBus
from thunderagent.model.errors import ConfigurationError
from thunderagent.model.task import Status
from thunderagent.testing import FakeClock, Recorder

pytestmark = pytest.mark.slow

TOKEN = "/latest/api/token"


@pytest.fixture
def service() -> Iterator[MetadataService]:
    with metadata_service() as one:
        yield one


def test_an_instance_that_stays_tells_nothing(service: MetadataService) -> None:
    metadata = Metadata(service.url)
    assert metadata.look() == Outlook()
    assert metadata.look() == Outlook()
    assert service.asked[TOKEN] == 1, "one token serves for hours"


@pytest.mark.parametrize(
    ("path", "text", "words"),
    [
        (SPOT, TAKEN_AWAY, "spot instance away: terminate at 2026-11-29T08:22:00Z"),
        (SPOT, '{"action": "hibernate", "time": "2026-11-29T08:22:00Z"}', "hibernate"),
        (SPOT, "marked-for-stop", "marked-for-stop"),
        (SPOT, "[]", "spot instance"),
        (STATE, "Terminated", "target state is Terminated"),
        (STATE, "Warmed:Stopped\n", "target state is Warmed:Stopped"),
    ],
)
def test_an_instance_that_goes_says_so(service: MetadataService, path: str, text: str, words: str) -> None:
    service.answers[path] = text
    leaves = Metadata(service.url).look().leaves
    assert leaves is not None
    assert words in leaves


@pytest.mark.parametrize("state", ["InService", "Standby", "Detached", "Warmed:Running", ""])
def test_other_states_of_auto_scaling_are_no_notice(service: MetadataService, state: str) -> None:
    service.answers[STATE] = state
    assert Metadata(service.url).look() == Outlook()


def test_a_recommendation_is_no_notice(service: MetadataService) -> None:
    service.answers[REBALANCE] = '{"noticeTime": "2026-11-29T08:22:00Z"}'
    assert Metadata(service.url).look() == Outlook(at_risk=True)


def test_a_token_is_renewed_when_it_is_refused(service: MetadataService) -> None:
    metadata = Metadata(service.url)
    metadata.look()
    service.forget_tokens()
    metadata.look()
    assert (service.asked[TOKEN], service.unauthorised) == (2, 1)


@pytest.mark.parametrize(
    ("path", "status", "words"),
    [
        (TOKEN, 403, "--http-endpoint enabled"),
        (SPOT, 401, "IMDSv2"),
        (TOKEN, 404, "IMDSv2"),
        (SPOT, 503, "asked again later"),
        (TOKEN, 0, "--http-put-response-hop-limit 2"),
    ],
)
def test_a_service_that_refuses_is_reported_with_the_remedy(
    service: MetadataService, path: str, status: int, words: str
) -> None:
    service.refusals[path] = status
    with pytest.raises(MetadataUnavailable, match=words):
        Metadata(service.url).look()


def test_a_token_that_is_lost_on_its_way_into_a_container_does_not_block() -> None:
    with socket.socket() as deaf:  # it takes the connection and never answers
        deaf.bind(("127.0.0.1", 0))
        deaf.listen(1)
        with pytest.raises(MetadataUnavailable, match="hop-limit 2"):
            Metadata(f"http://127.0.0.1:{deaf.getsockname()[1]}", timeout_s=0.05).look()


def test_no_proxy_of_the_environment_gets_the_token(service: MetadataService, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    assert Metadata(service.url).look() == Outlook()


def test_the_place_is_that_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Metadata().endpoint == ENDPOINT == "http://169.254.169.254"
    monkeypatch.setenv(VARIABLE, "http://[fd00:ec2::254]")
    assert Metadata().endpoint == "http://[fd00:ec2::254]"
    monkeypatch.setenv(VARIABLE, "169.254.169.254")
    with pytest.raises(ConfigurationError, match=VARIABLE):
        Metadata()


class Watch:
    """The thread with a clock of the test, looked with by hand."""

    def __init__(self, service: MetadataService) -> None:
        self.clock, bus = FakeClock(), EventBus()
        self.record = Recorder(bus)
        self.retired: list[str] = []
        self.held: list[str | None] = []
        self.notices = Notices(
            Metadata(service.url),
            bus,
            retire=self.retired.append,
            hold=self.held.append,
            every_s=LONG_S * 100,
            monotonic=self.clock.monotonic,
        )

    def events(self, kind: type[Any]) -> list[Any]:
        return self.record.of(kind)


def test_a_recommendation_is_reported_once_and_again_after_it_was_withdrawn(service: MetadataService) -> None:
    watch = Watch(service)
    for answers, number in (({}, 0), ({REBALANCE: "{}"}, 1), ({REBALANCE: "{}"}, 1), ({}, 1), ({REBALANCE: "{}"}, 2)):
        service.answers = answers
        watch.notices.look()
        assert len(watch.events(fleet_events.InstanceAtRisk)) == number
    assert (watch.retired, watch.held) == ([], [])


def test_a_service_that_does_not_answer_is_reported_once_and_asked_less_often(service: MetadataService) -> None:
    watch = Watch(service)
    service.refusals[TOKEN] = 403
    watch.notices.look()
    watch.notices.look()
    assert service.asked[TOKEN] == 1
    watch.clock.advance(RARELY_S)
    watch.notices.look()
    assert service.asked[TOKEN] == 2
    assert len(watch.events(fleet_events.NoticesFailed)) == 1
    service.refusals.clear()
    service.answers[SPOT] = TAKEN_AWAY
    watch.clock.advance(RARELY_S)
    watch.notices.look()
    assert len(watch.retired) == 1


def test_a_successor_is_held_before_anything_starts_until_the_notice_is_withdrawn(service: MetadataService) -> None:
    watch = Watch(service)
    service.answers[STATE] = "Terminated"
    watch.notices.start()
    try:
        assert len(watch.held) == 1, "the first look is done when the thread starts"
        watch.notices.look()
        assert len(watch.held) == 1
        assert watch.retired == [], "to drain again and again is of no use"
        service.answers[STATE] = "InService"
        watch.notices.look()
        assert watch.held[1:] == [None]
        service.answers[STATE] = "Terminated"
        watch.notices.look()
        assert len(watch.retired) == 1
    finally:
        watch.notices.close()


def stage_with_notices(stage: Stage, service: MetadataService) -> Agent:
    def notices(agent: AgentView) -> list[Notices]:
        return [Notices(Metadata(service.url), agent.bus, retire=agent.retire, hold=agent.pauses.hold, every_s=0.02)]

    return Agent(stage.store, stage.agent.jobs, stage.settings, bus=stage.bus, threads=notices, first_poll_s=0.0)


def test_a_notice_drains_an_agent_and_its_task_ends_well(service: MetadataService) -> None:
    started, may_end = threading.Event(), threading.Event()

    @job("hold")
    def hold(ctx: Context, payload: dict[str, Any]) -> str:
        started.set()
        assert may_end.wait(LONG_S)
        return "done"

    stage = Stage((hold,))
    agent = stage_with_notices(stage, service)
    thread = threading.Thread(target=agent.run, daemon=True)
    thread.start()
    task = stage.client.enqueue(hold, {})
    assert started.wait(LONG_S)
    service.answers[SPOT] = TAKEN_AWAY
    stage.record.wait(events.AgentDraining)
    late = stage.client.enqueue(hold, {})
    may_end.set()
    thread.join(LONG_S)
    assert not thread.is_alive()
    assert "terminate at" in stage.record.of(fleet_events.AgentRetires)[0].reason
    ended = stage.client.get(task)
    assert (ended.status, ended.fence, ended.retry_count) == (Status.SUCCESS, 1, 0)
    assert stage.client.get(late).fence == 0, "it was left for another machine"


def test_an_agent_on_a_machine_that_goes_claims_nothing_and_begins_when_the_notice_is_withdrawn(
    service: MetadataService,
) -> None:
    @job("quick")
    def quick(ctx: Context, payload: dict[str, Any]) -> str:
        return "done"

    stage = Stage((quick,))
    service.answers[SPOT] = TAKEN_AWAY
    agent = stage_with_notices(stage, service)
    tasks = [stage.client.enqueue(quick, {}) for _ in range(5)]
    thread = threading.Thread(target=agent.run, daemon=True)
    thread.start()
    [paused] = stage.record.wait(events.Paused)
    assert paused.reason is not None
    assert "terminate at" in paused.reason
    stage.client.enqueue(quick, {})
    agent.wake()
    rounds = service.asked[SPOT]
    eventually(lambda: service.asked[SPOT] > rounds + 5)  # many turns of the loop as well
    assert agent.vitals.entry()["paused"]
    assert {stage.client.get(task).fence for task in tasks} == {0}
    assert stage.record.of(fleet_events.AgentRetires) == []
    service.answers.clear()
    assert {stage.end_of(task).status for task in tasks} == {Status.SUCCESS}
    agent.stop()
    thread.join(LONG_S)
    assert not thread.is_alive()


def test_an_agent_asks_its_instance_only_if_its_settings_want_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from thunderagent.agent.assembly import equip

    monkeypatch.setenv(VARIABLE, "http://127.0.0.1:1")
    for wanted in (False, True):
        stage = Stage((), ec2_notices=wanted)
        agent = Agent(stage.store, Registry(), stage.settings, bus=stage.bus)
        assert ("notices" in [one.name for one in equip(agent)]) is wanted
        stage.store.engine.close()
