"""Each doorbell alone: what it carries, what it leaves to others, and what a broken one costs."""

from __future__ import annotations

import gc
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.config import Config

from tests.support.stands import eventually, patience
from thunderagent.model.errors import ConfigurationError, DoorbellError
from thunderagent.model.task import Status, Task
from thunderagent.queue.doorbell import open_doorbell
from thunderagent.queue.doorbell.memory import MemoryDoorbell
from thunderagent.queue.doorbell.message import DoorbellMessage
from thunderagent.queue.doorbell.port import Doorbell
from thunderagent.queue.doorbell.sqs import BREAK_S, RECEIVES, SqsDoorbell
from thunderagent.queue.doorbell.unix import BORN_S, FOLDER, SUFFIX, LocalDoorbell
from thunderagent.settings import load_settings
from thunderagent.testing import FakeClock

pytestmark = pytest.mark.slow

A: DoorbellMessage = DoorbellMessage.look("a")
B: DoorbellMessage = DoorbellMessage.look("b")


def everything(_: DoorbellMessage) -> bool:
    return True


def nothing(_: DoorbellMessage) -> bool:
    return False


def due(at: float, name: str = "t") -> DoorbellMessage:
    task = Task(task_id=name, status=Status.PENDING, created_at=at, submitted_at=0.0, job="test.job")
    return DoorbellMessage.task(task)


class Queue:
    """An SQS queue of the local engine."""

    def __init__(self, endpoint: str) -> None:
        self.aws = boto3.client(
            "sqs",
            region_name="us-east-1",
            endpoint_url=endpoint,
            aws_access_key_id="local",
            aws_secret_access_key="local",
        )
        name = f"wake-{uuid.uuid4().hex[:8]}"
        self.aws.create_queue(QueueName=name)
        self.url = f"{endpoint}/000000000000/{name}"
        self._bells: list[SqsDoorbell] = []

    def bell(self, **options: Any) -> SqsDoorbell:
        self._bells.append(SqsDoorbell(self.url, **options))
        return self._bells[-1]

    def left(self) -> int:
        """Messages that are in the queue, seen or not."""
        names = ["ApproximateNumberOfMessages", "ApproximateNumberOfMessagesNotVisible"]
        names.append("ApproximateNumberOfMessagesDelayed")
        attributes = self.aws.get_queue_attributes(QueueUrl=self.url, AttributeNames=names)["Attributes"]
        return sum(int(attributes[name]) for name in names)

    def close(self) -> None:
        for bell in self._bells:
            bell.close()
        self.aws.delete_queue(QueueUrl=self.url)
        self.aws.close()


@pytest.fixture
def sqs(ministack_endpoint: str) -> Iterator[Queue]:
    queue = Queue(ministack_endpoint)
    yield queue
    queue.close()


Pair = Callable[[], Doorbell]


@pytest.fixture(params=["local", "memory", pytest.param("sqs", marks=pytest.mark.ministack)])
def another(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Pair]:
    """Makes doorbells that belong together."""
    bells: list[Doorbell] = []
    hub = MemoryDoorbell().hub

    def make() -> Doorbell:
        if request.param == "sqs":
            bells.append(request.getfixturevalue("sqs").bell())
        elif request.param == "local":
            bells.append(LocalDoorbell(tmp_path / "tasks.db"))
        else:
            bells.append(MemoryDoorbell(hub))
        return bells[-1]

    yield make
    for bell in bells:
        bell.close()


def heard(
    bell: Doorbell, wanted: Callable[[DoorbellMessage], bool] = everything, within_s: float = 10.0
) -> list[DoorbellMessage]:
    return eventually(lambda: bell.listen(1.0, wanted), within_s)


def test_what_is_rung_is_heard(another: Pair) -> None:
    rings = [due(1.0), A, DoorbellMessage.beat("t", "agent-1")]
    listening, ringing = another(), another()
    assert listening.listen(0.0, everything) == []
    ringing.ring(rings)
    found: list[DoorbellMessage] = []
    while len(found) < 3:
        found += heard(listening)
    assert sorted(found, key=repr) == sorted(rings, key=repr)


