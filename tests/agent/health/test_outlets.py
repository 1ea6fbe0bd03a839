"""Where an agent says how it is: a file, systemd, a port."""

from __future__ import annotations

import http.client
import json
import os
import socket
import stat
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import pytest

from tests.support.stands import eventually
from thunderagent.agent.health.file import HealthFile, read_files
from thunderagent.agent.health.judgement import Health, Reason
from thunderagent.agent.health.monitor import Monitor, Systemd
from thunderagent.agent.health.probes import AT_ONCE, NO_METRICS, PORTS, Probes
from thunderagent.model import events, fleet_events
from thunderagent.model.bus import EventBus
from thunderagent.model.errors import ConfigurationError
from thunderagent.testing import FakeClock, Recorder

FINE: Final = Health(healthy=True, alive=True)
ILL: Final = Health(
    healthy=False, alive=True, reasons=(Reason("store", "the store has not answered for 75 s"),), state="not healthy"
)
WEDGED: Final = Health(healthy=False, alive=False, reasons=(Reason("loop", "the loop stands still"),))


class Patient:
    """An agent whose health is what a test says."""

    def __init__(self) -> None:
        self.is_ready = True
        self.now = FINE
        self.ended: tuple[str, ...] = ()

    def health(self) -> Health:
        return self.now

    def dead(self) -> tuple[str, ...]:
        return self.ended


