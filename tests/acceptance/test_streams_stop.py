"""Stopping an agent that holds streams: whatever their connections are doing, it ends in time and keeps no lease."""

from __future__ import annotations

import signal
import sqlite3
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.acceptance import streamjobs
from tests.acceptance.conftest import Measured, Place, Start
from tests.acceptance.feeds import Feeds, Story, closed_port, feeds, full_port
from tests.acceptance.processes import LONG_S, AgentProcess, Marks, until
from tests.acceptance.proxy import Proxy, proxy
from tests.support.stands import patience
from thunderagent.agent.executors.loop import LOOP_JOIN_S
from thunderagent.agent.in_flight import HURRY_S
from thunderagent.jobs.job import Job
from thunderagent.model.task import Handoff, Status, Task
from thunderagent.settings import Settings
from thunderagent.testing.chaos import Feed, Refuse, Silence, Unanswered

pytestmark = pytest.mark.processes

CLOSE_S = 2.0
"""`close_timeout_s` of streams: how long a peer may take to answer our close."""
SLACK_S = 2.0
"""What a busy machine, and the end of an interpreter, may add."""
SUPERVISOR_S = Settings().stop_wait_s - Settings().drain_s
"""What the supervisor adds to the drain before it kills the agent."""
CALL_S = 6.0
"""How long one call to a table that hangs takes; one that is under way goes on when the drain, if shorter, is over."""
JOBS: Mapping[str, Any] = {"jobs": "streamjobs"}
FOR_EVER = {"open_timeout_s": 3600.0, "dns_timeout_s": 3600.0, "subscribe_timeout_s": 3600.0}
FAR_OFF = {"backoff_base_s": 36000.0, "backoff_cap_s": 36000.0}


@pytest.fixture
def peers() -> Iterator[Feeds]:
    """Servers that streams connect to."""
    with feeds() as running:
        yield running


@pytest.fixture
def gate(ministack_endpoint: str) -> Iterator[Proxy]:
    """The network between an agent and its table."""
    with proxy(ministack_endpoint) as running:
        yield running


def rows(place: Place, names: Sequence[str]) -> dict[str, Task]:
    return place.client.store.peek(names)


def all_given_back(place: Place, names: Sequence[str]) -> None:
    """Every stream waits in its queue, owned by nobody, and nothing is held against it."""
    found = {
        name: (row.status, row.lease_owner, row.lock_time, row.crash_count, row.retry_count)
        for name, row in rows(place, names).items()
    }
    assert found == dict.fromkeys(names, (Status.PENDING, None, None, 0, 0))


def all_held(place: Place, names: Sequence[str], agent: AgentProcess, within_s: float = LONG_S) -> None:
    """Wait until this agent holds every stream."""

    def missing() -> list[str]:
        return [name for name, row in rows(place, names).items() if row.lease_owner != agent.name]

    until(lambda: not missing(), within_s, lambda: f"all streams with {agent.name}; not {missing()}")


def seen_at(place: Place, agent: AgentProcess) -> float:
    """When an agent last told of itself."""
    return next(info.seen_at for info in place.client.agents.list() if info.name == agent.name)


def connects_to(port: int) -> bool:
    """True while a socket of this machine waits for an answer to its SYN to this port."""
    lines = (line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:])
    return any(line[2].endswith(f":{port:04X}") and line[3] == "02" for line in lines)


STATES: Mapping[str, str] = {
    "endpoint-hangs": "resolving",
    "waits-for-a-turn": "resolving",
    "name-server-hangs": "connecting",
    "syn-unanswered": "connecting",
    "handshake-unanswered": "connecting",
    "never-subscribed": "subscribing",
    "deaf-to-close": "live",
    "half-open": "live",
    "in-a-message": "live",
    "shared": "live",
    "slow": "paused",
    "refused": "backoff",
    "retry-after": "backoff",
}
"""Where each stream is when the agent is told to stop."""


