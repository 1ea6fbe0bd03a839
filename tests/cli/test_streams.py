"""The commands on streams: what they say of a stream, and what they do to it."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import pytest
from typer.testing import CliRunner

from tests.support.engine import LONG_S, put, seen, serving
from thunderagent.cli import app
from thunderagent.cli.output import moment, notes, out
from thunderagent.cli.stream_story import begin_of, lines_of, summed
from thunderagent.client import Client
from thunderagent.model.errors import ConfigurationError
from thunderagent.model.task import Lane, Lease, Status, Task
from thunderagent.model.writes import tasks as writes
from thunderagent.ops.waiting import link_text
from thunderagent.settings import Settings
from thunderagent.stores import open_store
from thunderagent.stores.tasks import Beat, TaskStore, Wanted
from thunderagent.streams.connection.connection import Connection
from thunderagent.streams.context import StreamContext
from thunderagent.streams.cursor import Cursor
from thunderagent.streams.job import stream
from thunderagent.streams.journal import MOVES_KEPT, Link, Missed, Move, journal_id, keep_journals
from thunderagent.testing.chaos import ChaosServer

AGENT: Final = "host-1:4711:0a1b2c3d"
OTHER: Final = "host-2:4712:4d3c2b1a"
NIGHT: Final = datetime(2026, 3, 2, 3, 12, 0).timestamp()
"""12 minutes past three in the night, on the local clock, as an operator would say it."""


class Stand:
    """A store in a file, and the commands on it in this process."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.settings = Settings(store=url)
        self.store = open_store(self.settings)
        self.client = Client(self.store, self.settings)
        self.said = ""
        """Standard error of the last command."""

    def __call__(self, *arguments: str, code: int = 0) -> str:
        """Standard output of a command that ends with this code."""
        done = CliRunner().invoke(app, [*arguments, "--store", self.url])
        assert done.exit_code == code, (done.exit_code, done.output, done.exception)
        self.said = done.stderr
        return done.stdout

    def json(self, *arguments: str, code: int = 0) -> Any:
        return json.loads(self(*arguments, "--json", code=code))

    def add(self, name: str, **changes: Any) -> Task:
        """A stream in its queue."""
        values = {"job": "ticks.follow", "kind": "stream", "lane": Lane("streams"), "desired_state": "STARTED"}
        return put(self.store, name, **{**values, **changes})

    def hold(self, name: str, *, owner: str = AGENT, lease_s: float = 20.0, **changes: Any) -> Lease:
        """A stream that an agent holds."""
        [lease] = self.store.claim([Wanted(seen(self.add(name, **changes)), lease_s)], owner=owner)
        return lease

    def at(self, lease: Lease, **cursor: Any) -> Lease:
        """The lease after a heartbeat with this cursor."""
        [renewal] = self.store.renew([Beat(lease, last_seq=cursor)])
        assert renewal.lease
        return renewal.lease

    def apply(self, write: Any) -> Task:
        [task] = self.store.write_tasks([write])
        assert task
        return task

    def account(
        self,
        name: str,
        fence: int,
        moves: Sequence[tuple[float, str, str]] = (),
        gaps: Sequence[Missed] = (),
        agent: str = AGENT,
        link: Link | None = None,
        **counts: int,
    ) -> None:
        """Write the account of a run; its times are seconds after `NIGHT`."""
        info = {
            "agent": agent,
            "moves": [[NIGHT + at, state, reason] for at, state, reason in moves],
            "gaps": [asdict(replace(gap, at=NIGHT + gap.at)) for gap in gaps],
            **({"link": asdict(link)} if link else {}),
            **counts,
        }
        keep_journals(self.store, {journal_id(name, fence): info}, keep_s=86400.0)


@pytest.fixture
def stand(tmp_path: Path, columns: Callable[[int], None]) -> Iterator[Stand]:
    columns(200)
    stand = Stand(f"sqlite:///{tmp_path}/tasks.db")
    yield stand
    stand.client.close()


