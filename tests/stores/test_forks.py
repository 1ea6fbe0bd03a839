"""Forks: what a child and its parent acknowledge is there for everybody, and neither waits without end."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import select
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from moto import mock_aws
from websockets.asyncio.server import ServerConnection, serve

from tests.support.stands import eventually, patience
from thunderagent.client import Client
from thunderagent.jobs.context import Context
from thunderagent.model.bus import EventBus
from thunderagent.model.errors import ConfigurationError
from thunderagent.model.task import Lease
from thunderagent.ops.doctor.findings import State
from thunderagent.ops.doctor.sqlite import look_at_file
from thunderagent.queue.doorbell.message import DoorbellMessage, Verb
from thunderagent.queue.doorbell.sqs import SqsDoorbell
from thunderagent.queue.doorbell.unix import LocalDoorbell
from thunderagent.stores import aws
from thunderagent.stores.dynamo.engine import DynamoEngine
from thunderagent.stores.dynamo.table import create_table
from thunderagent.stores.s3 import S3Texts
from thunderagent.stores.sqlite import engine as sqlite
from thunderagent.stores.sqlite import link as sqlite_link
from thunderagent.stores.sqlite.engine import MEMORY, SqliteEngine
from thunderagent.streams.connection.endpoint import Endpoint
from thunderagent.streams.connection.options import StreamOptions
from thunderagent.streams.connection.resolver import Resolver
from thunderagent.streams.connection.transport import abort_connection, open_connection

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")

LONG_S = 60.0
"""Longest that a test waits for a child; nothing waits so long unless it hangs."""

READER = """
import sys
from thunderagent.client import Client
client = Client.from_settings(store=sys.argv[1])
print(sum(1 for _ in client.list(limit=None)))
client.close()
"""


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "tasks.db")


def _client(path: str) -> Client:
    return Client.from_settings(store=f"sqlite:///{path}")


def _seen_by_another(path: str) -> int:
    """Tasks that a process finds that has nothing to do with this one."""
    done = subprocess.run(
        [sys.executable, "-c", READER, f"sqlite:///{path}"],
        capture_output=True,
        text=True,
        timeout=LONG_S,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


class Child:
    """A forked child that does something when it is let go, and its answer."""

    def __init__(self, do: Callable[[], Any], *, waits: bool = False) -> None:
        answer, self._tell = os.pipe()
        self._go, go = os.pipe()
        begun = time.monotonic()
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                os.close(go)
                os.close(answer)
                os.read(self._go, 1)
                os.write(self._tell, json.dumps(do()).encode())
                code = 0
            except BaseException as error:
                os.write(self._tell, json.dumps(f"{type(error).__name__}: {error}").encode())
            finally:
                os._exit(code)
        self.forked_s = time.monotonic() - begun
        """How long the parent was held up."""
        os.close(self._tell)
        os.close(self._go)
        self._answer, self._release = answer, go
        if not waits:
            self.go()

    def go(self) -> None:
        os.write(self._release, b".")
        os.close(self._release)

    def answer(self) -> Any:
        """What it answered, or the error with which it ended; one that hangs is killed."""
        ready, _, _ = select.select([self._answer], [], [], LONG_S)
        if not ready:
            os.kill(self.pid, signal.SIGKILL)
        told = os.read(self._answer, 65536)  # not to the end: other children may have a copy of the other side
        os.close(self._answer)
        os.waitpid(self.pid, 0)
        assert told, "the child hung"
        return json.loads(told)


def _enqueue(client: Client, number: int) -> int:
    outcomes = client.enqueue_many("report.build", [{"n": one} for one in range(number)])
    return sum(one.error is None and one.created for one in outcomes)


@pytest.mark.slow
def test_what_a_child_acknowledges_is_seen_by_all_when_its_parent_closes(path: str) -> None:
    client = _client(path)
    assert _enqueue(client, 5) == 5
    step, closed = os.pipe()

    def work() -> list[int]:
        before = _enqueue(client, 10)
        os.read(step, 1)
        return [before, _enqueue(client, 10)]

    early, late = Child(work), Child(lambda: _enqueue(client, 1), waits=True)
    while client.store.engine.count("PENDING") < 15:
        time.sleep(0.01)
    client.close()
    assert _seen_by_another(path) == 15
    os.write(closed, b".")
    assert early.answer() == [10, 10]
    assert _seen_by_another(path) == 25
    late.go()
    assert late.answer() == 1
    assert _seen_by_another(path) == 26
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)


@pytest.mark.slow
def test_a_child_goes_on_when_its_parent_is_gone_and_a_command_has_opened_the_file(path: str) -> None:
    """The parent is a process of its own here, so that it can really be gone."""
    code = """
