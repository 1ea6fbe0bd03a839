"""The journal of a stream: a row for each run, which tells why it did what it did."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.engine import Rejecting, put
from tests.support.stands import eventually
from tests.support.streams import FeedThread, Fleet, Log, Watched, fleet, follower, lease_of, watched_memory
from thunderagent.agent import housekeeping
from thunderagent.model import events
from thunderagent.model.errors import StoreUnavailable, StreamFailed
from thunderagent.model.task import Status
from thunderagent.stores.sqlite.engine import MEMORY, SqliteEngine
from thunderagent.stores.tasks import TaskStore
from thunderagent.streams.connection.ending import CAUGHT_UP
from thunderagent.streams.cursor import Cursor
from thunderagent.streams.journal import (
    COUNTS_S,
    GAPS_KEPT,
    MOVES_KEPT,
    REASON_BYTES,
    Journal,
    Link,
    Missed,
    journal_id,
    keep_journals,
    read_cursor,
    read_journals,
    read_links,
)
from thunderagent.testing.chaos import Close, Feed
from thunderagent.testing.faulty_engine import Fault


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[Fleet]:
    with fleet(tmp_path) as made:
        yield made


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Journals are kept without delay."""
    monkeypatch.setattr(housekeeping, "JOURNAL_S", 0.1)


def missed(at: float = 1.0) -> Missed:
    return Missed(at, "missing", {"seq": 1}, {"seq": 5}, 3, "continue")


def keep(store: TaskStore, journal: Journal, **counts: int) -> None:
    info = journal.take(1.0, **counts)
    assert info is not None
    keep_journals(store, {journal.journal_id: info}, keep_s=60.0)


def test_an_account_that_the_store_never_takes_holds_up_none_of_the_others() -> None:
    engine = Rejecting(SqliteEngine(MEMORY), lambda write: write.task_id == journal_id("a", 1))
    infos = {journal_id(name, 1): {"agent": "me"} for name in ("a", "b")}
    keep_journals(TaskStore(engine), infos, keep_s=60.0)
    assert list(engine.get(list(infos))) == [journal_id("b", 1)]


# The account


def test_there_is_nothing_to_write_until_something_happens() -> None:
    journal = Journal("s", 1, "me")
    assert journal.take(1.0, handled=1000) is None
    journal.moved(1.0, "live")
    assert journal.take(1.0, handled=1000) is not None
    assert journal.take(1.0, handled=2000) is None
    journal.missed(missed())
    info = journal.take(1.0, handled=2000)
    assert info is not None
    assert (info["handled"], len(info["moves"]), len(info["gaps"])) == (2000, 1, 1)
    journal.keep()
    assert journal.take(1.0, handled=2000) == info


def test_other_counts_alone_are_kept_once_in_a_while() -> None:
    journal = Journal("s", 1, "me")
    journal.moved(1.0, "leased")
    assert journal.take(100.0, handled=1) is not None
    assert journal.take(99.0 + COUNTS_S, handled=2) is None
    info = journal.take(100.0 + COUNTS_S, handled=2)
    assert info is not None and info["handled"] == 2
    assert journal.take(100.0 + 3 * COUNTS_S, handled=2) is None, "nothing is new"


def link_of(*moves: tuple[float, str, str], wait_s: float = 5.0) -> Link | None:
    journal = Journal("s", 1, "me")
    for at, state, reason in moves:
        journal.moved(at, state, reason, feed="a feed", wait_s=wait_s)
    return journal.link


AWAY = [(1.0, "resolving", ""), (2.0, "connecting", ""), (3.0, "backoff", "http 503 (no); next attempt in 5 s")]
REASON = "while connecting: http 503 (no)"


