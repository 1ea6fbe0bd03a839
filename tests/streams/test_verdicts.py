"""What an end means: as a value, by the table of each profile."""

from __future__ import annotations

import asyncio
import ssl
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest
from websockets.datastructures import Headers
from websockets.exceptions import (
    ConnectionClosedError,
    ConnectionClosedOK,
    InvalidHandshake,
    InvalidMessage,
    InvalidProxy,
    InvalidStatus,
    InvalidURI,
    PayloadTooBig,
    SecurityError,
)
from websockets.frames import Close
from websockets.http11 import Response

from thunderagent.model.errors import ConfigurationError
from thunderagent.streams.connection.ending import Cause, ConnectionEnd, State, end_of
from thunderagent.streams.connection.verdicts import (
    PROFILES,
    REFUSED_S,
    UNKNOWN_S,
    Pace,
    Verdict,
    profile_named,
    verdict_of,
)

NOW = 1_700_000_000.0


def closed(code: int) -> ConnectionEnd:
    return ConnectionEnd(cause=Cause.CLOSED, state=State.LIVE, code=code)


def refused(status: int) -> ConnectionEnd:
    return ConnectionEnd(cause=Cause.HTTP, state=State.CONNECTING, status=status)


def said(end: ConnectionEnd, profile: str = "generic") -> tuple[str, bool, int | None]:
    verdict = verdict_of(end, profile_named(profile))
    return verdict.pace.value, verdict.refresh, verdict.fatal_after


@pytest.mark.parametrize(
    ("codes", "expected"),
    [
        ((1000, 1001, 1005, 1006, 1011, 1014), ("retry", False, None)),
        ((1002, 1003, 1007, 1010), ("retry", False, 3)),
        ((1008,), ("retry", True, 3)),
        ((1009,), ("retry", False, 2)),
        ((1012,), ("spread", False, None)),
        ((1013,), ("slow", False, None)),
        ((1015, 3000, 4000, 4999), ("retry", False, 10)),
    ],
)
def test_the_generic_table_of_close_codes(codes: tuple[int, ...], expected: tuple[str, bool, int | None]) -> None:
    assert {said(closed(code)) for code in codes} == {expected}


@pytest.mark.parametrize(
    ("statuses", "expected"),
    [
        ((401, 403), ("retry", True, 3)),
        ((429, 503), ("slow", False, None)),
        ((408, 425, 500, 502, 504, 520, 599), ("retry", False, None)),
        ((200, 301, 307, 400, 404, 405, 410, 426), ("retry", False, 3)),
    ],
)
def test_the_generic_table_of_statuses(statuses: tuple[int, ...], expected: tuple[str, bool, int | None]) -> None:
    for profile in PROFILES:
        assert {said(refused(status), profile) for status in statuses} == {expected}


@pytest.mark.parametrize("cause", Cause)
def test_every_cause_has_a_verdict_in_every_profile(cause: Cause) -> None:
    for profile in PROFILES:
        said(ConnectionEnd(cause=cause, state=State.LIVE), profile)


@pytest.mark.parametrize(
    ("cause", "expected"),
    [
        (Cause.NETWORK, ("retry", False, None)),
        (Cause.ZOMBIE, ("retry", False, None)),
        (Cause.IDLE, ("retry", False, None)),
        (Cause.ROTATED, ("at once", False, None)),
        (Cause.ASKED, ("at once", False, None)),
        (Cause.TLS, ("retry", False, 3)),
        (Cause.PROTOCOL, ("retry", False, 3)),
        (Cause.TOO_BIG, ("retry", False, 2)),
        (Cause.ENDPOINT, ("retry", False, 10)),
        (Cause.SUBSCRIBE, ("retry", False, 10)),
        (Cause.CONFIGURATION, ("retry", False, 1)),
        (Cause.INTERNAL, ("retry", False, 10)),
    ],
)
def test_the_generic_table_of_causes(cause: Cause, expected: tuple[str, bool, int | None]) -> None:
    assert said(ConnectionEnd(cause=cause, state=State.LIVE)) == expected


