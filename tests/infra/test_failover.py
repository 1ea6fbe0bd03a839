"""The template of the failover: what is watched, when that is an alarm, and which way the name points then."""

from __future__ import annotations

import json
from typing import Any, Final

import boto3
import pytest
from moto import mock_aws

from tests.infra.rendering import ACCOUNT, Rendered
from thunderagent.model.canary_targets import TokenSource
from thunderagent.regions.hysteresis import Hysteresis
from thunderagent.telemetry.dashboard import ALARMS
from thunderagent.telemetry.metrics import CANARY_BLIND, CANARY_HEALTHY, CANARY_TOKEN_DAYS
from thunderagent.websocket_api.canary.tokens import WARN_DAYS

GIVEN: Final = {
    "CodeBucket": "artefacts",
    "CodeKey": "thunderagent/lambda/0123.zip",
    "RegionalUrl": "wss://a1.execute-api.eu-central-1.amazonaws.com/live",
}
NAMES: Final = {
    "DomainName": "ws.example.com",
    "HostedZoneId": "Z123",
    "RegionalDomainName": "d-1.execute-api.eu-central-1.amazonaws.com",
}
OTHER: Final = {"OtherRegion": "eu-west-1", "OtherUrl": "wss://b1.execute-api.eu-west-1.amazonaws.com/live"}


def failover(region: str = "eu-central-1", **more: str) -> Rendered:
    return Rendered("failover", GIVEN | more, region)


def test_a_canary_that_fails_twice_or_says_nothing_is_an_alarm() -> None:
    alarm = failover().properties("CanaryAlarm")
    assert alarm["MetricName"] == CANARY_HEALTHY.cloudwatch
    assert tuple(one["Name"] for one in alarm["Dimensions"]) == CANARY_HEALTHY.dimensions
    assert alarm["Dimensions"] == [
        {"Name": "Target", "Value": "eu-central-1"},
        {"Name": "Observer", "Value": "eu-central-1"},
    ]
    assert alarm["TreatMissingData"] == "breaching"
    assert int(alarm["EvaluationPeriods"]) == Hysteresis().down
    assert (alarm["Statistic"], alarm["Threshold"]) == ("Average", 0.5)
    assert alarm["ComparisonOperator"] == "LessThanOrEqualToThreshold"  # 0 of 1, and 1 of 2
    # What Route 53 can follow: standard resolution, no percentile, no mathematics, no "2 of 3 periods".
    assert alarm["Period"] == 60
    assert not {"Metrics", "ExtendedStatistic", "DatapointsToAlarm"} & set(alarm)


def test_people_hear_of_a_canary_that_cannot_judge_and_of_its_token_before_it_is_over() -> None:
    rendered = failover(TokenSecret="canary")
    for name, metric, threshold in (("BlindAlarm", CANARY_BLIND, 0), ("TokenAlarm", CANARY_TOKEN_DAYS, WARN_DAYS)):
        alarm = rendered.properties(name)
        assert (alarm["MetricName"], alarm["Threshold"]) == (metric.cloudwatch, threshold)
        assert tuple(one["Name"] for one in alarm["Dimensions"]) == metric.dimensions
        assert alarm["TreatMissingData"] == "notBreaching"  # it is sent only when there is something to tell
    assert [one.below for one in ALARMS if one.metric is CANARY_TOKEN_DAYS] == [WARN_DAYS]
    assert "TokenAlarm" not in failover().resources
    assert rendered.properties("HealthCheck")["HealthCheckConfig"]["AlarmIdentifier"]["Name"] == "<CanaryAlarm>"


def test_a_health_check_without_data_is_unhealthy_and_follows_the_alarm_of_its_own_region() -> None:
    for region in ("eu-central-1", "eu-west-1"):
        config = failover(region, RegionalUrl="wss://x/live").properties("HealthCheck")["HealthCheckConfig"]
        assert config == {
            "Type": "CLOUDWATCH_METRIC",
            "AlarmIdentifier": {"Name": "<CanaryAlarm>", "Region": region},
            "InsufficientDataHealthStatus": "Unhealthy",
        }


