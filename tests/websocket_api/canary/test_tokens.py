"""The token of a canary: its sources; it is read again for every attempt, and is in no message."""

from __future__ import annotations

import asyncio
import json
import stat
import sys
import threading
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.websocket_api.canary.support import run, until
from thunderagent.model.canary_targets import From, TokenSource
from thunderagent.model.errors import AccessDenied, ConfigurationError
from thunderagent.testing import FakeClock
from thunderagent.websocket_api.canary import tokens
from thunderagent.websocket_api.canary.tokens import LARGEST, Tokens, TokenUnavailable

SECRET = "s3cret-of-the-client"


def get(source: str | None, target: str = "eu-central-1", **options: Any) -> str | None:
    return run(Tokens(source, **options).get(target))


def why(source: str, target: str = "eu-central-1") -> str:
    with pytest.raises(TokenUnavailable) as caught:
        get(source, target)
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("file:///run/canary.jwt", TokenSource(From.FILE, "/run/canary.jwt")),
        ("file:canary.jwt", TokenSource(From.FILE, "canary.jwt")),
        ("file:///run/{target}.jwt", TokenSource(From.FILE, "/run/eu-west-1.jwt")),
        ("env:CANARY_TOKEN", TokenSource(From.VARIABLE, "CANARY_TOKEN")),
        ("command:/opt/canary --for {target}", TokenSource(From.COMMAND, "/opt/canary --for eu-west-1")),
        ("secret:canary?region=eu-west-1", TokenSource(From.SECRET, "canary", "eu-west-1")),
        ("secret:arn:aws:secretsmanager:a:1:secret:b", TokenSource(From.SECRET, "arn:aws:secretsmanager:a:1:secret:b")),
    ],
)
def test_a_source_is_a_word_and_a_place(text: str, expected: TokenSource) -> None:
    assert TokenSource.parse(text, "eu-west-1") == expected


@pytest.mark.parametrize(
    "text", ["", "abc", "eyJhbGciOi.eyJz.sig", "file:", "env:", "env:A B", "http://a/b", "secret:?region=x"]
)
def test_a_text_that_is_no_source_is_refused_and_not_repeated(text: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        Tokens(text)
    assert not text or text.split(":")[0] in ("file", "env", "secret") or text not in str(caught.value)


def test_without_a_source_there_is_no_token() -> None:
    assert get(None) is None


def test_a_file_is_read_for_every_attempt(tmp_path: Path) -> None:
    file = tmp_path / "eu-west-1.jwt"
    file.write_text("first\n")
    kept = Tokens(f"file://{tmp_path}/{{target}}.jwt")
    assert run(kept.get("eu-west-1")) == "first"
    file.write_text("second")
    assert run(kept.get("eu-west-1")) == "second"
    file.unlink()
    with pytest.raises(TokenUnavailable, match="No such file"):
        run(kept.get("eu-west-1"))


def test_a_variable_is_read_for_every_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Tokens("env:CANARY")
    for token in ("one", "two"):
        monkeypatch.setenv("CANARY", token)
        assert run(kept.get("a")) == token


@pytest.mark.parametrize("text", ["", " \n", "two words", "two\nlines", "ümlaut", "a" * (LARGEST + 1), "tab\tbed"])
def test_what_cannot_be_a_token_is_refused_and_not_shown(tmp_path: Path, text: str) -> None:
    file = tmp_path / "token"
    file.write_text(text)
    message = why(f"file://{file}")
    assert "no token from" in message
    assert not text.strip() or text.strip() not in message


@pytest.mark.slow
def test_a_command_prints_it_and_knows_the_target() -> None:
    program = "import os; print(os.environ['THUNDERAGENT_CANARY_TARGET'] + '-token')"
    assert get(f'command:{sys.executable} -c "{program}"') == "eu-central-1-token"


@pytest.mark.slow
def test_a_command_that_fails_is_told_without_its_words_and_its_output(tmp_path: Path) -> None:
    script = tmp_path / "give"
    script.write_text(f"#!/bin/sh\necho {SECRET} >&2\necho {SECRET}\nexit 3\n")
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    message = why(f"command:{script} --password {SECRET}")
    assert message == f"no token from command:{script} …: it ended with exit code 3"
    assert "No such file" in why("command:/does/not/exist")


@pytest.mark.slow
def test_a_command_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "ASK_S", 0.2)
    assert "did not end within 0.2 s" in why("command:sleep 30")