class Manager:
    """A service manager that listens at its socket."""

    def __init__(self, address: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(address.replace("@", "\0", 1))
        self.socket.settimeout(5)
        self.environ = {"NOTIFY_SOCKET": address}

    def heard(self) -> list[str]:
        """The lines of the next datagram."""
        return self.socket.recv(65536).decode().split("\n")

    def hears_nothing(self) -> bool:
        self.socket.setblocking(False)
        try:
            self.socket.recv(65536)
        except BlockingIOError:
            return True
        finally:
            self.socket.settimeout(5)
        return False


@pytest.fixture(params=["path", "abstract"])
def manager(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Manager]:
    one = Manager(str(tmp_path / "notify") if request.param == "path" else f"@thunderagent-test-{os.getpid()}")
    yield one
    one.socket.close()


# systemd


@pytest.mark.slow
def test_systemd_is_notified_that_the_agent_is_ready_how_it_is_and_that_it_is_alive(manager: Manager) -> None:
    patient, bus = Patient(), EventBus()
    patient.is_ready = False
    environ = {**manager.environ, "WATCHDOG_USEC": "30000000", "WATCHDOG_PID": str(os.getpid())}
    monitor = Monitor("me", patient, bus, systemd=Systemd(environ))
    monitor.look()
    assert manager.heard() == ["STATUS=ok", "WATCHDOG=1"]
    patient.is_ready = True
    monitor.look()
    assert manager.heard() == ["READY=1", "WATCHDOG=1"]
    patient.now = ILL
    monitor.look()
    assert manager.heard() == ["STATUS=not healthy; the store has not answered for 75 s", "WATCHDOG=1"]
    patient.now = WEDGED
    monitor.look()
    assert not any(line.startswith("WATCHDOG") for line in manager.heard()), "a wedged agent is to be killed"
    bus.emit(events.AgentDraining(running=0, drain_s=30))
    assert manager.heard() == ["STOPPING=1"]
    bus.emit(events.AgentDraining(running=0, drain_s=30))
    assert manager.hears_nothing()


@pytest.mark.parametrize(
    ("environ", "watchdog_s", "every_s"),
    [
        ({"WATCHDOG_USEC": "600000"}, 0.6, 0.3),
        ({"WATCHDOG_USEC": "60000000"}, 60.0, 1.0),
        ({"WATCHDOG_USEC": "600000", "WATCHDOG_PID": "1"}, None, 1.0),
        ({"WATCHDOG_USEC": "0"}, None, 1.0),
        ({"WATCHDOG_USEC": "soon"}, None, 1.0),
        ({}, None, 1.0),
    ],
)
def test_the_watchdog_is_notified_twice_as_often_as_it_asks(
    environ: dict[str, str], watchdog_s: float | None, every_s: float
) -> None:
    systemd = Systemd({"NOTIFY_SOCKET": "/nowhere", **environ})
    assert systemd.watchdog_s == watchdog_s
    assert Monitor("me", Patient(), EventBus(), systemd=systemd).every_s == every_s


def test_without_systemd_nothing_is_sent() -> None:
    for environ in ({}, {"NOTIFY_SOCKET": ""}, {"NOTIFY_SOCKET": "vsock:2:1234"}, {"WATCHDOG_USEC": "1000"}):
        systemd = Systemd(environ)
        assert systemd.watchdog_s is None
        systemd.notify(READY=1)


@pytest.mark.slow
def test_a_manager_that_is_gone_or_slow_holds_nothing_up(tmp_path: Path) -> None:
    Systemd({"NOTIFY_SOCKET": str(tmp_path / "gone")}).notify(READY=1)
    deaf = Manager(str(tmp_path / "deaf"))
    with deaf.socket:
        for _ in range(5000):  # more than its queue takes
            Systemd(deaf.environ).notify(STATUS="x" * 200)


@pytest.mark.slow
def test_a_status_of_many_lines_is_no_other_fact(manager: Manager) -> None:
    Systemd(manager.environ).notify(STATUS="a\nMAINPID=1")
    assert manager.heard() == ["STATUS=a MAINPID=1"]


# The monitor


def test_a_change_of_health_is_reported_once_and_numbers_that_grow_are_no_change() -> None:
    patient, bus = Patient(), EventBus()
    record = Recorder(bus)
    monitor = Monitor("me", patient, bus)
    monitor.look()
    assert record.of(fleet_events.HealthChanged) == []
    for seconds in (75, 76, 77):
        patient.now = Health(healthy=False, alive=True, reasons=(Reason("store", f"no answer for {seconds} s"),))
        monitor.look()
    patient.now = WEDGED
    monitor.look()
    patient.now = FINE
    monitor.look()
    assert record.of(fleet_events.HealthChanged) == [
        fleet_events.HealthChanged(healthy=False, reasons=("no answer for 75 s",)),
        fleet_events.HealthChanged(healthy=False, reasons=("the loop stands still",)),
        fleet_events.HealthChanged(healthy=True),
    ]


def test_the_loop_is_woken_for_a_thread_that_has_died() -> None:
    patient, woken = Patient(), threading.Semaphore(0)
    monitor = Monitor("me", patient, EventBus(), wake=woken.release)
    monitor.look()
    assert not woken.acquire(blocking=False)
    patient.ended = ("heartbeat",)
    monitor.look()
    assert woken.acquire(blocking=False)


def test_a_file_that_cannot_be_written_is_reported_once_and_tried_again(tmp_path: Path) -> None:
    bus = EventBus()
    record = Recorder(bus)
    folder = tmp_path / "health"
    file = HealthFile(str(folder), now=lambda: 0.0)
    monitor = Monitor("me", Patient(), bus, file=file)
    folder.rmdir()
    monitor.look()
    monitor.look()
    [event] = record.of(fleet_events.ExportFailed)
    assert event.to == str(file.path)
    folder.mkdir()
    monitor.look()
    assert file.path.exists()


# The file


def read(folder: Path, now: float) -> list[dict[str, Any]]:
    return read_files(str(folder), now=now)


def test_the_file_says_how_the_agent_is_until_its_good_end(tmp_path: Path) -> None:
    clock, patient = FakeClock(), Patient()
    file = HealthFile(str(tmp_path / "a" / "b"), now=clock.now)
    monitor = Monitor("me", patient, EventBus(), file=file, http="http://127.0.0.1:9464")
    patient.now = ILL
    monitor.look()
    [facts] = read(file.path.parent, clock.now() + 2.9)
    assert (facts["agent"], facts["pid"], facts["http"]) == ("me", os.getpid(), "http://127.0.0.1:9464")
    assert (facts["healthy"], facts["alive"], facts["reasons"]) == (
        False,
        True,
        ["the store has not answered for 75 s"],
    )
    assert file.path.name == f"{os.getpid()}.json"
    monitor.end()
    assert list(file.path.parent.iterdir()) == []
    monitor.end()


def test_a_file_that_is_not_written_any_more_is_that_of_a_dead_agent(tmp_path: Path) -> None:
    clock = FakeClock()
    file = HealthFile(str(tmp_path), now=clock.now)
    Monitor("me", Patient(), EventBus(), file=file).look()
    assert read(tmp_path, clock.now() + 3.0)[0]["healthy"]
    [facts] = read(tmp_path, clock.now() + 3.5)
    assert (facts["agent"], facts["healthy"], facts["alive"]) == ("me", False, False)
    assert facts["reasons"] == [f"{file.path} was not written for 4 s: its process runs, and does not get on"]


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"agent": "me", "healthy": true, "time": "x", "every_s": 1}'])
def test_a_file_that_means_nothing_is_not_healthy(tmp_path: Path, text: str) -> None:
    (tmp_path / "12.json").write_text(text)
    [facts] = read(tmp_path, 0.0)
    assert not facts["healthy"]
    assert "is not the file of an agent" in facts["reasons"][0]