def test_an_agent_stops_in_time_whatever_its_streams_are_doing(
    sqlite_place: Place, start: Start, marks: Marks, peers: Feeds, measured: Measured
) -> None:
    place, names = sqlite_place, list(STATES)
    story = Story(marks.folder, names)
    healthy = peers.open(rate=10.0)
    busy = peers.open(rate=0.0)
    peers.call(lambda: busy.publish_many(1000))
    mute = peers.open(Feed(acknowledgement=None))
    unanswered = peers.open(Unanswered())
    deaf = peers.open(Feed(answers_close=False), rate=10.0)
    half_open = peers.open(Feed(ending=Silence(after_messages=1)), rate=10.0)
    later = peers.open(Refuse(status=503, retry_after=3600))
    agent = start(place, **JOBS, connect_concurrency=1, drain_s=20.0)

    def follow(name: str, url: str, job: Job[streamjobs.Peer] = streamjobs.exclusive, **facts: Any) -> None:
        peer = streamjobs.Peer(url=url, folder=marks.folder, **{"options": FOR_EVER, **facts})
        place.client.enqueue(job, peer, task_id=name)

    with full_port() as full, closed_port() as closed:
        follow("endpoint-hangs", healthy.url, streamjobs.no_endpoint)
        follow("never-subscribed", mute.url)
        follow("deaf-to-close", deaf.url)
        follow("half-open", half_open.url)
        follow("in-a-message", healthy.url, each_s=0.7)
        follow("shared", healthy.url, streamjobs.shared)
        follow("slow", busy.url, each_s=0.1, options={"max_pending": 4})
        follow("refused", f"ws://127.0.0.1:{closed}/", options=FAR_OFF)
        follow("retry-after", later.url)
        marks.read("endpoint-hangs", 1, "asked")
        agent.line("stream is not connected", task_id="refused")
        agent.line("stream is not connected", task_id="retry-after")
        until(lambda: mute.subscriptions, LONG_S, "a subscription that nobody acknowledges")
        for name in ("deaf-to-close", "half-open", "in-a-message", "shared", "slow"):
            until(lambda name=name: story.last(name), LONG_S, f"a message of {name}")  # type: ignore[misc]

        follow("name-server-hangs", healthy.url, streamjobs.no_name)
        follow("syn-unanswered", f"ws://127.0.0.1:{full}/")
        follow("handshake-unanswered", unanswered.url)
        marks.read("name-server-hangs", 1, "asked")
        until(lambda: connects_to(full), LONG_S, "a SYN without an answer")
        until(lambda: unanswered.attempts, LONG_S, "a handshake without an answer")
        follow("waits-for-a-turn", unanswered.url, streamjobs.waits)
        marks.read("waits-for-a-turn", 1, "asked")

        told = time.monotonic()
        assert agent.stop(CLOSE_S + LOOP_JOIN_S + SLACK_S) == 0
        measured("stopped_after_s", round(time.monotonic() - told, 2))
        assert agent.log.lines("agent stopped")[-1]["stuck"] == 0
        assert not agent.log.other
        assert place.client.agents.list() == []
        all_given_back(place, names)
        states = {name: [move.state for move in place.client.streams.runs(name)[-1].moves] for name in names}
        assert {name: moves[-3:] for name, moves in states.items()} == {
            name: [state, "closed", "release"] for name, state in STATES.items()
        }, "not every stream was where it should have been"
        for name in ("deaf-to-close", "half-open", "in-a-message", "shared", "slow"):
            last = story.last(name)
            assert last is not None
            assert rows(place, [name])[name].last_seq == {"seq": last.seq, "epoch": last.epoch}, name

        heir = start(place, **JOBS, connect_concurrency=1, drain_s=20.0)
        all_held(place, names, heir)
        told = time.monotonic()
        heir.send(signal.SIGINT)
        assert heir.wait(CLOSE_S + LOOP_JOIN_S + SLACK_S) == 0
        measured("interrupted_after_s", round(time.monotonic() - told, 2))
        all_given_back(place, names)
        assert {row.fence for row in rows(place, names).values()} == {2}


def test_a_message_longer_than_the_drain_goes_back_and_a_second_signal_hurries(
    sqlite_place: Place, start: Start, marks: Marks, peers: Feeds, measured: Measured
) -> None:
    place, names = sqlite_place, ["slow"]
    server = peers.open(rate=10.0)
    peer = streamjobs.Peer(url=server.url, folder=marks.folder, each_s=60.0, options={"handler_timeout_s": 3600.0})
    agent = start(place, **JOBS, drain_s=1.0)
    place.client.enqueue(streamjobs.exclusive, peer, task_id="slow")
    marks.read("slow", 1, "busy")
    told = time.monotonic()
    assert agent.stop(1.0 + HURRY_S + LOOP_JOIN_S + SLACK_S) == 0
    measured("stopped_after_s", round(time.monotonic() - told, 2))
    assert time.monotonic() - told > 1.0, "the drain was cut short"
    all_given_back(place, names)

    agent = start(place, **JOBS, drain_s=30.0)
    marks.read("slow", 2, "busy")
    agent.send(signal.SIGTERM)
    agent.line("agent draining")
    assert rows(place, names)["slow"].status is Status.RUNNING
    told = time.monotonic()
    assert agent.stop(HURRY_S + LOOP_JOIN_S + SLACK_S) == 0
    measured("hurried_after_s", round(time.monotonic() - told, 2))
    all_given_back(place, names)


