"""Options of a stream: what cannot work is refused, and all of it at once."""

from __future__ import annotations

import ssl
from dataclasses import fields
from typing import Any

import pytest

from thunderagent.model.errors import ConfigurationError
from thunderagent.streams.connection.ending import Cause, ConnectionEnd, State
from thunderagent.streams.connection.options import StreamOptions
from thunderagent.streams.connection.verdicts import FATAL, SLOW, Verdict

END = ConnectionEnd(cause=Cause.CLOSED, state=State.LIVE, code=1013)


def test_the_defaults_work() -> None:
    options = StreamOptions()
    assert options.ping_interval_s == 15.0
    assert options.idle_timeout_s is None
    assert options.age_limit_s is None
    assert options.on_full == "pause"


@pytest.mark.parametrize(
    "name",
    [
        one.name
        for one in fields(StreamOptions)
        if (isinstance(one.default, (int, float)) and not isinstance(one.default, bool))
        or one.name in ("ping_interval_s", "idle_timeout_s", "max_connection_age_s")
    ],
)
@pytest.mark.parametrize("value", [0, -1, float("nan")])
def test_a_number_that_is_not_over_zero_is_refused(name: str, value: float) -> None:
    with pytest.raises(ConfigurationError, match=f"{name} is {value!r}; use a (number of seconds|whole number) from"):
        StreamOptions(**dict[str, Any]({name: value}))


def test_all_problems_are_listed_at_once() -> None:
    wrong: dict[str, Any] = {"on_full": "panic", "profile": "nobody", "ping_interval_s": 0, "max_pending": -3}
    wrong["restart"] = "perhaps"
    with pytest.raises(ConfigurationError) as caught:
        StreamOptions(**wrong, backoff_base_s=90.0)
    text = str(caught.value)
    assert text.count("\n  - ") == 6
    for part in (
        "'panic'",
        "'perhaps'",
        "'nobody'",
        "ping_interval_s is 0",
        "max_pending is -3",
        "90, over backoff_cap_s",
    ):
        assert part in text


def test_only_limits_that_may_be_absent_may_be_none() -> None:
    options = StreamOptions(ping_interval_s=None, idle_timeout_s=None, max_connection_age_s=None)
    assert options.ping_interval_s is None


def test_the_age_of_a_connection_is_the_options_or_else_the_profiles() -> None:
    assert StreamOptions(profile="apigateway").age_limit_s == 6300.0
    assert StreamOptions(profile="apigateway", max_connection_age_s=60.0).age_limit_s == 60.0


def test_secrets_of_tls_are_not_shown() -> None:
    assert "SSLContext" not in repr(StreamOptions(ssl=ssl.create_default_context()))


def test_the_users_classify_comes_before_the_profile() -> None:
    assert StreamOptions(classify=lambda end: FATAL).verdict(END) is FATAL
    assert StreamOptions(classify=lambda end: None).verdict(END) is SLOW


def test_a_classify_that_answers_with_something_else_is_an_error() -> None:
    wrong: Any = lambda end: "retry"  # noqa: E731
    with pytest.raises(TypeError, match="classify answered with 'retry'"):
        StreamOptions(classify=wrong).verdict(END)
    assert isinstance(StreamOptions(classify=lambda end: Verdict()).verdict(END), Verdict)
