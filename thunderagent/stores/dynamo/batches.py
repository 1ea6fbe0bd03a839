"""Many rows in few requests of DynamoDB, and many requests at the same time.

A batch request is no transaction: each member has its own answer. DynamoDB may leave members out, and those are sent
again a bounded number of times.
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any, Final, TypeVar

from thunderagent.model.errors import StoreError, StoreRejected, StoreThrottled, StoreUnavailable
from thunderagent.model.forks import renewed
from thunderagent.model.task import Row
from thunderagent.stores import purposes
from thunderagent.stores.dynamo import expressions
from thunderagent.stores.dynamo.connection import Connection
from thunderagent.stores.dynamo.errors import Refused, of_member
from thunderagent.stores.engine import Applied


def batch_delays(rng: random.Random) -> Iterator[float]:
    """Waits before unprocessed members of a batch are sent again: 50 ms doubling to 5 s, full jitter."""
    ceiling = 0.05
    while True:
        yield rng.uniform(0.0, ceiling)
        ceiling = min(5.0, ceiling * 2)


PUT_BATCH: Final = 25
GET_BATCH: Final = 100
ROUNDS: Final = 8
"""How often what DynamoDB left out of a batch is sent again."""

LEFT_OUT: Final = "LeftOutOfBatch"
"""The reason of a throttle when DynamoDB leaves members out of a batch."""

PROBE_ID: Final = "probe:insert"
"""Id of a row that an engine must refuse to insert twice."""

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
        self._guard = renewed(threading.Lock())
        self._pool: ThreadPoolExecutor | None = None
        self._pool_pid = 0
        self._may_insert: bool | None = None

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

    def insert(self, rows: Sequence[Row], put_one: Callable[[Row], Applied]) -> list[Applied]:
        """Put new rows, 25 to a request, each on the condition that its id is not taken.

        `put_one` does the same for one row alone, on engines without such batches.
        """
        if not self._inserts():
            return self.each(put_one, rows)
        answers = self.each(lambda some: self._insert_some(some, put_one), list(chunks(rows, PUT_BATCH)))
        return [answer for some in answers for answer in some]

    def fetch(self, ids: Iterable[str], what_for: purposes.RequestPurpose | None = None) -> dict[str, Item]:
        """Items by id as they are now, 100 to a request, in the order of the ids.

        `what_for`: the purpose under which they are counted; None: by the first id of each request.

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

    def refuses(self, row: Row) -> bool:
        """Whether the engine refuses to insert a row whose id is taken; the row is there then.

        Some local engines know no PartiQL, and moto overwrites the row in silence or fails within this process.

        Raises:
            StoreError: the permission is missing, or there was no answer.
        """
        probe = [expressions.insert(self._table, row)]
        try:
            return any(isinstance(self._insert(probe, purposes.of_row(PROBE_ID))[0], Refused) for _ in range(2))
        except (StoreRejected, ImportError, TypeError):
            return False

    def _inserts(self) -> bool:
        """Whether new rows may go in batches; found out once."""
        if self._may_insert is None:
            try:
                self._may_insert = self.refuses({"taskId": PROBE_ID})
            except StoreUnavailable:
                return False
            except StoreError:  # a policy of an earlier version does not have the permission
                self._may_insert = False
        return self._may_insert

    def _insert_some(self, rows: Sequence[Row], put_one: Callable[[Row], Applied]) -> list[Applied]:
        """One batch. Where one row makes a request unacceptable, each goes alone, so that it alone is rejected."""
        try:
            waiting = {row["taskId"]: expressions.insert(self._table, row) for row in rows}
        except (TypeError, ValueError, KeyError):
            waiting = {}
        if len(waiting) < len(rows):  # or an id is named twice
            return [put_one(row) for row in rows]
        outcomes: dict[str, Refused | StoreError | None] = {}
        what_for = purposes.of_put(rows[0]["taskId"])
        for delay_s in islice(batch_delays(self._random), ROUNDS):
            try:
                results = self._insert(list(waiting.values()), what_for)
            except StoreRejected:
                return [put_one(row) for row in rows]
            except StoreThrottled as error:
                results = [error] * len(waiting)
            except StoreError as error:
                outcomes |= dict.fromkeys(waiting, error)
                break
            outcomes |= zip(waiting, results, strict=True)
            waiting = {name: one for name, one in waiting.items() if isinstance(outcomes[name], StoreUnavailable)}
            if not waiting:
                break
            self._sleep(delay_s)
        return self._answers(rows, outcomes, what_for)

    def _insert(self, statements: list[Item], what_for: purposes.RequestPurpose) -> list[Refused | StoreError | None]:
        """The outcome of each statement; None for a row that is put."""
        reply = self._connection.call("BatchExecuteStatement", what_for=what_for, Statements=statements)
        results = [of_member(member, self._connection.place) for member in reply["Responses"]]
        if any(isinstance(one, StoreUnavailable) for one in results):
            self._connection.consumed.add_throttle((LEFT_OUT,))
        return results

    def _answers(
        self, rows: Sequence[Row], outcomes: dict[str, Refused | StoreError | None], what_for: purposes.RequestPurpose
    ) -> list[Applied]:
        """The answers in the order of the rows. Rows whose ids are taken are read: one may be ours, its reply lost."""
        taken = [name for name, outcome in outcomes.items() if isinstance(outcome, Refused)]
        found: dict[str, Item] = {}
        try:
            found = self.fetch(taken, what_for)
        except StoreError as error:
            outcomes |= dict.fromkeys(taken, error)
        answers = list[Applied]()
        for row in rows:
            match outcomes[task_id := row["taskId"]]:
                case None:
                    answers.append(Applied(won=True, row=row))
                case StoreError() as problem:
                    answers.append(Applied(won=False, error=problem))
                case _ if task_id in found:
                    answers.append(Applied(won=False, row=expressions.decode_row(found[task_id])))
                case _:
                    answers.append(Applied(won=False, error=gone(task_id)))
        return answers

    def _fetch_some(self, ids: Sequence[str], what_for: purposes.RequestPurpose | None) -> dict[str, Item]:
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


def gone(task_id: str) -> StoreError:
    """The error of a row that refused a put, and is not there."""
    return StoreUnavailable(f"{task_id} was deleted while it was put: put it again")


def chunks(members: Sequence[T], size: int) -> Iterable[Sequence[T]]:
    """The members in their order, at most `size` together."""
    return (members[start : start + size] for start in range(0, len(members), size))
