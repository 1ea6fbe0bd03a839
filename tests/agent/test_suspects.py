"""A job that kills its agent takes no other task along: who is to blame is found by running suspects apart."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import pytest

from tests.simulation.limit_world import BOMB, LEASE_S, World, limited_jobs
from thunderagent.jobs.outcome import Returned
from thunderagent.model.losses import runs_alone
from thunderagent.model.task import Status, Task

FREE: Final = limited_jobs()["free"]
SLOTS: Final = 10


@dataclass
class Mine:
    """A fleet whose agents a supervisor starts again, and a job that kills the agent in which it runs."""

    agents: int
    bomb_s: float = 0.5
    lasts_s: float = 8.0
    options: dict[str, Any] = field(default_factory=lambda: {"queues": {"default": SLOTS}, "max_crashes": 3})

    def __post_init__(self) -> None:
        self.world = World(11)
        self.world.is_supervised, self.world.fuses_s = True, (self.bomb_s,)
        self.world.join = partial(self.world.join, **self.options)  # type: ignore[method-assign]
        self.world.ends = lambda task: (1e9 if task.task_id.startswith(BOMB) else self.lasts_s, Returned("done"))
        for _ in range(self.agents):
            self.world.join("free")

    def enqueue(self, *names: str) -> None:
        for name in names:
            self.world.client.enqueue(FREE, {}, task_id=name)

    def end(self, within_s: float) -> dict[str, Task]:
        self.world.pass_time_until(lambda: self.world.is_done, within_s)
        return {task.task_id: task for task in self.world.tasks()}

    @property
    def company(self) -> list[int]:
        """How many others ended with each run of the bomb."""
        return [beside for (name, _), beside in self.world.beside.items() if name == BOMB]


@pytest.fixture
def mines() -> Iterator[list[Mine]]:
    made: list[Mine] = []
    yield made
    for mine in made:
        mine.world.close()


BYSTANDERS: Final = [f"bystander-{number}" for number in range(9)]


@pytest.mark.slow
@pytest.mark.parametrize("agents", [1, 2, 3])
@pytest.mark.parametrize("bomb_s", [0.5, LEASE_S * 0.7])
def test_of_ten_tasks_beside_each_other_only_the_one_that_kills_their_agents_fails(
    mines: list[Mine], agents: int, bomb_s: float
) -> None:
    mines.append(mine := Mine(agents, bomb_s=bomb_s))
    mine.enqueue(BOMB, *BYSTANDERS)
    tasks = mine.end(600.0)
    assert {name: tasks[name].status for name in BYSTANDERS} == dict.fromkeys(BYSTANDERS, Status.SUCCESS)
    assert tasks[BOMB].status is Status.FAILED
    assert tasks[BOMB].crash_count == 4, "as many losses as before: three takeovers, and one too many"
    assert mine.company[-2:] == [0, 0], "from its second loss on it runs alone"


@pytest.mark.slow
def test_a_whole_day_of_work_goes_on_beside_bombs(mines: list[Mine]) -> None:
    mines.append(mine := Mine(3, lasts_s=3.0))
    for number in range(200):
        mine.enqueue(f"work-{number}")
        if number % 50 == 20:
            mine.enqueue(f"{BOMB}-{number}")
    tasks = mine.end(1200.0)
    ends = Counter((name.partition("-")[0], task.status) for name, task in tasks.items())
    assert ends == {("work", Status.SUCCESS): 200, (BOMB, Status.FAILED): 4}


# How one runs apart


@pytest.fixture
def mine(mines: list[Mine]) -> Mine:
    """One agent whose tasks take long."""
    mines.append(one := Mine(1, lasts_s=200.0))
    return one


def running(mine: Mine) -> set[str]:
    return {run.running.lease.task_id for run in mine.world.runs}


def suspect(mine: Mine, name: str) -> Task:
    """A task that has lost two agents and is in its queue again."""
    now = mine.world.clock.now()
    errors = ({"at": now, "attempt": 2, "error": "agent x was lost", "agent": "x", "beside": 3},)
    row = Task(
        task_id=name,
        status=Status.PENDING,
        created_at=now,
        submitted_at=now,
        job=FREE.name,
        payload_text="{}",
        crash_count=2,
        errors=errors,
        max_retry=3,
    )
    [answer] = mine.world.store.enqueue([row])
    return answer.task


def until_running(mine: Mine, *names: str, within_s: float = 20.0) -> float:
    return mine.world.pass_time_until(lambda: running(mine) == set(names), within_s)


def test_a_suspect_waits_for_what_runs_beside_it_and_nothing_else_is_claimed(mine: Mine) -> None:
    mine.lasts_s = 8.0
    mine.enqueue("a", "b")
    until_running(mine, "a", "b")
    suspect(mine, "s")
    mine.world.pass_time_until(lambda: mine.world.client.get("s").status is Status.RUNNING, 4.0)
    mine.enqueue("c")
    until_running(mine, "s")
    assert mine.world.started[2:] == ["s"]
    assert runs_alone(mine.world.client.get("s"))
    assert mine.end(60.0)["c"].status is Status.SUCCESS


def test_a_suspect_waits_no_longer_than_a_lease_for_tasks_that_take_long(mine: Mine) -> None:
    mine.enqueue("a", "b")
    until_running(mine, "a", "b")
    suspect(mine, "s")
    assert until_running(mine, "a", "b", "s") < LEASE_S + 6.0
    assert not runs_alone(mine.world.client.get("s"))
    mine.enqueue("c")
    until_running(mine, "a", "b", "c", "s", within_s=5.0)


def test_a_suspect_that_has_lived_for_a_lease_lets_others_in_and_its_row_says_so_before(mine: Mine) -> None:
    suspect(mine, "s")
    until_running(mine, "s")
    assert runs_alone(mine.world.client.get("s"))
    mine.enqueue("a")
    mine.world.pass_time(LEASE_S - 4.0)
    assert running(mine) == {"s"}
    until_running(mine, "a", "s")
    assert not runs_alone(mine.world.client.get("s"))


def test_of_two_suspects_one_goes_back_for_another_agent(mine: Mine) -> None:
    mine.lasts_s = 3.0
    for name in ("s", "t", "u"):
        suspect(mine, name)
    most = 0
    while not mine.world.is_done:
        mine.world.pass_time(0.1)
        most = max(most, len(mine.world.runs))
    assert most == 1
    assert {(task.status, task.fence > 1) for task in mine.world.tasks()} >= {(Status.SUCCESS, True)}


@pytest.mark.parametrize(("how", "end"), [("cancel", Status.DONE), ("drain", Status.PENDING)])
def test_a_suspect_that_waits_is_cancelled_or_given_back_without_a_run(mine: Mine, how: str, end: Status) -> None:
    mine.enqueue("a")
    until_running(mine, "a")
    suspect(mine, "s")
    mine.world.pass_time_until(lambda: mine.world.client.get("s").status is Status.RUNNING, 4.0)
    if how == "cancel":
        mine.world.client.cancel("s")
    else:
        mine.world.living[0].leave()
    mine.world.pass_time_until(lambda: mine.world.client.get("s").status is end, LEASE_S)
    assert mine.world.started == ["a"]
    assert mine.world.client.get("s").crash_count == 2
