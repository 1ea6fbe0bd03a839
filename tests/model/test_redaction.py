"""No secret of a known shape is shown, and ordinary lines stay as they are."""

from __future__ import annotations

import io
import json
import time
import timeit
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from loguru import logger

from tests.telemetry.test_logs import ABOUT, ALL, a_sample
from thunderagent.model import events, fleet_events
from thunderagent.model.bus import Event, EventBus
from thunderagent.model.redaction import HIDDEN, SECRET_NAMES, Redactor
from thunderagent.telemetry.logs import Telemetry, configure_logging

REDACTOR = Redactor()
SECRET = "s3cr" + "et"
KEY_ID = "AKIA" + "IOSFODNN7EXAMPLE"

NAMES = st.sampled_from(SECRET_NAMES).flatmap(
    lambda name: st.sampled_from((name, name.upper(), name.title(), f"db_{name}", f"{name}_2", f"AWS_{name}_KEY"))
)
SECRETS = st.text(
    st.characters(min_codepoint=33, max_codepoint=0x17F, exclude_characters="&\"'\\\x85\xa0"), min_size=1
).map(lambda text: f"s3cr{text}s3cr")
"""What cannot be told from what follows it (a space, an ampersand, a quote) is tried in quotes."""
QUOTED = st.text(st.characters(min_codepoint=32, max_codepoint=0x17F), min_size=1).map(lambda text: f"s3cr{text}s3cr")
WORDS = st.text(st.characters(categories=("L", "N"), include_characters=" .,-_/()#"))


@given(WORDS, NAMES, st.sampled_from(("=", ": ", " = ", ":")), SECRETS, WORDS)
def test_what_is_assigned_to_a_secret_name_is_hidden(
    before: str, name: str, mark: str, secret: str, after: str
) -> None:
    shown = REDACTOR.text(f"{before} {name}{mark}{secret} {after}")
    assert "s3cr" not in shown
    assert HIDDEN in shown


@given(NAMES, QUOTED)
@example("password", 's3cr"a\\"s3cr')
@example("password", "s3cr\\")
def test_secrets_in_json_and_in_the_text_of_an_object_are_hidden(name: str, secret: str) -> None:
    whole = {"user": "joe", name: secret, "last": 1}
    for text in (json.dumps(whole), json.dumps(json.dumps(whole)), json.dumps(whole, separators=(",", ":"))):
        assert "s3cr" not in REDACTOR.text(f"bad input: {text} at line 3")
    if "'" not in secret or '"' not in secret:
        assert "s3cr" not in REDACTOR.text(f"bad input: {whole!r}")


@given(st.text("abcABC019:@%_-.", min_size=1), st.sampled_from(("https", "postgres", "redis", "amqp")))
def test_credentials_in_a_url_are_hidden(user: str, scheme: str) -> None:
    shown = REDACTOR.text(f"cannot connect to {scheme}://s3cr{user}@db.example.org:5432/orders?x=1 now")
    assert shown == f"cannot connect to {scheme}://***@db.example.org:5432/orders?x=1 now"


@given(
    st.text("abcABC019._~+/=-", min_size=1),
    st.sampled_from(("Bearer ", "bearer ", "BEARER ")),
    st.sampled_from(("", "Authorization: ", "'Authorization': '", "authorization=", "got ")),
)
def test_bearer_tokens_are_hidden(token: str, scheme: str, before: str) -> None:
    assert "s3cr" not in REDACTOR.text(f"{before}{scheme}s3cr{token}' and more")


@given(st.text("ABCDEFGHIJKLMNOPQRSTUVWXYZ234567", min_size=16, max_size=16), st.sampled_from(("AKIA", "ASIA")))
def test_ids_of_aws_keys_are_hidden(rest: str, kind: str) -> None:
    assert REDACTOR.text(f"the key ({kind}{rest}) is not valid") == "the key (***) is not valid"


def test_a_presigned_url_loses_what_opens_it() -> None:
    url = (
        f"https://b.s3.amazonaws.com/k?X-Amz-Algorithm=AWS4&X-Amz-Credential={KEY_ID}%2F2026&X-Amz-Expires=60"
        "&X-Amz-Security-Token=s3cr%2Ft&X-Amz-Signature=s3crt99"
    )
    assert REDACTOR.text(f"GET {url} failed") == (
        "GET https://b.s3.amazonaws.com/k?X-Amz-Algorithm=AWS4&X-Amz-Credential=***&X-Amz-Expires=60"
        "&X-Amz-Security-Token=***&X-Amz-Signature=*** failed"
    )


@pytest.mark.parametrize(
    "text",
    [
        "Authorization: AWS4-HMAC-SHA256 Credential=s3cr/x, SignedHeaders=host, Signature=s3cr",
        "authorization:Basic s3cr==",
        r"{\"Authorization\": \"Basic s3cr\"}",
        "Set-Cookie: session=s3cr; Path=/; HttpOnly",
        "headers['token'] = 's3cr'",
        "password=(s3cr)s3cr",
        "secrets=['s3cr', 's3cr']",
        'password="s3cr that was cut of s3cr',
        "token=b's3cr'",
        "login password=s3cr,s3cr;s3cr failed",
    ],
)
def test_secrets_in_other_clothes_are_hidden(text: str) -> None:
    assert "s3cr" not in REDACTOR.text(text)


