"""Streams on real agents: killed, added, stopped, paused and wedged; every message is handled."""

from __future__ import annotations

import signal
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import pytest

from tests.acceptance import streamjobs
from tests.acceptance.conftest import GUARD_S, SWEEP_S, Measured, Place, Start
from tests.acceptance.feeds import Feeds, Story, feeds
from tests.acceptance.processes import LONG_S, AgentProcess, Marks, cli, until
from tests.support.stands import patience
from thunderagent.agent.executors.loop import LOOP_JOIN_S
from thunderagent.agent.housekeeping import LOST_LOOK_S
from thunderagent.agent.in_flight import HURRY_S
from thunderagent.agent.stream_balance import ABOVE_MEAN
from thunderagent.jobs.job import Job
from thunderagent.model.task import Handoff, Lease, Status, Task
from thunderagent.streams.context import LOOP_LATE_S, StreamContext
from thunderagent.streams.cursor import Cursor
from thunderagent.testing.chaos import ChaosServer

pytestmark = pytest.mark.processes

LEASE_S = streamjobs.LEASE_S
RATE = 10.0
"""Messages of each stream in a second."""
DRAINED_S = 4.0
"""How long after SIGTERM the next agent handles a stream's messages, at the latest."""
LOST_S = LEASE_S + 5.0
"""The same after SIGKILL."""
REBALANCE_S = 1.0
REST_S = REBALANCE_S + 0.5
"""How long nothing changes hands in a fleet that is balanced."""
SLACK_S = 2.0
"""What starting handlers, or ending an interpreter, may take on a busy machine."""
JOBS: Mapping[str, Any] = {"jobs": "streamjobs"}


@pytest.fixture
def peers() -> Iterator[Feeds]:
    """Servers that streams connect to."""
    with feeds() as running:
        yield running


@dataclass(slots=True)
class Crowd:
    """The streams of a test, who holds them, and what was handled of them."""

    place: Place
    story: Story
    names: Sequence[str]

    def held_by(self, agent: AgentProcess) -> list[str]:
        rows = self.place.client.store.peek(self.names)
        return [name for name in self.names if rows[name].lease_owner == agent.name]

    def fences(self) -> dict[str, int]:
        return {name: row.fence for name, row in self.place.client.store.peek(self.names).items()}

    def balance(self, agents: Sequence[AgentProcess], within_s: float = 20.0) -> list[int]:
        """Numbers of streams, once no agent has so many above the mean that it would give some away.

        No stream is on its way then either, nor was for longer than it takes to look for an imbalance anew: one whose
        agent is killed in the middle of handing it over waits for the end of the offer, not of the lease.
        """
        mean = len(self.names) / len(agents)
        seen: list[list[int]] = []
        rest: tuple[float, list[int]] = (0.0, [])

        def look() -> list[int] | None:
            nonlocal rest
            rows = list(self.place.client.store.peek(self.names).values())
            held, most = Counter(row.lease_owner for row in rows), max(mean * ABOVE_MEAN, mean + 1.9)
            seen.append(sorted(held.values()))
            is_moving = any(row.handoff_state in (Handoff.OFFERED, Handoff.READY) for row in rows)
            is_fair = set(held) == {agent.name for agent in agents} and max(held.values()) <= most
            fences = [row.fence for row in rows]
            if is_moving or not is_fair or fences != rest[1]:
                rest = (time.monotonic(), fences)
                return None
            return [held[agent.name] for agent in agents] if time.monotonic() - rest[0] >= REST_S else None

        return until(look, within_s, lambda: f"a balance; it was {seen[-1]}, fences {sorted(self.fences().values())}")

    def all_live(self, agents: Sequence[AgentProcess], since: float, within_s: float) -> None:
        """Wait until these agents were the last to handle each stream, after a moment."""
        pids = {agent.pid for agent in agents}

        def dead() -> list[str]:
            last = {name: self.story.last(name) for name in self.names}
            return [name for name, one in last.items() if not one or one.handed_at < since or one.pid not in pids]

        until(lambda: not dead(), within_s, lambda: f"life in {dead()}")

    def all_at(self, seq: int) -> None:
        """Wait until this message of each stream was handled."""

        def behind() -> list[str]:
            return [name for name in self.names if not (last := self.story.last(name)) or last.seq < seq]

        until(lambda: not behind(), LONG_S, lambda: f"message {seq} of {behind()}")

    def back_after(self, fences: Mapping[str, int], since: float) -> list[float]:
        """Seconds from a moment to the first message that was handled of each stream under a greater fence."""
        found = {name: self.story.first_after(name, fence) for name, fence in fences.items()}
        assert all(found.values()), f"nobody took {[name for name, one in found.items() if one is None]}"
        return sorted(one.handed_at - since for one in found.values() if one is not None)

    def nothing_is_missing(self, names: Sequence[str], *, repeats: bool = False) -> None:
        """Every message was handled, in order, by one run at a time, and once."""
        assert {name: gaps for name in names if (gaps := self.story.gaps(name))} == {}
        assert [name for name in names if not self.story.fences_in_order(name)] == []
        if not repeats:
            assert {name: found for name in names if (found := self.story.repeats(name))} == {}

    def all_given_back(self) -> None:
        """Every stream waits in its queue, owned by nobody."""
        rows = self.place.client.store.peek(self.names).values()
        assert {(row.status, row.lease_owner, row.lock_time) for row in rows} == {(Status.PENDING, None, None)}


