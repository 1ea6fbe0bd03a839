"""The canary as a Lambda function: what it reads from its environment, sends, answers and remembers."""

from __future__ import annotations

import base64
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from loguru import logger
from moto import mock_aws

from tests.websocket_api.canary.support import REGION, Api, an_api
from thunderagent.model.errors import ConfigurationError, StoreError, StoreUnavailable
from thunderagent.settings import load_settings
from thunderagent.telemetry.cloudwatch import CloudWatch
from thunderagent.telemetry.logs import configure_logging
from thunderagent.websocket_api.canary import function as canary_function
from thunderagent.websocket_api.canary.function import Canary, handler

pytestmark = pytest.mark.slow

OTHER = "eu-west-1"


@pytest.fixture
def api() -> Iterator[Api]:
    with an_api() as one:
        yield one


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A container that is started for the first time, without anything in its environment."""
    monkeypatch.setattr(canary_function, "_canary", None)
    monkeypatch.delenv("AWS_DEFAULT_REGION", raising=False)
    monkeypatch.setenv("AWS_REGION", REGION)
    yield
    logger.remove()


class Sink(CloudWatch):
    """Keeps the data in the place of CloudWatch."""

    def __init__(self) -> None:
        super().__init__("Shop", now=lambda: 1_800_000_000.0)
        self.data: list[dict[str, Any]] = []

    def put(self, data: Any, *, hurry: bool = False) -> None:
        self.data = list(data)

    def value(self, target: str = REGION) -> float:
        """What was sent of a target's health."""
        [value] = [
            one["Value"]
            for one in self.data
            if one["MetricName"] == "CanaryHealthy" and one["Dimensions"][0] == {"Name": "Target", "Value": target}
        ]
        assert isinstance(value, float)
        return value


@dataclass
class Two:
    """The APIs of two regions."""

    here: Api
    there: Api


def set_up(monkeypatch: pytest.MonkeyPatch, **variables: str) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(f"THUNDERAGENT_{name}", value)