def test_one_name_has_a_primary_and_a_secondary_that_follow_their_health_checks() -> None:
    primary = failover(**NAMES).properties("Record")
    secondary = failover("eu-west-1", **NAMES, FailoverRole="SECONDARY").properties("Record")
    for record, role, region in ((primary, "PRIMARY", "eu-central-1"), (secondary, "SECONDARY", "eu-west-1")):
        assert record["Failover"] == role
        assert record["SetIdentifier"] == region
        assert record["HealthCheckId"] == "<HealthCheck>"
        assert record["TTL"] == 60
        assert (record["Name"], record["Type"]) == ("ws.example.com", "CNAME")
        assert record["ResourceRecords"] == [NAMES["RegionalDomainName"]]
    assert "Record" not in failover().resources


def test_a_region_that_is_kept_away_from_is_never_healthy() -> None:
    rendered = failover(**NAMES, KeepAway="true")
    assert rendered.properties("Record")["HealthCheckId"] == "<Closed>"
    config = rendered.properties("Closed")["HealthCheckConfig"]
    assert config["Type"] == "CALCULATED"
    assert config["HealthThreshold"] > len(config["ChildHealthChecks"]) == 1  # more than there are: always unhealthy
    assert rendered.properties("HealthCheck") == failover(**NAMES).properties("HealthCheck")
    for others in (
        failover(**NAMES),
        failover(KeepAway="true"),
        failover(KeepAway="true", Endpoint="http://127.0.0.1:1"),
    ):
        assert "Closed" not in others.resources


def test_route_53_takes_the_health_checks_and_both_records_as_they_are_filled_in() -> None:
    """Moto keeps neither the alarm nor what missing data means: those are asserted on the template above."""
    with mock_aws():
        aws = {"aws_access_key_id": "x", "aws_secret_access_key": "x", "region_name": "us-east-1"}
        dns = boto3.client("route53", **aws)
        zone = dns.create_hosted_zone(Name="example.com", CallerReference="1")["HostedZone"]["Id"]
        for region, role in (("eu-central-1", "PRIMARY"), ("eu-west-1", "SECONDARY")):
            rendered = failover(region, **NAMES, FailoverRole=role)
            config = rendered.properties("HealthCheck")["HealthCheckConfig"]
            check = dns.create_health_check(CallerReference=region, HealthCheckConfig=config)["HealthCheck"]["Id"]
            record: dict[str, Any] = {**rendered.properties("Record"), "HealthCheckId": check}
            del record["HostedZoneId"]
            record["ResourceRecords"] = [{"Value": value} for value in record["ResourceRecords"]]
            change = {"Action": "CREATE", "ResourceRecordSet": record}
            dns.change_resource_record_sets(HostedZoneId=zone, ChangeBatch={"Changes": [change]})
        records = dns.list_resource_record_sets(HostedZoneId=zone)["ResourceRecordSets"]
        found = {one["Failover"]: one for one in records if "Failover" in one}
        assert set(found) == {"PRIMARY", "SECONDARY"}
        assert {one["SetIdentifier"] for one in found.values()} == {"eu-central-1", "eu-west-1"}
        types = {one["HealthCheckConfig"]["Type"] for one in dns.list_health_checks()["HealthChecks"]}
        assert types == {"CLOUDWATCH_METRIC"}


def test_the_canary_looks_each_minute_and_a_look_that_failed_is_not_repeated() -> None:
    rendered = failover()
    schedule = rendered.properties("CanarySchedule")
    assert schedule["ScheduleExpression"] == "rate(1 minute)"
    assert [one["Arn"] for one in schedule["Targets"]] == ["<CanaryFunction.Arn>"]
    [permission] = rendered.of_type("AWS::Lambda::Permission")
    assert permission["SourceArn"] == "<CanarySchedule.Arn>"
    once = rendered.properties("CanaryOnce")
    assert (once["MaximumRetryAttempts"], once["MaximumEventAgeInSeconds"]) == (0, 60)
    assert rendered.properties("CanaryFunction")["Timeout"] < 60


