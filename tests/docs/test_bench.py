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
        [str(BENCH), *arguments], env=environment, capture_output=True, text=True, timeout=120, check=False
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
