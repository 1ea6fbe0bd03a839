"""The DynamoDB engine: any number of machines on one table.

Batches of writes are concurrent requests, one for each row; new rows go 25 to a request. Each row has its condition and
its own outcome, and none takes its neighbours along. DynamoDB itself deletes rows whose `expireAt` is over.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final

from thunderagent.model.clock import DateClock
from thunderagent.model.conditions import Write
from thunderagent.model.errors import AccessDenied, StoreError, StoreRejected, StoreUnavailable, TableMissing
from thunderagent.model.rows import is_number, is_set, mistyped
from thunderagent.model.task import Lane, Page, Row, Status, StatusValue, lanes_of, timestamp
from thunderagent.stores import purposes
from thunderagent.stores.dynamo import expressions
from thunderagent.stores.dynamo.batches import Batches, chunks, gone
from thunderagent.stores.dynamo.connection import Connection, Purpose
from thunderagent.stores.dynamo.consumed import Consumed
from thunderagent.stores.dynamo.errors import Place, Refused
from thunderagent.stores.dynamo.expressions import INDEX
from thunderagent.stores.engine import PAYLOAD_MARK, Applied, KeptText, Overdue
from thunderagent.stores.large_texts import KEEP_PAYLOAD_S, SURE_S

TEXT_SETTLES_S: Final = 600.0
"""Age up to which a payload stays when its row is deleted: the row of an equal task may still come."""


LANES_ID: Final = "lanes:"
"""Id of the row that lists the suffixes of all lanes but the plain one; an index has no list of its distinct values."""

LANE_BATCH: Final = 50


CONNECTIONS: Final = 24
"""Least size of a client's pool."""