@pytest.mark.slow
def test_the_file_of_an_agent_that_was_killed_goes_when_another_is_started(tmp_path: Path) -> None:
    gone = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    pid, here = int(gone.stdout), socket.gethostname()
    files = {
        f"{pid}.json": json.dumps({"agent": "killed", "host": here}),
        f"{os.getppid()}.json": json.dumps({"agent": "runs", "host": here}),
        "7777777.json": json.dumps({"agent": "elsewhere", "host": "elsewhere"}),
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    HealthFile(str(tmp_path), now=lambda: 0.0)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([f"{os.getppid()}.json", "7777777.json"])


def test_a_folder_in_which_nothing_can_be_written_is_refused_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match=r"THUNDERAGENT_HEALTH_FOLDER is .*file/sub"):
        HealthFile(str(tmp_path / "file" / "sub"), now=lambda: 0.0)


def test_readers_see_the_file_before_or_after_and_never_in_between(tmp_path: Path) -> None:
    file = HealthFile(str(tmp_path), now=lambda: 0.0)
    file.write({"agent": "me", "healthy": True, "long": "x" * 100_000}, every_s=1.0)
    stop = threading.Event()

    def write() -> None:
        while not stop.is_set():
            file.write({"agent": "me", "healthy": True, "long": "x" * 100_000}, every_s=1.0)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        assert all(read(tmp_path, 0.0)[0]["healthy"] for _ in range(200))
    finally:
        stop.set()
        writer.join(10)
    assert stat.S_ISREG(file.path.stat().st_mode)


# The port

Open = Callable[..., Probes]


@pytest.fixture
def port() -> int:
    """The first of some ports that are probably free."""
    with socket.create_server(("127.0.0.1", 0)) as one:
        return int(one.getsockname()[1]) if one.getsockname()[1] < 65000 else 21000


@pytest.fixture
def opened(port: int) -> Iterator[Open]:
    with ExitStack() as stack:

        def open_(patient: Patient | None = None, **options: Any) -> Probes:
            one = Probes("127.0.0.1", port, agent="me", health=(patient or Patient()).health, **options)
            stack.callback(one.close)
            one.start()
            return one

        yield open_


def ask(url: str) -> tuple[int, str, str]:
    """Status, type and body."""
    try:
        with urllib.request.urlopen(url, timeout=10) as reply:
            return reply.status, reply.headers["Content-Type"], reply.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers["Content-Type"], error.read().decode()


@pytest.mark.slow
def test_the_port_answers_with_the_health_and_a_status_for_load_balancers(opened: Open) -> None:
    patient = Patient()
    url = opened(patient).url
    status, kind, body = ask(f"{url}/health?from=elb")
    assert (status, kind) == (200, "application/json")
    assert json.loads(body) == {"agent": "me", **FINE.entry()}
    patient.now = ILL
    status, _, body = ask(f"{url}/health")
    assert status == 503
    assert json.loads(body)["reasons"] == ["the store has not answered for 75 s"]


@pytest.mark.slow
def test_the_port_answers_with_metrics_if_there_are_some_and_to_nothing_else(opened: Open) -> None:
    url = opened().url
    assert ask(f"{url}/metrics") == (404, "text/plain; charset=utf-8", NO_METRICS.decode())
    assert ask(f"{url}/")[0] == 404
    assert ask(f"{url}/health/more")[0] == 404
    assert ask(f"{url}/..%2fmetrics")[0] == 404
    with pytest.raises(urllib.error.HTTPError, match="405") as posted:
        urllib.request.urlopen(urllib.request.Request(f"{url}/health", data=b"x", method="POST"), timeout=10)
    posted.value.close()
    with_metrics = opened(metrics=lambda: b"thunderagent_claimed_total 3\n").url
    status, kind, body = ask(f"{with_metrics}/metrics")
    assert (status, body) == (200, "thunderagent_claimed_total 3\n")
    assert kind == "text/plain; version=0.0.4; charset=utf-8"


@pytest.mark.slow
def test_metrics_that_raise_are_reported_and_the_port_goes_on(opened: Open) -> None:
    def broken() -> bytes:
        raise LookupError("nobody expected this")

    url = opened(metrics=broken).url
    assert ask(f"{url}/metrics")[::2] == (500, "LookupError('nobody expected this')\n")
    assert ask(f"{url}/health")[0] == 200


