"""The guides to hooks and traces say what is true: their examples run as they are printed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from thunderagent.agent.loop import Agent
from thunderagent.agent.scopes import HOOKS_END_S, MOST_WAITING
from thunderagent.jobs.registry import Registry
from thunderagent.model.redaction import SECRET_NAMES
from thunderagent.telemetry.traces import CHILD_SPANS_S, SPANS_END_S
from thunderagent.testing import memory_client, run_until_idle

DOCS = Path(__file__).parents[2] / "docs"
HOOKS = (DOCS / "guides" / "hooks.md").read_text()
TRACES = (DOCS / "guides" / "traces.md").read_text()


def test_the_hooks_of_the_guide_are_told_and_run_as_they_are_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [block] = re.findall(r"```python\n(.*?)```", HOOKS, flags=re.DOTALL)
    (tmp_path / "guidejobs").mkdir()
    (tmp_path / "guidejobs" / "__init__.py").touch()
    (tmp_path / "guidejobs" / "orders.py").write_text(block)
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        registry = Registry.from_package("guidejobs")
        from guidejobs import orders  # type: ignore[import-not-found]

        client = memory_client()
        agent = Agent(client.store, registry, client.settings, first_poll_s=0.0)
        good = client.enqueue(orders.ship, orders.Order(number=7))
        bad = client.enqueue(orders.ship, orders.Order(number=-1))
        run_until_idle(agent, client)
        assert client.get(good).result == "shipped 7"
        assert orders.alarms == [f"orders.ship {bad.id}: ValueError: no such order"]
        assert set(orders.seconds) == {"orders.ship returned", "orders.ship raised"}
    finally:
        for name in ("guidejobs", "guidejobs.orders"):
            sys.modules.pop(name, None)


def test_the_trace_of_the_guide_comes_out_as_it_is_printed(tmp_path: Path) -> None:
    [block] = re.findall(r"```python\n(.*?)```", TRACES, flags=re.DOTALL)
    [printed] = re.findall(r"```\n(POST.*?)```", TRACES, flags=re.DOTALL)
    (tmp_path / "example.py").write_text(block)
    done = subprocess.run(
        [sys.executable, "-W", "error", str(tmp_path / "example.py")],
        capture_output=True,
        text=True,
        timeout=60,
        env={"PYTHONPATH": str(DOCS.parent)},
        check=False,
    )
    assert done.stderr == ""
    assert done.stdout == printed


def test_the_numbers_and_names_of_the_guides_are_those_of_the_code() -> None:
    assert f"**{MOST_WAITING:,} events**" in HOOKS
    assert f"**at most {HOOKS_END_S:g} s**" in HOOKS
    assert f"at most {SPANS_END_S:g} s at its end, an isolated child {CHILD_SPANS_S:g} s" in " ".join(TRACES.split())
    shown = TRACES.partition("## What log lines do not show")[2]
    missing = [name for name in SECRET_NAMES if name not in shown and not name.startswith("x-amz-")]
    assert [name for name in missing if name.replace("-", "_") not in shown] == []
