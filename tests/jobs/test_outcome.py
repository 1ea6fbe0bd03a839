"""The outcome of an exception says what happened and where, and no secrets."""

from __future__ import annotations

from pydantic import BaseModel

from tests.support.engine import a_lease
from thunderagent.agent.executors.threads import run_handler
from thunderagent.jobs.context import Context
from thunderagent.jobs.job import job
from thunderagent.jobs.outcome import Raised, raised


class BadMonth(ValueError):
    """What the job of these tests says is fatal."""


def caught(error: BaseException) -> Raised:
    try:
        raise error
    except BaseException as problem:
        return raised(problem, (BadMonth,))


def test_an_error_names_its_type_its_message_and_where_it_happened() -> None:
    outcome = caught(ValueError("no such month"))
    first, *places = outcome.error.splitlines()
    assert first == "ValueError: no such month"
    assert len(places) == 1
    assert "jobs/test_outcome.py:" in places[0]
    assert places[0].endswith(" in caught")
    assert not outcome.fatal


def test_an_exception_is_fatal_with_its_subclasses() -> None:
    assert caught(BadMonth("x")).fatal
    assert not caught(KeyError("x")).fatal


def test_an_error_is_short_whatever_it_says() -> None:
    assert len(caught(ValueError("ü" * 5000)).error.encode()) < 1024


def test_an_exception_that_cannot_say_what_it_is_still_becomes_an_error() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    assert caught(Mute()).error.startswith("Mute: ")
    assert caught(ValueError("name \udcff")).error.startswith("ValueError: name ")


def test_secrets_of_a_payload_are_not_in_the_message_of_an_error() -> None:
    class Payload(BaseModel):
        token: int
        mode: int

    def handler(ctx: Context, payload: Payload) -> None: ...

    handler.__annotations__["payload"] = Payload
    one = job("test.secret")(handler)
    outcome = run_handler(one, Context(a_lease(payload_text='{"token": "hunter2-secret", "mode": "also-secret"}')))
    assert isinstance(outcome, Raised)
    assert outcome.fatal
    assert "token: Input should be a valid integer" in outcome.error
    assert "mode: " in outcome.error
    assert "secret" not in outcome.error.replace("test.secret", "")
    outcome = run_handler(one, Context(a_lease(payload_text="hunter2 is no JSON")))
    assert isinstance(outcome, Raised)
    assert "hunter2" not in outcome.error
