"""The order of the tests: the same tests, and every worker has something to wait for or something to calculate."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support import lanes

KINDS = st.lists(st.tuples(st.sampled_from("abcdef"), st.sampled_from(["waits", "long", "brief"])), max_size=60)


def dealt(tests: list[tuple[str, str, int]], workers: int) -> list[tuple[str, str, int]]:
    return lanes.dealt(
        tests,
        workers,
        group=lambda one: one[0],
        waits=lambda one: one[1] == "waits",
        is_long=lambda one: one[1] == "long",
    )


@given(kinds=KINDS, workers=st.integers(1, 9))
def test_no_test_is_lost_and_none_comes_twice(kinds: list[tuple[str, str]], workers: int) -> None:
    tests = [(file, kind, number) for number, (file, kind) in enumerate(kinds)]
    found = dealt(tests, workers)
    assert sorted(found, key=lambda one: one[2]) == tests
    assert found == dealt(tests, workers), "each worker finds the same order"


@pytest.mark.parametrize(("workers", "waiting"), [(2, [0]), (3, [0, 1]), (4, [0, 1]), (8, [0, 1, 2, 3])])
def test_half_of_the_workers_begin_with_tests_that_wait_and_the_others_with_long_ones(
    workers: int, waiting: list[int]
) -> None:
    files = [(f"file{number // 5}", "waits", number) for number in range(40)]
    models = [("model", "long", number) for number in range(40, 48)]
    plain = [("plain", "brief", number) for number in range(48, 848)]
    found = dealt([*plain[:400], *files, *models, *plain[400:]], workers)
    firsts = [found[len(found) * index // workers] for index in range(workers)]
    assert [index for index, one in enumerate(firsts) if one[1] == "waits"] == waiting
    assert {one[1] for index, one in enumerate(firsts) if index not in waiting} == {"long"}
    for name in {one[0] for one in files}:
        places = [index for index, one in enumerate(found) if one[0] == name]
        assert places == list(range(places[0], places[0] + 5)), "a file is not torn apart"
