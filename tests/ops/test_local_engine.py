"""The local DynamoDB as a background process."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest

from thunderagent.model.errors import ConfigurationError, StoreError, StoreUnavailable
from thunderagent.ops import local_engine as local

pytestmark = pytest.mark.slow


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    """A folder whose engine is gone after the test."""
    yield tmp_path / "engine"
    local.stop(tmp_path / "engine")


def client(service: str, engine: local.LocalEngine) -> Any:
    session: Any = boto3.session.Session(aws_access_key_id="local", aws_secret_access_key="local")
    return session.client(service, region_name="us-east-1", endpoint_url=engine.endpoint)


def listening_on(port: int) -> set[str]:
    """Hexadecimal addresses that listen on a port, IPv4 and IPv6."""
    lines = [line.split() for name in ("tcp", "tcp6") for line in Path("/proc/net", name).read_text().splitlines()]
    return {line[1].split(":")[0] for line in lines if line[1].endswith(f":{port:04X}") and line[3] == "0A"}


@pytest.mark.ministack
def test_tables_rows_and_objects_survive_a_restart(home: Path) -> None:
    first = local.start(home)
    dynamodb, s3 = client("dynamodb", first), client("s3", first)
    dynamodb.create_table(
        TableName="Survivor",
        BillingMode="PAY_PER_REQUEST",
        AttributeDefinitions=[{"AttributeName": "id", "AttributeType": "S"}],
        KeySchema=[{"AttributeName": "id", "KeyType": "HASH"}],
    )
    dynamodb.put_item(TableName="Survivor", Item={"id": {"S": "a"}, "number": {"N": "0.125"}})
    s3.create_bucket(Bucket="survivor")
    s3.put_object(Bucket="survivor", Key="folder/object", Body=b"\x00\xff")
    assert local.stop(home)

    second = local.start(home)
    assert second.pid != first.pid
    assert second.url == first.url, "a restart must not make the setting of everybody else wrong"
    answer = client("dynamodb", second).get_item(TableName="Survivor", Key={"id": {"S": "a"}})
    assert answer["Item"]["number"] == {"N": "0.125"}
    found = client("s3", second).get_object(Bucket="survivor", Key="folder/object")["Body"]
    with found:
        assert found.read() == b"\x00\xff"


@pytest.mark.ministack
def test_start_twice_is_one_process_and_stop_ends_it(home: Path) -> None:
    first = local.start(home)
    assert local.start(home) == first == local.status(home)
    with pytest.raises(ConfigurationError, match=f"runs already, on port {first.port}"):
        local.start(home, port=first.port + 1)
    assert local.stop(home)
    assert local.status(home) is None
    assert not local.stop(home)
    assert not Path("/proc", str(first.pid)).exists()


@pytest.mark.ministack
@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="reads /proc")
def test_only_the_loopback_address_listens(home: Path) -> None:
    engine = local.start(home)
    assert listening_on(engine.port) == {"0100007F"}


@pytest.mark.ministack
def test_an_engine_that_hangs_is_killed_and_the_loss_is_told(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = local.start(home)
    os.kill(engine.pid, signal.SIGSTOP)
    monkeypatch.setattr(local, "STOP_S", 0.2)
    with pytest.raises(StoreError, match="was killed: what changed since its start is lost"):
        local.stop(home)
    assert local.status(home) is None


@pytest.mark.ministack
def test_a_crashed_engine_is_started_again(home: Path) -> None:
    crashed = local.start(home)
    os.kill(crashed.pid, signal.SIGKILL)
    while local.status(home):
        pass
    assert local.start(home).pid != crashed.pid


@pytest.mark.ministack
def test_settings_of_the_caller_do_not_reach_the_engine(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"USE_SSL": "1", "BIND_HOST": "0.0.0.0", "STATE_DIR": "/nonexistent"}.items():  # noqa: S104
        monkeypatch.setenv(name, value)
    engine = local.start(home)
    assert client("dynamodb", engine).list_tables()["TableNames"] == []


def test_a_pid_that_another_process_has_by_now_is_left_alone(home: Path) -> None:
    home.mkdir()
    stale = {"pid": os.getpid(), "port": 1, "folder": str(home), "born": "1", "started_at": 1.0}
    (home / "engine.json").write_text(json.dumps(stale))
    assert local.status(home) is None
    assert not local.stop(home), "this would have sent SIGTERM to the test run"


@pytest.mark.parametrize("state", ["", "{", "[]", '{"pid": 1}'])
def test_a_broken_state_file_is_no_engine(home: Path, state: str) -> None:
    home.mkdir()
    (home / "engine.json").write_text(state)
    assert local.status(home) is None


def test_a_taken_port_is_refused(home: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ConfigurationError, match="is taken"):
            local.start(home, port=taken.getsockname()[1])


def test_an_engine_that_does_not_start_is_told_with_its_log(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = home.parent / "python"
    fake.write_text("#!/bin/sh\necho broken on purpose >&2\nexit 3\n")
    fake.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(fake))
    with pytest.raises(StoreUnavailable, match=r"ended at once(.|\n)*broken on purpose"):
        local.start(home)


def test_without_ministack_the_message_says_what_to_install(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match=r"pip install 'thunderagent\[local\]'"):
        local.start(home)
    assert not home.exists()


def test_the_url_is_what_the_store_setting_takes() -> None:
    engine = local.LocalEngine(pid=1, port=4567, folder=Path(), born="1", started_at=0.0)
    assert engine.url == "dynamodb://TaskTable?region=us-east-1&endpoint=http://127.0.0.1:4567"