import os, sys
from thunderagent.client import Client
client = Client.from_settings(store=sys.argv[1])
client.enqueue("report.build", {})
if os.fork():
    os._exit(0)
print("born", flush=True)
for line in sys.stdin:
    outcomes = client.enqueue_many("report.build", [{}] * 10)
    print(sum(one.error is None and one.created for one in outcomes), flush=True)
"""
    parent = subprocess.Popen(
        [sys.executable, "-c", code, f"sqlite:///{path}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert parent.stdin is not None
    assert parent.stdout is not None
    try:
        assert parent.stdout.readline() == "born\n"
        parent.wait(LONG_S)
        for round_ in (1, 2):
            assert _seen_by_another(path) == 1 + 10 * (round_ - 1)
            parent.stdin.write("go\n")
            parent.stdin.flush()
            assert parent.stdout.readline() == "10\n"
        assert _seen_by_another(path) == 21
    finally:
        parent.stdin.close()
        assert parent.stdout.read() == ""
        parent.stdout.close()


@pytest.mark.slow
def test_parent_and_child_write_at_the_same_time_and_lose_nothing(path: str) -> None:
    client = _client(path)
    beside = client.store.sibling()
    beside.engine.check()
    _enqueue(client, 1)
    children = [Child(lambda: sum(_enqueue(client, 1) for _ in range(30))) for _ in range(3)]
    assert sum(_enqueue(client, 1) for _ in range(30)) == 30
    assert [child.answer() for child in children] == [30, 30, 30]
    assert _seen_by_another(path) == 121
    beside.engine.close()
    client.close()


@pytest.mark.slow
def test_no_connection_is_open_while_a_child_is_made(path: str) -> None:
    """The locks of a file are those of the process: a child that inherits a connection believes in locks that it does
    not have, and ends those of its own that it gets when it closes the file."""
    client = _client(path)
    beside = client.store.sibling()
    for engine in (client.store.engine, beside.engine):
        engine.check()

    def open_files() -> list[str]:
        names = (os.path.join("/proc/self/fd", one) for one in os.listdir("/proc/self/fd"))
        files = {os.readlink(one) for one in names if os.path.lexists(one)}
        return sorted(files & {path, f"{path}-wal", f"{path}-shm"})

    with client.store.engine._reading() as kept:  # type: ignore[attr-defined]
        kept.execute("SELECT 1")  # as in the frame of another thread, which has left the block and not yet returned
    assert len(open_files()) == 3
    assert Child(open_files).answer() == []
    del kept
    assert client.store.engine.count("PENDING") == 0, "the parent opens the file again"
    beside.engine.close()
    client.close()


@pytest.mark.slow
def test_a_look_at_the_file_ends_no_lock_of_its_process(path: str) -> None:
    """To close any descriptor of a file ends all locks that the process has on it."""
    engine = SqliteEngine(path)
    engine.check()
    other = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1], timeout=0, isolation_level=None)
try:
    connection.execute("BEGIN IMMEDIATE")
except sqlite3.OperationalError as error:
    print(error)
"""
    with engine._transaction():
        findings = {one.check: one for one in look_at_file(path)}
        done = subprocess.run(
            [sys.executable, "-c", other, path], capture_output=True, text=True, timeout=LONG_S, check=True
        )
    assert findings["file"].state is State.OK
    assert done.stdout == "database is locked\n"
    engine.close()


def _enqueue_in_child(url: str, client: Client | None, number: int) -> None:
    _enqueue(client or Client.from_settings(store=url), number)


@pytest.mark.slow
def test_children_of_multiprocessing_use_the_client_of_their_parent(path: str) -> None:
    client = _client(path)
    _enqueue(client, 5)
    fork = multiprocessing.get_context("fork")
    children = [fork.Process(target=_enqueue_in_child, args=("", client, 10)) for _ in range(2)]
    for child in children:
        child.start()
    client.close()
    for child in children:
        child.join(LONG_S)
        assert child.exitcode == 0
    assert _seen_by_another(path) == 25