class DynamoEngine:
    """Rows in a DynamoDB table. Safe in threads; after a fork the child makes connections of its own.

    Args:
        table: its name.
        region: AWS region; None: the one of the environment.
        endpoint: URL of another DynamoDB, such as a local engine.
        purpose: `work`, or `lease` with shorter timeouts.
        threads: requests of one batch at the same time; 1: one after the other in the calling thread.
        clock: a shared clock to go on with.
        consumed: counts to go on with; None: new ones, without capacity.
        sleep: waits between the rounds of a batch, in seconds.

    Raises:
        ConfigurationError: no region is known, or the endpoint is not a URL.
    """

    inline_bytes = 512
    most_counted: int | None = 10_000

    def __init__(
        self,
        table: str,
        *,
        region: str | None = None,
        endpoint: str | None = None,
        purpose: Purpose = "work",
        threads: int = 8,
        clock: DateClock | None = None,
        consumed: Consumed | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.table = table
        self.sleep = sleep
        self.threads = threads
        self.connection = Connection(
            Place(table, region, endpoint),
            purpose=purpose,
            connections=max(CONNECTIONS, threads),
            clock=clock,
            consumed=consumed,
        )
        self._batches = Batches(self.connection, threads=threads, sleep=sleep)
        self._lanes = {""}

    @property
    def url(self) -> str:
        return self.connection.place.url

    @property
    def clock(self) -> DateClock:
        """The clock of DynamoDB, learnt from the replies of this engine and its siblings."""
        return self.connection.clock

    @property
    def consumed(self) -> Consumed:
        return self.connection.consumed

    # Writing

    def put(self, rows: Sequence[Row], *, fresh: bool = False) -> list[Applied]:
        try:
            self._register_lanes(rows)
        except StoreError as error:
            return [Applied(won=False, error=error)] * len(rows)
        if fresh and len(rows) > 1:
            return self._batches.insert(rows, self._put_one)
        return self._batches.each(self._put_one, rows)

    def apply(self, batch: Sequence[Write]) -> list[Applied]:
        return self._batches.each(self._apply_one, batch)

    def delete(self, tasks: Sequence[Row]) -> list[bool]:
        answers = self._batches.each(self._delete_one, tasks)
        for answer in answers:
            if answer.error:
                raise answer.error
        return [answer.won for answer in answers]

    def expire(self, now: float) -> int:
        """Nothing: the table's time to live does it."""
        return 0

    def overdue(self, now: float) -> Overdue | None:
        return None

    def put_texts(self, texts: Mapping[str, str], *, expire_at: float) -> None:
        def put(text_key: str) -> None:
            about = {"expire_at": expire_at, "now": timestamp(self.clock.now())}
            call, text = partial(self.connection.call, what_for=purposes.RequestPurpose.TEXTS), texts[text_key]
            try:
                call("PutItem", **expressions.put_text(self.table, text_key, text, **about))
            except Refused:  # it is there and lives as long or longer; its time keeps it from a purge under way
                call("UpdateItem", **expressions.touch_text(self.table, text_key, text, **about))

        self._batches.each(put, list(texts))

    # Reading

    def get(self, task_ids: Sequence[str]) -> dict[str, Row]:
        items = self._batches.fetch(task_ids)
        return {task_id: expressions.decode_row(item) for task_id, item in items.items()}

    def get_texts(self, keys: Sequence[str]) -> dict[str, KeptText]:
        items = self._batches.fetch(keys, purposes.RequestPurpose.TEXTS)
        rows = {text_key: expressions.decode_row(item) for text_key, item in items.items()}
        return {
            name: KeptText(row["payload"], row.get("expireAt"))
            for name, row in rows.items()
            if "payload" in row and mistyped(row, ("payload", "expireAt")) is None
        }

    def page(
        self,
        status_value: str,
        *,
        limit: int,
        until: float | None = None,
        after: Any = None,
        newest_first: bool = False,
    ) -> Page:
        arguments = expressions.query(
            self.table, status_value, until=until, limit=limit, after=after, newest_first=newest_first
        )
        reply = self.connection.call("Query", what_for=purposes.of_query(status_value), **arguments)
        entries = tuple(map(expressions.decode_candidate, reply["Items"]))
        return Page(entries, reply.get("LastEvaluatedKey"))

    def count(self, status_value: str, *, until: float | None = None, most: int | None = None) -> int:
        total = 0
        after: Any = None
        while most is None or total < most:
            limit = None if most is None else most - total
            arguments = expressions.count(self.table, status_value, until=until, limit=limit, after=after)
            reply = self.connection.call("Query", what_for=purposes.RequestPurpose.MEASURE, **arguments)
            total += int(reply["Count"])
            after = reply.get("LastEvaluatedKey")
            if after is None:
                break
        return total

    def lanes(self, strange: Callable[[str], None] = lambda suffix: None) -> list[Lane]:
        found = (self._read(LANES_ID) or {}).get("dependents", frozenset())
        if not is_set(found):  # made by hand
            strange(f"{found!r:.80} of the row {LANES_ID}")
            return [Lane()]
        self._lanes |= found
        return lanes_of(sorted({"", *found}), strange)

    # The place

    def check(self) -> None:
        try:
            table = self.connection.call("DescribeTable", TableName=self.table)["Table"]
        except AccessDenied:  # an agent needs no such permission: ask what it does need
            self.page(Status.PENDING, limit=1)
            return
        place = self.connection.place
        if table["TableStatus"] in ("CREATING", "DELETING"):
            raise StoreUnavailable(f"{place} is {table['TableStatus']}: wait until it is ACTIVE")
        if INDEX not in {index["IndexName"] for index in table.get("GlobalSecondaryIndexes", ())}:
            raise TableMissing(f"{place} has no index {INDEX!r}; see what is missing with: thunderagent table check")

    def refuses_duplicates(self, row: Row) -> bool:
        """Whether a batch of new rows leaves this row alone, which is there already and no task.

        Raises:
            StoreError: the permission is missing, or there was no answer.
        """
        return self._batches.refuses(row)

    def sibling(self) -> DynamoEngine:
        """The same table through a client with short timeouts; clock and counts are shared."""
        place = self.connection.place
        return DynamoEngine(
            self.table,
            region=place.region,
            endpoint=place.endpoint,
            purpose="lease",
            threads=self.threads,
            clock=self.clock,
            consumed=self.consumed,
            sleep=self.sleep,
        )

    def close(self) -> None:
        self._batches.close()
        self.connection.close()

    # One row

    def _apply_one(self, write: Write) -> Applied:
        what_for = purposes.of_write(write.verb, write.task_id)
        try:
            if write.delete:
                reply = self.connection.call("DeleteItem", what_for=what_for, **expressions.remove(self.table, write))
            else:
                reply = self.connection.call("UpdateItem", what_for=what_for, **expressions.update(self.table, write))
            return Applied(won=True, row=expressions.decode_row(reply["Attributes"]))
        except Refused as refusal:
            return self._refused(write.task_id, refusal)
        except StoreError as error:
            return Applied(won=False, error=error)
        except (TypeError, ValueError, KeyError) as error:
            return Applied(won=False, error=StoreRejected(f"{write.verb} {write.task_id}: {error}"))

    def _put_one(self, row: Row) -> Applied:
        try:
            what_for = purposes.of_put(row["taskId"])
            self.connection.call("PutItem", what_for=what_for, **expressions.put(self.table, row))
            return Applied(won=True, row=row)
        except Refused as refusal:
            answer = self._refused(row["taskId"], refusal)
            if answer.row is None and answer.error is None:
                return Applied(won=False, error=gone(row["taskId"]))
            return answer
        except StoreError as error:
            return Applied(won=False, error=error)
        except (TypeError, ValueError, KeyError) as error:
            return Applied(won=False, error=StoreRejected(f"{row.get('taskId')} cannot be put: {error}"))

    def _refused(self, task_id: str, refusal: Refused) -> Applied:
        """The row that refused a write, read when the reply has none."""
        try:
            row = expressions.decode_row(refusal.item) if refusal.item else self._read(task_id)
            return Applied(won=False, row=row)
        except StoreError as error:
            return Applied(won=False, error=error)

    def _delete_one(self, row: Row) -> Applied:
        what_for = purposes.of_row(row["taskId"])
        before = timestamp(self.clock.now() - TEXT_SETTLES_S)  # taken before the row goes: the process may stall
        try:
            reply = self.connection.call("DeleteItem", what_for=what_for, **expressions.delete(self.table, row))
        except Refused:
            return Applied(won=False)
        except StoreError as error:
            return Applied(won=False, error=error)
        had = expressions.decode_row(reply.get("Attributes", {}))
        for name in ("payloadRef", "resultRef"):
            ref = str(had.get(name, ""))
            if ref.startswith("item:"):
                with suppress(Refused, StoreError):  # a text that stays has an `expireAt` of its own
                    self._delete_text(ref.removeprefix("item:"), had, before)
        return Applied(won=True, row=had)

    def _delete_text(self, text_key: str, had: Row, before: float) -> None:
        """Delete a text of a row that is gone.

        A payload that was written since `before` stays: it may be that of an equal task whose row is still to come. If
        it is as old as the row that is gone, it lives on for as long as every open task needs at least.
        """
        call = partial(self.connection.call, what_for=purposes.RequestPurpose.TEXTS)
        submitted_at, due = (at if is_number(at := had.get(name)) else 0.0 for name in ("submittedAt", "createdAt"))
        if PAYLOAD_MARK not in text_key:
            call("DeleteItem", TableName=self.table, Key=expressions.key(text_key))
        elif submitted_at < before:
            call("DeleteItem", **expressions.delete_payload(self.table, text_key, before=before))
        else:
            latest = max(due, submitted_at)  # no equal task is due later whose payload ends by then
            life = {"until": latest + SURE_S, "most": latest + KEEP_PAYLOAD_S}
            call("UpdateItem", **expressions.shorten_payload(self.table, text_key, **life))

    def _read(self, task_id: str) -> Row | None:
        arguments = {"TableName": self.table, "Key": expressions.key(task_id), "ConsistentRead": True}
        reply = self.connection.call("GetItem", what_for=purposes.of_row(task_id), **arguments)
        return expressions.decode_row(reply["Item"]) if "Item" in reply else None

    def _register_lanes(self, rows: Sequence[Row]) -> None:
        """Note lanes that are new to this process before their first task is put, so that agents find it."""
        places = [StatusValue.parse(row["status"]) for row in rows if "status" in row]
        suffixes = {place.suffix for place in places if place.status in set(Status)}
        for some in chunks(sorted(suffixes - self._lanes), LANE_BATCH):
            with suppress(Refused):  # they are there already, or the row is none of ours: `lanes` says so
                arguments = expressions.add_lanes(self.table, LANES_ID, list(some))
                self.connection.call("UpdateItem", what_for=purposes.of_row(LANES_ID), **arguments)
            self._lanes.update(some)
