"""The tutorial works as it is printed: its jobs, its program, its failure and its test."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from tests.docs.test_reference import DOCS

FILES: Final = dict(
    re.findall(
        r"```python\n# ([\w/]+\.py)[^\n]*\n(.*?)```",
        (DOCS / "start" / "tutorial.md").read_text(encoding="utf-8"),
        re.DOTALL,
    )
)


@pytest.mark.processes
def test_the_shop_of_the_tutorial_opens(tmp_path: Path) -> None:
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    for folder in ("shop", "shop/jobs"):
        (tmp_path / folder / "__init__.py").touch()
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "COLUMNS": "200"}

    def run(*command: str) -> str:
        done = subprocess.run(
            [sys.executable, *command], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=90
        )
        return done.stdout

    with subprocess.Popen(
        [sys.executable, "-m", "thunderagent", "run", "shop.jobs"],
        cwd=tmp_path,
        env=environment,
        stderr=subprocess.DEVNULL,
    ) as agent:
        try:
            assert run("order.py") == "invoice 7: 2 lines\n"
            assert run("order.py") == "invoice 7: 2 lines\n", "the same tasks"
            failing = ("--jobs", "shop.jobs", "--task-id", "pack-8", "--max-retry", "0", "--wait", "60")
            shown = run("-m", "thunderagent", "enqueue", "order.pack", '{"number": 8, "lines": []}', *failing)
            assert "FAILED: ValueError: order 8 has no lines" in shown
            assert "thunderagent retry pack-8" in run("-m", "thunderagent", "explain", "pack-8")
        finally:
            agent.send_signal(signal.SIGTERM)
    assert "1 passed" in run("-m", "pytest", "-q", "-p", "no:cacheprovider", "test_orders.py")
