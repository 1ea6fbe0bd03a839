"""The public API against values that nobody should pass: an error of ours names the value, or it means what it says."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any, Final

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from moto import mock_aws

from thunderagent import Backoff, Cancel, Client, Fail, Snooze, StreamOptions, every, job, periodic, stream
from thunderagent.model.errors import ThunderAgentError
from thunderagent.model.task import Status, Task
from thunderagent.settings import Settings
from thunderagent.stores.dynamo.engine import DynamoEngine
from thunderagent.stores.dynamo.table import create_table
from thunderagent.stores.sqlite.engine import MEMORY, SqliteEngine
from thunderagent.stores.tasks import TaskStore

HOSTILE: Final = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**40), 10**40),
    st.floats(),
    st.text(max_size=20),
    st.binary(max_size=8),
    st.lists(st.integers(), max_size=2),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
    st.sets(st.integers(), max_size=2),
    st.builds(object),
    st.sampled_from(
        ["", " ", "5", "a b", "x" * 600, "\ud800", "\x00", 10**30, 1e200, -1e200, math.nan, math.inf, -math.inf]
    ),
)
FEW: Final = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(params=["sqlite", "dynamodb"], scope="module")
def client(request: pytest.FixtureRequest) -> Iterator[Client]:
    """A client of each engine."""
    if request.param == "sqlite":
        yield Client(TaskStore(SqliteEngine(MEMORY)), Settings())
        return
    with mock_aws():
        engine = DynamoEngine("Arguments", region="us-east-1")
        create_table(engine)
        yield Client(TaskStore(engine), Settings())


def is_seconds(value: object, least: float, most: float) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and least <= value <= most


def is_whole(value: object, least: int, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


TEN_YEARS: Final = 315_360_000.0
OPTIONS: Final[dict[str, Callable[[Any], bool]]] = {
    "task_id": lambda value: value is None or isinstance(value, str),
    "delay_s": lambda value: is_seconds(value, -TEN_YEARS, TEN_YEARS),
    "run_at": lambda value: value is None or is_seconds(value, 0, 10**10),
    "max_retry": lambda value: value is None or is_whole(value, 0, 1_000_000),
    "queue": lambda value: value is None or isinstance(value, str),
    "depends_on": lambda value: isinstance(value, (list, set)) and not value,
    "on_parent_failure": lambda value: value in ("fail", "cancel", "run"),
    "unique_key": lambda value: value is None or isinstance(value, str),
    "unique_scope": lambda value: value == "until_done",
    "limit": lambda value: value is None or is_whole(value, 1, 1000),
    "limit_key": lambda value: value is None,
}
"""Options of an enqueue: which values may be accepted at all."""


@pytest.mark.parametrize("name", sorted(OPTIONS))
@FEW
@given(value=HOSTILE)
@example(value="")
@example(value=5)
@example(value="5")
@example(value=2.5)
@example(value=True)
@example(value=10**30)
@example(value=math.nan)
def test_an_option_of_an_enqueue_is_what_it_says_or_an_error_names_it(client: Client, name: str, value: Any) -> None:
    try:
        task = client.enqueue("test.any", {}, **{name: value})
    except ThunderAgentError as error:
        assert any(part in str(error) for part in (name, repr(value)[:20], "is no task", "queue"))
        return
    assert OPTIONS[name](value)
    kept = client.get(task)
    match name:
        case "task_id":
            assert value is None or kept.id == value
        case "queue":
            assert kept.queue == (value or "default")
        case "max_retry" | "unique_key":
            assert getattr(kept, name) == value
        case "limit":
            assert kept.limit_max == value
        case "run_at" if value is not None:
            assert kept.created_at == pytest.approx(value, abs=0.002)


CALLS: Final[dict[str, Callable[[Client, Any], object]]] = {
    "job": lambda client, value: client.enqueue(value, {}),
    "payloads": lambda client, value: client.enqueue_many("test.any", value),
    "task_ids": lambda client, value: client.enqueue_many("test.any", [{}], task_ids=value),
    "one of task_ids": lambda client, value: client.enqueue_many("test.any", [{}], task_ids=[value])[0].error,
    "on_progress": lambda client, value: client.enqueue_many("test.any", [{}], on_progress=value),
    "depends_on": lambda client, value: client.enqueue("test.any", {}, depends_on=[value]),
    "get": lambda client, value: client.get(value),
    "cancel": lambda client, value: client.cancel(value),
    "retry": lambda client, value: client.retry(value),
    "stop": lambda client, value: client.streams.stop(value),
    "start": lambda client, value: client.streams.start(value, timeout_s=0.0),
    "start, timeout_s": lambda client, value: client.streams.start("missing", timeout_s=value),
    "runs": lambda client, value: client.streams.runs(value),
    "runs, number": lambda client, value: client.streams.runs("missing", number=value),
    "wait": lambda client, value: client.wait(value, timeout_s=0.0),
    "wait, timeout_s": lambda client, value: client.wait("missing", timeout_s=value),
    "list, status": lambda client, value: list(client.list(status=value, limit=1)),
    "list, queue": lambda client, value: list(client.list(queue=value, limit=1)),
    "list, limit": lambda client, value: list(client.list(status=Status.FAILED, limit=value)),
    "purge, status": lambda client, value: client.purge(value, queue="none"),
    "purge, older_than_s": lambda client, value: client.purge("FAILED", queue="none", older_than_s=value),
    "purge, limit": lambda client, value: client.purge("FAILED", queue="none", limit=value),
    "pause, queue": lambda client, value: client.pauses.resume(queue=value),
    "pause, job": lambda client, value: client.pauses.resume(job=value),
    "pause, agent": lambda client, value: client.pauses.resume(agent=value),
    "pause, for_s": lambda client, value: client.pauses.pause(queue="one", for_s=value),
    "pause, reason": lambda client, value: client.pauses.pause(queue="one", reason=value),
    "drain": lambda client, value: client.agents.drain(value),
    "drain, reason": lambda client, value: client.agents.drain("none", reason=value),
    "wait_gone": lambda client, value: client.agents.wait_gone(value, timeout_s=0.0),
    "wait_gone, one": lambda client, value: client.agents.wait_gone([value], timeout_s=0.0),
    "wait_gone, timeout_s": lambda client, value: client.agents.wait_gone(["none"], timeout_s=value),
    "schedule": lambda client, value: client.schedules.get(value),
    "next_ticks": lambda client, value: client.schedules.next_ticks("none", number=value),
    "run_now": lambda client, value: client.schedules.run_now(value),
    "pause_schedule": lambda client, value: client.schedules.pause("none", for_s=value),
}


@pytest.mark.parametrize("name", sorted(CALLS))
@FEW
@given(value=HOSTILE)
@example(value=5)
@example(value="")
@example(value=-1)
@example(value=math.nan)
def test_no_call_of_the_client_raises_a_bare_error(client: Client, name: str, value: Any) -> None:
    try:
        answer = CALLS[name](client, value)
    except ThunderAgentError:
        return
    if name == "one of task_ids" and not isinstance(value, str):
        assert isinstance(answer, ThunderAgentError), "a task without an id that its caller could find again"


def handler(ctx: Any, payload: dict[str, Any]) -> None:
    """A handler."""


async def coroutine(ctx: Any, payload: dict[str, Any]) -> None:
    """The handler of a stream."""


def a_job(name: str, value: Any) -> object:
    return job(**dict[str, Any]({"name": "a.job", name: value}))(handler)


def a_stream(name: str, value: Any) -> object:
    return stream(**dict[str, Any]({"name": "a.stream", name: value}))(coroutine)


def a_periodic(name: str, value: Any) -> object:
    decorate: Callable[[Any], object] = periodic(every(1).minutes, **dict[str, Any]({name: value}))
    return decorate(job("a.periodic")(handler))


def options(name: str, value: Any) -> object:
    return StreamOptions(**dict[str, Any]({name: value}))


JOB_OPTIONS: Final = (
    *("name", "queue", "max_retry", "timeout_s", "fatal", "isolation", "lease_s", "heartbeat_s"),
    *("backoff", "limit", "limit_key", "version", "upcasters"),
)
STREAM_OPTIONS: Final = ("name", "queue", "max_retry", "fatal", "lease_s", "heartbeat_s", "backoff", "exclusive")
MAKES: Final[dict[str, Callable[[Any], object]]] = {
    "Snooze": Snooze,
    "Cancel": Cancel,
    "Fail": Fail,
    **{f"@job {name}": partial(a_job, name) for name in JOB_OPTIONS},
    **{f"@stream {name}": partial(a_stream, name) for name in STREAM_OPTIONS},
    **{f"@periodic {name}": partial(a_periodic, name) for name in ("catch_up", "overlap", "jitter_s", "payload")},
    "@periodic spec": lambda value: periodic(value)(job("a.periodic")(handler)),
    "every": lambda value: every(value).minutes,
    "every.at": lambda value: every(1).days.at(value),
    "Backoff base_s": lambda value: Backoff(base_s=value),
    "Backoff cap_s": lambda value: Backoff(cap_s=value),
    **{
        f"StreamOptions {name}": partial(options, name)
        for name in StreamOptions.__dataclass_fields__
        if name not in ("ssl", "classify")
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(MAKES))
@FEW
@given(value=HOSTILE)
@example(value=math.nan)
@example(value="5")
@example(value=True)
def test_nothing_that_an_author_writes_raises_a_bare_error(name: str, value: Any) -> None:
    try:
        MAKES[name](value)
    except ThunderAgentError:
        return
    if name.endswith("_s"):
        assert value is None or (is_seconds(value, -math.inf, math.inf) and math.isfinite(value)), "NaN is no time"


@pytest.mark.parametrize(
    ("payloads", "task_ids"), [([{}], ["a", "b"]), ([{}, {}], ["a"])], ids=["more ids", "more payloads"]
)
def test_ids_and_payloads_that_do_not_pair_are_told(
    client: Client, payloads: list[dict[str, Any]], task_ids: list[str]
) -> None:
    with pytest.raises(ThunderAgentError, match="has only 1 members: give one id for each payload"):
        client.enqueue_many("test.pairs", payloads, task_ids=task_ids)


def test_one_task_may_stand_where_several_can(client: Client) -> None:
    parent = client.enqueue("test.any", {})
    child: Task = client.enqueue("test.any", {}, **dict[str, Any](depends_on=parent))
    assert child.depends_on == (parent.id,)


ENDLESS: Final = 10**5000
"""A number of which Python makes no text, as of some objects."""


@pytest.mark.parametrize("name", sorted({*OPTIONS, *CALLS, *MAKES} - {"one of task_ids"}))
def test_a_value_without_a_text_raises_no_bare_error_either(client: Client, name: str) -> None:
    with suppress(ThunderAgentError):
        if name in OPTIONS:
            client.enqueue("test.any", {}, **dict[str, Any]({name: ENDLESS}))
        elif name in CALLS:
            CALLS[name](client, ENDLESS)
        else:
            MAKES[name](ENDLESS)
