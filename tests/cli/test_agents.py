"""The commands on agents, and what the row of an agent tells."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from typer.testing import CliRunner

from tests.cli.test_pauses import AGENT, Stand, columns, words
from tests.support.billing import size
from tests.support.engine import Stage, a_job, serving
from tests.support.stands import eventually
from thunderagent.cli import app
from thunderagent.jobs.context import Context
from thunderagent.jobs.job import job
from thunderagent.model.writes.pauses import CONTROL_ID
from thunderagent.queue.pauses import drains_of
from thunderagent.stores.dynamo import expressions
from thunderagent.stores.sqlite.engine import SqliteEngine
from thunderagent.testing import FakeClock

__all__ = ("columns",)

FINE: Final = {"heartbeat_alive": True, "store_answers": True, "draining": False, "healthy": True}


@pytest.fixture
def stand(tmp_path: Path, columns: Callable[[int], None]) -> Iterator[Stand]:
    columns(80)
    stand = Stand(f"sqlite:///{tmp_path}/tasks.db")
    yield stand
    stand.client.close()


def introduce(stand: Stand, name: str = AGENT, health: dict[str, Any] | None = None, **info: Any) -> None:
    told = {"queues": {"default": 10, "reports": 3}, "running": {"default": 4}, "jobs": ["test.job"], "version": "9.8"}
    stand.store.announce(name, {**told, "health": {**FINE, **(health or {})}, **info}, lives_s=60.0)


# What an agent tells


@pytest.mark.slow
def test_an_agent_tells_what_it_has_done_since_its_start() -> None:
    @job("test.broken", max_retry=1)
    def broken(ctx: Context, payload: dict[str, Any]) -> None:
        raise ValueError("no")

    with serving(a_job(), broken) as stage:
        for _ in range(5):
            stage.end_of(stage.client.enqueue("test.job", {}))
        stage.end_of(stage.client.enqueue(broken, {}))
        row = announced(stage)
    assert row.info["counts"] == {"claimed": 7, "succeeded": 5, "retried": 1, "failed": 1}
    assert 5 < row.info["rss_mib"] < 10_000
    assert "retires" not in row.info


def test_an_agent_tells_how_far_the_clock_of_its_host_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage((a_job(),))
    assert "skew_s" not in announced(stage).info, "the clock of an embedded store is the host's"
    monkeypatch.setattr(stage.store.clock, "skew", -0.256, raising=False)
    assert announced(stage).info["skew_s"] == -0.26
    stage.store.engine.close()


def announced(stage: Stage) -> Any:
    stage.agent._housekeeping._announce()
    [row] = stage.client.agents.list()
    return row


def test_the_row_of_an_ordinary_agent_stays_under_a_kilobyte() -> None:
    """Each update is billed by the kilobyte of the whole row, four times a minute and agent."""
    queues = ["default", "reports", "mail", "imports", "webhooks"]
    jobs = [a_job(f"reports.build_{number:02}", queue=queues[number % 5]) for number in range(20)]
    with serving(*jobs, queues=dict.fromkeys(queues, 10)) as stage:
        names = ["claimed", "succeeded", "failed", "retried", "taken_over", "leases_lost", "claims_lost"]
        stage.agent._housekeeping._tally._counts.update(dict.fromkeys(names, 1_234_567))
        stage.agent.facts["http"] = "http://127.0.0.1:9464"
        announced(stage)
        [row] = stage.store.engine.get([f"agent:{stage.agent.name}"]).values()
    health = {**row["info"]["health"], "reasons": [], "notes": []}  # a busy machine makes it notice something at times
    info = {**row["info"], "health": health, "skew_s": -0.12}
    info.pop("boot", None)  # told in a file alone, where nothing is billed
    row = {**row, "info": info, "taskId": "agent:ip-10-12-134-201.eu-central-1.compute.internal:1234567:0a1b2c3d"}
    assert size(expressions.encode_row(row)) < 1024


# agents


def test_agents_are_listed_with_what_they_have_claimed_at_eighty_columns(stand: Stand) -> None:
    introduce(stand, counts={"claimed": 12345, "failed": 67}, skew_s=0.25)
    introduce(stand, "host-2:4712:4d3c2b1a")
    text = stand("agents")
    assert all(len(line) <= 80 for line in text.splitlines())
    lines = {line.split()[0]: words(line) for line in text.splitlines()}
    assert lines[AGENT] == f"{AGENT} default 4/10, reports 0/3 12345 67 ok"
    assert lines["host-2:4712:4d3c2b1a"].endswith("reports 0/3 ok"), "one of an older version tells nothing of that"


def test_a_wide_terminal_shows_more(stand: Stand, columns: Callable[[int], None]) -> None:
    columns(160)
    introduce(stand, counts={"claimed": 12345}, skew_s=-0.25)
    head, line = stand("agents").splitlines()
    assert words(head) == "agent since seen version slots in use claimed failed skew health"
    assert words(line).endswith("9.8 default 4/10, reports 0/3 12345 0 -0.25 s ok")


def test_an_agent_that_is_not_well_says_why_below(stand: Stand) -> None:
    introduce(stand, health={"healthy": False, "reasons": ["no [answer] of the store for 95 s"]})
    introduce(stand, "host-2:4712:4d3c2b1a", health={"draining": True}, retires="asked to drain: an upgrade")
    lines = stand("agents").splitlines()
    assert "not well" in lines[1]
    assert "draining" in lines[2]
    assert lines[3] == f"{AGENT} no [answer] of the store for 95 s"
    assert lines[4] == "host-2:4712:4d3c2b1a asked to drain: an upgrade"


def test_what_the_canary_of_an_agent_sees_down_stands_below(stand: Stand) -> None:
    down = {"state": "down", "ok": False, "step": "setState", "reason": "the error 'unavailable'"}
    introduce(stand, canary={"eu-central-1": {"state": "up", "ok": True}, "eu-west-1": down, "x": None})
    assert stand("agents").splitlines()[2:] == [f"{AGENT} canary: eu-west-1 is down, setState: the error 'unavailable'"]


def test_an_agent_that_was_asked_to_drain_for_no_reason_says_so_once(stand: Stand) -> None:
    introduce(stand, health={"draining": True}, retires="asked to drain")
    introduce(stand, "host-2:4712:4d3c2b1a", health={"draining": True}, retires="812 MiB of memory are resident")
    assert stand("agents").splitlines()[3:] == [
        f"{AGENT} asked to drain",
        "host-2:4712:4d3c2b1a drains: 812 MiB of memory are resident",
    ]


LONG: Final = "ip-10-0-3-7.eu-central-1.compute.internal:4711:0a1b2c3d"
STREAMS: Final = {"held": 700, "max": 700, "connections": 698}


@pytest.mark.parametrize(
    ("width", "name", "shown"),
    [
        (40, AGENT, "agent slots health"),
        (60, AGENT, "agent slots claimed failed health"),
        (80, AGENT, "agent slots in use claimed failed health"),
        (100, AGENT, "agent slots in use claimed failed streams health"),
        (200, AGENT, "agent since seen version slots in use claimed failed streams health"),
        (40, LONG, "agent slots health"),
        (60, LONG, "agent slots health"),
        (80, LONG, "agent slots health"),
        (100, LONG, "agent slots claimed failed streams health"),
        (120, LONG, "agent slots in use claimed failed streams health"),
        (200, LONG, "agent since seen version slots in use claimed failed streams health"),
    ],
)
def test_the_health_of_agents_is_there_on_every_terminal(
    stand: Stand, columns: Callable[[int], None], width: int, name: str, shown: str
) -> None:
    columns(width)
    introduce(stand, name, streams=STREAMS, counts={"claimed": 12345, "failed": 67})
    introduce(stand, "host-2:1:b", streams=STREAMS, counts={"claimed": 1}, health={"healthy": False})
    head, *lines = stand("agents").splitlines()
    assert words(head) == shown
    assert max(map(len, [head, *lines])) <= width
    assert [mark for line in lines for mark in ("ok", "not well") if mark in line] == ["ok", "not well"]
    assert "".join(line.split()[0] for line in lines[:-1]) == name, "a name is shown whole"


@pytest.mark.slow
def test_a_name_goes_over_several_lines_only_when_nothing_else_can_be_left_out(
    stand: Stand, columns: Callable[[int], None]
) -> None:
    name = "vm:21925:d4227d63"
    introduce(stand, name, queues={"default": 20}, streams={"held": 0}, counts={"claimed": 2, "failed": 1})
    for width in range(34, 100):
        columns(width)
        head, *lines = stand("agents").splitlines()
        assert len(lines) == 1 or (words(head) == "agent slots health" and width < 38), width
        assert max(map(len, [head, *lines])) <= width
        assert lines[0].split()[-1] == "ok", width


# Those that were lost


def test_agents_that_were_lost_are_listed_on_request(stand: Stand) -> None:
    introduce(stand, "host-2:1:b")
    lose(stand, AGENT, ago_s=125.0)
    assert AGENT not in stand("agents")
    text = stand("agents", "--all")
    lines = {line.split()[0]: words(line) for line in text.splitlines()}
    assert "lost" in [line.split()[-1] for line in text.splitlines() if line.startswith(AGENT)]
    assert lines["host-2:1:b"].endswith(" ok")
    heard, _, why = lines[AGENT].partition(" s ago: ")
    assert heard.rpartition(" ")[0] == f"{AGENT} was last seen 2 min"
    assert why == "it was killed, or does not reach the store"
    assert [(one["name"], one["lost"]) for one in stand.json("agents", "--all")] == [
        (AGENT, True),
        ("host-2:1:b", False),
    ]
    assert [one["name"] for one in stand.json("agents")] == ["host-2:1:b"]
    stand.store.sign_off("host-2:1:b")
    assert words(stand("agents")) == "no agents (thunderagent agents --all: also those that were lost)"


def test_the_row_of_a_lost_agent_stays_for_an_hour(stand: Stand) -> None:
    lose(stand, AGENT, ago_s=60 + 3500)
    engine, now = stand.store.engine, stand.store.clock.now()
    assert engine.expire(now) == 0
    assert engine.expire(now + 90) == 0
    assert engine.expire(now + 120) == 1
    assert stand.json("agents", "--all") == []


def lose(stand: Stand, name: str, *, ago_s: float) -> None:
    """An agent that was last heard of so long ago."""
    clock = stand.store.clock
    past = FakeClock(clock.now() - ago_s)
    assert isinstance(stand.store.engine, SqliteEngine)
    stand.store.engine.clock = past
    introduce(stand, name)
    stand.store.engine.clock = clock


def test_agents_may_be_had_as_json_and_none_is_an_answer(stand: Stand) -> None:
    assert stand("agents").startswith("no agents (")
    assert stand("agents", "--all") == "no agents\n"
    assert stand.json("agents") == []
    introduce(stand, counts={"claimed": 3})
    [one] = stand.json("agents")
    assert (one["name"], one["counts"], one["version"]) == (AGENT, {"claimed": 3}, "9.8")
    assert one["seen_at"] >= one["started_at"]


@pytest.mark.parametrize("told", [None, 5, "x", [], {"claimed": None}, {"claimed": {"a": 1}}])
def test_a_row_made_by_hand_stops_no_list(stand: Stand, told: Any, columns: Callable[[int], None]) -> None:
    columns(160)
    introduce(stand, counts=told, skew_s=told, streams=told, retires=told, version=told)
    introduce(stand, "host-2:1:a", health={"reasons": told}, counts={"claimed": 1})
    assert AGENT in stand("agents")
    stand.store.announce("host-3:1:a", {"queues": {"default": 1}, "health": told, "running": told}, lives_s=60)
    assert "host-3:1:a" in stand("agents")


# agents drain


def test_an_agent_is_asked_to_drain(stand: Stand) -> None:
    introduce(stand)
    assert stand("agents", "drain", "host-1", "--reason", "an upgrade") == f"{AGENT} is asked to drain\n"
    assert stand.json("agents", "drain", AGENT) == {"drains": [AGENT], "gone": False}
    row = stand.store.engine.get([CONTROL_ID])[CONTROL_ID]
    assert list(drains_of(row)) == [AGENT]
    assert row["info"][f"drain:{AGENT}"]["reason"] == "an upgrade"


def test_whoever_waits_is_told_that_it_is_gone_or_not(stand: Stand) -> None:
    introduce(stand)
    stand("agents", "drain", AGENT, "--wait", "0.05", code=1)
    assert f"not gone within 0.05 s: {AGENT} (4 tasks)" in words(stand.said)
    with serving(a_job(), store=stand.store.sibling(), poll_min_s=0.05) as stage:
        assert eventually(lambda: stage.agent.name in {one.name for one in stand.client.agents.list()})
        assert stand("agents", "drain", stage.agent.name, "--wait", "15") == f"{stage.agent.name} is gone\n"
        stage.join()


def test_all_agents_of_a_host_are_asked(stand: Stand) -> None:
    for name in (AGENT, "host-1:4712:aa", "host-10:1:aa"):
        introduce(stand, name)
    stand("agents", "drain", "host-1", code=2)
    assert "'host-1' is the beginning of 3 agents" in words(stand.said)
    assert stand.json("agents", "drain", "host-1", "--all-of-host")["drains"] == [AGENT, "host-1:4712:aa"]


def test_what_cannot_be_asked_says_what_can(stand: Stand) -> None:
    stand("agents", "drain", "host-1", code=1)
    assert "no agent is alive" in words(stand.said)
    introduce(stand)
    stand("agents", "drain", "host-2", code=1)
    assert f"alive are {AGENT}" in words(stand.said)
    for seconds in ("0", "-1", "1e9", "nan"):
        stand("agents", "drain", AGENT, "--wait", seconds, code=2)


def test_options_of_the_list_count_for_the_command_behind_it(stand: Stand) -> None:
    introduce(stand)
    done = CliRunner().invoke(app, ["agents", "--store", stand.url, "--json", "drain", AGENT])
    assert (done.exit_code, '"drains"' in done.stdout) == (0, True), done.output
