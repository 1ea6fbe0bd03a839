"""Stands: the places on which the conformance suite runs, and what its tests have in common.

* `sqlite-file`, `sqlite-memory`: the embedded engine;
* `moto`: DynamoDB in this process; its updates are not atomic between threads, so one thread only;
* `ministack`: DynamoDB as a process on the loopback address; atomic, so races are judged on it;
* `aws`: the real one, only when `THUNDER_TEST_DYNAMODB` holds a URL such as
  `dynamodb://ThunderAgentScratch?region=eu-central-1`. The table must exist (`thunderagent table create`), is not
  emptied, and each test uses a queue and ids of its own in it; make it a scratch table and delete it afterwards.
"""

from __future__ import annotations

import http.client
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

from thunderagent.model.task import Candidate, Lane, Lease, Status, Task, timestamp
from thunderagent.stores.dynamo.engine import DynamoEngine
from thunderagent.stores.dynamo.table import create_table
from thunderagent.stores.sqlite.engine import MEMORY, SqliteEngine
from thunderagent.stores.tasks import Enqueued, TaskStore, Wanted

REAL = os.environ.get("THUNDER_TEST_DYNAMODB", "")
ATOMIC = ("sqlite-file", "ministack", *(["aws"] if REAL else []))
"""Stands on which several threads may race."""
NAMES = ("sqlite-file", "sqlite-memory", "moto", *ATOMIC[1:])

T = TypeVar("T")


@dataclass(slots=True)
class Stand:
    """One engine with its rows; every test gets rows of its own."""

    name: str
    open: Callable[[], TaskStore]
    """Another store on the same rows, as another process would have it."""
    lane: Lane = field(default_factory=Lane)
    mark: str = field(default_factory=lambda: uuid.uuid4().hex[:8])
    store: TaskStore = field(init=False)
    _made: int = 0

    def __post_init__(self) -> None:
        self.store = self.open()

    @property
    def dynamo(self) -> DynamoEngine:
        """The engine of a stand on DynamoDB."""
        assert isinstance(self.store.engine, DynamoEngine)
        return self.store.engine

    def id(self, name: str) -> str:
        """An id that no other test uses."""
        return f"{name}-{self.mark}"

    def task(self, name: str = "a", **changes: Any) -> Task:
        """A task that is due now, in the lane of the test."""
        now = timestamp(self.store.clock.now())
        self._made += 1
        values: dict[str, Any] = {
            "task_id": self.id(name),
            "status": Status.PENDING,
            "lane": self.lane,
            "created_at": now,
            "submitted_at": timestamp(now - self._made),  # differs: it tells who created a task
            "job": "report.build",
            "payload_text": '{"month":"2026-07"}',
        }
        return Task(**{**values, **changes})

    def enqueue(self, name: str = "a", **changes: Any) -> Task:
        """Put one new task."""
        [answer] = self.store.enqueue([self.task(name, **changes)])
        assert answer.error is None
        assert answer.created
        return answer.task

    def ready(self, at_least: int, *, limit: int = 50) -> tuple[Candidate, ...]:
        """The first page of tasks that are due, once it has that many."""

        def look() -> tuple[Candidate, ...] | None:
            entries = self.store.ready(self.lane, limit=limit).entries
            return entries if len(entries) >= at_least else None

        return eventually(look)

    def now(self, name: str = "a") -> Task:
        """The task as it is in the store."""
        return self.store.get([self.id(name)])[self.id(name)]

    def lease(self, name: str = "a", *, owner: str = "agent-1", lease_s: float = 300.0, **changes: Any) -> Lease:
        """The lease of a new task that was claimed."""
        task = self.enqueue(name, **changes)
        [lease] = self.store.claim([Wanted(seen(task), lease_s)], owner=owner)
        return lease


def seen(task: Task) -> Candidate:
    """What a fresh index entry tells of a task."""
    return Candidate(task.task_id, task.status_value, task.created_at, task.job_value, task.kind)


def only(answers: list[Enqueued]) -> Enqueued:
    """The one answer."""
    [answer] = answers
    return answer


def patience() -> float:
    """How many times longer anything may take here: processes that want to run now for each core, at least 1.

    A bound of a test is on the waits of the product. What the machine adds is not the product's.
    """
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def eventually(look: Callable[[], T | None], within_s: float = 10.0) -> T:
    """What `look` finds, asked again until it finds something: an index may be late, a process may still start."""
    begun = time.monotonic()
    while True:
        found = look()
        if found:
            return found
        assert time.monotonic() - begun < within_s * patience(), f"nothing was found in {within_s:g} s"
        time.sleep(0.02)


def together(*actions: Callable[[], T]) -> list[T]:
    """Do all at the same moment, each in a thread of its own; what each answered, or the first exception."""
    barrier = threading.Barrier(len(actions))

    def start(action: Callable[[], T]) -> T:
        barrier.wait(30)
        return action()

    with ThreadPoolExecutor(len(actions)) as pool:
        return [future.result(60) for future in [pool.submit(start, action) for action in actions]]


@contextmanager
def open_stand(name: str, folder: Path, endpoint: str = "") -> Iterator[Stand]:
    """A stand with empty rows, closed at the end."""
    opened: list[TaskStore] = []

    def opening(make: Callable[[], SqliteEngine | DynamoEngine]) -> Callable[[], TaskStore]:
        def another() -> TaskStore:
            opened.append(TaskStore(make()))
            return opened[-1]

        return another

    try:
        if name == "sqlite-file":
            yield Stand(name, opening(lambda: SqliteEngine(str(folder / "tasks.db"))))
        elif name == "sqlite-memory":
            engine = SqliteEngine(MEMORY)
            yield Stand(name, opening(lambda: engine))
        elif name == "moto":
            from moto import mock_aws

            with mock_aws():
                stand = Stand(name, opening(lambda: DynamoEngine("TaskTable", region="eu-central-1", threads=1)))
                create_table(stand.dynamo)
                yield stand
        elif name == "ministack":
            table = f"TaskTable-{uuid.uuid4().hex[:8]}"
            stand = Stand(name, opening(lambda: DynamoEngine(table, endpoint=endpoint)))
            create_table(stand.dynamo)
            yield stand
            stand.dynamo.connection.call("DeleteTable", TableName=table)
        else:
            from thunderagent.stores import open_engine

            def real() -> DynamoEngine:
                engine = open_engine(REAL)
                assert isinstance(engine, DynamoEngine)
                return engine

            yield Stand(name, opening(real), lane=Lane(f"test-{uuid.uuid4().hex[:8]}"))
    finally:
        for store in opened:
            store.engine.close()


@contextmanager
def ministack(folder: Path, *, start_s: float = 60.0) -> Iterator[str]:
    """A real ministack process on a free loopback port; yields its endpoint and ends it with SIGTERM."""
    assert find_spec("ministack") is not None
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    environment = {
        **os.environ,
        "BIND_HOST": "127.0.0.1",
        "GATEWAY_PORT": str(port),
        "LOG_LEVEL": "ERROR",
        "PERSIST_STATE": "0",
    }
    log = folder / "ministack.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "ministack"], env=environment, stdout=output, stderr=subprocess.STDOUT, cwd=folder
        )
        try:
            eventually(lambda: is_healthy(port, process, log), start_s)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def is_healthy(port: int, process: subprocess.Popen[bytes], log: Path) -> bool:
    """Whether the engine answers; it must not have ended."""
    assert process.poll() is None, f"ministack ended with {process.returncode}:\n{log.read_text()[-2000:]}"
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/_ministack/health")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()