def test_the_canary_may_tell_its_metrics_read_its_token_and_write_its_log_and_nothing_else() -> None:
    def allowed(**more: str) -> dict[str, Any]:
        [policy] = failover(**more).properties("CanaryRole")["Policies"]
        return {one["Sid"]: one for one in policy["PolicyDocument"]["Statement"]}

    with_secret = allowed(TokenSecret="canary", Namespace="Shop", **OTHER)
    assert set(with_secret) == {"Logs", "Metrics", "Token"}
    assert with_secret["Metrics"]["Condition"] == {"StringEquals": {"cloudwatch:namespace": "Shop"}}
    assert with_secret["Metrics"]["Action"] == "cloudwatch:PutMetricData"
    secret = f"arn:aws:secretsmanager:eu-central-1:{ACCOUNT}:secret:canary"
    assert with_secret["Token"]["Action"] == "secretsmanager:GetSecretValue"
    assert with_secret["Token"]["Resource"] == [f"{secret}-eu-central-1-??????", f"{secret}-eu-west-1-??????"]
    assert allowed(TokenSecret="canary")["Token"]["Resource"] == [f"{secret}-eu-central-1-??????"]
    assert with_secret["Logs"]["Resource"] == "<CanaryLog.Arn>"
    assert set(allowed()) == {"Logs", "Metrics"}


def test_the_other_region_is_watched_too_when_it_is_named() -> None:
    def targets(**more: str) -> Any:
        return json.loads(
            failover(**more).properties("CanaryFunction")["Environment"]["Variables"]["THUNDERAGENT_CANARY_TARGETS"]
        )

    assert targets() == {"eu-central-1": GIVEN["RegionalUrl"]}
    environment = failover(TokenSecret="canary").properties("CanaryFunction")["Environment"]["Variables"]
    source = environment["THUNDERAGENT_CANARY_TOKEN_FROM"]  # a user for each region: their rows are replicated
    assert TokenSource.parse(source, "eu-west-1").place == "canary-eu-west-1"
    environment = failover().properties("CanaryFunction")["Environment"]["Variables"]
    assert "THUNDERAGENT_CANARY_TOKEN_FROM" not in environment
    assert targets(**OTHER) == {"eu-central-1": GIVEN["RegionalUrl"], "eu-west-1": OTHER["OtherUrl"]}


@pytest.mark.parametrize(
    ("parameters", "told"),
    [
        ({}, []),
        (NAMES | OTHER, []),
        ({"OtherRegion": "eu-west-1"}, ["OtherRegion and OtherUrl go together"]),
        (OTHER | {"OtherRegion": "eu-central-1"}, ["OtherRegion is the other region, not that of this stack"]),
        (NAMES | {"HostedZoneId": ""}, ["a custom domain needs HostedZoneId"]),
        (
            NAMES | {"RegionalDomainName": ""},
            ["a custom domain needs RegionalDomainName, an output of this region's wsapi stack"],
        ),
    ],
)
def test_parameters_that_do_not_fit_together_are_refused(parameters: dict[str, str], told: list[str]) -> None:
    assert failover(**parameters).refused == told


def test_people_are_told_when_a_topic_is_given() -> None:
    topic = "arn:aws:sns:eu-central-1:123456789012:alarms"
    rendered = failover(AlarmTopic=topic, TokenSecret="canary")
    for alarm in map(rendered.properties, ("CanaryAlarm", "BlindAlarm", "TokenAlarm")):
        assert alarm["AlarmActions"] == alarm["OKActions"] == [topic]
    assert not {"AlarmActions", "OKActions"} & set(failover().properties("CanaryAlarm"))


def test_a_local_engine_has_the_canary_and_its_alarm_and_neither_health_check_nor_record() -> None:
    everything, local = failover(**NAMES), failover(**NAMES, Endpoint="http://127.0.0.1:4566")
    assert set(everything.resources) - set(local.resources) == {"HealthCheck", "Record"}
    assert "HealthCheckId" not in local.outputs
