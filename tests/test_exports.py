"""What `import thunderagent` gives."""

from __future__ import annotations

import subprocess
import sys

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


def test_the_package_imports_without_boto3_and_without_a_log_library() -> None:
    program = (
        "import sys, thunderagent; print(sorted({'boto3', 'botocore', 'loguru', 'typer', 'moto', 'opentelemetry'}"
        " & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
