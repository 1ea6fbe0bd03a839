"""The commands for agents in several regions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from thunderagent.cli import app
from thunderagent.client import Client
from thunderagent.model.errors import ConfigurationError, NotAllowed
from thunderagent.ops.doctor.findings import State
from thunderagent.ops.doctor.regions import look_at_region
from thunderagent.ops.iam import Role, policy, resources
from thunderagent.regions.commands import Regions
from thunderagent.regions.grant import Record, RegionState, scope_id
from thunderagent.regions.writes import beat, first_row, vacate
from thunderagent.settings import Settings
from thunderagent.stores import open_engine, open_store

HERE, THERE = "eu-central-1", "eu-west-1"


class Stand:
    """An arbiter and a table in files, and the commands on them in this process."""

    def __init__(self, folder: Path) -> None:
        self.url = f"sqlite:///{folder}/arbiter.db"
        self.store_url = f"sqlite:///{folder}/tasks.db"
        self.engine = open_engine(self.url)
        self.said = ""

    def begin(self) -> None:
        now = self.engine.clock.now()
        self.engine.put([first_row("default", HERE, lease_s=30.0, by="host:1:ab", now=now)])

    def __call__(self, *arguments: str, code: int = 0, typed: str | None = None) -> str:
        given = ["region", *arguments, "--arbiter", self.url]
        done = CliRunner().invoke(app, given, input=typed, env={"THUNDERAGENT_STORE": self.store_url})
        assert done.exit_code == code, (done.exit_code, done.output, done.exception)
        self.said = done.stderr
        return done.stdout

    def json(self, *arguments: str) -> Any:
        return json.loads(self(*arguments, "--json"))

    def record(self) -> Record:
        return Record.from_row(self.engine.get([scope_id("default")])[scope_id("default")])


@pytest.fixture
def stand(tmp_path: Path) -> Stand:
    return Stand(tmp_path)


def test_without_an_arbiter_every_command_says_how_to_name_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for words in (["status"], ["failover", "--to", THERE, "--yes"], ["failback", "--yes"], ["freeze"], ["thaw"]):
        done = CliRunner().invoke(app, ["region", *words])
        assert done.exit_code == 2
        assert "THUNDERAGENT_REGION_ARBITER or --arbiter" in done.stderr and "infra/control.yaml" in done.stderr


def test_before_the_first_grant_there_is_nothing_to_order(stand: Stand) -> None:
    assert "no region was granted anything" in stand("status")
    assert stand.json("status")["record"] is None
    stand("failover", "--to", THERE, "--yes", code=1)
    assert "start agents first" in stand.said


def test_status_tells_who_has_the_grant_and_the_agents_of_both_regions(stand: Stand) -> None:
    stand.begin()
    store = open_store(Settings(store=stand.store_url))
    for name, region, state in (("a:1:x", HERE, "granted"), ("b:1:y", THERE, "passive")):
        store.announce(name, {"queues": {}, "region": {"name": region, "state": state, "epoch": 1}}, lives_s=60.0)
    store.announce("old:1:z", {"queues": {}}, lives_s=60.0)
    text = stand("status")
    assert "eu-central-1 has the grant of default, epoch 1" in text
    assert "agent a:1:x: eu-central-1, granted, epoch 1" in text and "agent b:1:y: eu-west-1, passive" in text
    assert "old:1:z" not in text and "renews it" not in text
    told = stand.json("status")
    assert told["record"]["holder"] == HERE and told["record"]["age_s"] < 5
    assert [one["agent"] for one in told["agents"]] == ["a:1:x", "b:1:y"]
    store.engine.close()


def test_status_warns_of_a_grant_that_nobody_renews_and_shows_a_table_that_does_not_answer(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = first_row("default", HERE, lease_s=30.0, by="host:1:ab", now=stand.engine.clock.now() - 100)
    stand.engine.put([row])
    stand.store_url = "dynamodb://Nowhere?region=eu-central-1&endpoint=http://127.0.0.1:9"
    monkeypatch.setattr("thunderagent.stores.dynamo.connection.client_config", _fast)
    assert "no agent there renews it" in stand("status")
    assert "the agents are not shown" in stand.said


def _fast(purpose: str, connections: int) -> Any:
    from botocore.config import Config

    return Config(connect_timeout=0.2, read_timeout=0.2, retries={"mode": "standard", "total_max_attempts": 1})


def test_a_move_in_good_order_asks_first_and_can_be_taken_back(stand: Stand) -> None:
    stand.begin()
    stand("failover", "--to", THERE, code=1, typed="n\n")
    assert stand.record().state is RegionState.ACTIVE
    assert "DRAINING: it goes to eu-west-1" in stand("failover", "--to", THERE, "--reason", "game day", typed="y\n")
    record = stand.record()
    assert (record.state, record.to, record.reason, record.drain_s) == (RegionState.DRAINING, THERE, "game day", 40.0)
    assert record.by and record.epoch == 1
    stand("failover", "--to", THERE, "--yes", code=1)
    assert "use --force, or wait" in stand.said
    assert "DRAINING" not in stand("stay")
    assert (stand.record().state, stand.record().to) == (RegionState.ACTIVE, None)
    stand("stay", code=1)
    assert "no move to take back" in stand.said


def test_a_move_by_force_says_when_it_ends(stand: Stand) -> None:
    stand.begin()
    assert "VACANT: eu-west-1 takes it 35 s after" in stand("failover", "--to", THERE, "--force", "--yes")
    assert stand.record().state is RegionState.VACANT
    assert stand.json("failover", "--to", HERE, "--force")["to"] == HERE  # and back, before it was taken


def test_a_move_to_a_region_without_agents_is_refused_as_a_slip_of_the_pen(stand: Stand) -> None:
    stand.begin()
    store = open_store(Settings(store=stand.store_url))
    for name, region in (("a:1:x", HERE), ("b:1:y", THERE)):
        store.announce(name, {"queues": {}, "region": {"name": region, "state": "passive", "epoch": 1}}, lives_s=60.0)
    store.engine.close()
    for words in (("failover", "--to", "eu-wset-1"), ("failover", "--to", "eu-wset-1", "--force")):
        stand(*words, "--yes", code=1)
        assert "no live agent is in the region 'eu-wset-1'" in stand.said
        assert "agents are in eu-central-1, eu-west-1" in stand.said
        assert stand.record().state is RegionState.ACTIVE
    stand("failback", "--to", "eu-wset-1", "--yes", code=1)
    stand("failover", "--to", THERE, "--yes")
    assert not stand.said and stand.record().to == THERE
    stand("failover", "--to", "eu-north-1", "--force", "--unseen", "--yes")
    assert stand.record().to == "eu-north-1"


def test_status_warns_of_a_grant_that_the_region_it_goes_to_does_not_take(stand: Stand) -> None:
    begun = first_row("default", HERE, lease_s=30.0, by="host:1:ab", now=stand.engine.clock.now() - 100)
    stand.engine.put([begun])
    record, now = stand.record(), stand.engine.clock.now()
    [answer] = stand.engine.apply([vacate(record, THERE, by="ops", reason="ordered", now=now - 60)])
    assert answer.won
    text = stand("status")
    assert "VACANT: eu-west-1 takes it 35 s after the order (it does not: are there agents" in text
    assert "renews it" not in text
    stand("failover", "--to", HERE, "--force", "--yes")
    assert "it does not" not in stand("status")


def test_where_no_agent_is_seen_at_all_an_order_is_taken_with_a_warning(stand: Stand) -> None:
    stand.begin()
    stand("failover", "--to", THERE, "--force", "--yes")
    assert "no agent is seen in any region: look whether 'eu-west-1' is the name of one" in stand.said
    assert stand.record().to == THERE


def test_a_grant_that_nobody_has_any_more_is_taken_back_by_the_command_that_is_told(stand: Stand) -> None:
    stand.begin()
    stand("failover", "--to", THERE, "--force", "--yes")
    for words in (("stay",), ("failover", "--to", HERE, "--yes")):
        stand(*words, code=1)
        assert "take that back with: thunderagent region failover --to eu-central-1 --force" in stand.said
    assert stand.json("failover", "--to", HERE, "--force")["to"] == HERE


def test_a_move_to_the_region_that_has_it_is_refused(stand: Stand) -> None:
    stand.begin()
    for more in ((), ("--force",)):
        stand("failover", "--to", HERE, "--yes", *more, code=1)
        assert "the region eu-central-1 has the grant, epoch 1" in stand.said


def test_failback_needs_a_region_to_go_back_to(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    stand.begin()
    stand("failback", "--yes", code=2)
    assert "THUNDERAGENT_REGION_PREFERRED" in stand.said
    monkeypatch.setenv("THUNDERAGENT_REGION_PREFERRED", THERE)
    assert "DRAINING" in stand("failback", "--yes")
    assert stand.record().to == THERE


def test_freeze_and_thaw(stand: Stand) -> None:
    stand.begin()
    assert "frozen: network work; end that with: thunderagent region thaw" in stand(
        "freeze", "--reason", "network work"
    )
    assert stand.record().frozen == "network work"
    assert "frozen" not in stand("thaw")
    assert stand.record().frozen is None


def test_an_order_that_a_beat_overtakes_looks_again(stand: Stand) -> None:
    stand.begin()
    real = stand.engine.apply
    beats = iter(range(3))

    def overtaken(batch: Any) -> Any:
        if next(beats, None) is not None:
            assert real([beat(stand.record(), now=stand.engine.clock.now())])[0].won
        return real(batch)

    stand.engine.apply = overtaken  # type: ignore[method-assign]
    orders = Regions(stand.engine, "default", by="ops")
    assert orders.freeze("work").frozen == "work"
    assert stand.record().beat == 3


def test_what_cannot_be_a_region_or_a_reason_is_refused_before_anything_is_asked(stand: Stand) -> None:
    orders = Regions(stand.engine, "default")
    with pytest.raises(ConfigurationError, match="--to is ''"):
        orders.failover("", drain_s=30.0, reason="")
    with pytest.raises(ConfigurationError, match="200 at most"):
        orders.freeze("x" * 201)
    with pytest.raises(NotAllowed):
        orders.thaw()


def test_the_policy_of_an_agent_has_the_arbiter_of_the_settings() -> None:
    settings = Settings(
        store="dynamodb://TaskTable?region=eu-central-1",
        region=HERE,
        region_arbiter="dynamodb://Arbiter?region=eu-north-1",
    )
    statements = {
        one["Sid"]: one for one in policy(Role.AGENT, resources(settings, account="123456789012"))["Statement"]
    }
    assert statements["Arbiter"]["Resource"] == "arn:aws:dynamodb:eu-north-1:123456789012:table/Arbiter"
    assert "dynamodb:DeleteItem" not in statements["Arbiter"]["Action"]


def test_agents_explain_and_doctor_tell_of_regions_that_wait(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    stand.begin()
    settings = Settings(store=stand.store_url)
    store = open_store(settings)
    health = {"healthy": True, "heartbeat_alive": True, "store_answers": True, "paused": True}
    info = {"queues": {"default": 2}, "jobs": ["j"], "health": health}
    store.announce("b:1:y", {**info, "region": {"name": THERE, "state": "passive", "epoch": 1}}, lives_s=60.0)
    task = Client(store, settings).enqueue("j", {})
    store.engine.close()
    environment = {
        "THUNDERAGENT_STORE": stand.store_url,
        "THUNDERAGENT_REGION": THERE,
        "THUNDERAGENT_REGION_ARBITER": stand.url,
    }
    told = CliRunner().invoke(app, ["agents"], env=environment)
    assert "passive" in told.stdout and "paused" not in told.stdout
    told = CliRunner().invoke(app, ["explain", task.id], env=environment)
    assert "in eu-west-1, which has no grant" in " ".join(told.stdout.split())
    told = CliRunner().invoke(app, ["doctor", "--json"], env=environment)
    [found] = [one for one in json.loads(told.stdout)["checks"] if one["check"] == "region"]
    assert found["state"] == "ok"
    assert "eu-central-1 has the grant, epoch 1" in found["found"] and "agents of eu-west-1 wait" in found["found"]


@pytest.mark.parametrize(
    ("age_s", "frozen", "state", "words"),
    [(100.0, None, State.WARNING, "no agent renews it"), (1.0, "work", State.WARNING, "frozen: work")],
)
def test_doctor_warns_of_a_grant_that_does_not_move_as_it_should(
    stand: Stand, age_s: float, frozen: str | None, state: State, words: str
) -> None:
    row = first_row("default", HERE, lease_s=30.0, by="a", now=stand.engine.clock.now() - age_s)
    row["info"] |= {"frozen": frozen} if frozen else {}
    stand.engine.put([row])
    settings = Settings(store=stand.store_url, region=HERE, region_arbiter=stand.url)
    [finding] = look_at_region(settings, open_engine)
    assert finding.state is state and words in finding.found
    assert list(look_at_region(Settings(store=stand.store_url), open_engine)) == []


def test_a_move_to_where_nobody_is_well_is_doubted_before_the_question(stand: Stand) -> None:
    stand.begin()
    stand("failover", "--to", THERE, code=1, typed="n\n")
    assert "no live agent is in eu-west-1" in stand.said
    store = open_store(Settings(store=stand.store_url))
    sick: dict[str, Any] = {"queues": {}, "region": {"name": THERE, "state": "passive", "epoch": 1, "well": False}}
    store.announce("b:1:y", sick, lives_s=60.0)
    stand("failover", "--to", THERE, code=1, typed="n\n")
    assert "no agent of eu-west-1 is well" in stand.said
    sick["region"]["well"] = True
    store.announce("b:1:y", sick, lives_s=60.0)
    store.engine.close()
    stand("failover", "--to", THERE, code=1, typed="n\n")
    assert "well" not in stand.said and "live agent" not in stand.said


def test_doctor_finds_agents_that_work_without_the_grant_of_this_arbiter(stand: Stand) -> None:
    now = stand.engine.clock.now()
    stand.engine.put([first_row("default", HERE, lease_s=30.0, by="a", now=now) | {"info": {"since": now - 100.0}}])
    store = open_store(Settings(store=stand.store_url))
    store.announce("a:1:x", {"queues": {}, "region": {"name": HERE, "state": "granted", "epoch": 1}}, lives_s=60.0)
    store.announce("b:1:y", {"queues": {}, "region": {"name": THERE, "state": "passive", "epoch": 1}}, lives_s=60.0)
    settings = Settings(store=stand.store_url, region=HERE, region_arbiter=stand.url)
    assert [one.state for one in look_at_region(settings, open_engine)] == [State.OK]
    store.announce("b:1:y", {"queues": {}, "region": {"name": THERE, "state": "granted", "epoch": 1}}, lives_s=60.0)
    store.announce("c:1:z", {"queues": {}}, lives_s=60.0)
    store.engine.close()
    _, blind, two = look_at_region(settings, open_engine)
    assert blind.state is State.WRONG and "agents that ask no arbiter" in blind.found and "c:1:z" in blind.found
    assert two.state is State.WRONG and f"agents of {HERE} and {THERE} tell" in two.found
    assert "REGION_SCOPE" in two.remedy


def test_doctor_compares_the_name_of_the_region_with_where_the_tables_are(stand: Stand) -> None:
    settings = Settings(
        store="dynamodb://Table?region=eu-west-1", region=HERE, region_arbiter="dynamodb://Arbiter?region=eu-west-1"
    )
    place, arbiter, _ = look_at_region(settings, lambda url: open_engine(stand.url))
    assert place.state is State.WRONG and "eu-central-1, and the table" in place.found
    assert arbiter.state is State.WARNING and "lost with the region" in arbiter.found
