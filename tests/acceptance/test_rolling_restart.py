"""A rolling restart under a real supervisord: the work in flight loses nothing and burns no attempt."""

from __future__ import annotations

import random
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.acceptance import rollingjobs
from tests.acceptance.conftest import Measured, Place
from tests.acceptance.feeds import Feeds, Story, feeds
from tests.acceptance.processes import HERE, Log, is_alive, until
from tests.acceptance.rollingjobs import Piece
from tests.acceptance.streamjobs import Peer
from tests.acceptance.supervised import Supervised, supervised
from thunderagent.jobs.job import Job
from thunderagent.model.task import Status
from thunderagent.testing.chaos import ChaosServer

pytestmark = pytest.mark.processes

AGENTS = 3
STREAMS = 20
RATE = 5.0
"""Messages of each stream in a second."""
ISOLATED_SHARE = 0.01
BRIEF_S, LONG_S = (0.002, 0.04), (1.0, 2.0)
BAD = (
    "lease lost",
    "late outcome refused",
    "task taken over",
    "task will be retried",
    "handler went on",
    "stream makes no progress",
    "stream has a gap",
    "store does not answer",
    "heartbeat is late",
)
"""Beginnings of log lines that a rolling restart has no reason for."""


@dataclass(frozen=True, slots=True)
class Said:
    """One line of a handler."""

    fence: int
    agent: int
    at: float


@dataclass(slots=True)
class Work:
    """Tasks of three kinds, and what their handlers said."""

    place: Place
    folder: Path
    long_share: float = 0.15
    """Of the tasks, how many take a second or two."""
    names: list[str] = field(default_factory=list)
    _rng: random.Random = field(default_factory=lambda: random.Random(7))
    _read: Counter[Path] = field(default_factory=Counter)
    _said: dict[tuple[str, str], list[Said]] = field(default_factory=lambda: defaultdict(list))

    def __post_init__(self) -> None:
        self.folder.mkdir()

    def put(self, number: int) -> None:
        """So many tasks, mixed, as an application puts them that goes on during a deploy."""
        left = number
        while left:
            left -= (batch := min(left, 100))
            some, few = round(batch * self.long_share), max(1, round(batch * ISOLATED_SHARE))
            self._put(rollingjobs.long, some, LONG_S)
            self._put(rollingjobs.isolated, few, LONG_S)
            self._put(rollingjobs.brief, batch - some - few, BRIEF_S)

    def _put(self, job: Job[Piece], number: int, bounds: tuple[float, float]) -> None:
        names = [f"{job.name}-{len(self.names) + index}" for index in range(number)]
        pieces = [Piece(folder=self.folder, seconds=self._rng.uniform(*bounds)) for _ in names]
        for answer in self.place.client.enqueue_many(job, pieces, task_ids=names):
            assert answer.error is None
        self.names += names

    def said(self, what: str) -> dict[str, list[Said]]:
        """By task: when each run began, or ended."""
        self._take()
        return {name: lines for (name, kind), lines in self._said.items() if kind == what}

    def in_flight(self, agent: int) -> set[str]:
        """Tasks that an agent has begun, and that have not ended."""
        ended = self.said("ended")
        return {name for name, lines in self.said("began").items() if lines[-1].agent == agent and name not in ended}

    def await_flight(self, agent: int) -> set[str]:
        """Tasks that this agent runs now; some of them for a second or more."""

        def look() -> set[str] | None:
            found = self.in_flight(agent)
            return found if any(not name.startswith(rollingjobs.brief.name) for name in found) else None

        return until(look, 20.0, f"work of agent {agent}")

    def await_ended(self, within_s: float, names: Sequence[str] = ()) -> None:
        """Wait until the handlers of these tasks, or of all, came to their ends."""

        def missing() -> list[str]:
            ended = self.said("ended")
            return [name for name in names or self.names if name not in ended]

        until(lambda: not missing(), within_s, lambda: f"{len(missing())} tasks: {missing()[:5]}")

    def ran_once(self) -> None:
        """Every task ran once, to its end, and nothing is held against it."""
        for what in ("began", "ended"):
            said = self.said(what)
            assert {name: lines for name, lines in said.items() if len(lines) > 1} == {}, f"some {what} again"
            assert said.keys() == set(self.names)
        until(lambda: not self._open(), 10.0, lambda: f"SUCCESS of {self._open()[:5]}")
        rows = self.place.client.store.get(self.names)
        assert Counter((row.attempt, row.retry_count, row.crash_count) for row in rows.values()) == {
            (1, 0, 0): len(self.names)
        }

    def _open(self) -> list[str]:
        rows = self.place.client.store.get(self.names)
        return [name for name in self.names if rows[name].status is not Status.SUCCESS]

    def _take(self) -> None:
        for path in self.folder.glob("*.said"):
            with path.open("rb") as file:
                file.seek(self._read[path])
                new = file.read()
            whole = new[: new.rfind(b"\n") + 1]
            self._read[path] += len(whole)
            for line in whole.decode().splitlines():
                name, fence, agent, what, at = line.split()
                self._said[name, what].append(Said(int(fence), int(agent), float(at)))


