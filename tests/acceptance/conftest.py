"""Places on which the agents run, and a fleet that is always gone after a test."""

from __future__ import annotations

import signal
import sqlite3
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.acceptance.processes import LONG_S, AgentProcess, Marks, until
from thunderagent.client import Client
from thunderagent.model.errors import TableMissing
from thunderagent.model.task import Status, Task
from thunderagent.stores.dynamo.engine import DynamoEngine
from thunderagent.stores.dynamo.table import create_table

LEASE_S = 3.0
GUARD_S = 0.5
SWEEP_S = 0.5
HEARTBEAT_S = 0.5

SETTINGS: Mapping[str, object] = {
    "lease_s": LEASE_S,
    "heartbeat_s": HEARTBEAT_S,
    "sweep_s": SWEEP_S,
    "clock_guard_s": GUARD_S,
    "poll_min_s": 0.05,
    "poll_max_s": 0.3,
    "poll_idle_s": 0.3,
    "backoff_base_s": 0.1,
    "log_level": "DEBUG",
}
"""Everything a hundred times faster than in production; the proportions stay."""


@dataclass(slots=True)
class Place:
    """A store with its rows; every test gets rows of its own."""

    kind: str
    url: str
    client: Client
    file: Path = field(default_factory=Path)

    @property
    def clock_width_s(self) -> float:
        """How far apart two agents may be about the time: DynamoDB's clock is learnt from whole seconds."""
        return 0.0 if self.kind == "sqlite" else 2.0

    def task(self, task_id: str) -> Task:
        return self.client.get(task_id)

    def wait(self, task_id: str, status: Status, within_s: float = LONG_S) -> Task:
        """The task once it has this status."""

        def look() -> Task | None:
            task = self.task(task_id)
            return task if task.status is status else None

        return until(look, within_s, lambda: f"{status} of {self.task(task_id)}")

    def is_writable(self) -> bool:
        """False while somebody holds the write lock of the file."""
        if self.kind != "sqlite":
            return True
        connection = sqlite3.connect(self.file, timeout=0.3, isolation_level=None)
        try:
            connection.execute("BEGIN IMMEDIATE")
            connection.execute("ROLLBACK")
        except sqlite3.OperationalError:
            return False
        finally:
            connection.close()
        return True

    def pause(self, agent: AgentProcess, when: Callable[[], object] = lambda: True) -> None:
        """Freeze an agent at a moment when `when` holds and it does not hold the write lock of the file.

        A writer of SQLite that is stopped in the middle of a transaction stops all others, like any lock of a file.
        """

        def stopped() -> bool:
            agent.freeze()
            if self.is_writable() and when():
                return True
            agent.send(signal.SIGCONT)
            return False

        until(stopped, LONG_S, "a good moment to stop the agent")


@pytest.fixture(params=["sqlite", pytest.param("ministack", marks=pytest.mark.ministack)])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    """Each kind of store in turn."""
    name = "sqlite_place" if request.param == "sqlite" else "ministack_place"
    yield request.getfixturevalue(name)


@pytest.fixture
def sqlite_place(tmp_path: Path) -> Iterator[Place]:
    """A new file."""
    file = tmp_path / "tasks.db"
    url = f"sqlite:///{file}"
    client = Client.from_settings(store=url)
    client.store.engine.check()
    yield Place("sqlite", url, client, file)
    client.close()


@pytest.fixture
def ministack_place(ministack_endpoint: str) -> Iterator[Place]:
    """A new table."""
    url = f"dynamodb://Acceptance-{uuid.uuid4().hex[:8]}?region=us-east-1&endpoint={ministack_endpoint}"
    client = Client.from_settings(store=url)
    engine = client.store.engine
    assert isinstance(engine, DynamoEngine)
    create_table(engine)
    yield Place("ministack", url, client)
    with suppress(TableMissing):
        engine.connection.call("DeleteTable", TableName=engine.table)
    client.close()


Measured = Callable[[str, object], None]


@pytest.fixture
def measured(request: pytest.FixtureRequest) -> Measured:
    """Keep a number of this run for the report of `pytest --junitxml`."""

    def keep(name: str, value: object) -> None:
        request.node.user_properties.append((name, value))

    return keep


@pytest.fixture
def marks(tmp_path: Path) -> Marks:
    """Where handlers leave their marks."""
    return Marks(tmp_path / "marks")


Start = Callable[..., AgentProcess]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start an agent on a place, with settings other than ours; it is gone after the test."""
    agents: list[AgentProcess] = []

    def launch(
        place: Place | str,
        *arguments: str,
        jobs: str = "workjobs",
        cwd: Path = tmp_path,
        ahead: Path | None = None,
        within: Sequence[str] = (),
        **settings: Any,
    ) -> AgentProcess:
        url = place if isinstance(place, str) else place.url
        log = tmp_path / f"agent-{len(agents)}.log"
        given = {**SETTINGS, "store": url, **settings}
        whole = [jobs, *arguments]
        agents.append(AgentProcess(whole, settings=given, log=log, cwd=cwd, ahead=ahead, within=within))
        return agents[-1]

    try:
        yield launch
    finally:
        for agent in agents:
            agent.end()
