"""Queues as the naive loop uses them.

On DynamoDB by the resource API of boto3, on SQLite with one transaction for each write.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from typing import Any, Final, Protocol
from urllib.parse import parse_qs, urlsplit

import boto3
from botocore.exceptions import ClientError

from benchmarks.tally import Tally
from thunderagent.stores.dynamo.expressions import INDEX

PAGE: Final = 10
LOCK_S: Final = 300.0


class Queue(Protocol):
    """A queue as the naive loop uses it."""

    def put(self, task_id: str) -> None:
        """One new task."""

    def put_many(self, task_ids: Iterator[str]) -> None:
        """Many new tasks, as fast as the API makes easy."""

    def oldest(self) -> list[str]:
        """Ids of the ten oldest PENDING tasks."""

    def claim(self, task_id: str) -> bool:
        """Take a task unless it is locked."""

    def finish(self, task_id: str) -> None:
        """Write that a task is done."""


class DynamoQueue:
    """A table by the resource API."""

    def __init__(self, url: str, tally: Tally) -> None:
        parts = urlsplit(url)
        query = parse_qs(parts.query)
        # Only engines that the benchmark itself has started come here: they check no credentials.
        session = boto3.Session("local", "local", region_name=query["region"][0])
        resource: Any = session.resource("dynamodb", endpoint_url=query["endpoint"][0])
        self._table = resource.Table(parts.netloc)
        self._tally = tally

    def put(self, task_id: str) -> None:
        self._wrote(self._table.put_item(Item=self._item(task_id), ReturnConsumedCapacity="TOTAL"))

    def put_many(self, task_ids: Iterator[str]) -> None:
        with self._table.batch_writer() as batch:
            for task_id in task_ids:
                batch.put_item(Item=self._item(task_id))

    def oldest(self) -> list[str]:
        reply = self._table.query(
            IndexName=INDEX,
            KeyConditionExpression="#s = :s",
            ExpressionAttributeNames={"#s": "status"},
            ExpressionAttributeValues={":s": "PENDING"},
            Limit=PAGE,
            ReturnConsumedCapacity="TOTAL",
        )
        self._tally.requests += 1
        self._tally.read_units += reply["ConsumedCapacity"]["CapacityUnits"]
        return [item["taskId"] for item in reply["Items"]]

    def claim(self, task_id: str) -> bool:
        now = int(time.time())
        try:
            self._update(
                task_id,
                "SET #s = :s, lockTime = :lock",
                {":s": "RUNNING", ":lock": now + int(LOCK_S), ":now": now},
                ConditionExpression="attribute_not_exists(lockTime) OR lockTime < :now",
            )
        except ClientError as error:
            if error.response["Error"]["Code"] != "ConditionalCheckFailedException":
                raise
            self._tally.requests += 1
            self._tally.refused += 1
            return False
        return True

    def finish(self, task_id: str) -> None:
        self._update(task_id, "SET #s = :s, finishedAt = :now", {":s": "SUCCESS", ":now": int(time.time())})

    def _update(self, task_id: str, change: str, values: dict[str, Any], **more: Any) -> None:
        self._wrote(
            self._table.update_item(
                Key={"taskId": task_id},
                UpdateExpression=change,
                ExpressionAttributeNames={"#s": "status"},
                ExpressionAttributeValues=values,
                ReturnConsumedCapacity="TOTAL",
                **more,
            )
        )

    def _wrote(self, reply: dict[str, Any]) -> None:
        self._tally.requests += 1
        self._tally.write_units += reply["ConsumedCapacity"]["CapacityUnits"]

    @staticmethod
    def _item(task_id: str) -> dict[str, Any]:
        created = int(time.time())
        return {
            "taskId": task_id,
            "status": "PENDING",
            "createdAt": created,
            "job": "bench.nothing",
            "kind": "batch",
            "payload": '{"n":1}',
        }


class SqliteQueue:
    """A file, write-ahead log and `synchronous=NORMAL`: quicker than an agent may be, as it may lose what it said."""

    def __init__(self, path: str) -> None:
        self._connection = sqlite3.connect(path, timeout=30.0, isolation_level=None)
        for statement in (
            "PRAGMA journal_mode = WAL",
            "PRAGMA synchronous = NORMAL",
            "CREATE TABLE IF NOT EXISTS tasks "
            "(taskId TEXT PRIMARY KEY, status TEXT, createdAt REAL, lockTime REAL, job TEXT, payload TEXT)",
            "CREATE INDEX IF NOT EXISTS pending ON tasks (status, createdAt)",
        ):
            self._connection.execute(statement)

    def put(self, task_id: str) -> None:
        self._connection.execute(
            "INSERT INTO tasks VALUES (?, 'PENDING', ?, NULL, 'bench.nothing', '{\"n\":1}')", (task_id, time.time())
        )

    def put_many(self, task_ids: Iterator[str]) -> None:
        for task_id in task_ids:
            self.put(task_id)

    def oldest(self) -> list[str]:
        found = self._connection.execute(
            "SELECT taskId FROM tasks WHERE status = 'PENDING' ORDER BY createdAt LIMIT ?", (PAGE,)
        )
        return [task_id for (task_id,) in found]

    def claim(self, task_id: str) -> bool:
        now = time.time()
        change = (
            "UPDATE tasks SET status = 'RUNNING', lockTime = ? WHERE taskId = ? AND (lockTime IS NULL OR lockTime < ?)"
        )
        return self._connection.execute(change, (now + LOCK_S, task_id, now)).rowcount == 1

    def finish(self, task_id: str) -> None:
        self._connection.execute("UPDATE tasks SET status = 'SUCCESS' WHERE taskId = ?", (task_id,))


def open_queue(url: str, tally: Tally) -> Queue:
    """The queue of a store's URL."""
    return SqliteQueue(url.removeprefix("sqlite:///")) if url.startswith("sqlite") else DynamoQueue(url, tally)