def test_nobody_who_listens_is_no_problem(another: Pair) -> None:
    bell = another()
    bell.ring([A])
    bell.ring([])
    assert bell.is_healthy


def test_nothing_is_heard_when_nothing_is_rung(another: Pair) -> None:
    assert another().listen(0.01, everything) == []


def test_a_ring_that_is_not_wanted_is_not_heard(another: Pair) -> None:
    listening = another()
    listening.listen(0.0, everything)
    another().ring([A, B])
    assert heard(listening, lambda ring: ring == B) == [B]


def test_a_close_in_another_thread_ends_a_wait_where_it_can(another: Pair) -> None:
    bell = another()
    if not bell.is_local:
        pytest.skip("a request to SQS cannot be broken off; the agent does not wait for it")
    bell.listen(0.0, everything)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(bell.listen, 60.0, everything)
        begun = time.monotonic()
        bell.close()
        with suppress(DoorbellError):
            assert waiting.result(50) == []
        assert time.monotonic() - begun < 50
    with pytest.raises(DoorbellError, match="closed"):
        bell.listen(0.0, everything)


# Sockets beside a database


def bells_of(database: Path) -> list[str]:
    folder = database.with_name(database.name + FOLDER)
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


LISTENER = """
import sys
from thunderagent.queue.doorbell.unix import LocalDoorbell
bell = LocalDoorbell(sys.argv[1])
bell.listen(0.0, lambda ring: True)
print("listening", flush=True)
while True:
    for ring in bell.listen(5.0, lambda ring: True):
        print(ring.queue, flush=True)
"""


@pytest.fixture
def process(tmp_path: Path) -> Iterator[Callable[[Path], subprocess.Popen[str]]]:
    """Starts processes that listen; they are gone after the test."""
    started: list[subprocess.Popen[str]] = []

    def start(database: Path) -> subprocess.Popen[str]:
        one = subprocess.Popen([sys.executable, "-c", LISTENER, str(database)], stdout=subprocess.PIPE, text=True)
        started.append(one)
        assert one.stdout and one.stdout.readline() == "listening\n"
        return one

    yield start
    for one in started:
        one.kill()
        one.wait(10)
        assert one.stdout
        one.stdout.close()


def test_every_process_on_the_machine_hears_a_ring(
    tmp_path: Path, process: Callable[[Path], subprocess.Popen[str]]
) -> None:
    listening = [process(tmp_path / "tasks.db") for _ in range(2)]
    LocalDoorbell(tmp_path / "tasks.db").ring([A])
    assert [one.stdout and one.stdout.readline() for one in listening] == ["a\n", "a\n"]


def test_the_name_of_a_killed_process_is_taken_away_by_the_next_who_rings(
    tmp_path: Path, process: Callable[[Path], subprocess.Popen[str]]
) -> None:
    database = tmp_path / "tasks.db"
    lost = process(database)
    lost.kill()
    lost.wait(10)
    assert len(bells_of(database)) == 1, "the kernel leaves the name"
    LocalDoorbell(database).ring([A])
    assert bells_of(database) == []


def test_the_name_of_a_killed_process_is_taken_away_by_the_next_who_listens(
    tmp_path: Path, process: Callable[[Path], subprocess.Popen[str]]
) -> None:
    database = tmp_path / "tasks.db"
    lost = process(database)
    lost.send_signal(signal.SIGKILL)
    lost.wait(10)
    half_born = tmp_path / f"tasks.db{FOLDER}" / "123-abc"
    half_born.touch()
    os.utime(half_born, (time.time() - 2 * BORN_S,) * 2)
    bell = LocalDoorbell(database)
    bell.listen(0.0, everything)
    assert [name.partition("-")[0] for name in bells_of(database)] == [str(os.getpid())]
    bell.close()
    assert bells_of(database) == []


