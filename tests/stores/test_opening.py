"""The URL of a store."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from thunderagent.client import Client
from thunderagent.model.errors import ConfigurationError
from thunderagent.stores import fixed, open_engine
from thunderagent.stores.dynamo.engine import DynamoEngine
from thunderagent.stores.sqlite.engine import SqliteEngine

LOCAL = "http://127.0.0.1:4566"


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("sqlite:///thunderagent.db", "thunderagent.db"),
        ("sqlite:///data/tasks.db", "data/tasks.db"),
        ("sqlite:////var/lib/tasks.db", "/var/lib/tasks.db"),
        ("sqlite://:memory:", ":memory:"),
    ],
)
def test_a_sqlite_url_names_a_file_and_comes_back(url: str, path: str) -> None:
    engine = open_engine(url)
    assert isinstance(engine, SqliteEngine)
    whole = path if path == ":memory:" else os.path.abspath(path)
    assert engine.path == whole
    assert engine.url == (url if path == whole else f"sqlite:///{whole}")


@pytest.mark.parametrize(
    ("url", "region", "endpoint"),
    [
        ("dynamodb://TaskTable?region=eu-central-1", "eu-central-1", None),
        (f"dynamodb://TaskTable?region=eu-west-1&endpoint={LOCAL}", "eu-west-1", LOCAL),
        (f"dynamodb://Task.Table_1-x?endpoint={LOCAL}", "us-east-1", LOCAL),
    ],
)
def test_a_dynamodb_url_names_table_region_and_endpoint(url: str, region: str, endpoint: str | None) -> None:
    engine = open_engine(url)
    assert isinstance(engine, DynamoEngine)
    place = engine.connection.place
    assert (place.table, place.region, place.endpoint) == (url[11:].partition("?")[0], region, endpoint)
    again = open_engine(engine.url)
    assert again.url == engine.url
    again.close()
    engine.close()


def test_the_region_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_DEFAULT_REGION", "ap-south-1")
    engine = open_engine("dynamodb://TaskTable")
    assert engine.url == "dynamodb://TaskTable?region=ap-south-1"
    engine.close()


@pytest.mark.parametrize(
    ("url", "problem", "example"),
    [
        ("postgres://host/db", "neither sqlite:// nor dynamodb://", "dynamodb://TaskTable?region=eu-central-1"),
        ("thunderagent.db", "neither sqlite:// nor dynamodb://", "sqlite:///thunderagent.db"),
        ("sqlite:thunderagent.db", "neither sqlite:// nor dynamodb://", "sqlite:///thunderagent.db"),
        ("", "neither sqlite:// nor dynamodb://", "sqlite:///thunderagent.db"),
        ("sqlite://", "names no file", "sqlite:///thunderagent.db"),
        ("sqlite:///", "names no file", "sqlite:///thunderagent.db"),
        ("sqlite:////", "names no file", "sqlite:////var/lib/thunderagent.db"),
        ("sqlite://thunderagent.db", "names no file", "sqlite:///thunderagent.db"),
        ("sqlite:///tasks.db?mode=ro", "has parameters", "sqlite:///thunderagent.db"),
        ("dynamodb://", "does not name a table", "dynamodb://TaskTable?region=eu-central-1"),
        ("dynamodb:///TaskTable", "does not name a table", "dynamodb://TaskTable?region=eu-central-1"),
        ("dynamodb://TaskTable/x", "does not name a table", "dynamodb://TaskTable?region=eu-central-1"),
        ("dynamodb://ab", "does not name a table", "3 to 255"),
        ("dynamodb://Task Table", "does not name a table", "dynamodb://TaskTable?region=eu-central-1"),
        ("dynamodb://TaskTable?regoin=x", "unknown parameter 'regoin'", "dynamodb://TaskTable?region=eu-central-1"),
        ("dynamodb://TaskTable?region=", "an empty region", "dynamodb://TaskTable?region=eu-central-1"),
        ("dynamodb://TaskTable?endpoint=localhost:1", "endpoint that is not a URL", "&endpoint=http://127.0.0.1:4566"),
    ],
)
def test_a_wrong_url_is_told_with_a_right_one(url: str, problem: str, example: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        open_engine(url)
    assert repr(url) in str(caught.value)
    assert problem in str(caught.value)
    assert example in str(caught.value)


@pytest.mark.slow
def test_an_embedded_store_does_not_load_boto3() -> None:
    code = (
        "import sys; from thunderagent.stores import open_engine; e = open_engine('sqlite://:memory:'); e.check(); "
        "print([name for name in sys.modules if name.startswith(('boto', 'urllib3'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.slow
def test_a_relative_path_is_that_of_the_moment_in_which_the_store_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that changes its folder, before its first task or after it, goes on with the file that it named."""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    client = Client.from_settings(store="sqlite:///tasks.db")
    engine = SqliteEngine("tasks.db")
    arbiter = fixed("sqlite:///arbiter.db")
    monkeypatch.chdir("elsewhere")
    sibling = engine.sibling()
    client.enqueue("report.build", {"n": 1}, task_id="a")
    client.close()
    client.enqueue("report.build", {"n": 2}, task_id="b")
    pid = os.fork()
    if pid == 0:
        try:
            client.enqueue("report.build", {"n": 3}, task_id="c")
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(pid, 0)[1] == 0
    for one in (engine, sibling, client.store.engine):
        assert set(one.get(["a", "b", "c"])) == {"a", "b", "c"}
        assert one.url == f"sqlite:///{tmp_path}/tasks.db"
        one.close()
    assert list(Path.cwd().iterdir()) == []
    assert arbiter == f"sqlite:///{tmp_path}/arbiter.db"
    for same in ("sqlite:////var/tasks.db", "sqlite://:memory:", "dynamodb://TaskTable?region=eu-central-1"):
        assert fixed(same) == same