@pytest.mark.parametrize(
    ("moves", "link"),
    [
        ([], None),
        (AWAY[:2], Link(False, 1.0)),
        (AWAY, Link(False, 1.0, REASON, 8.0)),
        ([*AWAY, (8.0, "resolving", "")], Link(False, 1.0, REASON)),
        ([*AWAY, (8.0, "resolving", ""), (9.0, "live", "")], Link(True, 9.0)),
        ([(9.0, "live", ""), (10.0, "paused", "slow"), (11.0, "live", CAUGHT_UP)], Link(True, 9.0)),
        ([(9.0, "live", ""), (20.0, "backoff", "closed; next attempt in 5 s")], Link(False, 20.0, "closed", 25.0)),
        ([(9.0, "live", ""), (10.0, "live", "replaced the connection")], Link(True, 10.0)),
        ([(9.0, "live", ""), (10.0, "closed", "")], None),
        ([(9.0, "live", ""), (10.0, "failed", "http 404")], None),
    ],
)
def test_whether_a_stream_is_connected_is_read_off_its_moves(
    moves: list[tuple[float, str, str]], link: Link | None
) -> None:
    assert link_of(*moves) == link


def test_of_several_feeds_the_one_that_is_away_longest_is_told() -> None:
    journal = Journal("s", 1, "me")
    for feed, at in (("a", 1.0), ("b", 2.0), ("c", 3.0)):
        journal.moved(at, "live", feed=feed)
    assert journal.link == Link(True, 3.0)
    journal.moved(4.0, "backoff", "b is away", feed="b")
    journal.moved(5.0, "backoff", "c is away", feed="c")
    assert journal.link == Link(False, 4.0, "b is away", 4.0)
    journal.moved(6.0, "leased", "a move of the run changes nothing")
    journal.moved(6.0, "closed", feed="b")
    assert journal.link == Link(False, 5.0, "c is away", 5.0)


def test_the_link_is_kept_with_the_account_and_a_strange_one_hides_no_account() -> None:
    store = TaskStore(SqliteEngine(MEMORY))
    journal = Journal("s", 1, "me")
    for at, state, reason in AWAY:
        journal.moved(at, state, reason, feed="a feed", wait_s=5.0)
    keep(store, journal, unsent=3)
    for name, link in (
        ("older", {}),
        ("by-hand", {"link": {"since": "noon"}}),
        ("newer", {"link": {"since": 1, "x": 2}}),
    ):
        keep_journals(store, {journal_id(name, 1): {"agent": "me", **link}}, keep_s=60.0)
    names = ("s", "older", "by-hand", "newer", "none")
    tasks = [replace(lease_of().task, task_id=name, kind="stream", fence=1, status=Status.RUNNING) for name in names]
    assert read_links(store, tasks) == {"s": Link(False, 1.0, REASON, 8.0), "newer": Link(False, 1.0)}
    assert read_links(store, [replace(task, status=Status.DONE) for task in tasks]) == {}
    [run] = read_journals(store, tasks[0], runs=1)
    assert (run.link, run.unsent) == (Link(False, 1.0, REASON, 8.0), 3)
    assert [read_journals(store, task, runs=1)[0].link for task in tasks[1:3]] == [None, None]


def test_a_long_reason_is_cut_before_the_next_attempt() -> None:
    journal = Journal("s", 1, "me")
    journal.moved(1.0, "backoff", f"{'long ' * 200}; next attempt in 5.0 s")
    info = journal.take(1.0)
    assert info is not None
    assert info["moves"][0][2].endswith("…; next attempt in 5.0 s")
    assert len(info["moves"][0][2].encode()) <= REASON_BYTES + 30


def test_an_attempt_is_one_move_that_tells_how_far_it_came_and_pauses_in_a_row_are_one() -> None:
    journal = Journal("s", 1, "me")
    for at, ending, reason in ((10.0, "backoff", "refused; next attempt in 1 s"), (20.0, "live", "")):
        journal.moved(at, "resolving")
        journal.moved(at + 0.5, "connecting")
        journal.moved(at + 1.5, ending, reason)
    for at in (30.0, 40.0, 95.0, 157.0):
        journal.moved(at, "paused", "slow")
        journal.moved(at + 1, "live", CAUGHT_UP)
    journal.moved(160.0, "resolving")
    info = journal.take(1.0)
    assert info is not None
    assert info["moves"] == [
        [11.5, "backoff", "while connecting: refused; next attempt in 1 s"],
        [21.5, "live", "connected in 1.5 s"],
        [30.0, "paused", "slow"],
        [96.0, "live", CAUGHT_UP],
        [157.0, "paused", "slow"],
        [158.0, "live", CAUGHT_UP],
        [160.0, "resolving", ""],
    ], "the step that goes on is there"
    journal.moved(161.0, "connecting")
    journal.moved(162.0, "closed")
    info = journal.take(2.0)
    assert info is not None
    assert info["moves"][-2:] == [[161.0, "connecting", ""], [162.0, "closed", ""]], "how far it came"