# Beside threads that are inside


@contextmanager
def _inside(engine: SqliteEngine) -> Iterator[Callable[[], None]]:
    """A thread in the middle of a transaction until it is let go, or until the end of the block."""
    entered, leave = threading.Event(), threading.Event()

    def stay() -> None:
        with engine._transaction() as cursor:
            cursor.execute("DELETE FROM tasks WHERE taskId = 'nobody'")
            entered.set()
            assert leave.wait(LONG_S)

    thread = threading.Thread(target=stay)
    thread.start()
    assert entered.wait(LONG_S)
    try:
        yield leave.set
    finally:
        leave.set()
        thread.join(LONG_S)
        assert not thread.is_alive()


@pytest.mark.slow
def test_a_fork_waits_for_a_thread_in_a_transaction_and_both_processes_go_on(path: str) -> None:
    client = _client(path)
    _enqueue(client, 1)
    with _inside(client.store.engine) as leave:  # type: ignore[arg-type]
        threading.Timer(0.2, leave).start()
        child = Child(lambda: _enqueue(client, 10))
    assert child.answer() == 10
    assert _enqueue(client, 1) == 1
    assert _seen_by_another(path) == 12
    client.close()


@pytest.mark.slow
def test_a_fork_beside_a_thread_that_stays_inside_ends_in_time_and_the_child_writes_nothing(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite_link, "FORK_S", 0.2)
    client = _client(path)
    beside = client.store.sibling()
    beside.engine.check()
    _enqueue(client, 1)
    os.symlink(path, f"{path}.link")

    def work() -> list[str]:
        told = []
        for one in (client, Client(beside, client.settings), _client(path), _client(f"{path}.link")):
            with pytest.raises(ConfigurationError, match=r"when this process was forked.*lazy-apps"):
                one.enqueue("a.b", {})
            one.close()
            told.append("refused")
        with _client(f"{path}.other").store.engine._reading():  # type: ignore[attr-defined]
            return told

    with _inside(client.store.engine):  # type: ignore[arg-type]
        child = Child(work)
        assert 0.2 <= child.forked_s < LONG_S / 2
        assert child.answer() == ["refused"] * 4
    assert _enqueue(client, 1) == 1, "the parent is none the worse"
    assert Child(lambda: _enqueue(client, 10)).answer() == 10, "and a later child may use it"
    assert _seen_by_another(path) == 12
    beside.engine.close()
    client.close()


