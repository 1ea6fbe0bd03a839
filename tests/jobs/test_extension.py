"""Extensions are found by their entry points; what is missing or broken is one clear error."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from configparser import ConfigParser
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

import pytest

from thunderagent.agent.loop import Agent
from thunderagent.jobs import extension as extensions
from thunderagent.jobs.extension import GROUP, extension
from thunderagent.jobs.registry import Registry
from thunderagent.model.errors import ConfigurationError
from thunderagent.settings import load_settings
from thunderagent.testing import memory_client

ROOT = Path(__file__).parents[2]


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Installs these objects as the only extensions, each under the name `push`."""

    def install(*values: str) -> None:
        extension.cache_clear()
        found = [EntryPoint("push", value, GROUP) for value in values]
        monkeypatch.setattr(extensions, "entry_points", lambda **_: found)

    yield install
    extension.cache_clear()


def test_installed_entry_points_are_those_of_the_source_tree() -> None:
    config = ConfigParser()
    config.read(ROOT / "setup.cfg")
    declared = dict(line.split(" = ") for line in config["options.entry_points"][GROUP].strip().splitlines())
    found = {one.name: one.value for one in entry_points(group=GROUP)}
    assert declared.items() <= found.items(), "the environment is older than setup.cfg: pip install --no-deps -e ."
    assert all(callable(extension(name)) for name in declared)


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ((), "extension 'push', which no installed package has"),
        (("first:push", "second:push"), "several packages have the extension 'push': first:push, second:push"),
        (("no_such_package:push",), r"extension 'push' \(no_such_package:push\) does not import: ModuleNotFoundError"),
        (("thunderagent.settings:no_such_name",), "does not import: AttributeError"),
    ],
)
def test_a_missing_or_broken_extension_is_one_error_that_names_it(
    values: tuple[str, ...], reason: str, installed: Callable[..., None]
) -> None:
    installed(*values)
    client = memory_client(push_endpoint="https://ws.example.com/prod", push_connections="sqlite:///c.db")
    with pytest.raises(ConfigurationError, match=reason):
        Agent(client.store, Registry(), client.settings)


def test_two_records_of_one_extension_are_one(installed: Callable[..., None]) -> None:
    installed("thunderagent.settings:load_settings", "thunderagent.settings:load_settings")
    assert extension("push") is load_settings


@pytest.mark.slow
def test_an_agent_without_such_settings_reads_no_entry_points_and_imports_no_extension() -> None:
    program = """
import sys
from thunderagent.jobs import extension
extension.entry_points = None
from thunderagent.agent.assembly import equip
from thunderagent.agent.loop import Agent
from thunderagent.jobs.registry import Registry
Agent.from_settings(Registry(), store="sqlite://:memory:")
assert not [name for name in sys.modules if name.startswith("thunderagent.websocket_api")]
"""
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)
