"""Jobs: what `@job` accepts, and how payloads become text and come back."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import date, datetime
from decimal import Decimal
from typing import Annotated, Any, Protocol

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import AliasGenerator, BaseModel, ConfigDict, Field, SecretStr
from pydantic.alias_generators import to_camel

from tests.support.engine import a_lease
from thunderagent.jobs.context import Context
from thunderagent.jobs.job import job
from thunderagent.model.errors import ConfigurationError, PayloadInvalid
from thunderagent.model.jsondata import dump_json, is_same_json, sorted_json


class Model(BaseModel):
    month: str
    day: date = date(2026, 7, 1)
    total: Decimal = Decimal("1.10")


@dataclass
class Data:
    month: str
    at: datetime | None = None


class Inner(BaseModel):
    anything: Any
    number: float = 0.0


@dataclass
class Outer:
    inner: Inner
    several: dict[str, Any]


class Camel(BaseModel):
    model_config = ConfigDict(alias_generator=AliasGenerator(alias=to_camel), validate_by_name=True)

    first_day: date
    last_day: date = Field(alias="end")


class OneWay(BaseModel):
    month: str = Field(validation_alias="monthIn", serialization_alias="monthOut")


@job("test.camel")
def of_camel(ctx: Context, payload: Camel) -> None: ...


@job("test.one_way")
def of_one_way(ctx: Context, payload: OneWay) -> None: ...


@job("test.model")
def of_model(ctx: Context, payload: Model) -> str:
    return payload.month


@job("test.data")
def of_data(ctx: Context, payload: Data) -> str:
    return payload.month


@job("test.dict")
def of_dict(ctx: Context, payload: dict[str, Any]) -> int:
    return len(payload)


@job("test.none")
async def of_none(ctx: Context, payload: None) -> None: ...


def refused(*args: Any, handler: Any = None, **options: Any) -> str:
    def plain(ctx: Context, payload: None) -> None: ...

    with pytest.raises(ConfigurationError) as caught:
        job(*args, **options)(handler or plain)
    return str(caught.value)


# Options


def test_all_problems_of_the_options_are_told_at_once() -> None:
    text = refused(
        "two words",
        queue="a#b",
        max_retry=-1,
        isolation="container",
        lease_s=10,
        heartbeat_s=9,
        fatal=(3,),
    )
    assert text.startswith("the job 'two words' cannot work:\n")
    lines = text.splitlines()[1:]
    assert len(lines) == 6
    for expected in (
        "the name 'two words' of a job must have 1 to 128 characters and no space",
        "'a#b' cannot be the name of a queue",
        "max_retry is -1",
        "fatal has 3",
        "isolation is 'container'",
        "three heartbeats must fit into a lease",
    ):
        assert any(expected in line for line in lines)


@pytest.mark.parametrize("name", ["", "x" * 129, "a\tb"])
def test_a_name_that_no_one_could_type_is_refused(name: str) -> None:
    assert "must have 1 to 128 characters" in refused(name)


@pytest.mark.parametrize("limit", [0, 1001, 2.5, "3", True])
def test_a_limit_that_is_no_number_of_tasks_is_refused(limit: Any) -> None:
    assert f"limit is {limit!r}; use 1 to 1000" in refused("limited", limit=limit)


def test_a_lease_of_nothing_is_refused() -> None:
    assert "lease_s is 0; use a number of seconds from 0.001" in refused("x", lease_s=0)
    assert "heartbeat_s is -1; use a number of seconds from 0.001" in refused("x", heartbeat_s=-1)


def test_a_lease_of_a_job_brings_a_heartbeat_of_a_third() -> None:
    made = job("x", lease_s=20)(of_dict.handler)
    assert made.heartbeat_s == pytest.approx(20 / 3)
    assert job("x", lease_s=20, heartbeat_s=5)(of_dict.handler).heartbeat_s == 5
    assert job("x")(of_dict.handler).heartbeat_s is None


@given(st.floats(min_value=0.01, max_value=1e6))
def test_any_lease_goes_with_its_own_third(lease_s: float) -> None:
    assert job("x", lease_s=lease_s)(of_dict.handler).lease_s == lease_s


def test_a_child_process_must_be_able_to_import_its_handler() -> None:
    assert "needs a handler at the top level of a module" in refused("x", isolation="process")


def test_a_coroutine_does_not_run_in_a_child_process() -> None:
    assert "needs a plain function" in refused("x", isolation="process", handler=of_none.handler)


def test_a_handler_that_yields_would_never_run() -> None:
    def generator(ctx: Context, payload: None) -> Any:
        yield

    async def also(ctx: Context, payload: None) -> Any:
        yield

    assert "must return, not yield" in refused("x", handler=generator)
    assert "must return, not yield" in refused("x", handler=also)


# The signature


def test_a_handler_takes_a_context_and_a_payload() -> None:
    def too_few(ctx: Context) -> None: ...

    def too_many(ctx: Context, payload: None, more: int) -> None: ...

    assert "must take (ctx, payload), not (ctx)" in refused("x", handler=too_few)
    assert "must take (ctx, payload), not (ctx, payload, more)" in refused("x", handler=too_many)


def numbers(a: int, b: int) -> int:
    return a + b


def turned(payload: dict[str, int], ctx: Context) -> None: ...


def by_name(ctx: Context, *, payload: int) -> None: ...


def all_of_them(*both: int) -> None: ...


@pytest.mark.parametrize(
    ("handler", "shown"),
    [
        (numbers, "(a: int, b: int)"),
        (turned, "(payload: dict[str, int], ctx: Context)"),
        (by_name, "(ctx, payload)"),
        (all_of_them, "(both)"),
    ],
)
def test_a_function_that_is_no_handler_is_refused_in_one_line(handler: Any, shown: str) -> None:
    text = refused("x", handler=handler)
    assert f"must take (ctx, payload), not {shown}: first its Context" in text
    assert "\n" not in text


class Opaque:
    """Nothing that pydantic knows."""


def test_a_payload_type_that_cannot_be_checked_is_refused_in_one_line() -> None:
    def handler(ctx: Context, payload: Opaque) -> None: ...

    text = refused("x", handler=handler)
    assert "the payload type Opaque of the job 'x' is none that pydantic can check" in text
    assert "\n" not in text


def test_a_context_may_be_annotated_with_what_it_is_or_not_at_all() -> None:
    def plain(ctx, payload: None) -> None: ...  # type: ignore[no-untyped-def]

    def wide(ctx: object, payload: None) -> None: ...

    def narrow(ctx: Checks, payload: None) -> None: ...

    for handler in (plain, wide, narrow):
        assert job("x")(handler).name == "x"


class Checks(Protocol):
    """What a handler needs of its context."""

    def check(self) -> None: ...


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"grace_s": 1.0}, 'grace_s needs isolation="process"'),
        ({"grace_s": -1.0, "isolation": "process"}, "grace_s is -1.0"),
        ({"grace_s": float("nan"), "isolation": "process"}, "grace_s is nan"),
        ({"grace_s": "5", "isolation": "process"}, "grace_s is '5'"),
        ({"on_bad_result": "raise"}, "on_bad_result is 'raise'; use 'note' or 'fail'"),
    ],
)
def test_what_a_job_says_of_its_end_is_checked(options: dict[str, Any], problem: str) -> None:
    assert problem in refused("x", **options)


def test_the_payload_must_be_annotated() -> None:
    def bare(ctx: Context, payload): ...  # type: ignore[no-untyped-def]

    assert "annotate the parameter 'payload' of 'x'" in refused("x", handler=bare)


def test_an_annotation_that_cannot_be_resolved_is_explained() -> None:
    def lost(ctx: Context, payload: Nowhere) -> None: ...  # type: ignore[name-defined] # noqa: F821

    assert "define its types at the top of the module" in refused("x", handler=lost)


def test_a_job_is_called_like_the_function_it_wraps() -> None:
    assert of_model(Context(a_lease()), Model(month="2026-07")) == "2026-07"
    assert of_model.where == "tests.jobs.test_job.of_model"
    assert of_none.is_async
    assert not of_model.is_async


# Payloads


@pytest.mark.parametrize(
    ("one", "payload", "text"),
    [
        (of_model, Model(month="2026-07"), '{"month":"2026-07","day":"2026-07-01","total":"1.10"}'),
        (of_data, Data("2026-07", datetime(2026, 7, 1)), '{"month":"2026-07","at":"2026-07-01T00:00:00"}'),
        (of_dict, {"b": [1, 2.5], "a": "ü"}, '{"b":[1,2.5],"a":"ü"}'),
        (of_none, None, "null"),
    ],
)
def test_a_payload_survives_the_trip_through_its_text(one: Any, payload: Any, text: str) -> None:
    assert one.dump_payload(payload) == text
    assert one.load_payload(text) == payload


def test_a_typed_payload_may_come_as_plain_data() -> None:
    assert of_model.dump_payload({"month": "2026-07"}) == of_model.dump_payload(Model(month="2026-07"))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("one", "payload", "place"),
    [
        (of_model, {"month": 7}, "month: Input should be a valid string"),
        (of_model, {}, "month: Field required"),
        (of_model, {"month": "x", "total": {}}, "total: "),
        (of_data, {"month": None}, "month: "),
        (of_dict, [1], "payload: Input should be a valid dictionary"),
        (of_none, 1, "payload: Input should be None"),
    ],
)
def test_a_payload_that_does_not_fit_is_refused_with_the_place(one: Any, payload: Any, place: str) -> None:
    with pytest.raises(PayloadInvalid) as caught:
        one.dump_payload(payload)
    assert f"the payload does not fit the job {one.name!r}: " in str(caught.value)
    assert place in str(caught.value)


@job("j.annotated")
def _annotated(ctx: Context, payload: Annotated[int, Field(gt=0)]) -> None: ...


def test_what_an_annotation_demands_beside_the_type_is_demanded() -> None:
    assert _annotated.dump_payload(1) == "1"
    with pytest.raises(PayloadInvalid, match="greater than 0"):
        _annotated.dump_payload(0)


def test_all_misfits_of_a_payload_are_told() -> None:
    with pytest.raises(PayloadInvalid, match=r"month: .*; total: "):
        of_model.dump_payload({"month": 7, "total": "much"})  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), object(), b"\xff", "\ud800", {1, object()}])
def test_what_is_no_json_is_refused_in_an_untyped_payload(value: Any) -> None:
    with pytest.raises(PayloadInvalid):
        of_dict.dump_payload({"value": value})
    with pytest.raises(PayloadInvalid):
        dump_json({"value": value}, "the payload of 'x'", PayloadInvalid)


@pytest.mark.parametrize("value", [datetime(2026, 7, 1), Decimal("1"), b"text", {1}])
def test_only_a_job_whose_code_is_at_hand_converts_values(value: Any) -> None:
    assert json.loads(of_dict.dump_payload({"value": value})).keys() == {"value"}
    with pytest.raises(PayloadInvalid, match="a typed payload converts dates"):
        dump_json({"value": value}, "the payload of 'x'", PayloadInvalid)


def test_a_text_of_an_older_version_of_the_job_is_refused_when_it_no_longer_fits() -> None:
    with pytest.raises(PayloadInvalid, match="month: Field required"):
        of_model.load_payload('{"moon": "2026-07"}')
    with pytest.raises(PayloadInvalid, match="Invalid JSON"):
        of_model.load_payload("")


def test_a_secret_is_not_in_the_message_of_a_misfit() -> None:
    with pytest.raises(PayloadInvalid) as caught:
        of_model.dump_payload({"month": "x", "total": "hunter2"})  # type: ignore[arg-type]
    assert "hunter2" not in str(caught.value)
    assert caught.value.__cause__ is None


def test_a_secret_type_is_masked_and_therefore_never_stored_in_clear() -> None:
    class Secret(BaseModel):
        token: SecretStr

    def handler(ctx: Context, payload: Any) -> None: ...

    handler.__annotations__["payload"] = Secret
    assert "hunter2" not in job("x")(handler).dump_payload(Secret(token=SecretStr("hunter2")))


plain_data = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=10,
)


@pytest.mark.slow
@given(st.dictionaries(st.text(max_size=5), plain_data, max_size=4))
def test_keys_keep_their_order_and_only_comparisons_do_not_see_it(payload: dict[str, Any]) -> None:
    turned = dict(reversed(payload.items()))
    one, other = of_dict.dump_payload(payload), of_dict.dump_payload(turned)
    assert list(json.loads(one)) == list(payload) == list(of_dict.load_payload(one))
    assert list(json.loads(other)) == list(turned)
    assert is_same_json(one, other)
    assert not is_same_json(one, of_dict.dump_payload({**payload, "another": 1}))


def test_data_that_only_python_takes_for_equal_is_not_the_same() -> None:
    texts = ["1", "1.0", "true", '"1"', "null", "[1]", '{"a":1}', '{"a":1.0}', "no JSON", None]
    for one in texts:
        assert [is_same_json(one, other) for other in texts] == [one == other for other in texts]


def test_keys_that_would_be_one_in_the_text_are_refused() -> None:
    for payload in ({1: "a", "1": "b"}, {"a": [{None: 1, "null": 2}]}):
        with pytest.raises(ValueError, match="it is not JSON data"):
            dump_json(payload, "it")
    assert dump_json({2: "a", 1: "b"}, "it") == '{"2":"a","1":"b"}'


@given(plain_data)
def test_text_has_no_spaces_outside_of_strings_and_is_json(value: Any) -> None:
    text = dump_json(value, "it")
    assert json.loads(text) == value
    assert text == json.dumps(json.loads(text), separators=(",", ":"), ensure_ascii=False)
    assert sorted_json(text) == json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def test_a_number_that_is_none_is_refused_wherever_it_hides_and_never_becomes_null() -> None:
    def handler(ctx: Context, payload: Any) -> None: ...

    for hint, payload in (
        (Inner, Inner(anything=float("nan"))),
        (Inner, Inner(anything={"a": [float("inf")]})),
        (Inner, Inner(anything=1, number=float("nan"))),
        (Outer, Outer(Inner(anything=1), {"a": float("nan")})),
        (dict[str, Any], {"a": float("-inf")}),
        (list[Inner], [Inner(anything=float("nan"))]),
        (Any, float("nan")),
    ):
        handler.__annotations__["payload"] = hint
        with pytest.raises(PayloadInvalid, match="Out of range float values"):
            job("x")(handler).dump_payload(payload)


def test_a_model_with_aliases_comes_back() -> None:
    payload = Camel(first_day=date(2026, 7, 1), last_day=date(2026, 7, 31))
    assert of_camel.dump_payload(payload) == '{"firstDay":"2026-07-01","end":"2026-07-31"}'
    assert of_camel.load_payload(of_camel.dump_payload(payload)) == payload


def test_a_payload_that_its_own_agent_would_refuse_is_refused_at_enqueue() -> None:
    with pytest.raises(PayloadInvalid, match="monthIn: Field required"):
        of_one_way.dump_payload(OneWay(monthIn="2026-07"))
    changed = Model(month="2026-07")
    changed.month = 7  # type: ignore[assignment]
    with pytest.raises(PayloadInvalid, match="month: Input should be a valid string"):
        of_model.dump_payload(changed)
