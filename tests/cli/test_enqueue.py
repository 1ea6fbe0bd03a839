"""What `enqueue` says beside the id: doubts about names, and how the task ended; what `run` says of idle queues."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli.test_agents import FINE
from tests.cli.test_pauses import Stand, columns
from tests.support.engine import a_job
from thunderagent.agent.loop import Agent
from thunderagent.cli.fleet import idle_queues
from thunderagent.cli.tasks import READ
from thunderagent.jobs.context import Cancel, Context
from thunderagent.jobs.job import job
from thunderagent.jobs.registry import Registry
from thunderagent.model.errors import StoreError
from thunderagent.stores import open_store
from thunderagent.stores.tasks import TaskStore
from thunderagent.testing import run_until_idle

__all__ = ("columns",)


@pytest.fixture
def stand(tmp_path: Path, columns: Callable[[int], None]) -> Iterator[Stand]:
    columns(80)
    stand = Stand(f"sqlite:///{tmp_path}/tasks.db")
    yield stand
    stand.client.close()


def live(stand: Stand, *jobs: str, queues: tuple[str, ...] = ("default",), name: str = "host:1:a") -> None:
    info = {"queues": dict.fromkeys(queues, 2), "running": {}, "jobs": list(jobs), "health": FINE}
    stand.store.announce(name, info, lives_s=60.0)


def run_all(stand: Stand, jobs: Registry) -> None:
    store = open_store(stand.client.settings, for_agent=True)
    run_until_idle(Agent(store, jobs, stand.client.settings, first_poll_s=0.0), stand.client)
    store.engine.close()


def said(stand: Stand, *arguments: str) -> str:
    """Standard error of `enqueue`, whose standard output is the id of a task that is there."""
    task_id = stand("enqueue", *arguments).strip()
    assert stand.client.get(task_id).status == "PENDING"
    return stand.said.rstrip("\n")


def test_a_name_that_no_live_agent_knows_is_told_with_what_was_meant(stand: Stand) -> None:
    live(stand, "hello", "report.build")
    assert said(stand, "helo") == (
        "no live agent has the job 'helo'; did you mean 'hello'? It waits in the queue default"
    )
    assert said(stand, "xyzzy", "--queue", "slow") == ("no live agent has the job 'xyzzy'. It waits in the queue slow")
    assert said(stand, "hello") == ""


def test_nothing_is_said_when_no_agent_is_alive(stand: Stand) -> None:
    assert said(stand, "helo") == ""
    stand.store.announce("gone:1:a", {"queues": {"default": 1}, "jobs": ["hello"]}, lives_s=-60.0)
    assert said(stand, "helo") == ""


def test_another_version_of_the_job_is_told(stand: Stand) -> None:
    live(stand, "hello@2", "hello@3")
    assert said(stand, "hello") == (
        "no live agent has the job 'hello'; they have 'hello@2' and 'hello@3'. It waits in the queue default"
    )
    assert said(stand, "hello@2") == ""


def test_a_job_that_is_served_in_other_queues_only_is_told_with_the_remedy(stand: Stand) -> None:
    live(stand, "hello", queues=("slow",))
    live(stand, "other", queues=("default",), name="host:2:b")
    assert said(stand, "hello") == (
        "no live agent that has the job 'hello' serves the queue default: "
        "give --queue slow, or --jobs PACKAGE, which knows the queue of each job"
    )
    assert said(stand, "hello", "--queue", "slow") == ""
    live(stand, "hello", queues=("slow", "default"), name="host:3:c")
    assert said(stand, "hello") == "", "which of its queues is the job's is not known"


def test_json_stays_whole_beside_a_note(stand: Stand) -> None:
    live(stand, "hello")
    assert json.loads(stand("enqueue", "helo", "--json"))["job"] == "helo"
    assert "did you mean 'hello'?" in stand.said


def test_an_agent_that_tells_no_jobs_may_have_any(stand: Stand) -> None:
    live(stand, "hello")
    live(stand, name="host:2:b")
    assert said(stand, "helo") == ""


def test_a_fleet_that_is_not_read_to_its_end_is_not_judged(stand: Stand) -> None:
    for number in range(READ + 5):
        live(stand, "hello", name=f"host:{number}:c")
    assert said(stand, "helo") == ""


def test_who_may_not_list_the_agents_enqueues_all_the_same(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    live(stand, "hello")

    def refuse(*arguments: Any, **options: Any) -> Any:
        raise StoreError("dynamodb:Query is not allowed")

    monkeypatch.setattr(TaskStore, "agents", refuse)
    assert said(stand, "helo") == ""


# --wait


@job("ends.well")
def well(ctx: Context, payload: dict[str, Any] | None) -> dict[str, Any]:
    return {"sum": 42}


@job("ends.badly", max_retry=0)
def badly(ctx: Context, payload: dict[str, Any] | None) -> None:
    raise ValueError("broken on purpose\nand more")


@job("ends.closed")
def closed(ctx: Context, payload: dict[str, Any] | None) -> Cancel:
    return Cancel("not needed any more")


def test_after_the_wait_stand_the_status_and_the_result_or_the_error_and_where_to_read_on(stand: Stand) -> None:
    names = {"a": "ends.well", "b c": "ends.badly", "d": "ends.closed"}
    for task_id, name in names.items():
        stand.client.enqueue(name, {}, task_id=task_id)
    run_all(stand, Registry(well, badly, closed))

    def told(task_id: str, *more: str, code: int = 0) -> list[str]:
        return stand("enqueue", names[task_id], "{}", "--task-id", task_id, *more, code=code).splitlines()

    assert told("a", "--wait", "5") == ["a", 'SUCCESS {"sum":42}']
    first, status, see = told("b c", "--wait", "5", code=1)
    assert (first, see) == ("b c", "see: thunderagent explain 'b c'")
    assert status.startswith("FAILED: ValueError: broken on purpose")
    assert told("d", "--wait", "5", code=1) == [
        "d",
        "DONE (closed on purpose): not needed any more",
        "see: thunderagent explain d",
    ]
    assert told("a") == ["a"]
    assert json.loads("".join(told("a", "--wait", "5", "--json")))["result"] == {"sum": 42}


def test_who_gives_up_waiting_has_the_id(stand: Stand) -> None:
    assert stand("enqueue", "ends.well", "{}", "--task-id", "a", "--wait", "0.05", code=1) == "a\n"
    assert "still PENDING after 0.05 s" in stand.said
    assert stand("enqueue", "ends.well", "{}", "--wait", "0.05", "--json", code=1) == ""


# list


@pytest.mark.parametrize("width", [60, 80, 120])
def test_a_list_shows_an_error_of_some_length_in_any_terminal(
    stand: Stand, columns: Callable[[int], None], width: int
) -> None:
    error = "ConnectionError: the warehouse at 10.0.0.7 did not answer within 30 s, order 4711 is not shipped"

    @job("orders.ship", max_retry=0)
    def ship(ctx: Context, payload: None) -> None:
        raise ConnectionError(error.partition(": ")[2])

    stand.client.enqueue("orders.ship", None, task_id="order-4711")
    run_all(stand, Registry(ship))
    columns(width)
    shown = stand("list")
    assert max(map(len, shown.splitlines())) <= width
    assert "orders.ship" in shown
    assert error[:99].replace(" ", "") in "".join(shown.split()).replace("order-4711FAILED", "")


# run


def test_queues_that_no_job_goes_to_are_named() -> None:
    jobs = Registry(a_job("a", queue="slow"), a_job("b", queue="reports"))
    assert list(idle_queues({"slow": 1, "default": 1, "reports": 2}, jobs)) == []
    assert list(idle_queues({"slw": 2, "zzz": 1}, jobs)) == [
        "no job goes to the queue 'slw'; did you mean 'slow'? It is served for tasks that name it",
        "no job goes to the queue 'zzz'. It is served for tasks that name it",
    ]
