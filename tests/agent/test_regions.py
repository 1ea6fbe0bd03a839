"""Agents of two regions with their threads: one region works, the other waits, and takes over."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest

from tests.support.engine import LONG_S, Recorder, settings
from tests.support.stands import eventually
from thunderagent.agent.assembly import equip
from thunderagent.agent.loop import Agent
from thunderagent.agent.regions import gated, region_entry, region_watch
from thunderagent.client import Client
from thunderagent.jobs.context import Context
from thunderagent.jobs.job import job
from thunderagent.jobs.registry import Registry
from thunderagent.model import events, fleet_events
from thunderagent.model.bus import EventBus
from thunderagent.model.errors import ConfigurationError
from thunderagent.model.task import Candidate
from thunderagent.model.writes import tasks as writes
from thunderagent.regions.gate import Gate
from thunderagent.regions.grant import Grant
from thunderagent.regions.sentinel import Sentinel
from thunderagent.settings import load_settings
from thunderagent.stores import open_store
from thunderagent.stores.tasks import Wanted
from thunderagent.testing import FaultyEngine, memory_store

HERE, THERE = "eu-central-1", "eu-west-1"


@job("where")
def where(ctx: Context, payload: None) -> int:
    return ctx.fence


class Stage:
    """An agent of a region in a thread, its events, and its region watch."""

    def __init__(self, folder: Path, region: str, **changes: Any) -> None:
        given: dict[str, Any] = {
            "store": f"sqlite:///{folder}/tasks.db",
            "region": region,
            "region_arbiter": f"sqlite:///{folder}/arbiter.db",
            "region_lease_s": 1.2,
            "region_beat_s": 0.3,
            "region_preferred": HERE,
            "drain_s": 1.0,
        }
        self.settings = settings(**{**given, **changes})
        self.bus = EventBus()
        self.told = Recorder(self.bus)
        store = open_store(self.settings)
        self.agent = Agent(store, Registry(where), self.settings, bus=self.bus, first_poll_s=0.0, threads=equip)
        self.thread = threading.Thread(target=self.agent.run, name=f"agent of {region}", daemon=True)

    @property
    def watch(self) -> Any:
        [watch] = [one for one in self.agent._threads._threads if one.name == "region"]
        return watch


@contextmanager
def running(*stages: Stage) -> Iterator[None]:
    with ExitStack() as ends:
        for stage in stages:
            ends.callback(stage.thread.join, LONG_S)
            ends.callback(stage.agent.stop)
            stage.thread.start()
        yield


@pytest.mark.slow
def test_one_region_works_and_the_other_takes_over_when_it_is_silent(tmp_path: Path) -> None:
    here, there = Stage(tmp_path, HERE), Stage(tmp_path, THERE)
    with running(here, there):
        here.told.wait(fleet_events.GrantBegan)
        client = Client(open_store(here.settings), here.settings)
        first = client.wait(client.enqueue(where, None), timeout_s=LONG_S)
        assert first.last_agent == here.agent.name and first.region_epoch == 1
        eventually(lambda: {one.info["region"]["state"] for one in client.store.agents()} == {"granted", "passive"})
        assert not there.told.events or not [one for one in there.told.events if isinstance(one, events.TaskStarted)]
        here.watch.close()  # as if its thread hung: the gate closes by itself
        here.told.wait(fleet_events.GrantEnded)
        there.told.wait(fleet_events.GrantBegan)
        second = client.wait(client.enqueue(where, None), timeout_s=LONG_S)
        assert second.last_agent == there.agent.name and second.region_epoch == 2
        client.store.engine.close()
    assert [event.won for event in there.told.events if isinstance(event, fleet_events.GrantAsked)] == [True]


@pytest.mark.slow
def test_a_region_whose_table_does_not_answer_gives_up_its_grant(tmp_path: Path) -> None:
    here = Stage(tmp_path, HERE)
    faulty = FaultyEngine(here.agent.store.engine.behind)  # type: ignore[attr-defined]
    here.watch._authority._table._store.engine.behind = faulty
    with running(here):
        here.told.wait(fleet_events.GrantBegan)
        faulty.outage()
        [ended] = here.told.wait(fleet_events.GrantEnded)
        assert "not well" in ended.reason
        faulty.outage(down=False)
        here.told.wait(fleet_events.GrantBegan, 2)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_asks_the_arbiter_and_dies_is_reported_and_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = Stage(tmp_path, HERE)
    died = threading.Event()
    step = here.watch._authority.step

    def dies() -> Any:
        if not died.is_set():
            died.set()
            raise SystemExit
        return step()

    monkeypatch.setattr(here.watch._authority, "step", dies)
    monkeypatch.setattr("thunderagent.agent.threads.RESTART_AFTER_S", 0.1)
    with running(here):
        [event] = here.told.wait(events.ThreadDied)
        assert (event.thread, event.restarted) == ("region", True)
        here.told.wait(fleet_events.GrantBegan)


def test_settings_of_regions_that_cannot_work_are_reported_together() -> None:
    with pytest.raises(ConfigurationError) as caught:
        load_settings(
            store="dynamodb://T?region=eu-central-1",
            region_arbiter="dynamodb://T?region=eu-central-1",
            region_failback="auto",
            region_beat_s=20.0,
            region_scope="no such",
        )
    text = str(caught.value)
    for words in ("REGION_ARBITER is set: set", "a table of its own", "REGION_PREFERRED", "at most 10", "REGION_SCOPE"):
        assert words in text


def test_an_arbiter_that_was_made_again_goes_on_behind_the_epochs_that_the_tasks_know(tmp_path: Path) -> None:
    there, here = Stage(tmp_path, THERE), Stage(tmp_path, HERE)
    gate = Gate(THERE)
    gate.grant = Grant(epoch=7)
    client = Client(open_store(there.settings), there.settings)
    before = gated(client.store, gate)
    task = client.enqueue(where, None)
    [lease] = before.claim([Wanted(Candidate(task.id, "PENDING", task.created_at, "where"), 3600.0)], owner="before")
    before.settle([writes.release(lease, now=client.store.clock.now())])
    before.announce("before", {"queues": {}, "region": region_entry(gate)}, lives_s=60.0)
    sentinel = Sentinel(before, THERE)
    sentinel.write()
    sentinel.write()
    with running(here):
        ended = client.wait(task.id, timeout_s=LONG_S)
        assert (ended.region_epoch, ended.last_agent) == (8, here.agent.name)
        client.store.engine.close()


def test_an_arbiter_that_cannot_be_opened_is_reported_and_ends_no_thread(tmp_path: Path) -> None:
    here = Stage(tmp_path, HERE, region_arbiter=f"sqlite:///{tmp_path}/missing/arbiter.db")
    with running(here):
        [failed] = here.told.wait(events.StoreFailed)
        assert failed.during == "asking the arbiter" and "create it first" in failed.error
        (tmp_path / "missing").mkdir()
        here.told.wait(fleet_events.GrantBegan)
        here.told.wait(events.StoreRecovered)
        assert not here.told.of(events.ThreadDied)


def test_a_copy_of_the_task_table_in_another_region_is_no_arbiter() -> None:
    with pytest.raises(ConfigurationError, match="must not be replicated"):
        load_settings(
            store="dynamodb://TaskTable?region=eu-central-1",
            region=HERE,
            region_arbiter="dynamodb://TaskTable?region=eu-north-1",
        )


@pytest.mark.parametrize(
    ("store", "region", "is_refused"),
    [
        ("dynamodb://TaskTable?region=eu-west-1", HERE, True),
        ("dynamodb://TaskTable?region=eu-central-1", HERE, False),
        ("dynamodb://TaskTable?region=eu-west-1", "primary", False),
        ("dynamodb://TaskTable?region=eu-west-1&endpoint=http://127.0.0.1:1", HERE, False),
    ],
)
def test_an_agent_with_the_settings_of_another_region_does_not_start(
    store: str, region: str, is_refused: bool, tmp_path: Path
) -> None:
    arbiter = f"sqlite:///{tmp_path}/arbiter.db"
    given = settings(store=store, region=region, region_arbiter=arbiter)
    refused = pytest.raises(ConfigurationError, match=r"REGION is eu-central-1, and the table .* is in eu-west-1")
    with refused if is_refused else nullcontext():
        Agent(memory_store(), Registry(where), given, threads=lambda agent: region_watch(agent))