@pytest.mark.slow
def test_a_thread_that_reads_in_the_middle_of_its_transaction_does_not_wait_for_the_fork_that_waits_for_it(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a handler of a signal may do."""
    monkeypatch.setattr(sqlite_link, "FORK_S", LONG_S)
    client = _client(path)
    _enqueue(client, 1)
    engine = client.store.engine
    entered, counted = threading.Event(), list[int]()

    def work() -> None:
        with engine._transaction():  # type: ignore[attr-defined]
            entered.set()
            eventually(lambda: sqlite_link._is_forking)
            counted.append(engine.count("PENDING"))

    thread = threading.Thread(target=work)
    thread.start()
    assert entered.wait(LONG_S)
    child = Child(lambda: _enqueue(client, 10))
    thread.join(LONG_S)
    assert counted == [1]
    assert child.answer() == 10
    assert _seen_by_another(path) == 11
    client.close()


@pytest.mark.slow
def test_threads_that_use_the_client_all_the_time_let_a_fork_go_first(path: str) -> None:
    client = _client(path)
    over, done = threading.Event(), [0, 0]

    def work(number: int) -> None:
        while not over.is_set():
            done[number] += _enqueue(client, 1)
            client.store.engine.count("PENDING")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    try:
        children = [Child(lambda: _enqueue(client, 2)) for _ in range(10)]
        assert [child.answer() for child in children] == [2] * 10
    finally:
        over.set()
        for thread in threads:
            thread.join(LONG_S)
    assert _seen_by_another(path) == 20 + sum(done)
    client.close()


@pytest.mark.slow
def test_a_thread_that_waits_for_the_writer_holds_up_no_fork_and_no_reader(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = _client(path)
    _enqueue(client, 1)
    waits, put = threading.Event(), list[int]()
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")

        def pause(*_: object) -> float:
            waits.set()
            return 0.005

        monkeypatch.setattr(sqlite, "lock_pause", pause)
        thread = threading.Thread(target=lambda: put.append(_enqueue(client, 1)))
        thread.start()
        assert waits.wait(LONG_S)
        child = Child(lambda: client.store.engine.count("PENDING"))
        assert child.forked_s < 2.0
        assert child.answer() == 1
        assert client.store.engine.count("PENDING") == 1
        other.execute("ROLLBACK")
        thread.join(LONG_S)
    assert put == [1]
    assert _seen_by_another(path) == 2
    client.close()


@pytest.mark.slow
def test_threads_that_fork_at_the_same_time_do_not_wait_for_each_other_for_ever(path: str) -> None:
    client = _client(path)
    siblings = [client.store.sibling() for _ in range(3)]
    for one in siblings:
        one.engine.check()
    children: list[Child] = []

    def work() -> None:
        for _ in range(5):
            children.append(Child(lambda: _enqueue(client, 1)))
            _enqueue(client, 1)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG_S)
        assert not thread.is_alive()
    assert [child.answer() for child in children] == [1] * 15
    assert _seen_by_another(path) == 30
    for one in siblings:
        one.engine.close()
    client.close()


@pytest.mark.slow
def test_a_signal_that_forks_in_the_middle_of_a_transaction_leaves_the_transaction_whole(path: str) -> None:
    engine = SqliteEngine(path)
    engine.check()
    row = {"taskId": "a", "status": "PENDING", "createdAt": 1.0, "submittedAt": 1.0, "job": "j", "fence": 0}
    with engine._transaction() as cursor:
        cursor.execute("SELECT 1")
        child = Child(engine.check, waits=True)
    assert engine.put([row])[0].won
    child.go()
    assert "ConfigurationError" in child.answer()
    assert engine.get(["a"])
    engine.close()


@pytest.mark.slow
def test_a_database_in_memory_is_not_of_a_forked_child(path: str) -> None:
    """What a child would put into its copy would be acknowledged and seen by nobody."""
    engine, unopened = SqliteEngine(MEMORY), SqliteEngine(MEMORY)
    row = {"taskId": "a", "status": "PENDING", "createdAt": 1.0, "submittedAt": 1.0, "job": "j", "fence": 0}
    assert engine.put([row])[0].won

    def work() -> list[Any]:
        with pytest.raises(ConfigurationError, match=r"belongs to the process that made it.*use a file"):
            engine.put([{**row, "taskId": "b"}])
        engine.close()
        return [unopened.put([row])[0].won, SqliteEngine(MEMORY).count("PENDING")]

    assert Child(work).answer() == [True, 0], "a store that the child opens itself is its own"
    assert set(engine.get(["a", "b"])) == {"a"}, "and the parent has what it had"
    engine.close()
    unopened.close()


@pytest.mark.slow
def test_a_program_that_is_started_takes_nothing_along_and_holds_up_nobody(path: str) -> None:
    engine = SqliteEngine(path)
    engine.check()
    with _inside(engine):
        assert subprocess.run([sys.executable, "-c", "pass"], timeout=LONG_S, check=False).returncode == 0
    with engine._link.used() as cursor:
        connection = cursor.connection
    assert subprocess.run([sys.executable, "-c", "pass"], timeout=LONG_S, check=False).returncode == 0
    with engine._link.used() as cursor:
        assert cursor.connection is connection
    done = subprocess.run([sys.executable, "-c", "pass"], preexec_fn=engine.check, timeout=LONG_S, check=False)
    assert done.returncode == 0, "a child that does something before it becomes another program opens the file itself"
    engine.close()


# DynamoDB


@contextmanager
def _held(*locks: Any) -> Iterator[None]:
    """Another thread has these locks."""
    taken, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with ExitStack() as held:
            for lock in locks:
                held.enter_context(lock)
            taken.set()
            assert leave.wait(LONG_S)

    thread = threading.Thread(target=hold)
    thread.start()
    assert taken.wait(LONG_S)
    try:
        yield
    finally:
        leave.set()
        thread.join(LONG_S)


def _rows(number: int) -> list[dict[str, Any]]:
    shared = {"status": "PENDING", "createdAt": 1.0, "submittedAt": 1.0, "job": "j", "fence": 0}
    return [{**shared, "taskId": f"n{one}"} for one in range(number)]


@pytest.mark.slow
def test_a_child_finds_every_lock_of_the_client_free_that_a_thread_of_its_parent_held() -> None:
    with mock_aws():
        engine = DynamoEngine("TaskTable", region="eu-central-1")
        create_table(engine)
        doorbell = SqsDoorbell("https://sqs.eu-central-1.amazonaws.com/1/none", make_client=lambda *_: Silent())
        local, blobs = LocalDoorbell("tasks.db"), S3Texts("bucket")
        bus, context = EventBus(), Context(Lease.__new__(Lease))
        assert [one.won for one in engine.put(_rows(30))] == [True] * 30

        def work() -> list[Any]:
            answers = engine.put(_rows(60))
            doorbell.ring([DoorbellMessage(verb=Verb.LOOK)])
            doorbell.close()
            local.close()
            bus.subscribe(print)
            context.progress(1)
            assert blobs._client is not None
            assert engine.sibling().get(["n59"])
            return [sum(one.won for one in answers), engine.consumed.requests > 0, engine.clock.now() > 0]

        locks = engine.consumed._guard, engine.clock._guard, engine._batches._guard, aws.BUILDING
        beside = doorbell._guard, doorbell._closed._cond, local._listening, blobs._guard, bus._guard, context._guard  # type: ignore[attr-defined]
        with _held(*locks, *beside):
            child = Child(work)
            assert child.forked_s < LONG_S / 2
            assert child.answer() == [30, True, True]
        assert len(engine.get([row["taskId"] for row in _rows(60)])) == 30, "moto is in each process"
        engine.close()


class Silent:
    """A client of SQS that takes everything."""

    def __getattr__(self, name: str) -> Callable[..., dict[str, Any]]:
        return lambda **_: {}


class Keeping(BaseHTTPRequestHandler):
    """A DynamoDB without rows, which keeps its connections open."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *_: Any) -> None:
        """Nothing."""


def _sockets_to(port: int) -> int:
    found = 0
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError), socket.socket(fileno=os.dup(int(name))) as one:
            found += one.getpeername()[1] == port if one.family == socket.AF_INET else 0
    return found


