"""The command `canary`: one attempt, shown step by step; its exit code says how it went."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from rich.console import Console
from typer.testing import CliRunner

from tests.websocket_api.canary.support import REGION, Api, an_api
from thunderagent.cli import app

pytestmark = pytest.mark.slow


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> Iterator[Api]:
    with an_api() as one:
        monkeypatch.setenv("THUNDERAGENT_CANARY_TARGETS", json.dumps({REGION: one.url}))
        yield one


def called(*arguments: str) -> tuple[int, str]:
    ran = CliRunner().invoke(app, ["canary", *arguments])
    return ran.exit_code, ran.output


def test_every_step_of_every_target_is_shown_with_its_time(api: Api) -> None:
    code, output = called()
    assert code == 0, output
    assert f"{REGION} ok in" in output
    assert api.url in output
    for step in ("token", "connect", "auth", "ping", "setState", "getState", "close"):
        assert step in output


def test_a_step_that_failed_is_named_with_its_reason_and_the_exit_code_is_1(api: Api) -> None:
    api.changes["setState"] = lambda asked, right: "{no"
    code, output = called(REGION)
    assert code == 1
    assert f"{REGION} failed in" in output
    assert "setState: what came is not JSON" in output
    assert "getState" not in output


def test_json_has_the_same(api: Api) -> None:
    code, output = called("--json")
    assert code == 0
    [found] = json.loads(output)
    assert (found["target"], found["ok"], found["region"]) == (REGION, True, REGION)
    assert found["observer"]
    api.status = 403
    code, output = called("--json")
    assert (code, json.loads(output)[0]["step"]) == (1, "auth")


def test_a_url_of_its_own_with_a_token_of_its_own(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    api.token = "a-token-of-mine"
    monkeypatch.setenv("MINE", "a-token-of-mine")
    code, output = called("--url", api.url, "--token-from", "env:MINE")
    assert code == 0, output
    assert "given ok" in output
    assert "answered by eu-central-1" in output
    assert "a-token-of-mine" not in output
    assert called("--url", api.url)[0] == 1


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("nowhere",), "no target is named 'nowhere'; known are: eu-central-1"),
        (("--url", "https://a"), "no URL of a WebSocket"),
        ((REGION, "--url", "wss://a"), "give names of targets or --url, not both"),
        (("--token-from", "eyJ.x.y"), "begins with none of"),
    ],
)
def test_what_cannot_be_is_refused_with_exit_code_2(api: Api, arguments: tuple[str, ...], told: str) -> None:
    code, output = called(*arguments)
    assert code == 2
    assert told in " ".join(output.split())


def test_without_targets_it_says_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("THUNDERAGENT_CANARY_TARGETS", raising=False)
    code, output = called()
    assert code == 2
    assert "set THUNDERAGENT_CANARY_TARGETS" in " ".join(output.split())


def test_it_is_readable_on_a_narrow_terminal(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("thunderagent.cli.canary.out", Console(width=40, highlight=False, emoji=False))
    code, output = called()
    assert code == 0
    assert "…" not in output
