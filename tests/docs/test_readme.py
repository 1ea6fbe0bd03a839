"""The README says what is true: its first job runs, and so do the tests of the guide."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import pytest

from thunderagent.agent.loop import Agent
from thunderagent.client import Client
from thunderagent.jobs.registry import Registry
from thunderagent.settings import Settings
from thunderagent.testing import ChaosServer, run_stream

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def code_blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def test_the_readme_is_one_screen_of_everything() -> None:
    assert len(README.splitlines()) <= 150


def test_the_first_job_runs_as_it_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    blocks = code_blocks("python")
    package = tmp_path / "myjobs"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "hello.py").write_text(blocks[0])
    assert len([line for line in textwrap.dedent(blocks[0]).splitlines() if line.strip()]) <= 20
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("THUNDERAGENT_STORE", f"sqlite:///{tmp_path}/tasks.db")
    agent = Agent(
        Client.from_settings().store, Registry.from_package("myjobs"), Settings(poll_min_s=0.05), first_poll_s=0.0
    )
    thread = threading.Thread(target=agent.run)
    thread.start()
    try:
        exec(compile(blocks[1], "README.md", "exec"), {})  # noqa: S102 - the README is ours
    finally:
        agent.stop()
        thread.join(30)
        for name in ("myjobs", "myjobs.hello"):
            sys.modules.pop(name, None)
    assert capsys.readouterr().out == "Hello, Ada!\n"


def test_the_stream_runs_as_it_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {"__name__": __name__}
    exec(compile(code_blocks("python")[2], "README.md", "exec"), names)  # noqa: S102 - the README is ours

    async def follow_two() -> None:
        async with ChaosServer(auto_subscribe=True, from_start=True) as server:
            server.publish_many(2)
            await run_stream(names["follow"], server.url, until=lambda ctx: ctx.cursor and ctx.cursor.seq == 2)

    asyncio.run(follow_two())
    assert capsys.readouterr().out == "1\n2\n"


def test_the_tests_of_the_testing_guide_pass_as_they_are_printed(tmp_path: Path) -> None:
    package = tmp_path / "myjobs"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "hello.py").write_text(code_blocks("python")[0])
    guide = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "guides" / "testing.md").read_text(), flags=re.DOTALL)
    for number, block in enumerate(guide):
        assert "def test_" in block
        (tmp_path / f"test_{number}.py").write_text(block)
    command = [sys.executable, "-m", "pytest", "-q", "-W", "error", "-p", "no:cacheprovider", "."]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stdout
    assert len(guide) == 8
    assert "9 passed" in ran.stdout
