"""What everybody writes first, to compare with: a queue without leases, and `async for socket in connect(url)`.

    python -m benchmarks.naive '{"store": "sqlite:////tmp/tasks.db"}'
    python -m benchmarks.naive '{"loop": "asyncio", "url": "ws://127.0.0.1:8000/"}'

The queue: query the ten oldest PENDING tasks, claim one after the other in that order, write the end without a
condition, and do not pause while there is work. The streams: one loop each. Only their beginning is gentler than usual:
connections are opened some at a time, so that all of them come about.

Nothing of ThunderAgent is imported here, as the memory of this process is measured.
"""

from __future__ import annotations

import asyncio
import json
import sqlite3
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any, Final
from urllib.parse import parse_qs, urlsplit

from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

from benchmarks.measured import COUNTS, raise_open_files, run, serve

PAGE: Final = 10
LOCK_S: Final = 300.0
EMPTY: Final = 3
"""Empty queries in a row after which there is nothing left; the index may be late."""
AT_ONCE: Final = 16
"""Connections that are opened at one time."""


class DynamoQueue:
    """A table by the resource API of boto3, on an engine of this machine."""

    def __init__(self, url: str) -> None:
        import boto3  # takes memory, which is measured where connections are held

        parts = urlsplit(url)
        query = parse_qs(parts.query)
        session = boto3.Session("local", "local", region_name=query["region"][0])
        self._table: Any = session.resource("dynamodb", endpoint_url=query["endpoint"][0]).Table(parts.netloc)
        self._refused = self._table.meta.client.exceptions.ConditionalCheckFailedException

    def put(self, task_id: str) -> None:
        """One new task."""
        self._ask("put_item", Item=self._item(task_id))

    def put_many(self, task_ids: Iterator[str]) -> None:
        """Many new tasks, as fast as the API makes easy."""
        with self._table.batch_writer() as batch:
            for task_id in task_ids:
                batch.put_item(Item=self._item(task_id))

    def oldest(self) -> list[str]:
        """Ids of the ten oldest PENDING tasks."""
        reply = self._ask(
            "query",
            IndexName="status-createdAt-index",
            KeyConditionExpression="#s = :s",
            ExpressionAttributeNames={"#s": "status"},
            ExpressionAttributeValues={":s": "PENDING"},
            Limit=PAGE,
        )
        return [item["taskId"] for item in reply["Items"]]

    def claim(self, task_id: str) -> bool:
        """Take a task unless it is locked."""
        now = int(time.time())
        try:
            self._ask(
                "update_item",
                Key={"taskId": task_id},
                UpdateExpression="SET #s = :s, lockTime = :lock",
                ConditionExpression="attribute_not_exists(lockTime) OR lockTime < :now",
                ExpressionAttributeNames={"#s": "status"},
                ExpressionAttributeValues={":s": "RUNNING", ":lock": now + int(LOCK_S), ":now": now},
            )
        except self._refused:
            COUNTS.refused += 1
            return False
        return True

    def finish(self, task_id: str) -> None:
        """Write that a task is done."""
        self._ask(
            "update_item",
            Key={"taskId": task_id},
            UpdateExpression="SET #s = :s, finishedAt = :now",
            ExpressionAttributeNames={"#s": "status"},
            ExpressionAttributeValues={":s": "SUCCESS", ":now": int(time.time())},
        )

    def _ask(self, verb: str, **arguments: Any) -> dict[str, Any]:
        COUNTS.requests += 1
        reply: dict[str, Any] = getattr(self._table, verb)(ReturnConsumedCapacity="TOTAL", **arguments)
        units = float(reply["ConsumedCapacity"]["CapacityUnits"])
        if verb == "query":
            COUNTS.read_units += units
        else:
            COUNTS.write_units += units
        return reply

    @staticmethod
    def _item(task_id: str) -> dict[str, Any]:
        item = {"taskId": task_id, "status": "PENDING", "job": "bench.nothing", "kind": "batch", "payload": '{"n":1}'}
        return {**item, "createdAt": int(time.time())}


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


Queue = DynamoQueue | SqliteQueue


def open_queue(url: str) -> Queue:
    """The queue of a store's URL."""
    return SqliteQueue(url.removeprefix("sqlite:///")) if url.startswith("sqlite") else DynamoQueue(url)


def drain(tasks: Queue) -> None:
    """Run what is there until nothing is left."""
    empty = 0
    while empty < EMPTY:
        found = tasks.oldest()
        if not found:
            empty += 1
            time.sleep(0.05)
            continue
        empty = 0
        for task_id in found:
            COUNTS.tried += 1
            if tasks.claim(task_id):
                COUNTS.won += 1
                COUNTS.start(task_id)
                tasks.finish(task_id)
                COUNTS.succeed()
    COUNTS.is_done = True


def run_queue(store: str) -> None:
    """Drain a queue from the request `go` on, and stay for questions."""
    tasks = open_queue(store)
    tasks.oldest()
    COUNTS.requests, COUNTS.read_units = 0, 0.0
    serve({})
    COUNTS.await_go()
    drain(tasks)
    threading.Event().wait()


async def run_streams(url: str) -> None:
    """Follow as many streams of this server as the requests `begin` say."""
    raise_open_files()
    loop = asyncio.get_running_loop()
    turns = asyncio.Semaphore(AT_ONCE)
    followers: list[asyncio.Task[None]] = []

    async def follow(url: str) -> None:
        await turns.acquire()
        is_first = True
        async for socket in connect(url):
            if is_first:
                is_first = False
                turns.release()
            COUNTS.live += 1
            COUNTS.last_live = time.monotonic()
            try:
                async for message in socket:
                    COUNTS.handled += 1
                    if COUNTS.mode != "raw":
                        json.loads(message)
            except ConnectionClosed:
                continue
            finally:
                COUNTS.live -= 1

    def begin(number: int) -> None:
        first = len(followers)
        followers.extend(loop.create_task(follow(f"{url}{first + index}")) for index in range(number))

    def answer(do: str, **arguments: Any) -> dict[str, Any]:
        if do == "begin":
            loop.call_soon_threadsafe(begin, int(arguments["number"]))
            return {}
        return COUNTS.answer(do, **arguments)

    serve({}, answer)
    await COUNTS.tick()


if __name__ == "__main__":
    given: dict[str, Any] = json.loads(sys.argv[1])
    if "store" in given:
        run_queue(given["store"])
    else:
        run(run_streams(given["url"]), on_uvloop=given["loop"] == "uvloop")