@pytest.mark.slow
def test_a_child_inherits_no_idle_connection_to_dynamodb_and_its_parent_opens_others() -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Keeping)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    port = server.server_address[1]
    engine = DynamoEngine("TaskTable", endpoint=f"http://127.0.0.1:{port}")
    try:
        client = engine.connection.client
        assert engine.lanes()
        assert _sockets_to(port) == 1
        assert Child(lambda: [_sockets_to(port), len(engine.lanes()), _sockets_to(port)]).answer() == [0, 1, 1]
        assert engine.lanes()
        assert engine.connection.client is client
        assert _sockets_to(port) == 1
    finally:
        engine.close()
        server.shutdown()
        server.server_close()
        thread.join(LONG_S)


@pytest.mark.slow
@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_the_connection_of_a_stream_ends_although_a_forked_child_lives(loop: str) -> None:
    """Its peer must not take it for open: the next agent connects to a stream that allows one connection."""

    async def cut_beside_a_child() -> None:
        ended = asyncio.Event()

        async def served(peer: ServerConnection) -> None:
            await peer.wait_closed()
            ended.set()

        async with serve(served, "127.0.0.1", 0) as server:
            [listening] = server.sockets
            endpoint = Endpoint(f"ws://127.0.0.1:{listening.getsockname()[1]}")
            connection = await open_connection(endpoint, StreamOptions(proxy=False), Resolver())
            child = Child(lambda: "ended", waits=True)
            assert await (await connection.ping()) >= 0, "a fork alone ends no connection"
            abort_connection(connection)
            try:
                await asyncio.wait_for(ended.wait(), patience())
            finally:
                child.go()
                assert child.answer() == "ended"

    made = asyncio.new_event_loop if loop == "asyncio" else pytest.importorskip("uvloop").new_event_loop
    with asyncio.Runner(loop_factory=made) as runner:
        runner.run(cut_beside_a_child())
