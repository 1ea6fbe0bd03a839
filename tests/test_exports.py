"""What `import thunderagent` gives."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

import thunderagent


def test_every_exported_name_exists_and_the_list_is_sorted() -> None:
    assert [name for name in thunderagent.__all__ if not hasattr(thunderagent, name)] == []
    assert thunderagent.__all__ == sorted(thunderagent.__all__)


def test_the_names_of_the_readme_are_exported() -> None:
    assert set(thunderagent.__all__) == {
        "Agent",
        "Attempt",
        "Backoff",
        "Cancel",
        "Client",
        "Connection",
        "Context",
        "Cursor",
        "Endpoint",
        "Fail",
        "Gap",
        "GapAction",
        "Job",
        "JobRun",
        "ParentFailure",
        "ParentResults",
        "Registry",
        "Settings",
        "Snooze",
        "Span",
        "Status",
        "StreamContext",
        "StreamOptions",
        "Task",
        "Tick",
        "__version__",
        "around",
        "cron",
        "every",
        "job",
        "on",
        "periodic",
        "stream",
    }


def test_every_exported_thing_says_what_it_is() -> None:
    undocumented = [
        name for name in thunderagent.__all__ if name != "__version__" and not getattr(thunderagent, name).__doc__
    ]
    assert undocumented == []


@pytest.mark.slow
def test_the_package_imports_without_boto3_and_without_a_log_library() -> None:
    program = (
        "import sys, thunderagent; print(sorted({'boto3', 'botocore', 'loguru', 'typer', 'moto', 'opentelemetry'}"
        " & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def loaded_by(*arguments: str) -> set[str]:
    """Modules that are there when a fresh interpreter has done something."""
    code = "import atexit, sys; atexit.register(lambda: print('\\n'.join(sys.modules)));" + arguments[0]
    done = subprocess.run([sys.executable, "-c", code, *arguments[1:]], capture_output=True, text=True, check=True)
    return set(done.stdout.splitlines())


HEAVY: Final = {"thunderagent.agent", "websockets", "boto3", "botocore"}


@pytest.mark.slow
def test_a_client_loads_no_agent_no_sockets_and_not_more_of_ours_than_it_needs() -> None:
    loaded = loaded_by("from thunderagent import Client")
    assert loaded & HEAVY == set()
    assert len([name for name in loaded if name.partition(".")[0] == "thunderagent"]) <= 60


@pytest.mark.slow
def test_the_help_of_the_program_loads_no_command() -> None:
    loaded = loaded_by("from thunderagent.cli import main; main()", "--help")
    assert loaded & (HEAVY | {"pydantic", "thunderagent.client"}) == set()


@pytest.mark.slow
def test_health_by_files_needs_no_client_and_no_settings(tmp_path: Path) -> None:
    code = "from thunderagent.cli import app; app(['health', '--folder', sys.argv[1]], standalone_mode=False)"
    assert loaded_by(code, str(tmp_path)) & {"websockets", "boto3", "pydantic_settings", "thunderagent.client"} == set()