def summary(seconds: Sequence[float]) -> dict[str, float]:
    return {"median": round(statistics.median(seconds), 2), "worst": round(max(seconds), 2), "of": len(seconds)}


def kinds_of(number: int) -> dict[str, Job[streamjobs.Peer]]:
    """Streams by name: of six, one without a place of its own and one that need not be exclusive."""
    kinds = (streamjobs.plain, streamjobs.shared, *[streamjobs.exclusive] * 4)
    return {f"{job.name.partition('.')[2]}-{one}": job for one in range(number) if (job := kinds[one % 6])}


@dataclass(slots=True)
class Deployment:
    """Agents that hold streams, and what is done to them."""

    place: Place
    start: Start
    marks: Marks
    peers: Feeds
    measured: Measured
    number: int
    settings: Mapping[str, Any] = field(default_factory=lambda: {**JOBS, "rebalance_s": REBALANCE_S, "drain_s": 10.0})
    jobs: dict[str, Job[streamjobs.Peer]] = field(init=False)
    server: ChaosServer = field(init=False)
    crowd: Crowd = field(init=False)
    repeats: dict[str, int] = field(default_factory=dict)
    agents: list[AgentProcess] = field(default_factory=list)
    stories: list[tuple[str, str]] = field(default_factory=list)
    """What is to be told of some streams. Agents write it down every few seconds, and when they stop."""

    def __post_init__(self) -> None:
        self.jobs = kinds_of(self.number)
        self.server = self.peers.open(rate=RATE)
        self.crowd = Crowd(self.place, Story(self.marks.folder, list(self.jobs)), list(self.jobs))

    def of(self, job: Job[streamjobs.Peer], names: Sequence[str]) -> list[str]:
        return [name for name in names if self.jobs[name] is job]

    def begin(self, number: int) -> list[AgentProcess]:
        """Agents that share all streams."""
        self.agents = agents = [self.start(self.place, **self.settings) for _ in range(number)]
        for agent in agents:
            agent.line("agent started")
        begun = time.time()
        for name, job in self.jobs.items():
            self.place.client.enqueue(job, streamjobs.Peer(url=self.server.url, folder=self.marks.folder), task_id=name)
        self.crowd.all_live(agents, begun, 20.0)
        self.measured("live_s", round(time.time() - begun, 2))
        self.measured("balance", self.crowd.balance(agents))
        return agents

    def kill(self, agent: AgentProcess, rest: Sequence[AgentProcess]) -> None:
        """SIGKILL; the others have its streams as soon as its leases are over."""
        fences, lost = self.crowd.fences(), self.crowd.held_by(agent)
        killed = agent.kill()
        self.crowd.all_live(rest, killed, LOST_S + 5.0)
        back = self.crowd.back_after({name: fences[name] for name in lost}, killed)
        self.measured("back_after_kill_s", summary(back))
        assert back[0] > LEASE_S * 0.5, "a lease was not respected"
        assert back[-1] < LOST_S * patience() + self.place.clock_width_s
        heirs = [self.marks.read(name, fences[name] + 1, "started") for name in lost]
        self.measured("handled_behind_the_cursor", summary([heir["kept"] - heir["cursor"] for heir in heirs]))
        plain = self.of(streamjobs.plain, lost)
        self.repeats = {name: len(found) for name in self.jobs if (found := self.crowd.story.repeats(name))}
        self.measured("repeats_of_handlers_without_a_place", sum(self.repeats.get(name, 0) for name in plain))
        self.measured("repeats_of_the_others", sum(self.repeats[name] for name in self.repeats if name not in plain))
        starved = {name for name in self.jobs if self.starved(name)}
        assert self.repeats.keys() <= set(self.of(streamjobs.plain, lost)) | starved, (
            "only what is behind a cursor may come again"
        )
        one = next(name for name in lost if self.jobs[name] is not streamjobs.shared)
        self.stories.append((one, "taken over from a lost agent"))

    def stop(self, agent: AgentProcess, rest: Sequence[AgentProcess]) -> None:
        """SIGTERM; the others have its streams at once, and those that may overlap without a pause."""
        fences, left = self.crowd.fences(), self.crowd.held_by(agent)
        told = time.time()
        assert agent.stop(15.0) == 0
        self.measured("stopped_after_s", round(time.time() - told, 2))
        self.crowd.all_live(rest, told, DRAINED_S + 5.0)
        back = self.crowd.back_after({name: fences[name] for name in left}, told)
        self.measured("back_after_stop_s", summary(back))
        assert back[len(back) // 2] < DRAINED_S * patience()
        assert back[-1] < DRAINED_S * 2 * patience()
        pauses = [self.crowd.story.longest_pause(name, told) for name in self.of(streamjobs.shared, left)]
        self.measured("pauses_of_shared_ones_at_the_stop_s", summary(pauses) if pauses else "none was there")
        self.measured("balance_after_stop", self.crowd.balance(rest))
        one = next(name for name in left if self.jobs[name] is not streamjobs.shared)
        self.stories.append((one, "the agent is stopping"))

    def starved(self, name: str) -> int:
        """How often an agent lost the lease of a stream, and said so: a machine may be too busy for one of 3 s."""
        return sum(len(agent.log.lines("lease lost", task_id=name)) for agent in self.agents)

    def explained(self, name: str) -> str:
        """What the command line tells of a stream."""
        return cli("streams", "explain", name, "--runs", "100", cwd=self.marks.folder, store=self.place.url).stdout

    def all_is_well(self) -> None:
        """Every message was handled; only the kill brought any of them twice; connections were alone."""
        names = list(self.jobs)
        self.peers.be_quiet()
        self.crowd.all_at(self.server.last_seq)
        shared, plain = self.of(streamjobs.shared, names), self.of(streamjobs.plain, names)
        self.crowd.nothing_is_missing([name for name in names if name not in plain])
        self.crowd.nothing_is_missing(plain, repeats=True)
        again = {name: len(found) for name in plain if (found := self.crowd.story.repeats(name))}
        calm = {name for name in plain if not self.starved(name)}
        assert {name: again.get(name) for name in calm} == {name: self.repeats.get(name) for name in calm}, (
            "a stop or a new agent repeats nothing"
        )
        most = self.server.most_open
        assert {name: most[name] for name in names if most[name] > (2 if name in shared else 1)} == {}
        assert [name for name in names if any(run.gaps for run in self.place.client.streams.runs(name))] == []
        for name, story in self.stories:
            until(lambda name=name, story=story: story in self.explained(name), LONG_S, f"{story!r} of {name}")  # type: ignore[misc]
        rows = self.place.client.store.peek(names)
        assert {name: rows[name].crash_count for name in names if rows[name].crash_count > 1 + self.starved(name)} == {}
        self.measured("messages", sum(len(self.crowd.story[name]) for name in names))


def test_sixty_streams_live_through_a_kill_a_new_agent_and_a_stop(
    sqlite_place: Place, start: Start, marks: Marks, peers: Feeds, measured: Measured
) -> None:
    fleet = Deployment(sqlite_place, start, marks, peers, measured, 60)
    doomed, leaver, stayer = fleet.begin(3)
    fleet.kill(doomed, [leaver, stayer])

    measured("balance_after_kill", fleet.crowd.balance([leaver, stayer]))
    fences, added = fleet.crowd.fences(), time.time()
    other_loop = {"event_loop": "uvloop"} if find_spec("uvloop") else {}
    newcomer = start(sqlite_place, **fleet.settings, **other_loop)
    newcomer.line("agent started")
    fleet.agents.append(newcomer)
    measured("balance_after_a_new_agent", fleet.crowd.balance([leaver, stayer, newcomer]))
    measured("balanced_after_s", round(time.time() - added, 2))
    moves = sum(fleet.crowd.fences().values()) - sum(fences.values())
    measured("moves_for_the_new_agent", moves)
    assert moves <= 60, "streams go to and fro"

    fleet.stop(leaver, [stayer, newcomer])
    fleet.all_is_well()


@pytest.mark.ministack
def test_streams_of_a_table_live_through_a_kill_and_a_stop(
    ministack_place: Place, start: Start, marks: Marks, peers: Feeds, measured: Measured
) -> None:
    fleet = Deployment(ministack_place, start, marks, peers, measured, 18)
    doomed, leaver, stayer = fleet.begin(3)
    fleet.kill(doomed, [leaver, stayer])
    measured("balance_after_kill", fleet.crowd.balance([leaver, stayer]))
    fleet.stop(leaver, [stayer])
    fleet.all_is_well()


def test_a_successor_on_hold_does_not_write_over_where_the_one_before_it_has_stopped() -> None:
    """Its handler may know a place of its own, which is older by the time its heartbeat takes it along."""
    task = Task(task_id="a", status=Status.RUNNING, created_at=0.0, submitted_at=0.0, job="ticks.shared", kind="stream")
    lease = Lease(task=task, owner="me", fence=2, lease_s=LEASE_S, held_from=time.monotonic())
    context = StreamContext(lease, exclusive=False, on_hold=True)
    context.checkpoint(seq=423)
    assert context.unsaved_cursor() is None
    context.release(Cursor(437))
    assert (context.cursor, context.unsaved_cursor()) == (Cursor(437), None)


# Agents that come back, and streams that make no progress


def test_an_agent_that_slept_longer_than_its_leases_hands_nothing_out_any_more(
    sqlite_place: Place, start: Start, marks: Marks, peers: Feeds, measured: Measured
) -> None:
    place = sqlite_place
    jobs = kinds_of(12)
    plain = [name for name, job in jobs.items() if job is streamjobs.plain]
    server = peers.open(rate=20.0)
    crowd = Crowd(place, story := Story(marks.folder, list(jobs)), list(jobs))
    sleeper = start(place, **JOBS, rebalance_streams=0)
    for name, job in jobs.items():
        place.client.enqueue(job, streamjobs.Peer(url=server.url, folder=marks.folder), task_id=name)
    crowd.all_live([sleeper], 0.0, LONG_S)
    heir = start(place, **JOBS)
    heir.line("agent started")

    place.pause(sleeper)
    slept = time.time()
    crowd.all_live([heir], slept, LOST_S)
    measured("back_after_s", summary(crowd.back_after(dict.fromkeys(jobs, 1), slept)))
    assert not sleeper.log.lines("lease lost"), "the agent was not stopped"
    sleeper.send(signal.SIGCONT)
    for name in jobs:
        sleeper.line("lease lost", task_id=name)
    crowd.all_at(server.last_seq + 20)

    late = [one for name in jobs for one in story[name] if one.pid == sleeper.pid and one.handed_at > slept]
    assert late == [], "an agent handed messages out whose leases were over"
    assert heir.stop() == 0
    crowd.all_live([sleeper], time.time(), DRAINED_S + 5.0)
    crowd.nothing_is_missing([name for name in jobs if name not in plain])
    crowd.nothing_is_missing(plain, repeats=True)
    assert sleeper.stop() == 0
    crowd.all_given_back()


def test_a_stream_that_makes_no_progress_goes_to_another_agent_and_batch_tasks_go_on(
    sqlite_place: Place, start: Start, marks: Marks, peers: Feeds, measured: Measured
) -> None:
    place = sqlite_place
    server = peers.open(rate=RATE)
    patient = streamjobs.Peer(url=server.url, folder=marks.folder)
    peer = patient.model_copy(update={"options": {"handler_timeout_s": 1.0}})
    names = ["deadlock", "deaf", "sleep", "innocent"]
    crowd = Crowd(place, story := Story(marks.folder, names), names)
    victim = start(place, **JOBS, drain_s=0.5)
    place.client.enqueue(streamjobs.wedge_deadlock, peer, task_id="deadlock")
    place.client.enqueue(streamjobs.wedge_deaf, peer, task_id="deaf")
    place.client.enqueue(streamjobs.exclusive, patient, task_id="innocent")
    stuck = {name: marks.read(name, 1, "wedged")["at"] for name in ("deadlock", "deaf")}
    victim.line("stream makes no progress: its lease is not renewed", task_id="deaf")
    until(lambda: story.first_after("deadlock", 1), LONG_S, "the second run of the handler that could be cancelled")
    assert "StreamWedged" in str(place.task("deadlock").errors)

    place.client.enqueue(streamjobs.wedge_sleep, patient, task_id="sleep")
    stuck["sleep"] = marks.read("sleep", 1, "wedged")["at"]
    batch = place.client.enqueue(streamjobs.add, streamjobs.Numbers(a=1), task_id="while-the-loop-is-blocked")
    assert place.wait(batch.id, Status.SUCCESS).result == {"sum": 2}
    heir = start(place, **JOBS)
    crowd.all_live([heir], 0.0, LOOP_LATE_S + LOST_S + 5.0)
    reason = victim.line("stream makes no progress: its lease is not renewed", task_id="sleep")["reason"]
    assert "the event loop has stood still" in reason
    for name in ("deaf", "sleep"):
        [back] = crowd.back_after({name: 1}, stuck[name])
        measured(f"back_after_s_{name}", round(back, 2))
    assert back < LOOP_LATE_S + LEASE_S + GUARD_S + SWEEP_S + LOST_LOOK_S + SLACK_S
    batch = place.client.enqueue(streamjobs.add, streamjobs.Numbers(a=2), task_id="after-it")
    assert place.wait(batch.id, Status.SUCCESS).result == {"sum": 3}
    victim.line("task succeeded", task_id="while-the-loop-is-blocked")

    told = time.time()
    assert victim.stop(0.5 + HURRY_S + LOOP_JOIN_S + SLACK_S) == 0, "a blocked event loop keeps the process alive"
    measured("stopped_after_s", round(time.time() - told, 2))
    crowd.all_at(server.last_seq)
    crowd.nothing_is_missing(names)
    assert heir.stop() == 0
    crowd.all_given_back()