def test_whoever_waits_may_go_and_a_second_attempt_does_not_wait_for_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, may_end = threading.Event(), threading.Event()

    def hanging(source: TokenSource, target: str) -> tuple[str, float]:
        begun.set()
        may_end.wait(20)
        return "late", 0.0

    monkeypatch.setattr(tokens, "_fetch", hanging)
    kept = Tokens("env:ANY")

    async def main() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await kept.get("a")
        assert begun.is_set()
        with pytest.raises(TokenUnavailable, match="has not ended yet"):
            await kept.get("a")
        may_end.set()
        await until(lambda: not kept._under_way)
        assert await kept.get("a") == "late"

    run(main())


class _Server(ThreadingHTTPServer):
    """Gives tokens as an identity provider does."""

    daemon_threads = True

    def __init__(self) -> None:
        self.asked: list[dict[str, list[str]]] = []
        self.status = 200
        self.answer: Any = {"access_token": "token-1", "expires_in": 3600}
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}/oauth2/token"


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        self.server.asked.append(urllib.parse.parse_qs(body))
        self.send_response(self.server.status)
        if self.server.status == 302:
            self.send_header("Location", "http://127.0.0.1:9/elsewhere")
        self.end_headers()
        self.wfile.write(json.dumps(self.server.answer).encode())

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def a_server() -> Iterator[_Server]:
    server = _Server()
    thread = threading.Thread(target=lambda: server.serve_forever(poll_interval=0.01), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)


def keep(monkeypatch: pytest.MonkeyPatch, secret: Any) -> None:
    """Let Secrets Manager have this."""
    text = secret if isinstance(secret, str) else json.dumps(secret)
    monkeypatch.setattr("thunderagent.websocket_api.canary.tokens.secret_text", lambda name, region: text)


def test_a_secret_is_a_token_or_an_object_with_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for secret in ("plain-token\n", {"token": "plain-token"}):
        keep(monkeypatch, secret)
        assert get("secret:canary") == "plain-token"


@pytest.mark.slow
def test_a_secret_of_client_credentials_is_exchanged_and_the_token_used_until_it_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = FakeClock()
    with a_server() as server:
        more = {"token_url": server.url, "client_id": "canary", "client_secret": SECRET, "scope": "ws/use"}
        keep(monkeypatch, more)
        kept = Tokens("secret:canary", monotonic=clock.monotonic)
        assert run(kept.get("a")) == "token-1"
        assert server.asked == [
            {
                "grant_type": ["client_credentials"],
                "client_id": ["canary"],
                "client_secret": [SECRET],
                "scope": ["ws/use"],
            }
        ]
        server.answer = {"access_token": "token-2", "expires_in": 3600}
        clock.advance(3500)
        assert run(kept.get("a")) == "token-1"
        clock.advance(50)
        assert run(kept.get("a")) == "token-2"  # a minute before its end
        server.answer = {"access_token": "token-3", "expires_in": 30}
        kept.drop("a")  # it was refused
        assert run(kept.get("a")) == "token-3"
        server.answer = {"access_token": "token-4"}
        assert run(kept.get("a")) == "token-4"  # the third was too short to be kept


@pytest.mark.slow
@pytest.mark.parametrize(
    ("status", "answer", "reason"),
    [
        (401, {"error": "invalid_client"}, "127.0.0.1 answered 401"),
        (302, {}, "127.0.0.1 answered 302"),
        (200, {"error": SECRET}, "has no access_token"),
        (200, [SECRET], "has no access_token"),
        (200, {"access_token": "two words"}, "is no token"),
    ],
)
def test_a_server_that_gives_none_is_told_without_the_secret(
    monkeypatch: pytest.MonkeyPatch, status: int, answer: Any, reason: str
) -> None:
    with a_server() as server:
        server.status, server.answer = status, answer
        keep(monkeypatch, {"token_url": server.url, "client_id": "canary", "client_secret": SECRET})
        message = why("secret:canary")
    assert reason in message
    assert SECRET not in message


@pytest.mark.parametrize(
    ("secret", "reason"),
    [
        ({}, "neither token nor token_url, client_id, client_secret"),
        ({"token_url": "http://example.com/", "client_id": "a", "client_secret": SECRET}, "must begin with https://"),
        ("{not json " + SECRET, "cannot be read"),
    ],
)
def test_a_secret_of_another_form_is_told_without_its_text(
    monkeypatch: pytest.MonkeyPatch, secret: Any, reason: str
) -> None:
    keep(monkeypatch, secret)
    message = why("secret:canary")
    assert reason in message
    assert SECRET not in message


def test_what_aws_says_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(name: str, region: str | None) -> str:
        raise AccessDenied("not allowed: secretsmanager:GetSecretValue")

    monkeypatch.setattr("thunderagent.websocket_api.canary.tokens.secret_text", denied)
    with pytest.raises(AccessDenied):
        get("secret:canary")