@pytest.mark.parametrize(
    ("profile", "code", "expected"),
    [
        ("pusher", 4000, ("retry", False, 1)),
        ("pusher", 4099, ("retry", False, 1)),
        ("pusher", 4100, ("slow", False, None)),
        ("pusher", 4200, ("retry", False, None)),
        ("pusher", 4300, ("retry", False, 10)),
        ("centrifugo", 3500, ("retry", False, 1)),
        ("centrifugo", 3999, ("retry", False, 1)),
        ("centrifugo", 4500, ("retry", False, 1)),
        ("centrifugo", 3014, ("retry", True, 3)),
        ("centrifugo", 3001, ("retry", False, 10)),
        ("discord", 4004, ("retry", True, 3)),
        ("discord", 4010, ("retry", False, 1)),
        ("discord", 4014, ("retry", False, 1)),
        ("discord", 4009, ("retry", False, None)),
        ("discord", 4008, ("slow", False, None)),
        ("graphql_ws", 4400, ("retry", False, 3)),
        ("graphql_ws", 4403, ("retry", True, 3)),
        ("apigateway", 1001, ("retry", False, None)),
        ("apigateway", 1012, ("spread", False, None)),
    ],
)
def test_the_tables_of_profiles(profile: str, code: int, expected: tuple[str, bool, int | None]) -> None:
    assert said(closed(code), profile) == expected


@pytest.mark.parametrize("profile", PROFILES)
def test_more_than_one_refusal_is_fatal_only_after_minutes(profile: str) -> None:
    ends = [closed(code) for code in (*range(1000, 1016), *range(3000, 5000))] + [refused(code) for code in (401, 404)]
    verdicts = [verdict_of(end, profile_named(profile)) for end in ends]
    spans = {(verdict.fatal_after, verdict.fatal_after_s) for verdict in verdicts if verdict.fatal_after is not None}
    assert {(number, span) for number, span in spans if number > 1} <= {
        (2, REFUSED_S),
        (3, REFUSED_S),
        (10, UNKNOWN_S),
    }
    assert not any(verdict.is_fatal(10, 84.0) for verdict in verdicts if verdict.fatal_after != 1)


def test_fatal_takes_a_number_and_a_time() -> None:
    verdict = Verdict(fatal_after=3)
    assert [verdict.is_fatal(*at) for at in ((2, 1e6), (3, REFUSED_S - 1.0), (3, REFUSED_S))] == [False, False, True]
    assert Verdict(fatal_after=1).is_fatal(1, 0.0), "one is at once"
    assert Verdict(fatal_after=3, fatal_after_s=0.0).is_fatal(3, 0.0)
    assert not Verdict().is_fatal(10**6, 1e9)


def test_a_profile_that_does_not_exist_is_told_with_those_that_do() -> None:
    with pytest.raises(ConfigurationError, match="no profile 'slack'; known are: generic, apigateway, pusher"):
        profile_named("slack")


def answer(status: int, **headers: str) -> InvalidStatus:
    return InvalidStatus(Response(status, "", Headers(headers)))


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("120", 120.0),
        ("0.5", 0.5),
        ("-3", 0.0),
        (format_datetime(datetime.fromtimestamp(NOW, UTC) + timedelta(seconds=90), usegmt=True), 90.0),
        (format_datetime(datetime.fromtimestamp(NOW, UTC) - timedelta(seconds=90), usegmt=True), 0.0),
        ("soon", None),
        ("", None),
        ("nan", None),
        ("inf", None),
    ],
)
def test_retry_after_is_a_number_or_a_date(value: str, expected: float | None) -> None:
    end = end_of(answer(503, **{"Retry-After": value}), State.CONNECTING, now=NOW)
    assert (end.cause, end.status, end.retry_after_s) == (Cause.HTTP, 503, expected)


def test_without_retry_after_there_is_none() -> None:
    assert end_of(answer(429), State.CONNECTING, now=NOW).retry_after_s is None