def test_a_socket_is_not_taken_for_a_dead_one_while_it_is_born(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel makes the file first and lets it hear a moment later: who rings in between sees a dead socket."""
    database = tmp_path / "tasks.db"
    bell, rings = LocalDoorbell(database), LocalDoorbell(database)
    bind = socket.socket.bind

    def slow_bind(listening: socket.socket, address: str) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:
            bind(other, address)
        rings.ring([A])
        Path(address).unlink()  # raises if the ring has taken it away
        bind(listening, address)

    monkeypatch.setattr(socket.socket, "bind", slow_bind)
    bell.listen(0.0, everything)
    rings.ring([B])
    assert bell.listen(1.0, everything) == [B]
    bell.close()


def test_a_listener_whose_file_was_removed_gets_a_new_one(tmp_path: Path) -> None:
    database = tmp_path / "tasks.db"
    bell = LocalDoorbell(database)
    bell.listen(0.0, everything)
    for path in (tmp_path / f"tasks.db{FOLDER}").iterdir():
        path.unlink()
    (tmp_path / f"tasks.db{FOLDER}").rmdir()
    bell.listen(0.0, everything)
    LocalDoorbell(database).ring([A])
    assert bell.listen(1.0, everything) == [A]
    bell.close()


def test_a_listener_that_does_not_read_holds_nobody_up(tmp_path: Path) -> None:
    database = tmp_path / "tasks.db"
    deaf, good = LocalDoorbell(database), LocalDoorbell(database)
    deaf.listen(0.0, everything)
    good.listen(0.0, everything)
    rings = LocalDoorbell(database)
    begun = time.monotonic()
    for _ in range(2000):
        rings.ring([A])
        assert good.listen(1.0, everything) == [A]
    assert time.monotonic() - begun < 10 * patience()
    assert deaf.listen(0.0, everything), "what had room is there"
    deaf.close()
    good.close()


def test_garbage_is_dropped_and_the_next_ring_is_heard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # an address has room for 107 bytes
    database = tmp_path / "tasks.db"
    bell = LocalDoorbell(database)
    bell.listen(0.0, everything)
    [name] = bells_of(database)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.connect(f"tasks.db{FOLDER}/{name}")
        for garbage in (b"", b"\x00" * 100, b"{", b"x" * 60_000):
            sender.send(garbage)
    LocalDoorbell(database).ring([A])
    assert heard(bell) == [A]
    bell.close()


def test_a_path_that_is_too_long_for_an_address_works_too(tmp_path: Path) -> None:
    folder = tmp_path / ("deep" * 40)
    folder.mkdir()
    bell = LocalDoorbell(folder / "tasks.db")
    bell.listen(0.0, everything)
    assert bells_of(folder / "tasks.db")[0].endswith(SUFFIX)
    LocalDoorbell(folder / "tasks.db").ring([A])
    assert bell.listen(1.0, everything) == [A]
    bell.close()


def test_a_folder_that_cannot_be_made_is_told_to_the_listener_and_to_nobody_who_rings(tmp_path: Path) -> None:
    (tmp_path / f"tasks.db{FOLDER}").write_text("a file where the folder would be")
    bell = LocalDoorbell(tmp_path / "tasks.db")
    bell.ring([A])
    with pytest.raises(DoorbellError, match="polling"):
        bell.listen(0.0, everything)
    bell.close()


def test_who_may_use_the_database_may_ring_and_nobody_else(tmp_path: Path) -> None:
    database = tmp_path / "tasks.db"
    database.touch()
    database.chmod(0o660)
    bell = LocalDoorbell(database)
    bell.listen(0.0, everything)
    folder = tmp_path / f"tasks.db{FOLDER}"
    modes = [path.stat().st_mode & 0o777 for path in (folder, *folder.iterdir())]
    assert modes == [0o770, 0o660]
    bell.close()


def test_a_listener_with_thousands_of_open_files_hears(tmp_path: Path) -> None:
    """`select` ends at number 1024."""
    held = [os.open("/dev/null", os.O_RDONLY) for _ in range(1100)]
    try:
        bell = LocalDoorbell(tmp_path / "tasks.db")
        bell.listen(0.0, everything)
        LocalDoorbell(tmp_path / "tasks.db").ring([A])
        assert bell.listen(1.0, everything) == [A]
        bell.close()
    finally:
        for one in held:
            os.close(one)


def test_a_doorbell_that_is_forgotten_leaves_no_open_socket(tmp_path: Path) -> None:
    bell = LocalDoorbell(tmp_path / "tasks.db")
    bell.listen(0.0, everything)
    bell.close()
    del bell
    gc.collect()  # an open one would be a ResourceWarning, which is an error here


# SQS


@pytest.mark.ministack
def test_what_was_handed_over_is_deleted_and_what_is_no_message_too(sqs: Queue) -> None:
    bell = sqs.bell()
    sqs.aws.send_message(QueueUrl=sqs.url, MessageBody="garbage")
    sqs.aws.send_message(QueueUrl=sqs.url, MessageBody="x" * 100_000)
    sqs.bell().ring([A])
    assert heard(bell) == [A]
    bell.listen(0.0, everything)
    assert eventually(lambda: sqs.left() == 0)


@pytest.mark.ministack
def test_what_is_of_no_use_here_reaches_the_agent_for_which_it_is(sqs: Queue) -> None:
    """The agent that gets it first has no such job, the other has."""
    lacks, has = sqs.bell(), sqs.bell()
    lacks.ring([due(1.0)])
    assert eventually(lambda: bool(lacks.listen(1.0, nothing) == [] and sqs.left()))
    lacks.listen(0.0, nothing)
    assert heard(has) == [due(1.0)]


@pytest.mark.ministack
def test_what_is_of_no_use_to_anybody_is_dropped_after_a_few_tries(sqs: Queue) -> None:
    bell, tries = sqs.bell(), []
    bell.ring([A])

    def refuse(ring: DoorbellMessage) -> bool:
        tries.append(ring)
        return False

    for _ in range(RECEIVES + 5):
        bell.listen(0.0, refuse)
    assert len(tries) == RECEIVES
    assert sqs.left() == 0


@pytest.mark.ministack
def test_what_a_killed_agent_took_comes_again(sqs: Queue) -> None:
    lost = sqs.bell()
    lost.ring([A])
    assert heard(lost) == [A], "it has it, and has not deleted it"
    assert heard(sqs.bell(), within_s=15.0) == [A]


@pytest.mark.ministack
def test_what_comes_after_the_stop_is_given_back(sqs: Queue) -> None:
    bell = sqs.bell()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(bell.listen, 3.0, everything)
        bell.close()
        sqs.bell().ring([A])
        with suppress(DoorbellError):
            assert waiting.result(20) == []
    assert heard(sqs.bell(), within_s=4.0) == [A]


@pytest.mark.ministack
def test_a_ring_for_later_is_delivered_later_and_one_for_much_later_not_at_all(sqs: Queue) -> None:
    now = float(int(time.time())) + 0.25
    bell, sent = sqs.bell(), time.time()
    bell.ring([due(now + 2.75, "soon"), due(now + 3600.0, "late"), due(now + 0.75, "now")])
    assert heard(bell) == [due(now + 0.75, "now")], "the agent waits for less than a second itself"
    assert heard(bell) == [due(now + 2.75, "soon")]
    assert time.time() >= sent + 1.9, "SQS counts whole seconds from when it was sent"
    assert bell.listen(0.0, everything) == []
    assert sqs.left() == 0


class Dead:
    """Makes clients that reach nobody, and counts how often somebody tries."""

    def __init__(self) -> None:
        self.tries = 0
        self.works = False

    def __call__(self, url: str, config: Config) -> Any:
        return self

    def send_message_batch(self, **_: Any) -> None:
        self.tries += 1
        if not self.works:
            raise OSError("no route")

    def close(self) -> None:
        """As of a client."""


def test_after_a_failure_nothing_is_sent_for_a_while_and_then_one_tries() -> None:
    clock, dead = FakeClock(), Dead()
    bell = SqsDoorbell("https://sqs.eu-central-1.amazonaws.com/1/q", make_client=dead, monotonic=clock.monotonic)
    for _ in range(100):
        bell.ring([A])
    assert (dead.tries, bell.is_healthy) == (1, False)
    assert "no route" in bell.problem
    clock.advance(BREAK_S + 0.1)
    for _ in range(100):
        bell.ring([A])
    assert dead.tries == 2
    clock.advance(BREAK_S + 0.1)
    dead.works = True
    bell.ring([A])
    bell.ring([A])
    assert (dead.tries, bell.is_healthy) == (4, True)


def test_a_queue_that_takes_the_connection_and_says_nothing_costs_three_seconds_once() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(5)
        bell = SqsDoorbell(f"http://127.0.0.1:{silent.getsockname()[1]}/1/q")
        begun = time.monotonic()
        bell.ring([A])
        first = time.monotonic() - begun
        bell.ring([A])
        rest = time.monotonic() - begun - first
        bell.close()
    assert first < 4.5  # with the making of a client
    assert rest < 0.05


@pytest.mark.ministack
def test_a_queue_that_does_not_exist_is_told_with_the_remedy(ministack_endpoint: str) -> None:
    bell = SqsDoorbell(f"{ministack_endpoint}/000000000000/nobody-made-this")
    bell.ring([A])
    assert not bell.is_healthy
    with pytest.raises(DoorbellError, match="does not exist: create it"):
        bell.listen(0.0, everything)
    bell.close()


def test_a_dead_endpoint_is_told_to_the_listener() -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{nobody.getsockname()[1]}/1/q"
        bell = SqsDoorbell(url)
        with pytest.raises(DoorbellError, match="polling"):
            bell.listen(0.0, everything)
        bell.close()


@pytest.mark.parametrize(
    ("url", "region"),
    [
        ("https://sqs.eu-central-1.amazonaws.com/123/q", "eu-central-1"),
        ("https://sqs-fips.us-gov-west-1.amazonaws.com/123/q", "us-gov-west-1"),
        ("https://eu-west-1.queue.amazonaws.com/123/q", "eu-west-1"),
        ("https://vpce-0a-b.sqs.ap-southeast-2.vpce.amazonaws.com/123/q", "ap-southeast-2"),
        ("http://127.0.0.1:4566/000000000000/q", "us-east-1"),
    ],
)
def test_the_region_is_that_of_the_queue(url: str, region: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    bell = SqsDoorbell(url)
    client = bell._sender
    assert client.meta.region_name == region
    assert client.meta.endpoint_url == url.rpartition("/")[0].rpartition("/")[0]
    bell.close()


@pytest.mark.ministack
def test_many_threads_ring_at_once(sqs: Queue) -> None:
    bell = sqs.bell()
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: bell.ring([due(float(number), f"t{number}")]), range(80)))
    found: set[str] = set()
    while len(found) < 80:
        found |= {ring.task_id for ring in heard(bell)}
    assert len(found) == 80


# Opening


def test_a_database_file_has_its_doorbell_without_a_setting(tmp_path: Path) -> None:
    bell = open_doorbell(load_settings(store=f"sqlite:///{tmp_path}/tasks.db"))
    assert isinstance(bell, LocalDoorbell)
    assert bell.folder == tmp_path / f"tasks.db{FOLDER}"


def test_dynamodb_has_one_when_its_queue_is_set() -> None:
    store = "dynamodb://TaskTable?region=eu-central-1"
    assert open_doorbell(load_settings(store=store)) is None
    url = "https://sqs.eu-central-1.amazonaws.com/123456789012/thunderagent"
    assert isinstance(open_doorbell(load_settings(store=store, wake_queue_url=url)), SqsDoorbell)


def test_a_store_in_memory_has_none() -> None:
    assert open_doorbell(load_settings(store="sqlite://:memory:")) is None


@pytest.mark.parametrize(
    ("url", "what"),
    [
        ("my-queue", "is not the URL of an SQS queue"),
        ("arn:aws:sqs:eu-central-1:123:q", "is not the URL"),
        ("https://sqs.eu-central-1.amazonaws.com/", "is not the URL"),
        ("https://sqs.eu-central-1.amazonaws.com/123/q.fifo", "is a FIFO queue"),
    ],
)
def test_a_queue_that_cannot_be_one_is_told_before_anything_starts(url: str, what: str) -> None:
    with pytest.raises(ConfigurationError, match=f"THUNDERAGENT_WAKE_QUEUE_URL {what}"):
        load_settings(wake_queue_url=url)
