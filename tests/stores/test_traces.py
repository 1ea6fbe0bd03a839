"""The trace of a task is kept by every engine."""

from __future__ import annotations

import json

from tests.support.stands import Stand
from thunderagent.client import Client
from thunderagent.model.traceparent import continuing
from thunderagent.settings import load_settings

GOOD = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_the_trace_is_kept_on_every_engine_and_rows_stay_small(stand: Stand) -> None:
    client = Client(stand.store, load_settings(store=stand.store.engine.url))
    with continuing(GOOD):
        one = client.enqueue("a.job", {"x": 1}, task_id=stand.id("one"))
        many = client.enqueue_many("a.job", [{"x": 1}, {"x": 2}])
        child = client.enqueue("a.job", {}, depends_on=[one], unique_key=stand.id("key"))
    for task in (one, child, *(put.task for put in many)):
        now = client.get(task)
        assert now.traceparent == GOOD
        assert len(json.dumps(now.to_row(), default=list)) < 1024


def test_an_equal_put_from_another_trace_is_the_same_task(stand: Stand) -> None:
    client = Client(stand.store, load_settings(store=stand.store.engine.url))
    first = client.enqueue("a.job", {"x": 1}, task_id=stand.id("one"))
    with continuing(GOOD):
        again = client.enqueue("a.job", {"x": 1}, task_id=stand.id("one"))
    assert (again.id, again.traceparent) == (first.id, None)