def test_it_keeps_the_last_moves_and_gaps_and_cuts_long_reasons() -> None:
    journal = Journal("s", 1, "me")
    for number in range(200):
        journal.moved(float(number), "backoff", "é" * 500)
        journal.missed(missed(float(number)))
    info = journal.take(1.0)
    assert info is not None
    assert [move[0] for move in info["moves"]] == [float(one) for one in range(200 - MOVES_KEPT, 200)]
    assert [gap["at"] for gap in info["gaps"]] == [float(one) for one in range(200 - GAPS_KEPT, 200)]
    assert all(len(move[2].encode()) <= REASON_BYTES for move in info["moves"])


# The row


def test_what_was_kept_is_read_again_run_by_run() -> None:
    store, engine = watched_memory()
    for fence in (1, 2, 4):
        journal = Journal("s", fence, f"agent-{fence}")
        journal.moved(10.0 + fence, "live")
        journal.missed(missed())
        keep(store, journal, connects=fence, handled=10)
    task = put(store, "s", fence=4)
    runs = read_journals(store, task, runs=3)
    assert [(run.fence, run.agent, run.connects) for run in runs] == [(2, "agent-2", 2), (4, "agent-4", 4)]
    assert (runs[0].moves[0].at, runs[0].moves[0].state, runs[0].handled) == (12.0, "live", 10)
    assert runs[0].gaps[0] == missed()
    assert engine.page("PENDING", limit=10).entries[0].task_id == "s"


def test_the_row_has_no_status_and_goes_away_by_itself() -> None:
    store, engine = watched_memory()
    journal = Journal("s", 1, "me")
    journal.moved(1.0, "live")
    now = store.clock.now()
    keep(store, journal)
    row = engine.get([journal_id("s", 1)])[journal_id("s", 1)]
    assert set(row) == {"taskId", "info", "expireAt", "updatedAt"}
    assert row["expireAt"] == pytest.approx(now + 60, abs=2)
    assert engine.expire(now + 120) == 1


def test_one_row_is_written_again_and_a_new_one_put() -> None:
    store, engine = watched_memory()
    journal = Journal("s", 1, "me")
    for number in range(3):
        journal.moved(float(number), "live")
        keep(store, journal)
    [run] = read_journals(store, put(store, "s", fence=1), runs=5)
    assert len(run.moves) == 3
    assert engine.verbs_of(journal_id("s", 1)) == ["journal"] * 3


@pytest.mark.parametrize("verb", ["journal", "put"])
def test_a_store_that_does_not_answer_is_told(verb: str) -> None:
    store, engine = watched_memory()
    journal = Journal("s", 1, "me")
    journal.moved(1.0, "live")
    engine.fail(verb, Fault.THROTTLED)
    with pytest.raises(StoreUnavailable):
        keep(store, journal)
    journal.keep()
    keep(store, journal)
    assert engine.get([journal_id("s", 1)])


def test_nothing_new_asks_for_nothing() -> None:
    store, engine = watched_memory()
    keep_journals(store, {}, keep_s=60.0)
    assert engine.batches == []


# The cursor of the row


def test_a_cursor_that_is_none_is_told_from_none_at_all() -> None:
    store, _ = watched_memory()
    assert read_cursor(put(store, "none")) is None
    assert read_cursor(put(store, "good", last_seq={"seq": 3, "epoch": 2})) == Cursor(3, 2)
    with pytest.raises(StreamFailed, match=r"lastSeq of the row is no cursor .*: correct it or remove it"):
        read_cursor(put(store, "odd", last_seq={"seq": "x"}))