@pytest.mark.slow
def test_each_agent_of_a_machine_has_the_next_free_port(opened: Open, port: int) -> None:
    urls = [opened().url for _ in range(3)]
    assert len(set(urls)) == 3
    assert all(port <= int(url.rpartition(":")[2]) < port + PORTS for url in urls)


@pytest.mark.slow
def test_when_all_ports_are_taken_the_agent_says_which(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("thunderagent.agent.health.probes.PORTS", 1)
    message = f"the ports {port} to {port} of 127.0.0.1 are all taken"
    with socket.create_server(("127.0.0.1", port)), pytest.raises(ConfigurationError, match=message):
        Probes("127.0.0.1", port, agent="me", health=Patient().health)


@pytest.mark.slow
def test_an_address_that_is_not_of_this_machine_is_refused(port: int) -> None:
    with pytest.raises(ConfigurationError, match=r"THUNDERAGENT_HTTP_PORT are 192\.0\.2\.1"):
        Probes("192.0.2.1", port, agent="me", health=Patient().health)


@pytest.mark.slow
def test_slow_clients_take_a_bounded_number_of_threads_and_are_broken_off(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    probes = opened()
    host, _, number = probes.url.removeprefix("http://").partition(":")
    before = threading.active_count()
    slow = [socket.create_connection((host, int(number))) for _ in range(AT_ONCE * 3)]
    try:
        for one in slow:
            one.sendall(b"GET /health")
            one.settimeout(10)
        turned_away = [one for one in slow[AT_ONCE:] if b"503" in _received(one)]
        assert len(turned_away) == AT_ONCE * 2
        assert threading.active_count() <= before + AT_ONCE
        for one in slow[:AT_ONCE]:
            one.settimeout(3)  # less than the patience with one that sends nothing at all
        monkeypatch.setattr("thunderagent.agent.health.probes.PROBE_S", -1.0)  # from now on everything takes too long
        assert [_received(one) for one in slow[:AT_ONCE]] == [b""] * AT_ONCE
        monkeypatch.undo()
        eventually(lambda: threading.active_count() <= before)
        assert ask(f"{probes.url}/health")[0] == 200
    finally:
        for one in slow:
            one.close()


def _received(one: socket.socket) -> bytes:
    try:
        return one.recv(1000)
    except ConnectionResetError:
        return b""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_the_port_ends_with_the_agent_and_answers_again_at_the_same_one_after_its_death(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    probes = Probes("127.0.0.1", port, agent="me", health=Patient().health)
    probes.close()
    assert not probes.is_alive
    probes = Probes("127.0.0.1", port, agent="me", health=Patient().health)
    probes.start()
    url = probes.url
    monkeypatch.setattr(probes._server, "service_actions", lambda: (_ for _ in ()).throw(SystemExit))
    eventually(lambda: not probes.is_alive)
    probes.start()
    assert probes.url == url
    assert ask(f"{url}/health")[0] == 200
    probes.close()
    assert not probes.is_alive
    with pytest.raises(urllib.error.URLError):
        ask(f"{url}/health")


def request(url: str, method: str, path: str) -> tuple[int, http.client.HTTPMessage, bytes]:
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=10)
    try:
        connection.request(method, path, body=b"{}" if method == "POST" else None)
        reply = connection.getresponse()
        return reply.status, reply.headers, reply.read()
    finally:
        connection.close()


def everything(url: str, text: str) -> str:
    """All that comes back until the other side closes."""
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(text.encode())
        return b"".join(iter(lambda: connection.recv(65536), b"")).decode()


@pytest.mark.slow
def test_head_is_answered_as_get_without_the_body_and_other_methods_are_not_allowed(opened: Open) -> None:
    patient = Patient()
    url = opened(patient, metrics=lambda: b"a 1\n").url
    for path in ("/health", "/health/", "/metrics", "/metrics/", "/nothing"):
        status, headers, body = request(url, "GET", path)
        assert status == (404 if path == "/nothing" else 200)
        assert len(body) == int(headers["Content-Length"]) > 0
        head, mark, nothing = everything(url, f"HEAD {path} HTTP/1.0\r\n\r\n").partition("\r\n\r\n")
        assert (mark, nothing) == ("\r\n\r\n", ""), "a client that reads on would take it for the next reply"
        assert head.startswith(f"HTTP/1.0 {status} ")
        for name in ("Content-Length", "Content-Type"):
            assert f"\r\n{name}: {headers[name]}" in head
    patient.now = ILL
    assert request(url, "HEAD", "/health")[0] == 503
    for method in ("POST", "PUT", "PATCH", "DELETE", "OPTIONS"):
        status, headers, _ = request(url, method, "/health")
        assert (status, headers["Allow"]) == (405, "GET, HEAD")
