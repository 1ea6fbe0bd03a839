"""`scripts/bench` measures, and its numbers are numbers. Whether they are good is not judged here: machines differ."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from benchmarks.__main__ import app
from benchmarks.harness import BenchFailed, children

SCRIPTS = Path(__file__).parents[2] / "scripts"
Report = dict[str, dict[str, Any]]
"""The lines of each section of a measurement, by their names."""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """`scripts/bench` on the Python of the tests."""
    environment = {**os.environ, "BENCH_PYTHON": sys.executable, "COLUMNS": "140", "NO_COLOR": "1"}
    return subprocess.run(
        [str(SCRIPTS / "bench"), *arguments], env=environment, capture_output=True, text=True, timeout=300, check=False
    )


def numbers(lines: dict[str, dict[str, Any]], side: str = "ours") -> dict[str, float]:
    return {name: line[side] for name, line in lines.items() if line[side] is not None}


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Report], str]:
    """What a run without a name measures, and what it prints."""
    file = tmp_path_factory.mktemp("bench") / "bench.json"
    done = run("--quick", "--json", str(file))
    assert done.returncode == 0, done.stderr
    return json.loads(file.read_text(encoding="utf-8"))["reports"], done.stdout


@pytest.mark.processes
def test_throughput_of_agents_stands_beside_that_of_the_naive_loop(reports: tuple[dict[str, Report], str]) -> None:
    [(title, lines)] = reports[0]["throughput"].items()
    assert title == "1 agent, 200 tasks on sqlite"
    ours, naive = numbers(lines), numbers(lines, "naive")
    for side in (ours, naive):
        for name in ("enqueue, single /s", "enqueue, bulk /s", "drain, tasks/s", "CPU, ms/task", "peak memory, MiB"):
            assert side[name] > 0, name
        assert (side["tasks run twice"], side["not succeeded"]) == (0, 0)
        assert side["failed claims/task"] == 0, "an agent that is alone loses no claim"
    drain = lines["drain, tasks/s"]
    assert drain["ratio"] == pytest.approx(drain["ours"] / drain["naive"])
    assert (drain["goal"], drain["met"]) == ("≥ 4,400", drain["ours"] >= 4400)
    assert lines["tasks run twice"]["met"] is True
    assert "drain, tasks/s" in reports[1]


@pytest.mark.processes
def test_latency_is_measured_with_the_doorbell_and_with_polls(reports: tuple[dict[str, Report], str]) -> None:
    sections = reports[0]["latency"]
    assert [title.removeprefix("from the enqueue to the handler, sqlite, ") for title in sections] == [
        "doorbell, 3 tasks",
        "polls, 1 s, 3 tasks",
        "polls, default, 1 task",
    ]
    for lines in sections.values():
        found = numbers(lines)
        assert 0 < found["p50, ms"] <= found["p99, ms"] <= found["worst, ms"]
        assert found["of that the call of enqueue, p50, ms"] > 0
    bell, polls, _ = map(numbers, sections.values())
    assert bell["p50, ms"] < polls["worst, ms"]


@pytest.mark.processes
def test_units_of_tasks_and_streams_are_those_of_the_rules(reports: tuple[dict[str, Report], str]) -> None:
    task, polls, stream = map(numbers, reports[0]["units"].values())
    verbs = {"all but heartbeats": 8, "enqueue": 2, "claim": 3, "heartbeat": 1, "succeed": 3}
    assert verbs.items() <= task.items()
    assert polls["a poll that finds nothing"] == 0.5
    assert 0 < polls["a poll of 50 tasks, each"] < 0.05
    verbs = {"enqueue": 2, "claim": 3, "heartbeat": 1, "heartbeat with cursor": 1, "journal, new": 1, "stop": 3}
    assert verbs.items() <= stream.items()
    assert stream["a stream and hour, at most"] == 720, "a heartbeat each 5 s, with its cursor"
    assert stream["100 streams a month, $, at most"] == pytest.approx(32.85)
    assert task["largest row, bytes"] < 1024
    assert stream["largest row, bytes"] < 1024


@pytest.mark.processes
def test_the_same_reconnects_are_simulated_each_time(reports: tuple[dict[str, Report], str], tmp_path: Path) -> None:
    file = tmp_path / "again.json"
    done = CliRunner().invoke(app, ["reconnects", "--clients", "2000", "--json", str(file)])
    assert done.exit_code == 0, done.stderr
    assert json.loads(file.read_text(encoding="utf-8"))["reports"]["reconnects"] == reports[0]["reconnects"]
    lines, wrong = reports[0]["reconnects"].values()
    assert lines["attempts"]["ours"] < wrong["attempts"]["ours"] < lines["attempts"]["naive"]
    assert "all back, s" in done.stdout


@pytest.mark.processes
def test_streams_are_held_beside_the_naive_loop_and_come_back(tmp_path: Path) -> None:
    file = tmp_path / "streams.json"
    done = run("streams", "--quick", "--only", "memory,reconnect", "--json", str(file))
    assert done.returncode == 0, done.stderr
    [(title, lines)] = json.loads(file.read_text(encoding="utf-8"))["reports"]["streams"].items()
    assert title == "20 connections, ws, asyncio"
    ours, naive = numbers(lines), numbers(lines, "naive")
    for side in (ours, naive):
        assert side["until all were live at first, s"] > 0
        assert side["memory with one connection, MiB"] > 5
        assert "memory, KiB a connection" in side
        assert side["all cut: live in the end"] == 21, "all connections came back, the first one too"
        assert side["all cut: attempts"] >= 21
        assert 0 < side["all cut: most attempts in a second"] <= side["all cut: attempts"]
        assert 0 < side["all cut: until all were live again, s"] < 60
        assert 0 <= side["all cut: longest stall of the loop, ms"] < 60_000
    assert ours["all cut: leases lost"] == 0
    assert 0 <= ours["all cut: latest heartbeat, s late"] < 20
    assert lines["all cut: leases lost"]["met"] is True
    assert "CPU while idle, % of a core" not in lines, "it was not asked for"
    assert title in done.stdout


@pytest.mark.ministack
@pytest.mark.processes
def test_requests_and_units_of_a_task_are_counted_on_a_local_dynamodb(tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    done = run("throughput", "--quick", "--tasks", "40", "--store", "ministack", "--json", str(file))
    assert done.returncode == 0, done.stderr
    [lines] = json.loads(file.read_text(encoding="utf-8"))["reports"]["throughput"].values()
    for side in (numbers(lines), numbers(lines, "naive")):
        assert 1 < side["requests/task"] < 10
        assert side["write units/task, by the rules"] == 8
        assert 0 < side["read units/task, as the engine says"] < 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["throughputt"], "'throughputt' is not known; did you mean 'throughput'?"),
        (["fleet"], "throughput, latency, streams, units, reconnects"),
        (["--agents", "many"], "integer"),
        (["streams", "--only", "memory,speed"], "reconnect"),
        (["streams", "--only", ","], "reconnect"),
        (["streams", "--loop", "trio"], "uvloop"),
        (["streams", "--conections", "3"], "--connections"),
    ],
)
def test_options_are_checked_and_what_was_meant_is_shown(arguments: list[str], words: str) -> None:
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 2
    assert words in " ".join(done.stderr.replace("│", " ").split())


def test_a_store_that_is_not_known_is_refused_in_words() -> None:
    done = CliRunner().invoke(app, ["throughput", "--store", "redis"])
    assert done.exit_code == 1
    assert "--store redis: use sqlite, ministack, or http://127.0.0.1:PORT" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.fixture
def at_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(SCRIPTS), str(SCRIPTS.parent))))


@pytest.mark.usefixtures("at_home")
def test_a_process_that_does_not_start_is_shown_with_the_end_of_its_log(tmp_path: Path) -> None:
    with (
        children(tmp_path) as start,
        pytest.raises(BenchFailed, match=r"No module named benchmarks\.nothing") as problem,
    ):
        start("nothing", {})
    assert "has ended with 1" in str(problem.value)


@pytest.mark.usefixtures("at_home")
def test_measured_processes_end_when_the_harness_is_gone() -> None:
    arguments: dict[str, dict[str, Any]] = {
        "feed": {"tls": False},
        "naive": {"loop": "asyncio", "url": "ws://127.0.0.1:9/"},
        "agent": {"settings": {"store": "sqlite://:memory:"}},
    }
    running = [
        subprocess.Popen(
            [sys.executable, "-m", f"benchmarks.{module}", json.dumps(one)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for module, one in arguments.items()
    ]
    for process in running:
        said, problem = process.communicate(timeout=60)
        assert process.returncode == 1, problem
        assert said.startswith("{"), "it has said hello"