# In an agent


def journals(engine: Watched) -> list[Any]:
    return [write for batch in list(engine.batches) for write in batch if write.verb == "journal"]


def more_beats(engine: Watched, task_id: str) -> None:
    """Wait for two more heartbeats."""
    number = engine.verbs_of(task_id).count("renew")
    eventually(lambda: engine.verbs_of(task_id).count("renew") > number + 1)


@pytest.mark.slow
def test_a_run_is_told_with_its_reasons_and_its_gaps(agents: Fleet, often: None) -> None:
    log = Log()
    with FeedThread(Feed(skip={2}, ending=Close(code=1012, reason="deploy", after_messages=2)), Feed()) as feed:
        follow = follower(log)
        stage = agents.add(follow)
        task = agents.client.enqueue(follow, {"url": feed.url})
        feed.publish(3)
        log.until(3)
        eventually(
            lambda: any(move.state == "backoff" for run in agents.client.streams.runs(task) for move in run.moves)
        )
        [run] = agents.client.streams.runs(task)
        [backoff] = [move for move in run.moves if move.state == "backoff"]
        assert backoff.reason.startswith("closed 1012 (deploy); next attempt in ")
        [gap] = run.gaps
        assert (gap.cause, gap.missed, gap.after["seq"], gap.before["seq"]) == ("missing", 1, 1, 3)
        [told] = stage.record.of(events.StreamGap)
        assert told.gap == "1 messages after 1 (missing)"
        assert (run.fence, run.agent) == (1, stage.agent.name)
        assert run.moves[0].state == "leased"
        assert run.moves[0].reason == "claimed"


@pytest.mark.slow
def test_heartbeats_and_messages_write_no_journal(agents: Fleet, often: None) -> None:
    log = Log()
    with FeedThread() as feed:
        follow = follower(log)
        agents.add(follow)
        task = agents.client.enqueue(follow, {"url": feed.url})
        feed.publish(1)
        log.until(1)
        engine = agents.engines[0]
        eventually(lambda: any(one.state == "live" for run in agents.client.streams.runs(task) for one in run.moves))
        written = len(journals(engine))
        for _ in range(5):
            log.until(feed.publish(10))
            more_beats(engine, task.id)
        assert len(journals(engine)) == written
        assert written <= 2 * len({write.set["info"]["moves"][-1][1] for write in journals(engine)}) + 1


@pytest.mark.slow
def test_moves_that_come_fast_are_written_together_every_few_seconds(agents: Fleet) -> None:
    log = Log()
    assert housekeeping.JOURNAL_S == 5.0
    with FeedThread(Feed(ending=Close(after_messages=1))) as feed:
        follow = follower(log)
        agents.add(follow)
        agents.client.enqueue(follow, {"url": feed.url})
        feed.publish(20)
        log.until(10)
        assert len(journals(agents.engines[0])) <= 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "state", "reason"),
    [
        ("stop", "stop", "The stream was stopped; it can be started again."),
        ("cancel", "close", "cancelled"),
        ("drain", "release", "the agent is stopping"),
    ],
)
def test_the_last_entry_tells_how_the_run_has_ended(
    agents: Fleet, often: None, end: str, state: str, reason: str
) -> None:
    log = Log()
    with FeedThread() as feed:
        follow = follower(log)
        stage = agents.add(follow)
        task = agents.client.enqueue(follow, {"url": feed.url})
        feed.publish(2)
        log.until(2)
        if end == "drain":
            stage.stop()
        else:
            {"stop": agents.client.streams.stop, "cancel": agents.client.cancel}[end](task)

        def told() -> bool:
            return [(run.moves[-1].state, run.moves[-1].reason) for run in agents.client.streams.runs(task)] == [
                (state, reason)
            ]

        eventually(told)
        [run] = agents.client.streams.runs(task)
        assert (run.connects, run.handled) == (1, 2)
        assert stage.agent._in_flight.closed == [] or end == "drain"


