"""Thirty thousand clients lose their region at one moment: a simulation, the same for each seed."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "scripts"))

from benchmarks.reconnects import CLIENTS, comparison, reconnect, resilient


@pytest.mark.slow
def test_a_fleet_comes_back_as_fast_as_the_api_takes_it_with_few_attempts_in_vain() -> None:
    outcomes = comparison()
    ours, theirs = outcomes["thunderagent"], outcomes["naive"]
    assert CLIENTS == 30_000
    assert ours["all back, s"] < 62.0, "500 in a second need 60 s"
    assert ours["refused"] < 300
    assert ours["attempts in the busiest second"] < 700
    assert theirs["refused"] > 300_000
    assert theirs["attempts in the busiest second"] > 50_000


def test_a_fleet_that_was_told_a_third_of_its_size_still_comes_back() -> None:
    wrong = reconnect(CLIENTS, resilient(CLIENTS // 3, random.Random(1)))
    assert wrong["all back, s"] < 90.0
    assert wrong["attempts"] < 70_000


@pytest.mark.slow
def test_clients_that_cannot_see_why_they_are_refused_come_back_too() -> None:
    wrong = reconnect(CLIENTS, resilient(CLIENTS // 3, random.Random(1), sees_why=False))
    assert wrong["all back, s"] < 120.0
    assert wrong["attempts"] < 200_000


def test_a_few_clients_do_not_wait_for_a_fleet_that_is_not_there() -> None:
    assert reconnect(100, resilient(1, random.Random(1)))["all back, s"] < 1.0
