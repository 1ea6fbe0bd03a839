"""The Lambda functions, made of the settings of their environment; and the command that serves all of it here."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

from tests.websocket_api.server.support import LONG_S, Asking
from thunderagent.cli import app
from thunderagent.model.errors import ConfigurationError
from thunderagent.websocket_api.gateway.events import connect_event, message_event
from thunderagent.websocket_api.gateway.issuer import Issuer
from thunderagent.websocket_api.server import functions
from thunderagent.websocket_api.server.functions import make_api, make_authorizer, management_endpoint

ISSUER = Issuer()


@pytest.fixture
def lambda_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[pytest.MonkeyPatch]:
    """What the template sets, on SQLite, for new functions."""
    for name, value in {
        "STATE_STORE": f"sqlite:///{tmp_path}/states.db",
        "CONNECTION_STORE": f"sqlite:///{tmp_path}/connections.db",
        "REGION": "eu-central-1",
        "ISSUER": ISSUER.issuer,
        "AUDIENCE": ISSUER.audience,
        "JWKS": ISSUER.jwks,
    }.items():
        monkeypatch.setenv(f"WSAPI_{name}", value)
    monkeypatch.setenv("AWS_REGION", "eu-central-1")
    monkeypatch.setattr(functions, "_api", None)
    monkeypatch.setattr(functions, "_authorizer", None)
    yield monkeypatch


def test_the_functions_of_lambda_serve_a_client_and_are_made_once(
    lambda_environment: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    event = connect_event("c1", "/", {"Authorization": f"Bearer {ISSUER.token('ada')}"}, now=0.0)
    policy = functions.authorize(event, None)
    context = {**policy["context"], "principalId": policy["principalId"]}
    event["requestContext"]["authorizer"] = context
    assert functions.handle(event, None)["statusCode"] == 200
    made = [functions._api, functions._authorizer]
    message = {"action": "setState", "id": 1, "version": 0, "change": "c", "patch": {"a": 1}}
    for _ in range(2):
        answer = functions.handle(message_event("c1", json.dumps(message), context, now=0.0), None)
        assert json.loads(answer["body"])["version"] == 1
    assert made == [functions._api, functions._authorizer]
    with pytest.raises(Exception, match=r"^Unauthorized$"):
        functions.authorize(connect_event("c1", "/", {"Authorization": "Bearer geheim"}, now=0.0), None)
    log = capsys.readouterr().err
    assert "connection refused" in log
    assert "geheim" not in log


def given(environment: pytest.MonkeyPatch, name: str, value: str | None) -> None:
    """Set a variable, or take it away."""
    if value is None:
        environment.delenv(f"WSAPI_{name}")
    else:
        environment.setenv(f"WSAPI_{name}", value)


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("ISSUER", None, "WSAPI_ISSUER: Field required"),
        ("AUDIENCE", "", "audience"),
        ("JWKS", None, "either WSAPI_JWKS_URL or WSAPI_JWKS"),
        ("JWKS_URL", "https://issuer.example/jwks", "either WSAPI_JWKS_URL or WSAPI_JWKS"),
        ("JWKS", "{}", "WSAPI_JWKS: the JWKS has no list"),
        ("QUERY_TOKEN", "perhaps", "WSAPI_QUERY_TOKEN"),
    ],
)
def test_an_authorizer_whose_environment_cannot_work_says_why(
    lambda_environment: pytest.MonkeyPatch, name: str, value: str | None, says: str
) -> None:
    given(lambda_environment, name, value)
    with pytest.raises(ConfigurationError, match=says):
        make_authorizer()


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("STATE_STORE", None, "WSAPI_STATE_STORE: Field required"),
        ("CONNECTION_STORE", "redis://x", "neither sqlite:// nor dynamodb://"),
        ("REGION", None, "WSAPI_REGION"),
        ("ENDPOINT", "wss://x", "https"),
    ],
)
def test_a_handler_whose_environment_cannot_work_says_why(
    lambda_environment: pytest.MonkeyPatch, name: str, value: str | None, says: str
) -> None:
    given(lambda_environment, name, value)
    with pytest.raises(ConfigurationError, match=says):
        make_api(connect_event("c1", "/", {}, now=0.0))


def test_pushes_go_where_aws_names_the_api_and_not_to_the_domain_of_the_event(monkeypatch: pytest.MonkeyPatch) -> None:
    event = {"requestContext": {"apiId": "abc123", "stage": "prod", "domainName": "ws.example.com"}}
    monkeypatch.setenv("AWS_REGION", "eu-west-1")
    assert management_endpoint(event) == "https://abc123.execute-api.eu-west-1.amazonaws.com/prod"
    monkeypatch.setenv("AWS_REGION", "cn-north-1")
    assert management_endpoint(event) == "https://abc123.execute-api.cn-north-1.amazonaws.com.cn/prod"
    monkeypatch.delenv("AWS_REGION")
    with pytest.raises(ConfigurationError, match="WSAPI_ENDPOINT"):
        management_endpoint(event)


# thunderagent wsapi serve


@contextmanager
def served(folder: Path) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """The command in a process, and what it printed."""
    command = [sys.executable, "-m", "thunderagent", "wsapi", "serve", "--demo", "--port", "0", "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=folder)
    try:
        assert process.stdout is not None
        yield process, json.loads(process.stdout.readline())
    finally:
        process.kill()
        process.communicate(timeout=LONG_S)


def a_token(told: dict[str, Any]) -> str:
    with urllib.request.urlopen(f"{told['page']}token?user=ada", timeout=LONG_S) as response:
        return str(json.loads(response.read())["token"])


@asynccontextmanager
async def client_of(region: dict[str, Any], token: str) -> AsyncIterator[Asking]:
    async with connect(region["url"], additional_headers={"Authorization": f"Bearer {token}"}) as socket:
        yield Asking(socket)


@pytest.mark.processes
def test_the_command_serves_a_demo_of_two_regions_whose_states_survive_a_kill(tmp_path: Path) -> None:
    with served(tmp_path) as (process, told):
        regions, token = told["regions"], a_token(told)
        assert [one["region"] for one in regions] == ["eu-central-1", "eu-west-1"]

        async def use() -> None:
            for version, one in enumerate(regions):
                async with client_of(one, token) as client:
                    assert (await client.ask("getState"))["version"] == version
                    saved = await client.ask("setState", version=version, change=str(version), patch={"n": version})
                    assert (saved["version"], saved["region"]) == (version + 1, one["region"])
                    if version:
                        process.kill()  # right after it has said that the change is saved
                        with pytest.raises(ConnectionClosed):
                            await client.receive()

        asyncio.run(use())
    with served(tmp_path) as (process, told):
        token = a_token(told)

        async def look() -> None:
            async with client_of(told["regions"][0], token) as client:
                reply = await client.ask("getState", known_version=2)
                assert (reply["state"], reply["client_ahead"]) == ({"n": 1}, False)
                assert (await client.ask("setState", version=1, change="1", patch={"n": 1}))["version"] == 2

        asyncio.run(look())
        process.send_signal(signal.SIGTERM)
        assert process.wait(LONG_S) == 0
        assert process.stderr is not None
        assert "Traceback" not in process.stderr.read()


def test_the_command_says_what_it_needs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    runner = CliRunner()
    without = runner.invoke(app, ["wsapi", "serve", "--port", "0", "--folder", str(tmp_path)])
    assert without.exit_code == 2
    assert "WSAPI_ISSUER" in without.output
    twice = runner.invoke(
        app, ["wsapi", "serve", "--demo", "--region", "a", "--region", "a", "--folder", str(tmp_path / "x")]
    )
    assert twice.exit_code == 2
    assert "two regions have one name" in twice.output
    (tmp_path / "file").touch()
    no_folder = runner.invoke(app, ["wsapi", "serve", "--demo", "--folder", str(tmp_path / "file")])
    assert no_folder.exit_code == 2
    monkeypatch.setattr("thunderagent.cli.wsapi.has_package", lambda name: False)
    missing = runner.invoke(app, ["wsapi", "serve", "--demo"])
    assert missing.exit_code == 2
    assert "pip install 'thunderagent[wsapi]'" in missing.output.replace("\n", " ")


@pytest.mark.slow
def test_a_port_that_is_taken_is_told_with_what_to_do(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = CliRunner().invoke(app, ["wsapi", "serve", "--demo", "--port", port, "--folder", str(tmp_path)])
    assert done.exit_code == 2
    assert "choose another --port" in done.output.replace("\n", " ")
