"""A task in words: every state that an operator may meet at night, staged, and what is said of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from typer.testing import CliRunner

from tests.support.engine import claimed, put
from tests.support.stands import eventually
from thunderagent.cli import app
from thunderagent.cli.output import notes, out
from thunderagent.client import Client
from thunderagent.model.task import Candidate, Lane, Lease, Status, Task
from thunderagent.model.writes import tasks as writes
from thunderagent.ops.explain import Explanation, explain, similar_ids
from thunderagent.settings import Settings
from thunderagent.stores import open_store
from thunderagent.stores.tasks import Wanted

AGENT: Final = "host-1:4711:0a1b2c3d"


class Stand:
    """A store in a file, its client, and the commands on it in this process."""

    def __init__(self, url: str) -> None:
        settings = Settings(store=url)
        self.store = open_store(settings)
        self.client = Client(self.store, settings)
        self.said = ""

    def __call__(self, *arguments: str, code: int = 0) -> str:
        done = CliRunner().invoke(app, [*arguments, "--store", self.store.engine.url])
        assert done.exit_code == code, (done.exit_code, done.output, done.exception)
        self.said = done.stderr
        return done.stdout

    def json(self, *arguments: str) -> Any:
        return json.loads(self(*arguments, "--json"))

    def agent(self, *jobs: str, name: str = AGENT, queue: str = "default") -> None:
        health = {"heartbeat_alive": True, "store_answers": True, "draining": False}
        info: dict[str, Any] = {"queues": {queue: 2}, "running": {queue: 0}, "jobs": list(jobs), "health": health}
        self.store.announce(name, info, lives_s=60.0)

    def task(self, name: str = "a") -> Task:
        return self.client.get(name)

    def explained(self, name: str = "a") -> Explanation:
        return explain(self.store, self.task(name))

    def fail(self, lease: Lease, error: str, *, due: float | None = None) -> None:
        now = self.store.clock.now()
        [done] = self.store.settle([writes.retry(lease, due=now if due is None else due, error=error, now=now)])
        assert done.accepted

    def claim(self, name: str = "a", *, owner: str = AGENT, lease_s: float = 300.0) -> Lease:
        task = self.task(name)
        seen = Candidate(task.task_id, task.status_value, task.created_at, task.job, task.kind)
        [lease] = self.store.claim([Wanted(seen, lease_s)], owner=owner)
        return lease


@pytest.fixture
def columns(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    def make(width: int) -> None:
        for console in (out, notes):
            monkeypatch.setattr(console, "_width", width)
            monkeypatch.setattr(console, "_height", 50)

    return make


@pytest.fixture
def stand(tmp_path: Path, columns: Callable[[int], None]) -> Iterator[Stand]:
    columns(200)
    made = Stand(f"sqlite:///{tmp_path}/tasks.db")
    yield made
    made.client.close()


def commands(found: Explanation) -> list[str | None]:
    return [one.command for one in found.next]


def texts(found: Explanation) -> str:
    return "\n".join(one.text for one in found.next)


def happened(found: Explanation) -> str:
    return "\n".join(one.text for one in found.happened)


def test_a_task_that_waits_for_its_turn(stand: Stand) -> None:
    put(stand.store)
    stand.agent("test.job")
    found = stand.explained()
    assert found.summary == "a is a task of the job test.job in the queue default: it waits to run, attempt 1"
    assert found.why == ("it is ready: an agent takes it with its next poll",)
    assert [one.text for one in found.happened] == ["it was enqueued for the queue default"]
    assert commands(found) == ["thunderagent top --once", "thunderagent cancel a"]


def test_a_task_that_no_agent_can_run(stand: Stand) -> None:
    put(stand.store, lane=Lane("reports"))
    assert commands(stand.explained())[0] == "thunderagent run JOBS"
    stand.agent("test.job")
    assert stand.explained().why == ("no live agent serves the queue reports",)
    assert commands(stand.explained())[0] == "thunderagent run JOBS --queue reports"
    stand.agent("another.job", name="host-2:1:a", queue="reports")
    assert "has the job test.job" in stand.explained().why[0]


def test_a_task_that_is_due_later(stand: Stand) -> None:
    stand.agent("test.job")
    put(stand.store, created_at=stand.store.clock.now() + 3600)
    found = stand.explained()
    assert "it is due at" in found.why[0]
    assert "it runs at" in texts(found)
    assert commands(found)[-1] == "thunderagent cancel a"


def test_a_task_whose_queue_is_paused(stand: Stand) -> None:
    stand.agent("test.job")
    put(stand.store)
    stand.client.pauses.pause(queue="default", reason="database upgrade")
    stand.client.pauses.pause(job="test.job", for_s=600)
    found = stand.explained()
    assert "its queue default is paused" in found.why[0]
    assert "thunderagent resume queue default" in commands(found)
    assert "thunderagent resume job test.job" in commands(found)
    assert "until that is resumed" in texts(found)


@pytest.mark.parametrize(
    ("policy", "says"), [("fail", "it fails too"), ("cancel", "it is closed"), ("run", "whatever the end")]
)
def test_a_task_that_waits_for_others_and_those_that_wait_for_it(stand: Stand, policy: str, says: str) -> None:
    put(stand.store, "load")
    child = stand.client.enqueue("report.build", {}, task_id="child", depends_on=["load"], on_parent_failure=policy)
    found = explain(stand.store, child)
    assert [(one.task_id, one.status, one.is_waited_for) for one in found.parents] == [("load", Status.PENDING, True)]
    assert says in texts(found)
    assert commands(found)[0] == "thunderagent explain load"
    assert [one.task_id for one in stand.explained("load").children] == ["child"]
    shown = stand("explain", "child")
    assert "still waited for" in shown
    assert "it waits for load (PENDING), which it depends on" in shown


def test_children_beyond_the_first_ten_are_counted(stand: Stand) -> None:
    put(stand.store, "load")
    for number in range(12):
        stand.client.enqueue("report.build", {}, task_id=f"child-{number}", depends_on=["load"])
    found = stand.explained("load")
    assert (len(found.children), found.children_left_out) == (10, 2)
    assert "and 2 more" in stand("explain", "load")


def test_a_task_that_runs(stand: Stand) -> None:
    claimed(stand.store, owner=AGENT, lease_s=300.0)
    found = stand.explained()
    assert found.summary.endswith("it runs for 0 s, attempt 1")
    assert found.holding is not None
    assert (found.holding.owner, found.holding.beats, found.holding.is_over) == (AGENT, 0, False)
    assert found.holding.last_beat == pytest.approx(found.now, abs=5)
    assert "another takes it over when the lease ends" in texts(found)
    assert commands(found)[-1] == "thunderagent cancel a"
    assert f"held by {AGENT}" in stand("explain", "a")
    stand.client.cancel("a")
    found = stand.explained()
    assert "was asked to stop" in found.summary
    assert "learns that with the next heartbeat, within 100 s" in texts(found)


def test_a_task_whose_agent_was_killed_a_moment_ago(stand: Stand) -> None:
    claimed(stand.store, owner="host-1:1:lost", lease_s=300.0)
    why = "its agent host-1:1:lost is not among the live agents: when the lease ends in"
    assert [one[: len(why)] for one in stand.explained().why] == [why, "no agent is alive"]
    assert "no agent is alive" in stand("explain", "a")
    assert "no agent is alive" in stand("show", "a")


def test_a_task_whose_agent_was_lost(stand: Stand) -> None:
    lease = claimed(stand.store, owner="host-1:1:lost", lease_s=0.001)
    assert eventually(lambda: stand.store.clock.now() > (lease.task.lock_time or 0.0))
    found = stand.explained()
    assert found.holding is not None
    assert found.holding.is_over
    assert "the lease of host-1:1:lost ended" in found.why[0]
    assert "over for" in stand("explain", "a")
    [taken] = stand.store.take_over([(lease.task, 300.0)], owner=AGENT).leases
    found = stand.explained()
    assert "attempt 1 on host-1:1:lost: agent host-1:1:lost was lost" in happened(found)
    assert f"it started on {AGENT}, run 2" in happened(found)
    assert (found.task.fence, taken.fence) == (2, 2)


def test_a_task_that_failed_and_tries_again(stand: Stand) -> None:
    stand.agent("test.job")
    due = stand.store.clock.now() + 120
    error = 'Traceback (most recent call last):\n  File "x.py", line 1\nValueError: no rows for 2026-07'
    stand.fail(claimed(stand.store, owner=AGENT), error, due=due)
    found = stand.explained()
    assert "due again, after an error" in found.why[0]
    assert f"attempt 1 on {AGENT}: ValueError: no rows for 2026-07" in happened(found)
    assert "went back" not in happened(found)


def test_a_task_that_went_back_without_an_error(stand: Stand) -> None:
    put(stand.store)
    for number in range(2):
        lease, now = stand.claim(), stand.store.clock.now()
        write = writes.snooze(lease, due=now, now=now) if number else writes.release(lease, now=now)
        assert stand.store.settle([write])[0].accepted
    assert "2 times it went back to its queue without an error" in happened(stand.explained())
    stand.fail(stand.claim(), "broken")
    assert "2 times it went back" in happened(stand.explained())
    stand.claim()
    assert "2 times it went back" in happened(stand.explained())


def test_a_task_that_failed_for_good(stand: Stand) -> None:
    lease, now = claimed(stand.store, owner=AGENT), stand.store.clock.now()
    stand.store.settle([writes.fail(lease, error="broken on purpose", now=now, expire_at=now + 90 * 86400)])
    found = stand.explained()
    assert "it failed for good" in found.summary
    assert "it ended as FAILED after 0.0" in happened(found)
    assert ": broken on purpose" in happened(found)
    assert "thunderagent retry a" in commands(found)
    assert "its row is deleted at" in texts(found)


def test_a_task_that_succeeded(stand: Stand) -> None:
    lease, now = claimed(stand.store, owner=AGENT), stand.store.clock.now()
    stand.store.settle([writes.succeed(lease, result="{}", now=now, expire_at=now + 14 * 86400)])
    found = stand.explained()
    assert "it succeeded" in found.summary
    assert found.why == ()
    assert commands(found) == [None]


def test_a_task_that_was_closed(stand: Stand) -> None:
    put(stand.store)
    stand.client.cancel("a")
    found = stand.explained()
    assert found.summary.endswith("ago: cancelled")
    assert "thunderagent retry a" in commands(found)


def test_a_stream_comes_with_its_head_and_the_way_to_its_story(stand: Stand) -> None:
    claimed(stand.store, "ticks", kind="stream", lane=Lane("streams"), job="ticker.follow", owner=AGENT)
    found = stand.explained("ticks")
    assert "the stream of the job ticker.follow" in found.summary
    assert "thunderagent streams stop ticks" in commands(found)
    assert "thunderagent streams explain ticks" in commands(found)
    stand.client.streams.stop("ticks")
    assert "asked to stop" in stand.explained("ticks").summary


def test_the_trace_is_named(stand: Stand) -> None:
    trace = "4bf92f3577b34da6a3ce929d0e0e4736"
    put(stand.store, traceparent=f"00-{trace}-00f067aa0ba902b7-01")
    assert stand.explained().trace_id == trace
    assert trace in stand("explain", "a")


def test_ids_are_quoted_as_a_shell_takes_them(stand: Stand) -> None:
    put(stand.store, "it's [bold]odd[/bold]")
    assert (
        commands(stand.explained("it's [bold]odd[/bold]"))[-1] == """thunderagent cancel 'it'"'"'s [bold]odd[/bold]'"""
    )
    assert "[bold]odd[/bold]" in stand("explain", "it's [bold]odd[/bold]")


def test_a_row_made_by_hand_is_explained_as_far_as_it_goes(stand: Stand) -> None:
    row = {
        "taskId": "odd",
        "status": "FAILED",
        "createdAt": 1e100,
        "fence": 3,
        "job": "x",
        "errors": [{"at": "x"}],
    }
    stand.store.engine.put([row])
    found = stand.explained("odd")
    assert "attempt ?: no message" in happened(found)
    assert "1e+100" in stand("explain", "odd")


# Unknown ids


def test_an_id_that_is_not_there_is_answered_with_those_like_it(stand: Stand) -> None:
    for name in ("report-2026-07", "report-2026-08", "import-1"):
        put(stand.store, name)
    assert similar_ids(stand.store, "report-2026-7")[0] == "report-2026-07"
    assert set(similar_ids(stand.store, "report-20")) == {"report-2026-07", "report-2026-08"}
    assert similar_ids(stand.store, "quite-another") == []
    stand("explain", "reprot-2026-07", code=1)
    assert "there is no task 'reprot-2026-07' in sqlite:///" in stand.said
    assert "did you mean report-2026-07" in stand.said
    stand("explain", "quite-another", code=1)
    assert "it may have expired" in stand.said
    stand("explain", "agent:x", code=1)
    assert "ThunderAgent's own rows" in stand.said


def test_the_look_for_ids_like_it_is_bounded(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    for number in range(10):
        put(stand.store, f"a{number}", lane=Lane(f"queue-{number}"))
    real = stand.store.engine.page

    def page(value: str, *, limit: int, **more: Any) -> Any:
        asked.append(limit)
        return real(value, limit=limit, **more)

    monkeypatch.setattr(stand.store.engine, "page", page)
    similar_ids(stand.store, "nothing")
    assert len(asked) == 24
    assert max(asked) == 200


# The command


def test_the_json_form_has_the_facts_and_the_sentences(stand: Stand) -> None:
    claimed(stand.store, owner=AGENT)
    data = stand.json("explain", "a")
    assert set(data) == {
        "task",
        "now",
        "summary",
        "why",
        "lease",
        "happened",
        "parents",
        "children",
        "children_left_out",
        "trace_id",
        "run",
        "next",
    }
    assert data["task"]["taskId"] == "a"
    assert data["lease"]["owner"] == AGENT
    assert 200 < data["lease"]["ends_in_s"] <= 301
    assert data["next"][-1] == {"text": "to have its agent stop it", "command": "thunderagent cancel a"}


@pytest.mark.parametrize("width", [60, 80, 200])
def test_it_fits_every_terminal(stand: Stand, columns: Callable[[int], None], width: int) -> None:
    columns(width)
    put(stand.store, "load")
    stand.client.enqueue("report.build", {}, task_id="a-rather-long-id-of-a-task-that-waits", depends_on=["load"])
    lines = stand("explain", "a-rather-long-id-of-a-task-that-waits").splitlines()
    assert max(map(len, lines)) <= width
    assert "why" in lines
    assert "what comes next" in lines
