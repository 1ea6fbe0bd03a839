"""The order in which several workers run the tests: those that wait beside those that calculate.

Tests with real processes mostly wait, the others keep a core busy. With `--dist worksteal` every worker begins with an
equal part of the list and takes from the ends of the others when it has none left. In the order of the files, one
worker would get all tests with processes and still run them one after the other when the rest has long ended. So half
of the parts begin with them, the other half with the longest calculations, and at no moment do all workers start
processes, whose deadlines are real.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from itertools import groupby, islice
from typing import TypeVar

import pytest

T = TypeVar("T")


def waits(item: pytest.Item) -> bool:
    """The test starts real processes."""
    return item.get_closest_marker("processes") is not None


def is_long(item: pytest.Item) -> bool:
    """The test calculates for many seconds."""
    return item.path.parent.name == "simulation"


def dealt(
    items: Sequence[T],
    workers: int,
    *,
    group: Callable[[T], Hashable],
    waits: Callable[[T], bool],
    is_long: Callable[[T], bool],
) -> list[T]:
    """The same items in an order whose equal parts, one a worker, take about equally long.

    Args:
        items: in the order of their files.
        workers: number of parts.
        group: what has to stay together as far as possible: the file of a test, for the sake of its fixtures.
        waits: tests that are dealt to the first half of the parts, group by group, the last one first: what stands at
            the beginning of a part is not taken away from its worker, so a group that shares much should be late.
        is_long: tests with which the other half begins.
    """
    lanes: list[list[T]] = [[] for _ in range(workers)]
    waiting, calculating = lanes[: (workers + 1) // 2], lanes[(workers + 1) // 2 :] or lanes
    groups = [list(some) for _, some in groupby(filter(waits, items), group)]
    for index, some in enumerate(reversed(groups)):  # the files of `acceptance`, which share nothing, come last
        waiting[index % len(waiting)].extend(some)
    others = [item for item in items if not waits(item)]
    for index, item in enumerate(filter(is_long, others)):
        calculating[index % len(calculating)].append(item)
    rest = iter([item for item in others if not is_long(item)])
    found: list[T] = []
    for index, lane in enumerate(lanes, 1):
        found += lane
        found += islice(rest, max(0, len(items) * index // workers - len(found)))
    return found
