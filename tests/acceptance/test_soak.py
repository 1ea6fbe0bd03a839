"""The soak: played small, and its verdict shown to find each broken promise."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import threading
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar, Final

import pytest

SCRIPTS: Final = Path(__file__).parents[2] / "scripts"


@pytest.mark.processes
def test_a_small_soak_breaks_no_promise_and_prints_its_figures(tmp_path: Path) -> None:
    told = tmp_path / "soak.json"
    small = ("--tasks", "300", "--agents", "2", "--kill-every", "2")
    ran = subprocess.run(
        [sys.executable, "-m", "soaking", "--store", "sqlite", *small, "--json", str(told)],
        env={**os.environ, "PYTHONPATH": f"{SCRIPTS}{os.pathsep}{SCRIPTS.parent}"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    [found] = json.loads(told.read_text(encoding="utf-8"))
    assert found["violations"] == []
    for name in (
        "tasks acknowledged",
        "runs",
        "retried by hand",
        "purged",
        "cancelled",
        "ticks",
        "messages of streams",
    ):
        assert found["figures"][name] > 0, name
    assert "no violation" in ran.stdout


class Echo(BaseHTTPRequestHandler):
    """Answers with what it was sent."""

    protocol_version = "HTTP/1.1"
    heard: ClassVar[list[bytes]] = []

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.heard.append(body)
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


@pytest.mark.parametrize(
    ("fate", "is_heard", "is_answered"),
    [
        ("passed", True, True),
        ("late", True, True),
        ("request lost", False, False),
        ("reply lost", True, False),
        ("reset", False, False),
    ],
)
def test_the_network_does_to_a_request_what_it_says(
    monkeypatch: pytest.MonkeyPatch, fate: str, is_heard: bool, is_answered: bool
) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    network_of = importlib.import_module("soaking.network")
    monkeypatch.setattr(network_of, "LATE_S", (0.01, 0.02))
    monkeypatch.setattr(network_of, "SILENCE_S", 0.1)
    monkeypatch.setattr(network_of, "FATES", (fate,))
    monkeypatch.setattr(Echo, "heard", [])
    server = ThreadingHTTPServer(("127.0.0.1", 0), Echo)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    network = network_of.Network(f"http://127.0.0.1:{server.server_port}", 0.0 if fate == "passed" else 1.0, 1)
    connection = HTTPConnection(network.endpoint.removeprefix("http://"), timeout=30)
    try:
        connection.request("POST", "/", body=b"hello")
        assert connection.getresponse().read() == b"hello"
        assert is_answered
    except OSError:
        assert not is_answered
    finally:
        connection.close()
        network.close()
        server.shutdown()
        server.server_close()
    assert (Echo.heard == [b"hello"]) is is_heard
    assert network.requests == {fate: 1}


@pytest.fixture
def ledger(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module that judges."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("soaking.ledger")


ONE: Final = "begin one 1 1.0\nend one 1 ok 2.0\n"
ROW: Final = {"taskId": "one", "job": "soak.quick", "status": "SUCCESS", "fence": 1, "crashCount": 0}


@pytest.mark.parametrize(
    ("text", "asked", "row", "promise"),
    [
        (ONE, {}, ROW, None),
        (ONE, {"purged": True}, None, None),
        ("begin one 1 1.0\nbegin one 2 3.0\nend one 2 ok 4.0\n", {}, ROW | {"crashCount": 1}, None),
        (ONE, {}, None, "an acknowledged task is lost"),
        ("", {"purged": True}, None, "an acknowledged task is lost"),
        (ONE, {}, ROW | {"status": "PENDING"}, "a task is stuck"),
        (ONE, {}, ROW | {"status": "FAILED"}, "a task ended otherwise than its handler did"),
        ("begin one 1 1.0\n", {}, ROW, "a task succeeded that no handler has run to its end"),
        (ONE, {"end": "DONE"}, ROW | {"status": "DONE"}, "a task ran that was cancelled before"),
        (ONE + ONE, {}, ROW | {"crashCount": 1}, "a task ran twice under one fence"),
        (ONE + "begin one 2 1.5\nend one 2 ok 3.0\n", {}, ROW | {"crashCount": 1}, "two runs of a task overlap"),
        (ONE + "begin one 2 1.5\nend one 2 ok 3.0\n", {"job": "soak.stream"}, ROW | {"job": "soak.stream"}, None),
        (ONE + "begin one 2 3.0\nend one 2 ok 4.0\n", {}, ROW, "a second run does not show in its row"),
        (ONE, {"parents": ("other",)}, ROW, "a child ran before its parent had succeeded"),
        (ONE + "seq s 1 1 1.0\nseq s 1 3 2.0\n", {}, ROW, "a stream has a gap"),
        (ONE + "seq s 2 1 1.0\nseq s 1 2 2.0\n", {}, ROW, "a stream was handled by a run that was over"),
    ],
)
def test_each_broken_promise_is_found(
    ledger: Any, tmp_path: Path, text: str, asked: dict[str, Any], row: dict[str, Any] | None, promise: str | None
) -> None:
    (tmp_path / "7.1.txt").write_text(text, encoding="utf-8")
    wanted = {"one": ledger.Asked(**{"job": "soak.quick", **asked})}
    table = {} if row is None else {"one": row}
    found = ledger.judge(wanted, ledger.Ledger.read(tmp_path, {7: 2.5}), table, limit=1)
    assert {one.promise for one in found} == ({promise} if promise else set())


@pytest.mark.parametrize(
    ("job", "key", "promise"),
    [
        ("soak.limited", "", "the limit is exceeded"),
        ("soak.unique", "key", "two tasks of a unique key ran at once"),
        ("soak.quick", "", None),
    ],
)
def test_tasks_that_must_not_run_at_once_are_found(
    ledger: Any, tmp_path: Path, job: str, key: str, promise: str | None
) -> None:
    (tmp_path / "7.1.txt").write_text(ONE, encoding="utf-8")
    (tmp_path / "8.1.txt").write_text("begin two 1 1.5\nend two 1 ok 3.0\n", encoding="utf-8")
    wanted = {name: ledger.Asked(job=job, key=key) for name in ("one", "two")}
    table = {name: ROW | {"taskId": name} for name in wanted}
    found = ledger.judge(wanted, ledger.Ledger.read(tmp_path, {}), table, limit=1)
    assert {one.promise for one in found} == ({promise} if promise else set())