@dataclass(slots=True)
class Crowd:
    """Streams of one feed, and what was handled of them."""

    place: Place
    folder: Path
    peers: Feeds
    names: list[str] = field(default_factory=lambda: [f"stream-{number}" for number in range(STREAMS)])
    server: ChaosServer = field(init=False)
    story: Story = field(init=False)

    def __post_init__(self) -> None:
        self.folder.mkdir()
        self.story = Story(self.folder, self.names)

    def begin(self) -> None:
        """Put the streams, and wait until each has handled a message."""
        self.server = self.peers.open(rate=RATE)
        for name in self.names:
            self.place.client.enqueue(rollingjobs.ticker, Peer(url=self.server.url, folder=self.folder), task_id=name)
        self.all_at(1)

    def all_at(self, seq: int, within_s: float = 20.0) -> None:
        """Wait until this message of each stream was handled."""

        def behind() -> list[str]:
            return [name for name in self.names if not (last := self.story.last(name)) or last.seq < seq]

        until(lambda: not behind(), within_s, lambda: f"message {seq} of {behind()}")

    def nothing_is_missing(self) -> None:
        """Every message was handled once, in order, by one run at a time, and every stream went from hand to hand."""
        self.peers.be_quiet()
        self.all_at(self.peers.call(lambda: self.server.last_seq))
        assert {name: gaps for name in self.names if (gaps := self.story.gaps(name))} == {}
        assert {name: again for name in self.names if (again := self.story.repeats(name))} == {}
        assert [name for name in self.names if not self.story.fences_in_order(name)] == []
        assert [name for name in self.names if len({line.pid for line in self.story[name]}) < 2] == []

    def all_given_back(self) -> None:
        """Every stream waits in its queue, owned by nobody, and nothing is held against it."""
        rows = self.place.client.store.peek(self.names).values()
        facts = {(row.status, row.lease_owner, row.lock_time, row.crash_count, row.retry_count) for row in rows}
        assert facts == {(Status.PENDING, None, None, 0, 0)}


@pytest.fixture
def peers() -> Iterator[Feeds]:
    """Servers that streams connect to."""
    with feeds() as running:
        yield running


