"""Many rows in few requests of DynamoDB, and many requests at the same time.

A batch request is not one transaction: DynamoDB may leave members out of it, and they are sent again a bounded number
of times.
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any, Final, TypeVar

from thunderagent import purposes
from thunderagent.errors import StoreError, StoreThrottled
from thunderagent.pacing import batch_delays
from thunderagent.port import Applied
from thunderagent.stores import expressions
from thunderagent.stores.connection import Connection
from thunderagent.task import Row

PUT_BATCH: Final = 25
GET_BATCH: Final = 100
ROUNDS: Final = 8
"""How often what DynamoDB left out of a batch is sent again before that is an error."""

LEFT_OUT: Final = "LeftOutOfBatch"
"""The reason of a throttle that is counted when DynamoDB leaves members out of a batch."""

T = TypeVar("T")
R = TypeVar("R")
Item = dict[str, Any]


class Batches:
    """Batch requests to one table, and a pool of threads for requests that have no batch form."""

    def __init__(self, connection: Connection, *, threads: int, sleep: Callable[[float], None]) -> None:
        self._connection = connection
        self._table = connection.place.table
        self._threads = threads
        self._sleep = sleep
        self._random = random.Random()
        self._guard = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None
        self._pool_pid = 0

    def each(self, do: Callable[[T], R], members: Sequence[T]) -> list[R]:
        """Do something for each member at the same time; answers are in the order of the members."""
        if self._threads == 1 or len(members) < 2:
            return [do(member) for member in members]
        with self._guard:
            if self._pool is None or self._pool_pid != os.getpid():
                self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="dynamodb")
                self._pool_pid = os.getpid()
            pool = self._pool
        return list(pool.map(do, members))

    def put(self, rows: Sequence[Row], put_one: Callable[[Row], Applied]) -> list[Applied]:
        """Put rows whose ids are random, 25 to a request; `put_one` puts a row on the condition that it is new."""
        answers = self.each(lambda some: self._put_some(some, put_one), list(chunks(rows, PUT_BATCH)))
        return [answer for some in answers for answer in some]

    def fetch(self, ids: Iterable[str], what_for: purposes.Purpose | None = None) -> dict[str, Item]:
        """Items by id as they are now, 100 to a request, in the order of the ids.

        `what_for` they are counted; None: as the first id of a request tells.

        Raises:
            StoreError: one of the requests had no answer.
        """
        wanted = list(dict.fromkeys(ids))
        found: dict[str, Item] = {}
        for some in self.each(lambda some: self._fetch_some(some, what_for), list(chunks(wanted, GET_BATCH))):
            found.update(some)
        return {task_id: found[task_id] for task_id in wanted if task_id in found}

    def close(self) -> None:
        """Wait for requests under way and let the threads go."""
        with self._guard:
            pool, self._pool = self._pool, None
        if pool is not None and self._pool_pid == os.getpid():
            pool.shutdown()

    def _put_some(self, rows: Sequence[Row], put_one: Callable[[Row], Applied]) -> list[Applied]:
        """One batch. It never overwrites a row that is at work.

        A batch request has no conditions, so it is not repeated after a failure that leaves open whether its rows were
        put: each is then put on its condition. The same after a rejection, so that one bad row is alone.
        """
        try:
            waiting = {row["taskId"]: {"PutRequest": {"Item": expressions.encode_row(row)}} for row in rows}
        except (TypeError, ValueError, KeyError):
            waiting = {}
        if len(waiting) < len(rows):
            return [put_one(row) for row in rows]
        what_for = purposes.of_put(rows[0]["taskId"])
        problem = StoreThrottled(f"{self._connection.place} left rows out of {ROUNDS} batches: try again later")
        for delay_s in islice(batch_delays(self._random), ROUNDS):
            try:
                request = {self._table: list(waiting.values())}
                reply = self._connection.call("BatchWriteItem", what_for=what_for, RequestItems=request)
                left_out = reply.get("UnprocessedItems", {}).get(self._table, [])
                if left_out:
                    self._connection.consumed.add_throttle((LEFT_OUT,))
                waiting = {put["PutRequest"]["Item"]["taskId"]["S"]: put for put in left_out}
            except StoreThrottled as error:  # the request as a whole: nothing was put
                problem = error
            except StoreError:
                return [put_one(row) if row["taskId"] in waiting else Applied(won=True, row=row) for row in rows]
            if not waiting:
                break
            self._sleep(delay_s)
        return [
            Applied(won=False, error=problem) if row["taskId"] in waiting else Applied(won=True, row=row)
            for row in rows
        ]

    def _fetch_some(self, ids: Sequence[str], what_for: purposes.Purpose | None) -> dict[str, Item]:
        what_for = what_for or purposes.of_row(ids[0])
        found: dict[str, Item] = {}
        keys: list[Any] = [expressions.key(task_id) for task_id in ids]
        delays = islice(batch_delays(self._random), ROUNDS)
        while True:
            request = {self._table: {"Keys": keys, "ConsistentRead": True}}
            reply = self._connection.call("BatchGetItem", what_for=what_for, RequestItems=request)
            items = reply["Responses"].get(self._table, [])
            found.update((item["taskId"]["S"], item) for item in items)
            keys = reply.get("UnprocessedKeys", {}).get(self._table, {}).get("Keys", [])
            if not keys:
                return found
            if items:  # more than 16 MB, not throttled: go on at once
                delays = islice(batch_delays(self._random), ROUNDS)
                continue
            self._connection.consumed.add_throttle((LEFT_OUT,))
            delay_s = next(delays, None)
            if delay_s is None:
                place = self._connection.place
                raise StoreThrottled(f"{place} left rows out of {ROUNDS} reads: try again later")
            self._sleep(delay_s)


def chunks(members: Sequence[T], size: int) -> Iterable[Sequence[T]]:
    """The members in their order, at most `size` together."""
    return (members[start : start + size] for start in range(0, len(members), size))