@pytest.mark.slow
def test_an_error_of_the_handler_is_the_last_entry_of_its_run(agents: Fleet, often: None) -> None:
    log = Log()

    async def each(ctx: Any, message: Any) -> None:
        if ctx.fence == 1:
            raise RuntimeError("boom")

    with FeedThread() as feed:
        follow = follower(log, each=each)
        agents.add(follow)
        task = agents.client.enqueue(follow, {"url": feed.url})
        feed.publish(1)
        log.until(1, fence=2)
        eventually(lambda: len(agents.client.streams.runs(task)) == 2)
        first = agents.client.streams.runs(task)[0]
        assert (first.moves[-1].state, first.moves[-1].reason) == ("retry", "RuntimeError: boom")


@pytest.mark.slow
def test_a_run_that_was_handed_over_says_so(agents: Fleet, often: None) -> None:
    log = Log()
    with FeedThread() as feed:
        follow = follower(log, exclusive=False)
        old = agents.add(follow)
        task = agents.client.enqueue(follow, {"url": feed.url})
        feed.publish(1)
        log.until(1)
        agents.add(follow).record.wait(events.AgentStarted)
        old.stop()
        log.until(feed.publish(1), fence=2)
        first = agents.client.streams.runs(task)[0]
        assert (first.fence, first.moves[-1].state) == (1, "handed over")


@pytest.mark.slow
def test_what_could_not_be_written_is_written_with_the_next(agents: Fleet, often: None) -> None:
    log = Log()
    with FeedThread() as feed:
        follow = follower(log)
        stage = agents.add(follow, start=False)
        engine = agents.engines[0]
        engine.fail("journal", *[Fault.THROTTLED] * 4)
        stage.start()
        task = agents.client.enqueue(follow, {"url": feed.url})
        feed.publish(1)
        log.until(1)
        agents.client.streams.stop(task)
        stage.record.wait(events.StoreFailed, 2, where=lambda event: event.during == "journals")
        eventually(lambda: [run.moves[-1].state for run in agents.client.streams.runs(task)] == ["stop"])
        assert agents.row(task).status is Status.DONE


@pytest.mark.slow
def test_what_waits_for_a_store_that_takes_no_journals_is_bounded(
    agents: Fleet, often: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from thunderagent.agent import in_flight

    monkeypatch.setattr(in_flight, "CLOSED_KEPT", 3)
    log = Log()
    with FeedThread() as feed:
        follow = follower(log)
        stage = agents.add(follow, start=False)
        agents.engines[0].chance("journal", Fault.THROTTLED, 1.0)
        stage.start()
        for number in range(8):
            task = agents.client.enqueue(follow, {"url": feed.url}, task_id=f"s{number}")
            stage.record.wait(events.TaskStarted, number + 1)
            agents.client.streams.stop(task)
            stage.end_of(task)
        assert len(stage.agent._in_flight.closed) <= 4


@pytest.mark.slow
def test_a_late_owner_writes_into_its_own_row(agents: Fleet, often: None) -> None:
    log = Log()
    with FeedThread() as feed:
        follow = follower(log, lease_s=1.5)
        first = agents.add(follow)
        task = agents.client.enqueue(follow, {"url": feed.url})
        feed.publish(1)
        log.until(1)
        first.store.engine.outage()  # type: ignore[attr-defined] # a Watched
        second = agents.add(follow)
        second.record.wait(events.TaskTakenOver)
        log.until(feed.publish(1), fence=2)
        first.store.engine.calm()  # type: ignore[attr-defined] # a Watched
        first.record.wait(events.LeaseLost)
        eventually(lambda: [run.moves[-1].state for run in agents.client.streams.runs(task)][:1] == ["lost"])
        eventually(lambda: len(agents.client.streams.runs(task)) == 2)
        runs = agents.client.streams.runs(task)
        assert [(run.fence, run.agent) for run in runs] == [(1, first.agent.name), (2, second.agent.name)]
        assert runs[1].moves[0].reason == "taken over from a lost agent"