@pytest.mark.parametrize(
    ("place", "as_group"),
    [
        pytest.param("sqlite", "true", id="sqlite-stopasgroup"),
        pytest.param("sqlite", "false", id="sqlite-agent-alone"),
        pytest.param("ministack", "true", id="ministack-stopasgroup", marks=pytest.mark.ministack),
    ],
    indirect=["place"],
)
def test_a_rolling_restart_loses_nothing_and_burns_no_attempt(
    place: Place, tmp_path: Path, peers: Feeds, measured: Measured, as_group: str
) -> None:
    total, long_share = (700, 0.15) if place.kind == "sqlite" else (240, 0.5)  # its local engine is slow
    work, crowd = Work(place, tmp_path / "work", long_share), Crowd(place, tmp_path / "streams", peers)
    changes = {"stopasgroup": as_group}
    settings = {"store": place.url, "poll_max_s": 1.0, "poll_idle_s": 1.0}
    began = time.monotonic()
    with supervised(tmp_path, jobs="rollingjobs", home=HERE, number=AGENTS, changes=changes, **settings) as supervisor:
        crowd.begin()
        measured("streams_live_s", round(time.monotonic() - began, 1))
        pids = [supervisor.started(index) for index in range(AGENTS)]
        straddled = 0
        for index, pid in enumerate(pids):
            work.put(total // AGENTS if index else total - (AGENTS - 1) * (total // AGENTS))
            in_flight = work.await_flight(pid)
            told = time.time()
            pids[index] = supervisor.restart(index)
            ended = work.said("ended")
            straddled += sum(name in ended and ended[name][0].at > told for name in in_flight)
            assert not is_alive(pid)
        assert straddled >= AGENTS, "nothing was in flight: this proved nothing"
        measured("straddled", straddled)
        measured("restarted_s", round(time.monotonic() - began, 1))
        work.await_ended(40.0)
        work.ran_once()
        crowd.nothing_is_missing()
        measured("done_s", round(time.monotonic() - began, 1))

        assert supervisor.stop(20.0) == 0
        measured("stopped_s", round(time.monotonic() - began, 1))
        crowd.all_given_back()
        came_to_good_ends(supervisor, 2 * AGENTS)


BOTH = """
import os

from rollingjobs import Piece, brief, isolated, long, work
from thunderagent.jobs.context import Context
from thunderagent.jobs.job import job
"""
OLD, NEW = (
    f"""{BOTH}
@job("rolling.{name}", isolation="process")
def {name}(ctx: Context, payload: Piece) -> None:
    work(ctx, payload, os.getppid())
"""
    for name in ("retired", "fresh")
)
"""Two versions of an application: one job of the first is gone in the second, which has one that the first has not.

Both run in processes of their own, which must find the code of their agent when the next version is in its place."""


def test_tasks_of_a_job_that_one_version_lacks_wait_for_the_other_during_a_rolling_deploy(
    sqlite_place: Place, tmp_path: Path, measured: Measured
) -> None:
    place, work, number = sqlite_place, Work(sqlite_place, tmp_path / "work"), 12
    current = tmp_path / "current"
    for version, text in (("old", OLD), ("new", NEW)):
        (tmp_path / version / "app").mkdir(parents=True)
        (tmp_path / version / "app" / "__init__.py").write_text(text)

    def put(job: str) -> list[str]:
        names = [f"{job}-{len(work.names) + index}" for index in range(number)]
        pieces = [{"folder": str(work.folder), "seconds": 0.05} for _ in names]
        assert not [one.error for one in place.client.enqueue_many(job, pieces, task_ids=names) if one.error]
        work.names += names
        return names

    def whose(names: list[str]) -> set[int]:
        began = work.said("began")
        return {began[name][0].agent for name in names if name in began}

    current.symlink_to("old")
    settings: dict[str, Any] = {"store": place.url, "poll_max_s": 1.0, "poll_idle_s": 1.0, "slots": 4}
    with supervised(tmp_path, jobs="app", home=current, number=AGENTS, **settings) as supervisor:
        pids = [supervisor.started(index) for index in range(AGENTS)]
        early = put("rolling.fresh")  # the application is new already
        work.put(100)
        for log in supervisor.logs:
            leaves_alone(log, "rolling.fresh")
        assert not whose(early)
        (tmp_path / "next").symlink_to("new")
        (tmp_path / "next").replace(current)
        for index, pid in enumerate(pids):
            work.put(100)
            work.await_flight(pid)
            pids[index] = supervisor.restart(index)
            if index == 0:
                until(lambda: whose(early), 20.0, "a task of the new job")
                assert whose(early) == {pids[0]}, "an agent of the old version ran a job that it does not have"
                last = put("rolling.retired")  # by somebody who is late
                work.await_ended(20.0, last)
        work.await_ended(40.0)
        work.ran_once()
        assert whose(last).isdisjoint(pids), "an agent of the new version ran a job that it does not have"
        late = place.client.enqueue("rolling.retired", {"folder": str(work.folder), "seconds": 0.0}, task_id="late")
        for log in supervisor.logs:
            leaves_alone(log, "rolling.retired")
        waiting = place.task(late.task_id)
        assert (waiting.status, waiting.fence, waiting.retry_count) == (Status.PENDING, 0, 0)
        assert [one.unknown_jobs for one in place.client.stats() if one.queue == "default"] == [("rolling.retired",)]
        assert supervisor.stop(20.0) == 0
        came_to_good_ends(supervisor, 2 * AGENTS)


def leaves_alone(log: Log, job: str) -> None:
    """Wait until an agent has said that it does not have a job."""
    message = "tasks of jobs that this agent does not have are left alone"
    until(lambda: any(job in line["jobs"] for line in log.lines(message)), 20.0, f"{job!r} in {log.tail}")


def came_to_good_ends(supervisor: Supervised, number: int) -> None:
    """So many processes of agents ended, each by itself, with code 0, and had nothing to complain about."""
    assert supervisor.ends() == ["exit status 0"] * number, supervisor.log
    assert "killing" not in supervisor.log
    assert "not expected" not in supervisor.log
    assert supervisor.problems(*BAD) == []
    assert [line["stuck"] for log in supervisor.logs for line in log.lines("agent stopped")] == [0] * number
    assert not [log.other for log in supervisor.logs if log.other]