@pytest.fixture
def columns(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Make the terminal so wide."""

    def make(width: int) -> None:
        for console in (out, notes):
            monkeypatch.setattr(console, "_width", width)
            monkeypatch.setattr(console, "_height", 50)

    return make


def gap(at: float, after: int, before: int, action: str = "continue", *, cause: str = "missing") -> Missed:
    return Missed(at, cause, {"seq": after}, {"seq": before}, before - after - 1, action)


def words(text: str) -> str:
    """A text with single spaces: how it is laid out does not matter."""
    return " ".join(text.split())


def widest(text: str) -> int:
    return max(len(line.rstrip()) for line in text.splitlines())


# list


def test_streams_that_run_are_listed_first_and_say_who_holds_them(stand: Stand) -> None:
    assert stand("streams", "list") == "no streams\n"
    put(stand.store, "a-batch-task")
    stand.add("waits")
    stand.at(stand.hold("runs"), seq=1234, epoch="e7")
    lines = stand("streams", "list").splitlines()
    assert [line.split()[0] for line in lines] == ["stream", "runs", "waits"]
    assert "1234 (epoch e7)" in lines[1] and f"by {AGENT}" in lines[1] and "RUNNING" in lines[1]
    assert lines[2].split()[1] == "PENDING" and lines[2].strip().endswith("waits for an agent")
    assert "a-batch-task" not in "".join(lines)


def test_every_state_of_a_stream_says_what_keeps_it_from_running(stand: Stand) -> None:
    now = stand.store.clock.now()
    stopping = stand.hold("stopping")
    stand.apply(writes.request_stop(stopping.task, now=now))
    failed = stand.hold("failed")
    stand.apply(writes.fail(failed, error="StreamFailed: http 410\n  at x.py", now=now, expire_at=now + 900))
    stand.apply(writes.stop(stand.hold("stopped"), now=now, expire_at=now + 900))
    stand.apply(writes.retry(stand.hold("tries-again"), due=now + 3600, error="ValueError: odd", now=now))
    offered = stand.apply(writes.offer(stand.hold("handed-off"), now=now, until=now + 900))
    stand.store.claim([Wanted(seen(offered), 20.0)], owner=OTHER)
    late = stand.hold("late")
    stand.apply(replace(writes.renew(late, now=now - 99, until=now - 60), verb="renew"))

    said = {line.split()[0]: words(line) for line in stand("streams", "list").splitlines()[1:]}
    assert "RUNNING" in said["stopping"] and f"stop requested, by {AGENT}" in said["stopping"]
    assert "FAILED" in said["failed"] and said["failed"].endswith("StreamFailed: http 410")
    assert "DONE" in said["stopped"] and said["stopped"].endswith("stopped")
    assert "PENDING" in said["tries-again"] and said["tries-again"].endswith("s, ValueError: odd")
    assert said["handed-off"].endswith(f"handoff: {AGENT} handles on, by {OTHER}")
    assert said["late"].endswith(f"by {AGENT}, whose lease has expired")


def test_streams_are_filtered_by_status_queue_and_number(stand: Stand) -> None:
    for name in ("a", "b", "c"):
        stand.add(name)
    stand.hold("other", lane=Lane("elsewhere"))
    assert {task["taskId"] for task in stand.json("streams", "list", "--status", "pending")} == {"a", "b", "c"}
    assert [task["taskId"] for task in stand.json("streams", "list", "--queue", "elsewhere")] == ["other"]
    assert [task["taskId"] for task in stand.json("streams", "list", "--limit", "1")] == ["other"]
    assert "use one of" in (stand("streams", "list", "--status", "gone", code=2) or stand.said)


def test_no_batch_task_is_read_to_list_streams(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(30):
        put(stand.store, f"batch-{number}")
    stand.add("the-stream")
    asked: list[str] = []
    get = TaskStore.get

    def counting(self: TaskStore, names: Any) -> dict[str, Task]:
        names = list(names)
        asked.extend(names)
        return get(self, names)

    monkeypatch.setattr(TaskStore, "get", counting)
    assert len(stand.json("streams", "list")) == 1
    assert asked == ["the-stream"]


def test_a_narrow_terminal_shows_less_and_wraps_nothing(stand: Stand, columns: Callable[[int], None]) -> None:
    now = stand.store.clock.now()
    name = "a-stream-whose-name-takes-thirty-six"
    stand.at(stand.hold(name), seq=123456789, epoch="an-epoch-with-a-name-that-nobody-can-read")
    failed = stand.hold("failed")
    stand.apply(writes.fail(failed, error="StreamFailed: " + "long " * 50, now=now, expire_at=now + 900))
    columns(80)
    said = stand("streams", "list")
    assert len(said.splitlines()) == 3
    assert name in said
    assert said.splitlines()[0].split() == ["stream", "status", "cursor", "now"]
    assert "123456789 (epoch an…" in said
    assert widest(said) <= 80
    columns(200)
    said = stand("streams", "list")
    assert len(said.splitlines()) == 3
    assert "since" in said and widest(said) <= 200


AWAY: Final = Link(False, NIGHT, "while connecting: http 503 (no), Retry-After 120 s", NIGHT + 120)
AWAY_TEXT: Final = f"not connected since {moment(NIGHT)}, next attempt at {moment(NIGHT + 120)}: {AWAY.reason}"


def test_every_command_says_in_the_same_words_whether_a_stream_is_connected(
    stand: Stand, columns: Callable[[int], None]
) -> None:
    columns(250)
    for name, link in (("away", AWAY), ("live", Link(True, NIGHT)), ("first", Link(False, NIGHT))):
        stand.hold(name)
        stand.account(name, 1, [(0, "resolving", "")], link=link)
    said = {line.split()[0]: words(line) for line in stand("streams", "list").splitlines()[1:]}
    assert said["live"].endswith(f"connected since {moment(NIGHT)}; by {AGENT}")
    assert f"not connected yet: it tries since {moment(NIGHT)}; by {AGENT}" in said["first"]
    assert f"{AWAY_TEXT}; by ho" in said["away"]
    assert f"connection {AWAY_TEXT}" in words(stand("show", "away"))
    local = AWAY_TEXT.replace(moment(NIGHT), "2026-03-02 03:12:00").replace(moment(NIGHT + 120), "2026-03-02 03:14:00")
    for command in (("explain",), ("streams", "explain")):
        assert f"connection {local}" in words(stand(*command, "away"))
    listed = {row["taskId"]: row["connection"] for row in stand.json("streams", "list")}
    assert listed["away"] == stand.json("show", "away")["connection"] == asdict(AWAY)
    assert stand.json("explain", "away")["run"]["link"] == asdict(AWAY)


def test_an_attempt_that_is_under_way_or_still_to_come_says_so() -> None:
    assert link_text(replace(AWAY, next_at=None), NIGHT).startswith(f"not connected since {moment(NIGHT)}, tries now: ")
    assert f"at {moment(NIGHT + 120)} (in 45 s): while" in link_text(AWAY, NIGHT + 75)


# stop and start


def test_a_stop_says_when_the_stream_will_stop_and_the_other_ids_get_their_turn(stand: Stand) -> None:
    stand.hold("runs", lease_s=15.0)
    stand.add("waits")
    put(stand.store, "batch", status=Status.FAILED)
    said = stand("streams", "stop", "nothing", "runs", "batch", "waits", code=1).splitlines()
    assert said == [f"runs stops with the next heartbeat of {AGENT}, within 5 s", "waits is stopped"]
    assert "there is no task 'nothing'" in stand.said
    assert "'batch' is no stream" in stand.said
    assert stand.client.get("runs").desired_state == "STOPPED"
    again = stand("streams", "stop", "runs", "waits").splitlines()
    assert again == [
        f"runs stops with the next heartbeat of {AGENT}, within 5 s (it was asked before)",
        "waits is already stopped",
    ]


def test_a_stop_of_a_stream_whose_agent_is_not_heard_of_says_so(stand: Stand) -> None:
    lease, now = stand.hold("runs"), stand.store.clock.now()
    stand.apply(writes.renew(lease, now=now - 99, until=now - 60))
    assert "when another agent has taken it over" in stand("streams", "stop", "runs")


def test_a_stop_waits_until_the_stream_is_done(stand: Stand) -> None:
    lease = stand.at(stand.hold("runs"), seq=77)

    def obey() -> None:
        until = time.monotonic() + LONG_S
        while stand.client.get("runs").desired_state != "STOPPED" and time.monotonic() < until:
            threading.Event().wait(0.01)
        now = stand.store.clock.now()
        stand.apply(writes.stop(lease, now=now, expire_at=now + 900))

    agent = threading.Thread(target=obey)
    agent.start()
    said = stand("streams", "stop", "runs", "--wait", str(LONG_S)).splitlines()
    agent.join(LONG_S)
    assert said[-1] == "runs is stopped, its cursor is 77"


def test_a_stop_that_takes_too_long_is_an_error_and_is_told_in_json(stand: Stand) -> None:
    stand.hold("runs")
    [told] = stand.json("streams", "stop", "runs", "--wait", "0.05", code=1)
    assert (told["status"], told["desiredState"]) == ("RUNNING", "STOPPED")
    assert "still RUNNING after" in told["refused"]


def test_a_stream_that_ends_otherwise_while_it_is_stopped_is_an_error(stand: Stand) -> None:
    lease, now = stand.hold("runs"), stand.store.clock.now()
    wait = Client.wait

    def fails(self: Client, *arguments: Any, **options: Any) -> Task:
        stand.apply(writes.fail(lease, error="StreamFailed: gone", now=now, expire_at=now + 900))
        return wait(self, *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Client, "wait", fails)
        stand("streams", "stop", "runs", "--wait", "5", code=1)
    assert "was not stopped: it has ended as FAILED" in stand.said


def test_a_start_says_where_the_stream_goes_on(stand: Stand) -> None:
    now = stand.store.clock.now()
    stopped = stand.at(stand.hold("stopped"), seq=77, epoch="e7")
    stand.apply(writes.stop(stopped, now=now, expire_at=now + 900))
    stand.hold("runs")
    stand.add("waits")
    ended = stand.hold("ended")
    stand.apply(writes.succeed(ended, now=now, expire_at=now + 900))
    put(stand.store, "batch")
    said = stand("streams", "start", "batch", "stopped", "runs", "waits", "ended", code=1).splitlines()
    assert said == [
        "stopped is in its queue and goes on behind 77 (epoch e7)",
        f"runs runs already, held by {AGENT}",
        "waits is in its queue already and begins at its beginning",
    ]
    assert "'batch' is no stream" in stand.said
    assert "'ended' has ended by itself" in stand.said
    assert stand.client.get("stopped").status is Status.PENDING
    assert [one.get("refused", "") for one in stand.json("streams", "start", "stopped", "waits")] == ["", ""]


def test_all_that_have_failed_are_started_together(stand: Stand) -> None:
    now = stand.store.clock.now()
    for number, lane in enumerate((Lane("streams"), Lane("streams"), Lane("elsewhere"))):
        failed = stand.hold(f"failed-{number}", lane=lane)
        stand.apply(writes.fail(failed, error="StreamFailed: http 404", now=now, expire_at=now + 900))
    stand.apply(writes.stop(stand.hold("stopped"), now=now, expire_at=now + 900))
    put(stand.store, "batch", status=Status.FAILED)
    assert stand("streams", "start", "--all-failed", "--queue", "elsewhere").splitlines() == [
        "failed-2 is in its queue and begins at its beginning"
    ]
    assert {task["taskId"] for task in stand.json("streams", "start", "--all-failed")} == {"failed-0", "failed-1"}
    assert stand("streams", "start", "--all-failed") == "no stream is FAILED\n"
    assert stand.json("streams", "start", "--all-failed") == []
    statuses = {name: stand.client.get(name).status for name in ("failed-0", "failed-1", "failed-2")}
    assert set(statuses.values()) == {Status.PENDING}
    assert stand.client.get("stopped").status is Status.DONE
    assert stand.client.get("batch").status is Status.FAILED


@pytest.mark.parametrize("arguments", [(), ("a", "--all-failed"), ("a", "--queue", "q"), ("--queue", "q")])
def test_a_start_of_nothing_or_of_both_is_refused(stand: Stand, arguments: tuple[str, ...]) -> None:
    stand("streams", "start", *arguments, code=2)
    assert "give the ids of streams, or --all-failed" in stand.said


# explain


def test_an_account_says_why_a_stream_connected_again(stand: Stand) -> None:
    lease = stand.at(stand.hold("ticks"), seq=900, epoch="e1")
    now = stand.store.clock.now()
    released = stand.apply(writes.release(lease, now=now))
    stand.store.claim([Wanted(seen(released), 20.0)], owner=OTHER)
    stand.account(
        "ticks",
        1,
        [
            (-60, "leased", "claimed"),
            (-60, "resolving", ""),
            (-59.9, "connecting", ""),
            (-59.8, "subscribing", ""),
            (-59.5, "live", ""),
            (7, "backoff", "zombie (2 pings were not answered); next attempt in 0.4 s"),
            (7.4, "resolving", ""),
            (7.4, "connecting", ""),
            (8.4, "backoff", "network (refused); next attempt in 0.7 s"),
            (9.1, "resolving", ""),
            (9.1, "connecting", ""),
            (9.2, "live", ""),
        ],
        [gap(9.3, 100, 105)],
    )
    stand.account("ticks", 2, [(99, "leased", "taken over from a lost agent")], agent=OTHER, connects=3, handled=8)
    said = stand("streams", "explain", "ticks")
    text = words(said)
    assert "RUNNING since" in text and f"by {OTHER}" in text and "900 (epoch e1)" in text
    assert "this run connects 3, handled 8, duplicates dropped 0, gaps 0; as of its last move or gap" in text
    assert "fence 2, lost agents 0, retries 0" in text
    first, second = said.split("run 2 by ")
    assert [words(line) for line in first.split("run 1 by ")[1].splitlines() if line] == [
        f"{AGENT}, 2026-03-02",
        "03:11:00 leased claimed",
        "03:11:00 live connected in 0.5 s",
        "03:12:07 backoff zombie (2 pings were not answered); next attempt in 0.4 s",
        "03:12:08 backoff while connecting: network (refused); next attempt in 0.7 s",
        "03:12:09 live connected in 0.1 s",
        "nothing more is written: its agent died, or was cut off",
        "03:12:09 gap missing: 4 messages after 100 and before 105; went on without",
    ]
    assert "nothing more is written" not in second, "it goes on"


def test_what_repeats_is_one_line() -> None:
    moves = [
        Move(1, "live", "x"),
        Move(2, "paused", "slow"),
        Move(4, "live"),
        Move(5, "paused", "slow"),
        Move(6, "live"),
        Move(7, "backoff", "network (refused); next attempt in 0.1 s"),
        Move(8, "connecting"),
        Move(9, "backoff", "network (refused); next attempt in 5 s"),
        Move(10, "connecting"),
        Move(12, "backoff", "network (refused); next attempt in 9 s"),
        Move(13, "connecting"),
        Move(14, "backoff", "http 500; next attempt in 9 s"),
        Move(15, "resolving"),
    ]
    until_6, until_12 = (datetime.fromtimestamp(at).strftime("%H:%M:%S") for at in (6, 12))
    assert [(line.at, line.state, line.text) for line in lines_of(moves)] == [
        (1, "live", "x"),
        (2, "paused", f"2 times until {until_6}, 3.0 s in all: slow"),
        (7, "backoff", "network (refused); next attempt in 0.1 s"),
        (9, "backoff", f"2 times until {until_12}: while connecting: network (refused); next attempt in 9 s"),
        (14, "backoff", "while connecting: http 500; next attempt in 9 s"),
        (15, "resolving", ""),
    ]


def test_a_pause_that_has_not_ended_is_shown() -> None:
    assert [line.state for line in lines_of([Move(1, "live", "x"), Move(2, "paused", "slow")])] == ["live", "paused"]


def test_gaps_alone_are_shown_over_all_runs_with_a_sum(stand: Stand, columns: Callable[[int], None]) -> None:
    stand.hold("ticks", fence=7)
    epoch = Missed(5, "epoch", {"seq": 9, "epoch": "e1"}, {"seq": 1, "epoch": "e2"}, None, "continue")
    stand.account("ticks", 1, [(0, "leased", "claimed")], [gap(1, 10, 15), gap(2, 20, 23, "snapshot")])
    stand.account("ticks", 8, [(3, "leased", "claimed")], [gap(4, 30, 32, "reconnect"), epoch])
    columns(80)
    said = stand("streams", "explain", "ticks", "--gaps")
    assert widest(said) <= 80
    assert "claimed" not in said
    assert "2026-03-02 03:12:01 1 missing 4 10 15 continue" in words(said)
    assert words(said).endswith(
        "4 gaps: 4 messages missed for good, 2 messages made up for by a snapshot, 1 message sent again, "
        "1 of unknown size"
    )
    columns(200)
    said = stand("streams", "explain", "ticks", "--gaps")
    assert "2026-03-02 03:12:05 8 epoch ? 9 (epoch e1) 1 (epoch e2) continue" in words(said)
    stand.account("ticks", 7, [(2, "leased", "claimed")])
    told = stand.json("streams", "explain", "ticks", "--gaps")
    assert [run["fence"] for run in told["runs"]] == [1, 8], "those that missed something"
    assert told["missed"] == {"gaps": 4, "messages": 4, "by_snapshot": 2, "sent_again": 1, "unknown": 1}


def test_a_gap_that_is_found_again_counts_once() -> None:
    again = [gap(1, 10, 15, "reconnect"), gap(2, 10, 15, "reconnect"), gap(3, 10, 15), gap(60, 10, 15), gap(61, 20, 22)]
    total = summed(again)
    assert (total.gaps, total.messages, total.sent_again) == (2, 5, 0)


def test_gaps_of_two_sequences_are_two_and_one_that_waited_for_a_snapshot_is_made_up_for() -> None:
    ends = {"after": {"seq": 10, "key": "BTC"}, "before": {"seq": 15, "key": "BTC"}}
    other = {"after": {"seq": 10, "key": "ETH"}, "before": {"seq": 15, "key": "ETH"}}
    total = summed(
        [
            Missed(at, "missing", missed=4, action=action, **places)
            for at, action, places in ((1, "continue", ends), (2, "await", other), (3, "await", other))
        ]
    )
    assert (total.gaps, total.messages, total.by_snapshot) == (2, 4, 4)


def test_the_place_of_each_sequence_is_shown_and_a_gap_names_its_own(stand: Stand) -> None:
    others = {"ETHUSDT": 40, "ADAUSDT": {"seq": 7, "epoch": "e1"}}
    lease = stand.at(stand.hold("ticks"), seq=900, key="BTCUSDT", others=others)
    stand.account(
        "ticks",
        lease.fence,
        gaps=[Missed(5, "missing", {"seq": 30, "key": "ETHUSDT"}, {"seq": 33, "key": "ETHUSDT"}, 2, "await")],
    )
    assert "BTCUSDT 900, ADAUSDT 7 (epoch e1), ETHU…" in words(stand("streams", "list"))
    for command in (["streams", "explain", "ticks"], ["show", "ticks"]):
        assert "BTCUSDT 900, ADAUSDT 7 (epoch e1), ETHUSDT 40" in words(stand(*command))
    assert "2 messages after ETHUSDT 30 and before 33; waited for a snapshot" in words(
        stand("streams", "explain", "ticks")
    )


def test_an_account_begins_at_a_time(stand: Stand) -> None:
    stand.hold("ticks", fence=1)
    stand.account("ticks", 1, [(-7200, "leased", "claimed"), (-7000, "live", "x"), (-6000, "stop", "y")])
    stand.account(
        "ticks", 2, [(-3600, "leased", "claimed"), (7, "backoff", "zombie")], [gap(-3000, 1, 3), gap(8, 5, 9)]
    )
    said = stand("streams", "explain", "ticks", "--since", "2026-03-02T03:12")
    assert "run 1" not in said
    assert "claimed" not in said
    assert "03:12:07 backoff zombie" in words(said)
    assert "3 messages after 5" in said and "after 1 and" not in said
    assert "Nothing happened since 2026-03-02 04:00:00." in stand(
        "streams", "explain", "ticks", "--since", "2026-03-02 04:00"
    )
    told = stand.json("streams", "explain", "ticks", "--since", "2026-03-02T03:12")
    assert [[move["state"] for move in run["moves"]] for run in told["runs"]] == [["backoff"]]
    stand("streams", "explain", "ticks", "--since", "three", code=2)
    assert "write a time such as 03:12" in words(stand.said)


def test_a_time_without_a_date_is_the_last_one_on_the_local_clock() -> None:
    noon = datetime(2026, 3, 2, 12, 0).timestamp()
    assert begin_of("03:12", noon) == NIGHT
    assert begin_of("3:12", noon) == NIGHT
    assert begin_of("03:12:30", noon) == NIGHT + 30
    assert begin_of("23:12", noon) == datetime(2026, 3, 1, 23, 12).timestamp()
    assert begin_of("12:00", noon) == noon
    assert begin_of("2026-03-02T03:12:00Z", noon) == datetime.fromisoformat("2026-03-02T03:12:00+00:00").timestamp()
    for wrong in ("25:00", "03:12 h", "", "yesterday"):
        with pytest.raises(ConfigurationError, match="--since"):
            begin_of(wrong, noon)


def test_an_account_that_is_not_written_yet_or_not_kept_any_more_says_so(stand: Stand) -> None:
    stand.add("new")
    assert "It has not run yet." in stand("streams", "explain", "new")
    stand.hold("runs")
    said = words(stand("streams", "explain", "runs"))
    assert f"run 1 by {AGENT} nothing is written yet: its agent writes its journal every 5 s" in said
    stand.hold("old", fence=9)
    stand.account("old", 8, [(0, "leased", "claimed"), (1, "release", "stop")])
    said = words(stand("streams", "explain", "old"))
    assert "5 earlier runs: --runs shows up to 100" in said
    assert said.index("runs 6 to 7 nothing is left") < said.index("run 8 by") < said.index("run 10 by")
    assert "nothing is written yet" in said.partition("run 10 by")[2]
    assert "nothing is written yet" in stand("streams", "explain", "old", "--since", "2026-03-02T03:13")


def test_an_account_of_which_the_beginning_is_lost_says_so(stand: Stand) -> None:
    stand.hold("ticks")
    stand.account("ticks", 1, [(number, "live", f"{number}") for number in range(MOVES_KEPT)])
    assert f"only its last {MOVES_KEPT} moves are kept" in stand("streams", "explain", "ticks")


def test_a_long_reason_wraps_inside_its_column(stand: Stand, columns: Callable[[int], None]) -> None:
    stand.hold("ticks", task_id="ticks")
    reason = "network ([Errno 113] no route to host) " + "and more words about it " * 7
    stand.account("ticks", 1, [(0, "leased", "[bold]odd[/bold]"), (1, "backoff", reason.strip())])
    columns(80)
    said = stand("streams", "explain", "ticks")
    assert widest(said) <= 80
    assert "[bold]odd[/bold]" in said
    rest = said.splitlines()[said.splitlines().index(next(x for x in said.splitlines() if "backoff" in x)) + 1]
    assert rest.startswith(" " * 20) and reason.strip() in words(said)


def test_a_task_that_is_no_stream_is_refused_with_the_command_for_it(stand: Stand) -> None:
    put(stand.store, "batch", fence=1)
    assert stand("streams", "explain", "batch", code=1) == ""
    assert "is no stream: see `thunderagent show batch`" in words(stand.said)
    stand("streams", "explain", "nothing", code=1)
    assert "there is no task" in stand.said
    put(stand.store, "by-name")
    stand("streams", "explain", "by-name", code=1)
    assert "is known as a stream once an agent has it" in words(stand.said)


def test_a_cursor_that_was_written_by_hand_keeps_nobody_from_looking(stand: Stand) -> None:
    lease = stand.hold("ticks")
    stand.apply(replace(writes.renew(lease, now=0.0, until=2e9), set={"lastSeq": "900"}))
    for command in (["streams", "list"], ["streams", "explain", "ticks"], ["show", "ticks"]):
        assert "'900', which is no cursor" in stand(*command)


# show, agents, and a real agent


def test_show_tells_of_the_cursor_and_of_a_handoff(stand: Stand) -> None:
    now = stand.store.clock.now()
    lease = stand.at(stand.hold("ticks"), seq=5, epoch="e1", token="abc")
    stand.apply(writes.offer(lease, now=now, until=now + 900))
    said = words(stand("show", "ticks"))
    assert "wanted STARTED" in said
    assert "cursor 5 (epoch e1), token abc" in said
    assert f"handoff OFFERED by {AGENT} until" in said
    assert "thunderagent streams explain ticks" in said
    put(stand.store, "batch")
    assert "streams explain" not in stand("show", "batch")


def test_agents_tell_how_many_streams_they_hold_and_older_ones_nothing(
    stand: Stand, columns: Callable[[int], None]
) -> None:
    info = {"queues": {"default": 10}, "running": {}, "health": {"heartbeat_alive": True, "store_answers": True}}
    stand.store.announce(OTHER, info, lives_s=60)
    assert "streams" not in stand("agents")
    stand.store.announce(AGENT, {**info, "streams": {"held": 12, "max": 700, "connections": 11}}, lives_s=60)
    for width in (80, 200):
        columns(width)
        lines = {line.split()[0]: words(line) for line in stand("agents").splitlines()}
        assert "12/700, 11 connected ok" in lines[AGENT]
        assert lines[OTHER].endswith("default 0/10 ok")


@contextmanager
def feeding() -> Iterator[ChaosServer]:
    """A feed in a loop of its own."""
    loop, ready, stopped = asyncio.new_event_loop(), threading.Event(), asyncio.Event()
    servers: list[ChaosServer] = []

    async def serve() -> None:
        async with ChaosServer(from_start=True) as server:
            server.publish_many(5)
            servers.append(server)
            ready.set()
            await stopped.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    try:
        assert ready.wait(LONG_S)
        yield servers[0]
    finally:
        loop.call_soon_threadsafe(stopped.set)
        thread.join(LONG_S)
        loop.close()


async def subscribe(connection: Connection, cursor: Cursor | None) -> None:
    since = (cursor.seq, cursor.epoch) if cursor else (None, None)
    await connection.send_json({"op": "subscribe", "since": since[0], "epoch": since[1]})
    await connection.expect(op="subscribed")


@stream("ticks.follow", lease_s=30.0, heartbeat_s=0.1)
async def follow(ctx: StreamContext, payload: dict[str, str]) -> None:
    feed = ctx.connect(
        payload["url"], decode=json.loads, on_open=subscribe, position=lambda tick: Cursor(tick["seq"], tick["epoch"])
    )
    async for tick in feed:
        ctx.checkpoint(seq=tick["seq"], epoch=tick["epoch"])


@pytest.mark.slow
def test_a_stream_of_a_real_agent_is_listed_explained_stopped_and_started(stand: Stand) -> None:
    with feeding() as feed, serving(follow, store=stand.store.sibling()) as stage:
        stand.client.enqueue(follow, {"url": feed.url}, task_id="ticks")
        stage.agent.wake()

        def until(command: Sequence[str], says: str) -> str:
            deadline = time.monotonic() + LONG_S
            while says not in (said := words(stand(*command))):
                assert time.monotonic() < deadline, said
                threading.Event().wait(0.05)
            return said

        until(["streams", "list"], f"RUNNING ticks.follow 5 (epoch {feed.epoch})")
        assert f"by {stage.agent.name}" in stand("streams", "list")
        assert "live connected in" in until(["streams", "explain", "ticks"], "live connected in")
        said = stand("streams", "stop", "ticks", "--wait", str(LONG_S)).splitlines()
        assert said[-1] == f"ticks is stopped, its cursor is 5 (epoch {feed.epoch})"
        assert "goes on behind 5" in stand("streams", "start", "ticks")
        stage.agent.wake()
        until(["streams", "list"], f"by {stage.agent.name}")
        stage.stop()  # writes what is left to tell
        told = words(stand("streams", "explain", "ticks"))
        assert "stop The stream was stopped" in told.partition("run 2")[0]