def chained(error: BaseException, cause: BaseException) -> BaseException:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ConnectionClosedOK(Close(1000, ""), Close(1000, ""), True), "closed 1000"),
        (ConnectionClosedError(Close(1012, "restart"), Close(1012, ""), True), "closed 1012"),
        (ConnectionClosedError(None, None), "closed 1006"),
        (ConnectionClosedError(None, Close(1009, "too big")), "message_too_big 1009"),
        (ConnectionClosedError(None, Close(1002, "reserved bits")), "protocol 1002"),
        (ConnectionClosedError(None, Close(1007, "no UTF-8")), "protocol 1007"),
        (ConnectionClosedError(Close(1009, ""), Close(1009, ""), True), "closed 1009"),
        (PayloadTooBig(11, 10), "message_too_big 1009"),
        (answer(404), "http 404"),
        (InvalidURI("x", "y"), "configuration"),
        (InvalidProxy("x", "y"), "configuration"),
        (ConfigurationError("x"), "configuration"),
        (SecurityError("x"), "protocol"),
        (ssl.SSLCertVerificationError("x"), "tls_verify"),
        (ssl.SSLError("x"), "network"),
        (InvalidHandshake("x"), "protocol"),
        (chained(InvalidMessage("x"), EOFError()), "network"),
        (chained(InvalidMessage("x"), ValueError()), "protocol"),
        (ConnectionRefusedError("x"), "network"),
        (TimeoutError("x"), "network"),
        (EOFError("x"), "network"),
    ],
)
def test_what_an_exception_means(error: BaseException, kind: str) -> None:
    assert end_of(error, State.CONNECTING, now=NOW).kind == kind


@pytest.mark.parametrize(
    "error",
    [
        ValueError("x"),
        SystemExit(1),
        asyncio.CancelledError(),
        TimeoutError("of a token service"),
        FileNotFoundError("token.txt"),
        ConnectionRefusedError("of another host"),
        answer(404),
        InvalidHandshake("of another host"),
        ssl.SSLCertVerificationError("of another host"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_user_code_raises_is_named_by_where_it_was(error: BaseException) -> None:
    causes = {state: end_of(error, state, now=NOW).cause for state in (State.RESOLVING, State.SUBSCRIBING, State.LIVE)}
    assert list(causes.values()) == [Cause.ENDPOINT, Cause.SUBSCRIBE, Cause.INTERNAL]


def test_a_connection_of_user_code_that_has_closed_is_not_ours() -> None:
    error = ConnectionClosedError(Close(1008, "no"), None)
    assert end_of(error, State.RESOLVING, now=NOW).cause is Cause.ENDPOINT
    assert end_of(error, State.SUBSCRIBING, now=NOW, is_open=True).cause is Cause.SUBSCRIBE
    assert end_of(error, State.SUBSCRIBING, now=NOW).kind == "closed 1008"


@pytest.mark.parametrize("state", [State.RESOLVING, State.CONNECTING, State.SUBSCRIBING])
def test_a_url_is_shown_nowhere(state: State) -> None:
    end = end_of(InvalidURI("wss://peer?token=secret", "no"), state, now=NOW)
    assert (end.cause, end.detail) == (Cause.CONFIGURATION, "the endpoint is no valid URL")


def test_a_text_that_cannot_be_made_hides_no_end() -> None:
    class Nasty(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    assert end_of(Nasty(), State.RESOLVING, now=NOW).detail == "Nasty"
    assert len(end_of(ValueError("x" * 5000), State.RESOLVING, now=NOW).detail) == 300


def test_an_end_reads_well() -> None:
    assert str(ConnectionEnd(cause=Cause.CLOSED, state=State.LIVE, code=1001, detail="bye")) == "closed 1001 (bye)"
    assert str(ConnectionEnd(cause=Cause.IDLE, state=State.LIVE)) == "idle"
    assert Verdict().pace is Pace.RETRY
