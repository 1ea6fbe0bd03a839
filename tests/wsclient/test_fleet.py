"""Thirty thousand clients lose their region at one moment: a simulation, the same for each seed."""

from __future__ import annotations

import random

import pytest

from scripts.benchmarks.reconnects import CLIENTS, comparison, naive, reconnect, resilient


@pytest.mark.parametrize("seed", [1, 2])
def test_a_fleet_comes_back_as_fast_as_the_api_takes_it_with_hardly_an_attempt_in_vain(
    seed: int, capsys: pytest.CaptureFixture[str]
) -> None:
    outcomes = comparison(seed=seed)
    with capsys.disabled():
        for name, outcome in outcomes.items():
            print(f"\n{name:>13}: {outcome}", end="")
    ours, theirs = outcomes["thunderagent"], outcomes["naive"]
    assert ours.clients == theirs.clients == CLIENTS == 30_000
    assert ours.seconds < 62.0, "500 in a second need 60 s"
    assert ours.refused < 300
    assert ours.busiest < 700
    assert theirs.refused > 300_000
    assert theirs.busiest > 50_000


def test_a_fleet_that_was_told_a_third_of_its_size_still_comes_back() -> None:
    wrong = reconnect(CLIENTS, resilient(CLIENTS // 3, random.Random(1)))
    without = reconnect(CLIENTS, naive(random.Random(1)))
    assert wrong.seconds < 180.0
    assert wrong.attempts < without.attempts / 3


def test_a_few_clients_do_not_wait_for_a_fleet_that_is_not_there() -> None:
    assert reconnect(100, resilient(1, random.Random(1))).seconds < 1.0
