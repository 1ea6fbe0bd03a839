"""The index: pages, counts, lanes and shards."""

from __future__ import annotations

import pytest

from tests.support.stands import Stand, eventually
from thunderagent.model.task import Candidate, Lane, Page, Status, Task
from thunderagent.queue.stats import queue_stats


def _three_pages(stand: Stand, status_value: str, *, newest_first: bool = False) -> list[str]:
    found: list[str] = []
    after, pages = None, 0
    while True:
        page: Page = stand.store.engine.page(status_value, limit=3, after=after, newest_first=newest_first)
        found += [entry.task_id for entry in page.entries]
        after, pages = page.after, pages + 1
        assert pages < 20
        if after is None:
            return found


def test_paging_brings_every_entry_once_and_oldest_first(stand: Stand) -> None:
    ids = [stand.enqueue(f"n{number}", created_at=1760000000.0 + number % 4).task_id for number in range(8)]
    pending = stand.lane.value(Status.PENDING)
    assert eventually(lambda: stand.store.engine.count(pending) == 8)
    found = _three_pages(stand, pending)
    assert sorted(found) == sorted(ids)
    times = stand.store.get(found)
    assert [times[task_id].created_at % 100 for task_id in found] == sorted(number % 4 for number in range(8))
    newest = _three_pages(stand, pending, newest_first=True)
    assert sorted(newest) == sorted(ids)
    assert [times[task_id].created_at % 100 for task_id in newest] == sorted((n % 4 for n in range(8)), reverse=True)


def test_until_cuts_the_page_and_the_count_and_includes_its_moment(stand: Stand) -> None:
    for number in range(5):
        stand.enqueue(f"n{number}", created_at=1760000000.25 + number)
    pending = stand.lane.value(Status.PENDING)
    assert eventually(lambda: stand.store.engine.count(pending) == 5)
    page = stand.store.engine.page(pending, limit=10, until=1760000002.25)
    assert [entry.task_id for entry in page.entries] == [stand.id(f"n{number}") for number in range(3)]
    assert stand.store.engine.count(pending, until=1760000002.25) == 3
    assert stand.store.engine.count(stand.lane.value(Status.FAILED)) == 0


@pytest.mark.slow
def test_a_count_stops_at_its_cap(stand: Stand) -> None:
    for number in range(5):
        stand.enqueue(f"n{number}", created_at=1760000000.25 + number)
    pending = stand.lane.value(Status.PENDING)
    assert eventually(lambda: stand.store.engine.count(pending) == 5)
    for most in (0, 1, 3, 5, 6, 100):
        assert stand.store.engine.count(pending, most=most) == min(5, most)
        assert stand.store.engine.count(pending, until=1760000002.25, most=most) == min(3, most)
        assert stand.store.engine.count(stand.lane.value(Status.FAILED), most=most) == 0


def test_on_dynamodb_the_numbers_of_a_queue_stop_at_a_cap(dynamo_stand: Stand) -> None:
    stand = dynamo_stand
    assert stand.dynamo.most_counted == 10_000
    stand.dynamo.most_counted = 3
    for number in range(5):
        stand.enqueue(f"n{number}", created_at=1760000000.25 + number)
    assert eventually(lambda: stand.store.engine.count(stand.lane.value(Status.PENDING)) == 5)
    [queue] = [one for one in queue_stats(stand.store) if one.queue == stand.lane.queue]
    assert (queue.ready, queue.delayed, queue.at_least) == (3, 0, ("ready", "delayed"))


def test_an_entry_has_what_a_claim_needs(stand: Stand) -> None:
    task = stand.enqueue(kind="stream", created_at=1760000000.125)
    [entry] = stand.ready(1)
    assert entry == Candidate(task.task_id, stand.lane.value("PENDING"), 1760000000.125, "report.build", "stream")


def test_an_empty_queue_has_an_empty_page(stand: Stand) -> None:
    page = stand.store.engine.page(Lane(f"empty-{stand.mark}").value("PENDING"), limit=10)
    assert (page.entries, page.after) == ((), None)


def test_lanes_are_listed_once_each_and_the_plain_one_is_there(stand: Stand) -> None:
    reports, third = Lane(f"reports-{stand.mark}"), Lane(f"reports-{stand.mark}", 3)
    stand.enqueue("a")
    for name in ("b", "c"):
        stand.enqueue(name, lane=reports)
    stand.enqueue("d", lane=third, status=Status.BLOCKED, waiting_for=frozenset({"p"}))
    lanes = stand.store.engine.lanes()
    assert {stand.lane, reports, third} <= set(lanes)
    assert len(lanes) == len(set(lanes))


def test_another_process_sees_the_lanes_of_this_one(stand: Stand) -> None:
    lane = Lane(f"reports-{stand.mark}", 1)
    stand.enqueue(lane=lane)
    assert lane in stand.open().engine.lanes()


@pytest.mark.slow
def test_more_shards_need_no_migration(stand: Stand) -> None:
    queue = f"reports-{stand.mark}"

    def put(number: int, shards: int) -> Task:
        task_id = stand.id(f"n{number}")
        return stand.enqueue(f"n{number}", lane=Lane.of(task_id, queue, shards))

    before = [put(number, 1) for number in range(4)]
    after = [put(number, 4) for number in range(4, 24)]
    assert {task.lane for task in before} == {Lane(queue)}
    assert len({task.lane for task in after}) > 1
    lanes = [lane for lane in stand.store.engine.lanes() if lane.queue == queue]
    assert set(lanes) == {task.lane for task in [*before, *after]}

    def everything() -> bool:
        found = [entry.task_id for lane in lanes for entry in stand.store.ready(lane, limit=50).entries]
        return sorted(found) == sorted(task.task_id for task in [*before, *after])

    assert eventually(everything)
