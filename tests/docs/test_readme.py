"""The README says what is true: its settings, its diagram, its commands and its first job."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest

from tests.support.program import program
from thunderagent.agent.loop import Agent
from thunderagent.client import Client
from thunderagent.jobs.registry import Registry
from thunderagent.model.task import TRANSITIONS, Status
from thunderagent.settings import PREFIX, Settings

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def settings_table() -> str:
    """The table as the README must have it, made from the settings themselves."""
    lines = ["| variable | default | meaning |", "|---|---|---|"]
    for name, field in Settings.model_fields.items():
        default = field.get_default(call_default_factory=True)
        shown = "" if default in (None, {}) else f"{default:g}" if isinstance(default, float) else str(default)
        lines.append(f"| `{PREFIX}{name.upper()}` | {f'`{shown}`' if shown else ''} | {field.description} |")
    return "\n".join(lines)


def code_blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def test_the_settings_table_is_the_settings() -> None:
    found = re.search(r"<!-- settings: .*? -->\n(.*?)\n<!-- end of settings -->", README, flags=re.DOTALL)
    assert found and found.group(1) == settings_table()


def test_the_state_diagram_is_the_transition_table() -> None:
    [diagram] = code_blocks("mermaid")
    drawn = {status: set[Status]() for status in Status}
    for before, after in re.findall(r"^\s*(\w+) --> (\w+)", diagram, flags=re.MULTILINE):
        drawn[Status(before)].add(Status(after))
    assert drawn == {status: set(after) for status, after in TRANSITIONS.items()}


def test_every_command_is_in_the_readme_and_has_help() -> None:
    group = program()
    for name, command in group.commands.items():
        assert command.help, f"{name} has no help"
        names = [f"{name} {sub}" for sub in command.commands] if hasattr(command, "commands") else [name]
        for one in names:
            assert f"`thunderagent {one}" in README, f"{one} is not in the README"


def test_every_link_to_a_file_leads_to_one() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    for page in pages:
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
            assert "://" in target or (page.parent / target).exists(), f"{page.name} links to {target}"


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