def test_it_answers_and_sends_what_it_saw(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    set_up(monkeypatch, CANARY_TARGETS=json.dumps({REGION: api.url}), REGION=OTHER)
    sink = Sink()
    answer = Canary(load_settings(), sink).run()
    assert answer["observer"] == OTHER
    assert answer["healthy"] == {REGION: True}
    assert answer["probes"][0]["target"] == REGION
    json.dumps(answer)  # Lambda sends it so
    [healthy] = [one for one in sink.data if one["MetricName"] == "CanaryHealthy"]
    assert healthy["Dimensions"] == [{"Name": "Target", "Value": REGION}, {"Name": "Observer", "Value": OTHER}]
    assert (healthy["Value"], healthy["Unit"]) == (1.0, "None")
    latencies = [one for one in sink.data if one["MetricName"] == "CanaryLatency"]
    assert {one["Dimensions"][1]["Value"] for one in latencies} >= {"connect", "auth", "ping", "setState", "getState"}
    assert all(one["Unit"] == "Seconds" and one["Counts"] == [1.0] for one in latencies)


def test_what_was_down_is_shown_so_until_five_runs_in_a_row_did(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    set_up(monkeypatch, CANARY_TARGETS=json.dumps({REGION: api.url}))
    sink = Sink()
    canary, seen = Canary(load_settings(), sink), []
    for number in range(10):
        api.status = 503 if number in (2, 3) else None
        canary.run()
        seen.append(sink.value())
    assert seen == [1, 1, 0, 0, 0, 0, 0, 0, 1, 1]


def test_a_single_failure_is_over_with_the_next_success(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    set_up(monkeypatch, CANARY_TARGETS=json.dumps({REGION: api.url}))
    sink = Sink()
    canary, seen = Canary(load_settings(), sink), []
    for number in range(5):
        api.status = 503 if number == 2 else None
        canary.run()
        seen.append(sink.value())
    assert seen == [1, 1, 0, 1, 1]


def test_a_target_that_fails_does_not_hide_another(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    with an_api(OTHER) as other:
        other.status = 503
        set_up(monkeypatch, CANARY_TARGETS=json.dumps({REGION: api.url, OTHER: other.url}))
        sink = Sink()
        answer = Canary(load_settings(), sink).run()
    assert answer["healthy"] == {REGION: True, OTHER: False}
    assert (sink.value(REGION), sink.value(OTHER)) == (1.0, 0.0)


def test_the_handler_keeps_what_it_knows_while_its_container_lives(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    set_up(monkeypatch, CANARY_TARGETS=json.dumps({REGION: api.url}))
    for _ in range(2):
        assert handler({}, None)["healthy"] == {REGION: True}
    changes = [asked for asked in api.seen if asked["action"] == "setState"]
    assert [asked["version"] for asked in changes] == [0, 1]  # the second knows the version of the first


def test_data_that_nobody_takes_fail_the_function(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(Sink):
        def put(self, data: Any, *, hurry: bool = False) -> None:
            raise StoreUnavailable("no answer from CloudWatch")

    set_up(monkeypatch, CANARY_TARGETS=json.dumps({REGION: api.url}))
    with pytest.raises(StoreError, match="no answer"):
        Canary(load_settings(), Broken()).run()


@mock_aws
def test_cloudwatch_takes_it(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    import boto3

    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
    monkeypatch.setenv("AWS_DEFAULT_REGION", REGION)
    set_up(monkeypatch, CANARY_TARGETS=json.dumps({REGION: api.url}), CLOUDWATCH_NAMESPACE="Shop")
    assert handler({}, None)["healthy"] == {REGION: True}
    found = boto3.client("cloudwatch").list_metrics(Namespace="Shop")["Metrics"]
    told = {(one["MetricName"], tuple(pair["Name"] for pair in one["Dimensions"])) for one in found}
    assert told == {("CanaryHealthy", ("Target", "Observer")), ("CanaryLatency", ("Target", "Step"))}


@mock_aws
def test_the_token_comes_from_a_secret_and_a_new_one_is_used_at_once(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    import boto3

    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
    monkeypatch.setenv("AWS_DEFAULT_REGION", REGION)
    secrets = boto3.client("secretsmanager")
    arn = secrets.create_secret(Name="canary", SecretString="first")["ARN"]
    set_up(monkeypatch, CANARY_TARGETS=json.dumps({REGION: api.url}), CANARY_TOKEN_FROM=f"secret:{arn}")
    api.token = "first"
    assert handler({}, None)["healthy"] == {REGION: True}
    api.token = "second"
    secrets.put_secret_value(SecretId=arn, SecretString="second")
    assert handler({}, None)["healthy"] == {REGION: True}
    secrets.delete_secret(SecretId=arn, ForceDeleteWithoutRecovery=True)
    [probe] = handler({}, None)["probes"]
    assert (probe["ok"], probe["step"]) == (False, "token")
    assert "there is no secret" in probe["reason"]


@pytest.fixture
def two(api: Api, monkeypatch: pytest.MonkeyPatch) -> Iterator[Two]:
    """Two regions, and a canary in the first that looks at both."""
    with an_api(OTHER) as other:
        set_up(monkeypatch, CANARY_TARGETS=json.dumps({REGION: api.url, OTHER: other.url}))
        set_up(monkeypatch, CANARY_TOKEN_FROM="env:CANARY_TOKEN", LOG_JSON="true")
        api.token = other.token = "good"
        monkeypatch.setenv("CANARY_TOKEN", "good")
        yield Two(api, other)


def a_jwt(**claims: Any) -> str:
    body = base64.urlsafe_b64encode(json.dumps(claims).encode()).decode().rstrip("=")
    return f"eyJhbGciOiJFUzI1NiJ9.{body}.c2lnbmF0dXJl"


@pytest.mark.parametrize(
    ("token", "is_fresh", "healthy"),
    [
        ("revoked", False, (1, 1)),  # no region takes it: so it is the token
        ("revoked", True, (1, 1)),  # a container that never saw a good one
        (a_jwt(exp=time.time() - 3600), False, (1, 1)),
        ("", False, (1, 1)),  # the secret is empty
        ("good, there", False, (0, 1)),  # one region takes it, so the other is to blame
    ],
    ids=["revoked", "revoked from the start", "over", "none", "one region"],
)
def test_a_token_that_no_region_takes_moves_no_region_and_is_told(
    two: Two,
    token: str,
    is_fresh: bool,
    healthy: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    configure_logging("INFO", as_json=True, stream=sys.stderr)
    sink = Sink()
    canary = Canary(load_settings(), sink)
    if not is_fresh:
        canary.run()
    if token == "good, there":
        two.here.token = "another"
    else:
        monkeypatch.setenv("CANARY_TOKEN", token)
    for _ in range(3):
        answer = canary.run()
        assert (sink.value(REGION), sink.value(OTHER)) == healthy, answer
    told = [json.loads(line)["message"] for line in capsys.readouterr().err.splitlines()]
    is_blind = healthy == (1, 1)
    blind = [one["Value"] for one in sink.data if one["MetricName"] == "CanaryBlind"]
    assert blind == [1.0, 1.0] * is_blind
    assert told.count("canary cannot judge the target: the last judgement stays") == 2 * is_blind  # once each
    assert told.count("canary: the target is down") == (not is_blind)
    monkeypatch.setenv("CANARY_TOKEN", "good")
    two.here.token = "good"
    assert all(probe["ok"] for probe in canary.run()["probes"])
    assert not [one for one in sink.data if one["MetricName"] == "CanaryBlind"]


@pytest.mark.parametrize("how", ["handshake", "gateway", "limit"])
def test_an_api_that_is_throttled_is_no_reason_to_move_its_clients(two: Two, how: str) -> None:
    sink = Sink()
    canary = Canary(load_settings(), sink)
    canary.run()
    match how:
        case "handshake":
            two.here.status = 429
        case "gateway":
            full = {"message": "Limit Exceeded", "connectionId": "c", "requestId": "r"}
            two.here.changes["ping"] = lambda asked, right: full
        case "limit":
            refused = {"type": "error", "error": "throttled", "message": "too many", "retry_after_s": 1}
            two.here.changes["setState"] = lambda asked, right: {**refused, "id": asked["id"]}
    for _ in range(3):
        [here, there] = canary.run()["probes"]
        assert (here["ok"], here["unjudged"], there["ok"]) == (False, "throttled", True)
        assert (sink.value(REGION), sink.value(OTHER)) == (1.0, 1.0)
    assert [one["Value"] for one in sink.data if one["MetricName"] == "CanaryBlind"] == [1.0]
    two.here.changes.clear()
    two.here.status = 503  # what is broken is broken, throttled before or not
    canary.run()
    assert (sink.value(REGION), sink.value(OTHER)) == (0.0, 1.0)


@pytest.mark.parametrize(
    ("life_days", "left_days", "days"),
    [(365, 30, 30), (365, 3, 3), (None, 3, 3), (1, 0.5, None), (1, 0.05, 0.05), (30, 0.5, 0.5)],
)
def test_a_token_that_is_over_soon_is_told_beforehand_once_a_day(
    two: Two,
    life_days: float | None,
    left_days: float,
    days: float | None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    configure_logging("INFO", as_json=True, stream=sys.stderr)
    ends_at = time.time() + left_days * 86400
    made = {} if life_days is None else {"iat": ends_at - life_days * 86400}
    two.here.token = two.there.token = token = a_jwt(exp=ends_at, **made)
    monkeypatch.setenv("CANARY_TOKEN", token)
    sink = Sink()
    canary = Canary(load_settings(), sink)
    for _ in range(2):
        assert canary.run()["healthy"] == {REGION: True, OTHER: True}
    sent = [one["Value"] for one in sink.data if one["MetricName"] == "CanaryTokenDays"]
    assert sent == ([] if days is None else [pytest.approx(days, abs=0.01)] * 2)
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    told = [one for one in lines if one["message"] == "canary: its token is over soon"]
    assert len(told) == (0 if days is None or days >= 7 else 2)  # one of each target
    assert token not in json.dumps(lines)


@pytest.mark.parametrize("targets", ["", "{}", "[1]", "{no", '{"a": 1}'])
def test_targets_that_are_none_are_refused_with_the_name_of_the_variable(
    targets: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_up(monkeypatch, CANARY_TARGETS=targets)
    with pytest.raises(ConfigurationError, match="CANARY_TARGETS"):
        handler({}, None)


def test_what_changes_is_a_line_of_its_log(
    api: Api, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    set_up(monkeypatch, CANARY_TARGETS=json.dumps({REGION: api.url}), LOG_JSON="true")
    api.status = 503
    for _ in range(2):
        handler({}, None)
    [line] = capsys.readouterr().err.splitlines()
    told = json.loads(line)
    assert (told["level"], told["message"]) == ("WARNING", "canary: the target is down")
    assert (told["target"], told["step"], told["failures"]) == (REGION, "auth", 2)