def held_streams(place: Place, agent: AgentProcess, marks: Marks, url: str) -> Story:
    """Two streams that this agent holds, one of each kind, and a batch task; what was handled of the streams."""
    story = Story(marks.folder, ["alone", "shared"])
    peer = streamjobs.Peer(url=url, folder=marks.folder)
    place.client.enqueue(streamjobs.exclusive, peer, task_id="alone")
    place.client.enqueue(streamjobs.shared, peer, task_id="shared")
    all_held(place, ["alone", "shared"], agent)
    until(lambda: story.last("alone") and story.last("shared"), LONG_S, "messages of both streams")
    return story


def goes_on(place: Place, start: Start, story: Story) -> None:
    """Another agent takes the streams when their leases are over; nothing is missing."""
    heir = start(place, **JOBS)
    for name in ("alone", "shared"):
        until(lambda name=name: story.first_after(name, 1), 20.0, f"the next run of {name}")  # type: ignore[misc]
        assert story.gaps(name) == []
        assert story.fences_in_order(name)
    assert heir.stop() == 0


@pytest.mark.ministack
def test_an_agent_with_streams_stops_in_time_although_its_store_does_not_answer(
    ministack_place: Place, start: Start, marks: Marks, peers: Feeds, gate: Proxy, measured: Measured
) -> None:
    place = ministack_place
    server = peers.open(rate=10.0)
    agent = start(f"{place.url.partition('&')[0]}&endpoint={gate.endpoint}", **JOBS, drain_s=1.0)
    story = held_streams(place, agent, marks, server.url)
    gate.hang()
    told = time.monotonic()
    assert agent.stop(30.0) == 0
    measured("stopped_after_s", round(time.monotonic() - told, 2))
    assert time.monotonic() - told < (max(1.0, CALL_S) + SUPERVISOR_S) * patience(), "a supervisor would have killed it"
    assert not agent.log.other
    gate.on()
    goes_on(place, start, story)


def test_an_agent_with_streams_stops_in_time_although_its_file_is_locked(
    sqlite_place: Place, start: Start, marks: Marks, peers: Feeds, measured: Measured
) -> None:
    place = sqlite_place
    server = peers.open(rate=10.0)
    agent = start(place, **JOBS, drain_s=1.0)
    story = held_streams(place, agent, marks, server.url)
    connection = sqlite3.connect(place.file, isolation_level=None)
    connection.execute("BEGIN IMMEDIATE")
    try:
        told = time.monotonic()
        assert agent.stop(30.0) == 0
        measured("stopped_after_s", round(time.monotonic() - told, 2))
        assert time.monotonic() - told < (1.0 + SUPERVISOR_S) * patience(), "a supervisor would have killed it"
        assert not agent.log.other
    finally:
        connection.execute("ROLLBACK")
        connection.close()
    goes_on(place, start, story)


def test_a_successor_on_hold_that_is_stopped_leaves_the_stream_to_the_next_one(
    sqlite_place: Place, start: Start, marks: Marks, peers: Feeds, measured: Measured
) -> None:
    place = sqlite_place
    server = peers.open(Feed(), Feed(handshake_s=2.0), Feed(), rate=10.0, per_key=True)
    story = Story(marks.folder, ["shared"])

    def row() -> Task:
        return rows(place, ["shared"])["shared"]

    first = start(place, **JOBS, drain_s=25.0)
    peer = streamjobs.Peer(url=server.url, folder=marks.folder)
    place.client.enqueue(streamjobs.shared, peer, task_id="shared")
    until(lambda: story.last("shared"), LONG_S, "a message")
    second = start(place, **JOBS, drain_s=25.0)
    second.line("agent started")
    seen = seen_at(place, second)
    until(lambda: seen_at(place, second) > seen, LONG_S, "its next registration: the first one knows of it by then")
    first.send(signal.SIGTERM)
    until(lambda: row().lease_owner == second.name, LONG_S, "a successor")
    place.pause(first, when=lambda: row().handoff_state == Handoff.OFFERED)
    until(lambda: row().handoff_state == Handoff.READY, LONG_S, "a successor that is ready")

    told = time.monotonic()
    assert second.stop(CLOSE_S + LOOP_JOIN_S + SLACK_S) == 0
    measured("stopped_after_s", round(time.monotonic() - told, 2))
    assert (row().status, row().lease_owner, row().crash_count, row().fence) == (Status.PENDING, None, 0, 2)
    third = start(place, **JOBS)
    third.line("stream is live", task_id="shared", fence=3)
    assert {line.fence for line in story["shared"]} == {1}, "the one on hold has handled a message"
    first.send(signal.SIGCONT)
    assert first.wait(10.0) == 0
    until(lambda: story.first_after("shared", 2), LONG_S, "a message that the third agent handles")
    server_at = server.last_seq
    until(lambda: (last := story.last("shared")) and last.seq >= server_at, LONG_S, "the rest")
    assert story.gaps("shared") == []
    assert story.repeats("shared") == []
    assert [line.fence for line in story["shared"]] == sorted(line.fence for line in story["shared"])
    assert third.stop() == 0
