"""`scripts/bench` measures, and its numbers are numbers. Whether they are good is not judged here: machines differ."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).parents[2] / "scripts" / "bench"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """`scripts/bench` on the Python of the tests."""
    environment = {**os.environ, "BENCH_PYTHON": sys.executable, "COLUMNS": "140", "NO_COLOR": "1"}
    return subprocess.run(
        [str(BENCH), *arguments], env=environment, capture_output=True, text=True, timeout=300, check=False
    )


@pytest.mark.processes
def test_agent_on_sqlite_writes_sane_numbers(tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    options = ("--poll", "0.1", "--latency", "5", "--json", str(file))
    done = run("agent", "--store", "sqlite", "--tasks", "200", "--agents", "1", *options)
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    [both] = report["runs"]
    for side in (both["ours"], both["naive"]):
        assert (side["agents"], side["tasks"]) == (1, 200)
        for name in ("enqueue_single", "enqueue_bulk", "drain", "cpu_ms", "peak_mib"):
            assert side[name] > 0, name
        assert (side["run_twice"], side["not_succeeded"]) == (0, 0)
        assert side["failed_claims"] == 0, "an agent alone has nobody to lose to"
    assert 0 < both["ours"]["latency_p50_ms"] <= both["ours"]["latency_p99_ms"]
    assert both["ratios"]["drain"] == pytest.approx(both["ours"]["drain"] / both["naive"]["drain"], rel=0.1)
    assert any(target["name"].startswith("tasks run twice") and target["met"] for target in report["targets"])
    assert "drain, tasks/s" in done.stdout


def test_a_store_that_nobody_knows_is_told() -> None:
    done = run("agent", "--store", "redis", "--tasks", "20", "--agents", "1")
    assert done.returncode == 1
    assert "sqlite, ministack, dynalite" in done.stderr
    assert "Traceback" not in done.stderr


def test_numbers_of_agents_are_checked() -> None:
    assert run("agent", "--agents", "many").returncode == 2


@pytest.mark.processes
def test_streams_on_sqlite_write_sane_numbers(tmp_path: Path) -> None:
    file = tmp_path / "streams.json"
    only = ("--connections", "20", "--only", "memory,reconnect", "--settle", "0.3")
    done = run("streams", "--store", "sqlite", *only, "--json", str(file))
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    [holding] = report["holdings"]
    assert holding["variation"] == {"connections": 20, "tls": False, "loop": "asyncio"}
    for side in (holding["ours"], holding["naive"]):
        assert side["connect_s"] > 0
        assert side["base_mib"] > 5
        assert isinstance(side["connection_kib"], float), "a small number of connections may fit into what is there"
        assert side["live_after"] == 21, "all connections came back, the first one too"
        assert side["attempts"] >= 21
        assert 0 < side["attempts_a_second"] <= side["attempts"]
        assert 0 < side["live_s"] < 60
        assert 0 <= side["stall_s"] < 60
    assert holding["ours"]["leases_lost"] == 0
    assert 0 <= holding["ours"]["beat_late_s"] < 20
    assert report["takeovers"] == []
    assert report["flap"] is report["units"] is None
    assert {goal["name"] for goal in report["goals"]} >= {"memory, KiB a connection", "all cut: leases lost"}
    assert "20 connections, ws, asyncio" in done.stdout


@pytest.mark.processes
def test_units_of_streams_are_those_of_the_rules(tmp_path: Path) -> None:
    file = tmp_path / "streams.json"
    done = run("streams", "--only", "units", "--streams", "2", "--idle", "0.5", "--json", str(file))
    assert done.returncode == 0, done.stderr
    units: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))["units"]
    wanted = {"enqueue": 2, "claim": 3, "heartbeat": 1, "heartbeat with cursor": 1, "journal, new": 1, "stop": 3}
    for verb, number in wanted.items():
        assert units["verbs"][verb] == number, verb
    assert units["stream_hour"] == 720, "a heartbeat each 5 s, with its cursor"
    assert units["dollars_100_month"] == pytest.approx(32.85)
    assert units["row_bytes"] < 1024


@pytest.mark.processes
def test_latency_on_sqlite_writes_sane_numbers(tmp_path: Path) -> None:
    file = tmp_path / "latency.json"
    done = run("latency", "--store", "sqlite", "--tasks", "4", "--json", str(file))
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    assert [(one["how"], one["tasks"]) for one in report["latencies"]] == [
        ("with the doorbell", 4),
        ("polls, 1 s", 4),
        ("polls, default", 1),
    ]
    assert all(0 < one["p50_ms"] <= one["p99_ms"] <= one["worst_ms"] for one in report["latencies"])
    assert "4 tasks: p50, ms" in done.stdout


def test_options_of_latency_are_checked() -> None:
    done = run("latency", "--store", "dynalite")
    assert done.returncode == 2
    assert "ministack" in done.stderr


@pytest.mark.parametrize(
    ("option", "value", "known"),
    [("--only", "memory,speed", "reconnect"), ("--only", ",", "reconnect"), ("--loop", "trio", "uvloop")],
)
def test_options_of_streams_are_checked(option: str, value: str, known: str) -> None:
    done = run("streams", option, value)
    assert done.returncode == 2
    assert known in done.stderr


def test_a_store_that_cannot_be_opened_is_told_in_words() -> None:
    done = run("streams", "--store", "sqlite:////dev/null/no/tasks.db", "--only", "units")
    assert done.returncode == 1
    assert "the folder '/dev/null/no' of the database does not exist" in done.stderr
    assert "Traceback" not in done.stderr


CHILDREN = """
import sys
from pathlib import Path
from benchmarks.streams_children import children
with children(Path(sys.argv[1])) as started:
    started.start("benchmarks.no_such_module", {})
"""


def test_a_child_that_does_not_start_is_told_with_the_end_of_its_log(tmp_path: Path) -> None:
    done = python("-c", CHILDREN, str(tmp_path))
    assert "BenchFailed: no_such_module-1 has ended with 1" in done.stderr
    assert "No module named benchmarks.no_such_module" in done.stderr


@pytest.mark.parametrize(
    ("module", "argument"),
    [
        ("benchmarks.streams_feed", {"tls": False}),
        ("benchmarks.streams_naive", {"loop": "asyncio", "url": "ws://127.0.0.1:9/"}),
        ("benchmarks.streams_launcher", {"store": "sqlite://:memory:"}),
        ("benchmarks.cronfree_launcher", {"doorbell": True, "settings": {"store": "sqlite://:memory:"}}),
    ],
)
def test_a_child_ends_when_nobody_can_ask_it_any_more(module: str, argument: dict[str, Any]) -> None:
    done = python("-m", module, json.dumps(argument))
    assert done.returncode == 1, done.stderr
    assert done.stdout.startswith("{"), "it has said hello"


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The Python of the tests with the modules of the benchmarks, and nobody who asks."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(BENCH.parent), str(BENCH.parents[1])))}
    return subprocess.run(
        [sys.executable, *arguments],
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.processes
def test_reconnects_are_simulated_and_the_same_seed_gives_the_same_numbers(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("one.json", "two.json")]
    for file in files:
        done = run("reconnects", "--clients", "2000", "--seed", "3", "--json", str(file))
        assert done.returncode == 0, done.stderr
    first, second = (json.loads(file.read_text(encoding="utf-8")) for file in files)
    assert first == second
    ours, _, naive = first["runs"]
    assert (ours["kind"], naive["kind"]) == ("thunderagent", "naive")
    assert ours["attempts"] < naive["attempts"]
    assert "all back, s" in done.stdout