@given(WORDS)
@example("the lease of task 0197c0de-1234-7abc is lost: 12:30:01, x=3")
@example("https://example.org/@user?page=2")
@example("joe@example.org: no such user")
@example("a bearer of news")
@example("MAKIA" + "IOSFODNN7EXAMPLEX")
def test_ordinary_texts_stay_as_they_are(text: str) -> None:
    text = text.replace("earer ", "earers ")
    low = text.lower()
    if not any(name in low for name in SECRET_NAMES):
        assert REDACTOR.text(text) == text


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("db_password", "s3cr", HIDDEN),
        ("API_KEY", 123, HIDDEN),
        ("api-key", "s3cr", HIDDEN),
        ("tokens", ["s3cr"], HIDDEN),
        ("password", None, None),
        ("iban", "DE99", HIDDEN),
        ("Card_Number", "4111", HIDDEN),
        ("port", 5432, 5432),
        ("ratio", 0.5, 0.5),
        ("is_live", True, True),
        ("names", ("a", "token=s3cr"), ("a", f"token={HIDDEN}")),
        ("rows", ["a"], ["a"]),
        ("data", {"user": "joe", "login": {"password": "s3cr"}}, {"user": "joe", "login": {"password": HIDDEN}}),
        ("error", ValueError("secret=s3cr"), f"secret={HIDDEN}"),
    ],
)
def test_the_value_of_a_fact_is_hidden_by_its_name_or_by_its_shape(name: str, value: Any, shown: Any) -> None:
    assert Redactor("iban, card_number").value(name, value) == shown


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.__name__)
def test_no_fact_of_an_event_of_ours_is_hidden_by_its_name(kind: type[Event]) -> None:
    event = a_sample(kind)
    assert [name for name in dir(event) if not name.startswith("_") and REDACTOR.hides(name)] == []


@pytest.fixture(params=[False, True], ids=["text", "json"])
def lines(request: pytest.FixtureRequest) -> Iterator[io.StringIO]:
    stream = io.StringIO()
    configure_logging("DEBUG", as_json=request.param, stream=stream, redact="iban")
    yield stream
    logger.remove()


def test_our_lines_and_those_of_handlers_show_no_secret(lines: io.StringIO) -> None:
    bus = EventBus()
    Telemetry(bus)
    bus.emit(events.TaskFailed(**ABOUT, error="ValueError: postgres://joe:s3cr@db/x"))
    bus.emit(events.StoreFailed(during="polling", error="token: s3cr", next_try_s=1.0))
    bus.emit(fleet_events.HookFailed(hook="jobs.x", error="KeyError: 'password=s3cr'"))
    logger.bind(iban="s3cr", config={"secret": "s3cr"}).info("signing in with password={}", "s3cr")
    logger.info("Bearer s3cr")
    assert len(lines.getvalue().splitlines()) == 5
    assert "s3cr" not in lines.getvalue()
    assert lines.getvalue().count(HIDDEN) == 7


def test_the_text_of_an_exception_shows_no_secret_and_the_rest_of_it(lines: io.StringIO) -> None:
    try:
        try:
            raise ValueError(f"GET https://x.org/?token={SECRET}")
        except ValueError as error:
            raise RuntimeError(f"signing in failed: {error}") from error
    except RuntimeError:
        logger.exception("caught")
    assert "s3cr" not in lines.getvalue()
    assert "RuntimeError" in lines.getvalue()
    assert "https://x.org/?token=***" in lines.getvalue()


def test_the_text_of_an_object_that_json_cannot_hold_shows_no_secret(lines: io.StringIO) -> None:
    logger.bind(client=type("Client", (), {"__repr__": lambda self: "Client(password=s3cr)"})()).info("made")
    assert "s3cr" not in lines.getvalue()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("unit", "end"),
    [("password=", ""), ("token", "="), ("://a", "@"), ('"token":"', ""), ("cookie", ":"), ("a.b-", "@://")],
)
def test_no_text_takes_longer_than_its_length(unit: str, end: str) -> None:
    def seconds(number: int) -> float:
        text = unit * number + end
        return min(timeit.repeat(lambda: REDACTOR.text(text), timer=time.thread_time, number=1, repeat=3))

    assert seconds(20_000) < 40 * seconds(2_500) + 0.05


def test_a_usual_line_costs_microseconds() -> None:
    facts = {**ABOUT, "task_id": "0197c0de-1234-7abc-8def-0123456789ab", "seconds": 1.25}

    def show() -> None:
        for name, value in facts.items():
            REDACTOR.value(name, value)
        REDACTOR.text("task succeeded")

    assert min(timeit.repeat(show, timer=time.thread_time, number=1000, repeat=5)) / 1000 < 20e-6, (
        "measured: 2 µs on a quiet machine"
    )
