"""Random faults of two regions, their table, the arbiter and the agents, against the rules of the region's grant.

Everything runs in one thread on a clock that moves by hand (`region_world.py`). 10,000 faults happen, and at each step:

* at most one region has a valid grant, and each epoch is of one region and never comes back;
* no write leaves an agent, and no task is claimed, without a valid grant;
* an agent changes no task that has a later epoch, and nothing that was written under a later epoch is overwritten by a
  write of an earlier one, unless that write's agent was stopped for long right before it left, while the regions were
  apart;
* each lease, told by task, epoch and fence, ends once;
* what a newer version wrote, in the table and at the arbiter, stays as it is;
* no task fails unless the store has refused a write of it for good;
* when the faults are over every task comes to its end, the same in both regions.

`THUNDER_TEST_REGIONS=100` runs that many worlds of 1,000 faults, each from another seed; without it there are ten,
always the same.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Final

import pytest

from tests.simulation.region_world import AGENTS, REGIONS, Agent, Broken, World

RUNS: Final = int(os.environ.get("THUNDER_TEST_REGIONS", "0"))
FAULTS_A_RUN: Final = 1_000
SEEDS: Final = 5
STEPS_A_TASK: Final = 25
END_S: Final = 600.0

LEAST: Final = {
    **dict.fromkeys((f"grant of {region}" for region in REGIONS), 2),
    "claim": 200,
    "take over": 20,
    "end by succeed": 200,
    "stopped in a call": 10,
    "asleep in a call": 10,
    "suspend": 1,
    "lost reply": 20,
    "drain ordered": 1,
    "vacate ordered": 1,
    "refused": 5,
    "unreadable text": 1,
    "halted": 1,
}
"""How often each must have happened in a run, so that one which tries nothing does not pass."""

IN_CALLS: Final = ("lost request", "lost reply", "stopped in a call", "asleep in a call")
"""Faults of single calls."""


def something(world: World) -> None:
    """One fault, the end of one, or a command."""
    dice = world.dice
    region = dice.choice(REGIONS)
    living = [agent for agent in world.agents if agent.region == region]
    what = dice.choice(CHOICES)
    world.seen[what] += 1
    FAULTS[what](world, region, living)


def _cut_all(world: World, region: str) -> None:
    world.cut_from_arbiter.add(region)
    world.table.partition(*REGIONS)


def _change_of_mind(world: World, region: str, living: list[Agent]) -> None:
    """An order, its end and the order again, of which an agent that was stopped sees the two orders."""
    world.order("drain", region)
    world.run(world.dice.choice([3.0, 6.0]))
    for agent in world.agents:
        if agent.region != region and world.dice.random() < 0.4:
            world.stop_for_a_while(agent, world.dice.choice([20.0, 50.0, 80.0]))
    world.order("stay", region)
    world.run(world.dice.choice([3.0, 20.0, 50.0, 80.0]))
    world.order("drain", region)


def _flap(world: World, region: str) -> None:
    one = world.wellness[region]
    one.is_well = not one.is_well
    one.successes = 0 if not one.is_well else world.dice.choice([1, 6])


def _lose(world: World, region: str) -> None:
    if world.dice.random() < 0.5:
        world.table.isolate(region)
    else:
        for one in REGIONS:
            world.table.rejoin(one)


FAULTS: Final[dict[str, Callable[[World, str, list[Agent]], None]]] = {
    "arbiter cut off": lambda world, region, living: world.cut_from_arbiter.add(region),
    "arbiter reached": lambda world, region, living: world.cut_from_arbiter.discard(region),
    "arbiter reached by all": lambda world, region, living: world.cut_from_arbiter.clear(),
    "regions apart": lambda world, region, living: world.table.partition(*REGIONS),
    "regions together": lambda world, region, living: world.table.heal(),
    "all cut": lambda world, region, living: _cut_all(world, region),
    "region lost": lambda world, region, living: _lose(world, region),
    "canary": lambda world, region, living: _flap(world, region),
    "stop": lambda world, region, living: (
        world.stop_for_a_while(world.dice.choice(living), world.dice.choice([5.0, 20.0, 60.0])) if living else None
    ),
    "suspend": lambda world, region, living: (
        world.suspend(world.dice.choice(living), world.dice.choice([20.0, 60.0, 3600.0])) if living else None
    ),
    "crash": lambda world, region, living: world.kill(world.dice.choice(living)) if len(living) > 1 else None,
    "start": lambda world, region, living: world.start(region) if len(living) < AGENTS else None,
    "drain": lambda world, region, living: world.order("drain", region),
    "vacate": lambda world, region, living: world.order("vacate", region),
    "stay": lambda world, region, living: world.order("stay", region),
    "change of mind": _change_of_mind,
    "newer task": lambda world, region, living: world.write_newer(region),
    "newer grant": lambda world, region, living: world.halt(),
    "full row": lambda world, region, living: world.full.update(world.names[-2:]),
    "texts lost for a while": lambda world, region, living: world.without_texts.add(region),
    "texts back": lambda world, region, living: world.without_texts.discard(region),
    "freeze": lambda world, region, living: world.order("freeze", region),
    "thaw": lambda world, region, living: world.order("thaw", region),
    "all well": lambda world, region, living: world.mend(),
}

CHOICES: Final = [
    *FAULTS,
    *("drain", "stay", "vacate", "thaw", "stop", "arbiter reached by all", "all well"),
    *("regions apart", "all cut", "region lost"),
]


def faults(world: World) -> int:
    """How many there were, without those calls that were only slow."""
    return sum(world.seen[name] for name in (*FAULTS, *IN_CALLS))


def run(seed: int, most: int, *, counts_sleep: bool = True) -> World:
    """So many faults from a seed, then the end of all of them, and of all tasks."""
    world = World(seed, goes_back=seed % 2 == 0, counts_sleep=counts_sleep)
    try:
        while faults(world) < most:
            world.run(world.dice.choice([0.3, 1.0, 3.0, 10.0, 30.0]))
            for _ in range(len(world.names), world.steps // STEPS_A_TASK):  # both regions may be lost
                world.enqueue(world.dice.choice(REGIONS))
            for _ in range(world.dice.choice([1, 1, 2, 4])):
                something(world)
        world.finish(END_S)
    except Broken as error:
        raise Broken(f"seed {seed}, step {world.steps}, {world.clock.monotonic() - 1000.0:.2f} s: {error}") from error
    finally:
        world.close()
    return world


@pytest.mark.parametrize("seed", range(RUNS or SEEDS))
def test_whatever_happens_at_most_one_region_acts_and_every_task_ends(seed: int) -> None:
    tried = run(seed, FAULTS_A_RUN).seen
    missing = [name for name, least in LEAST.items() if tried[name] < least]
    assert not missing, f"the run has not tried what it is about: {tried}"


@pytest.mark.parametrize("seed", range(4))
def test_on_a_clock_that_stands_still_while_a_machine_sleeps_two_regions_would_act(seed: int) -> None:
    """As on `time.monotonic`: these worlds must be able to show it."""
    with pytest.raises(Broken, match="both regions have a valid grant"):
        run(seed, FAULTS_A_RUN, counts_sleep=False)
