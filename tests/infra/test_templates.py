"""The templates of the table, the arbiter, the doorbell and the machines, as CloudFormation would fill them in."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import unquote

import pytest
from cfnlint.api import ManualArgs, lint_file

from tests.infra.rendering import ACCOUNT, INFRA, ROOT, Rendered
from tests.infra.test_failover import GIVEN as FAILOVER
from tests.infra.test_failover import NAMES
from tests.infra.test_wsapi import DOMAIN
from tests.infra.test_wsapi import GIVEN as WSAPI
from thunderagent.model import edge_events, events, fleet_events
from thunderagent.model.bus import Event
from thunderagent.ops.iam import Resources, Role, policy
from thunderagent.router.function import DETAIL_TYPE
from thunderagent.stores.dynamo.expressions import INDEX, PROJECTED
from thunderagent.stores.dynamo.table import EXPIRY, INDEX_KEY, KEY
from thunderagent.telemetry import metrics
from thunderagent.telemetry.dashboard import ALARMS
from thunderagent.telemetry.logs import LEVELS
from thunderagent.telemetry.metrics import Metric

sys.path.insert(0, str(ROOT / "scripts"))

from deployment.plan import LARGEST_TEMPLATE, STACKS

REGIONS: Final = ("eu-central-1", "eu-west-1")
OURS: Final = ("agents", "containers", "control", "doorbell", "table")
QUEUE: Final = "thunderagent-doorbell-WakeQueue-1"
AGENTS: Final = {
    "ArtefactBucket": "artefacts",
    "ArtefactKey": f"thunderagent/agents/{'0123' * 16}.tar.gz",
    "Subnets": "subnet-0a,subnet-0b",
}
CONTAINERS: Final = {
    "Image": f"{ACCOUNT}.dkr.ecr.eu-central-1.amazonaws.com/shop:42",
    "Subnets": "subnet-0a,subnet-0b",
}
SECRET: Final = f"arn:aws:secretsmanager:eu-central-1:{ACCOUNT}:secret:canary-abcdef"
DOORBELL: Final = {"CodeBucket": "artefacts", "CodeKey": "thunderagent/lambda/0123.zip"}
WITH_ALL: Final = {
    "WakeQueueUrl": f"https://sqs.eu-central-1.amazonaws.com/{ACCOUNT}/{QUEUE}",
    "WakeQueueArn": f"arn:aws:sqs:eu-central-1:{ACCOUNT}:{QUEUE}",
    "BlobBucket": "texts",
    "Namespace": "Shop",
    "TableName": "ShopTasks",
}


def given(name: str) -> Mapping[str, str]:
    """What a template asks for."""
    known = {"agents": AGENTS, "containers": CONTAINERS, "doorbell": DOORBELL, "failover": FAILOVER, "wsapi": WSAPI}
    return known.get(name, {})


@pytest.mark.parametrize("name", OURS)
def test_the_template_is_free_of_what_cfn_lint_finds_in_both_regions(name: str) -> None:
    found = lint_file(INFRA / f"{name}.yaml", config=ManualArgs(regions=list(REGIONS)))
    assert [str(one) for one in found] == []


@pytest.mark.parametrize("name", OURS)
def test_every_parameter_says_what_it_is_and_refuses_what_cannot_work(name: str) -> None:
    template = Rendered.template_of(name)
    for parameter, told in template["Parameters"].items():
        assert told["Description"].endswith("."), parameter
        limits = {"AllowedPattern", "AllowedValues", "MinValue"} & set(told)
        # The members of a list, and what is looked up elsewhere, are checked there.
        assert limits or told["Type"].startswith(("CommaDelimitedList", "List<", "AWS::SSM::")), parameter


def test_every_template_is_deployed_and_fits_into_a_request() -> None:
    assert sorted(one.path for one in STACKS) == sorted(INFRA.glob("[a-z]*.yaml"))
    for one in STACKS:
        assert len(one.template.encode()) < LARGEST_TEMPLATE


# The table


def test_the_table_is_the_one_that_thunderagent_makes() -> None:
    table = Rendered("table", {}).properties("TaskTable")
    assert table["KeySchema"] == KEY
    [index] = table["GlobalSecondaryIndexes"]
    assert (index["IndexName"], index["KeySchema"]) == (INDEX, INDEX_KEY)
    assert index["Projection"] == {"ProjectionType": "INCLUDE", "NonKeyAttributes": list(PROJECTED)}
    assert table["TimeToLiveSpecification"] == {"AttributeName": EXPIRY, "Enabled": True}
    assert table["PointInTimeRecoverySpecification"] == {"PointInTimeRecoveryEnabled": True}
    assert table["BillingMode"] == "PAY_PER_REQUEST"


@pytest.mark.parametrize("name", ["control", "table"])
def test_a_table_outlives_its_stack_unless_somebody_says_otherwise(name: str) -> None:
    logical = {"control": "Arbiter", "table": "TaskTable"}[name]
    kept = Rendered(name, {})
    assert kept.resources[logical]["DeletionPolicy"] == "Retain"
    assert kept.properties(logical)["DeletionProtectionEnabled"] is True
    given_up = Rendered(name, {"DeletionPolicy": "Delete", "DeletionProtection": "false"})
    assert given_up.resources[logical]["DeletionPolicy"] == "Delete"
    assert given_up.properties(logical)["DeletionProtectionEnabled"] is False
    assert given_up.resources[logical]["UpdateReplacePolicy"] == "Retain"


def test_a_replica_makes_it_a_global_table_of_the_same_shape() -> None:
    plain = Rendered("table", {}).properties("TaskTable")
    rendered = Rendered("table", {"ReplicaRegion": "eu-west-1"})
    assert "TaskTable" not in rendered.resources
    table = rendered.properties("GlobalTaskTable")
    for name in plain.keys() - {"PointInTimeRecoverySpecification", "DeletionProtectionEnabled"}:
        assert table[name] == plain[name], name
    assert [one["Region"] for one in table["Replicas"]] == ["eu-central-1", "eu-west-1"]
    for replica in table["Replicas"]:
        assert replica["PointInTimeRecoverySpecification"] == {"PointInTimeRecoveryEnabled": True}
        assert replica["DeletionProtectionEnabled"] is True
    assert "MultiRegionConsistency" not in table
    assert table["StreamSpecification"] == {"StreamViewType": "NEW_AND_OLD_IMAGES"}
    assert len(Rendered("table", {"Global": "true"}).properties("GlobalTaskTable")["Replicas"]) == 1


STRONG: Final = {"Consistency": "STRONG", "ReplicaRegion": "eu-west-1", "WitnessRegion": "eu-west-3"}
BOUNDS: Final = {
    f"{edge}{where}{kind}Units": str(units)
    for where, kind, few, most in (("", "Read", 5, 50), ("", "Write", 60, 600), ("Index", "Read", 7, 70))
    for edge, units in (("Min", few), ("Max", most))
} | {"MinIndexWriteUnits": "80", "MaxIndexWriteUnits": "800"}
PROVISIONED: Final = {"BillingMode": "PROVISIONED", **BOUNDS}
CAPPED: Final = {name: units for name, units in BOUNDS.items() if name.startswith("Max")}
WARM: Final = {f"Warm{name}": str(20_000 + at) for at, name in enumerate(("ReadUnits", "WriteUnits"))}


def test_strong_consistency_has_three_regions_and_neither_time_to_live_nor_a_stream() -> None:
    rendered = Rendered("table", STRONG)
    table = rendered.properties("GlobalTaskTable")
    assert rendered.refused == []
    assert (table["MultiRegionConsistency"], table["GlobalTableWitnesses"]) == ("STRONG", [{"Region": "eu-west-3"}])
    assert not {"TimeToLiveSpecification", "StreamSpecification"} & table.keys()  # it has no former and needs no latter


@pytest.mark.parametrize(
    ("region", "given", "words"),
    [
        ("eu-central-1", STRONG, None),
        ("us-east-1", STRONG | {"ReplicaRegion": "us-east-2", "WitnessRegion": "us-west-2"}, None),
        ("ap-northeast-3", STRONG | {"ReplicaRegion": "ap-northeast-1", "WitnessRegion": "ap-northeast-2"}, None),
        ("us-east-1", STRONG, "regions of one set"),
        ("eu-central-1", STRONG | {"WitnessRegion": "us-east-1"}, "regions of one set"),
        ("eu-north-1", STRONG, "regions of one set"),
        ("eu-central-1", STRONG | {"SecondReplicaRegion": "eu-west-2"}, "three regions"),
        ("eu-central-1", STRONG | {"WitnessRegion": ""}, "needs ReplicaRegion, and"),
        ("eu-central-1", STRONG | {"WitnessRegion": "eu-west-1"}, "region without the table"),
        ("eu-central-1", STRONG | {"WitnessRegion": "eu-central-1"}, "region without the table"),
        ("eu-central-1", STRONG | {"Consistency": "EVENTUAL"}, "for Consistency STRONG alone"),
        ("eu-west-1", {"ReplicaRegion": "eu-west-1"}, "two regions beside"),
        ("us-east-1", {"ReplicaRegion": "eu-west-1", "SecondReplicaRegion": "eu-west-1"}, "two regions beside"),
        ("us-east-1", {"ReplicaRegion": "eu-west-1", "SecondReplicaRegion": "eu-west-2"}, None),
        ("us-east-1", PROVISIONED, None),
        ("us-east-1", CAPPED | WARM, None),
        ("us-east-1", {"MaxWriteUnits": "500"}, None),
        ("us-east-1", PROVISIONED | {"MaxIndexWriteUnits": ""}, "the Min and the Max of reads and writes"),
        ("us-east-1", BOUNDS, "for BillingMode PROVISIONED"),
        ("us-east-1", {"WarmReadUnits": "20000"}, "WarmReadUnits and WarmWriteUnits are given together"),
    ],
)
def test_what_aws_would_refuse_is_refused_before(region: str, given: dict[str, str], words: str | None) -> None:
    refused = Rendered("table", given, region=region).refused
    assert len(refused) == (words is not None)
    assert (words or "") in " ".join(refused)


@pytest.mark.parametrize(("name", "least"), [("WarmReadUnits", 12_000), ("WarmIndexWriteUnits", 4_000)])
def test_no_warm_throughput_is_below_that_of_a_new_table(name: str, least: int) -> None:
    pattern = Rendered.template_of("table")["Parameters"][name]["AllowedPattern"]
    taken = [bool(re.fullmatch(pattern, str(units))) for units in (least - 1, least, 40_000, 1_000_000)]
    assert taken == [False, True, True, True]


def test_capacity_is_the_same_for_one_region_and_for_several() -> None:
    def capacity(given: dict[str, str]) -> tuple[Any, ...]:
        """Cap, provisioned units, warm units, insights of the table, then of its index."""
        table = Rendered("table", given).properties("TaskTable")
        names = ("OnDemandThroughput", "ProvisionedThroughput", "WarmThroughput", "ContributorInsightsSpecification")
        return tuple(one.get(name) for one in (table, *table["GlobalSecondaryIndexes"]) for name in names)

    def bounds(scaled: dict[str, Any]) -> tuple[Any, ...]:
        """The units after a switch from on demand, the least and the most."""
        return tuple(scaled.get(f"{name}Capacity") for name in ("Seed", "Min", "Max"))

    insights = {"Enabled": True, "Mode": "THROTTLED_KEYS"}
    warm = {"ReadUnitsPerSecond": "20000", "WriteUnitsPerSecond": "20001"}
    cap = {"MaxReadRequestUnits": "50", "MaxWriteRequestUnits": "600"}
    index_cap = {"MaxReadRequestUnits": "70", "MaxWriteRequestUnits": "800"}
    units = (
        {"ReadCapacityUnits": "5", "WriteCapacityUnits": "60"},
        {"ReadCapacityUnits": "7", "WriteCapacityUnits": "80"},
    )
    listed = {"ContributorInsights": "THROTTLED_KEYS"}
    assert capacity({}) == (None,) * 8
    assert capacity(CAPPED | WARM | listed) == (cap, None, warm, insights, index_cap, None, None, insights)
    assert capacity(PROVISIONED) == (None, units[0], None, None, None, units[1], None, None)

    both = {"ReplicaRegion": "eu-west-1"}
    table = Rendered("table", both | CAPPED | WARM | listed).properties("GlobalTaskTable")
    [index] = table["GlobalSecondaryIndexes"]
    assert (table["WarmThroughput"], "WarmThroughput" in index) == (warm, False)
    assert [one["WriteOnDemandThroughputSettings"]["MaxWriteRequestUnits"] for one in (table, index)] == ["600", "800"]
    for replica in table["Replicas"]:
        [of_index] = replica["GlobalSecondaryIndexes"]
        reads = [one["ReadOnDemandThroughputSettings"]["MaxReadRequestUnits"] for one in (replica, of_index)]
        assert (reads, replica["ContributorInsightsSpecification"]) == (["50", "70"], insights)
        assert of_index["ContributorInsightsSpecification"] == insights

    all_three = both | {"SecondReplicaRegion": "us-east-2"}
    table = Rendered("table", all_three | PROVISIONED).properties("GlobalTaskTable")
    [index] = table["GlobalSecondaryIndexes"]
    writes = [one["WriteProvisionedThroughputSettings"]["WriteCapacityAutoScalingSettings"] for one in (table, index)]
    assert [bounds(one) for one in writes] == [("60", "60", "600"), ("80", "80", "800")]
    for replica in table["Replicas"]:
        settings = [one["ReadProvisionedThroughputSettings"] for one in (replica, *replica["GlobalSecondaryIndexes"])]
        scaled = [one["ReadCapacityAutoScalingSettings"] for one in settings]
        assert [bounds(one) for one in scaled] == [("5", "5", "50"), ("7", "7", "70")]
        assert scaled[0]["TargetTrackingScalingPolicyConfiguration"] == {"TargetValue": 70}


def test_provisioned_units_of_one_region_are_scaled_between_their_bounds() -> None:
    made = Rendered("table", PROVISIONED)
    targets = {
        (one["ScalableDimension"], one["ResourceId"]): (one["MinCapacity"], one["MaxCapacity"])
        for one in made.of_type("AWS::ApplicationAutoScaling::ScalableTarget")
    }
    index = f"table/<TaskTable>/index/{INDEX}"
    assert targets == {
        ("dynamodb:table:ReadCapacityUnits", "table/<TaskTable>"): ("5", "50"),
        ("dynamodb:table:WriteCapacityUnits", "table/<TaskTable>"): ("60", "600"),
        ("dynamodb:index:ReadCapacityUnits", index): ("7", "70"),
        ("dynamodb:index:WriteCapacityUnits", index): ("80", "800"),
    }
    policies = made.of_type("AWS::ApplicationAutoScaling::ScalingPolicy")
    assert sorted(one["ScalingTargetId"] for one in policies) == [
        f"<{where}{kind}Scaling>" for where in ("Index", "Table") for kind in ("Read", "Write")
    ]
    for one in policies:
        kind = "Read" if "Read" in one["ScalingTargetId"] else "Write"
        followed = one["TargetTrackingScalingPolicyConfiguration"]
        assert followed["TargetValue"] == 70
        assert followed["PredefinedMetricSpecification"]["PredefinedMetricType"] == f"DynamoDB{kind}CapacityUtilization"
    for other in ({}, PROVISIONED | {"ReplicaRegion": "eu-west-1"}):  # where there are none, or the table has its own
        assert Rendered("table", other).of_type("AWS::ApplicationAutoScaling::ScalableTarget") == []


def test_in_the_region_of_a_replica_there_are_alarms_alone() -> None:
    rendered = Rendered("table", {"CreateTable": "false", "ReplicaRegion": "eu-west-1"})
    assert {one["Type"] for one in rendered.resources.values()} == {"AWS::CloudWatch::Alarm"}


# Alarms


def alarm_of(metric: Metric, statistic: str) -> Any:
    """What the list of alarms says of a metric."""
    return next(one for one in ALARMS if one.metric is metric and one.statistic == statistic)


@pytest.mark.parametrize(
    ("template", "logical", "metric", "more"),
    [
        ("table", "OldestReadyOfQueue", metrics.OLDEST_READY_AGE, {"AlarmQueue": "reports"}),
        ("agents", "Unhealthy", metrics.HEALTHY, {}),
        ("agents", "StoreFailures", metrics.STORE_FAILURES, {}),
        ("agents", "ThreadsDied", metrics.THREADS_DIED, {}),
    ],
)
def test_alarms_over_the_metrics_of_agents_are_those_of_the_list(
    template: str, logical: str, metric: Metric, more: dict[str, str]
) -> None:
    made = Rendered(template, {**given(template), **more, "Namespace": "Shop"}).properties(logical)
    listed = alarm_of(metric, made["Statistic"])
    assert (made["Namespace"], made["MetricName"]) == ("Shop", metric.cloudwatch)
    assert float(made["Threshold"]) == listed.threshold
    assert made["ComparisonOperator"] == ("GreaterThanThreshold" if listed.above is not None else "LessThanThreshold")
    assert made["EvaluationPeriods"] * made["Period"] == listed.minutes * 60
    assert made["TreatMissingData"] == ("breaching" if listed.missing_is_bad else "notBreaching")
    dimensions = [one["Name"] for one in made.get("Dimensions", [])]
    assert dimensions == ([] if metric.dimension is None else [str(metric.dimension)])


def test_the_age_of_all_queues_is_one_query_as_the_page_of_metrics_has_it() -> None:
    made = Rendered("table", {})
    [query] = made.properties("OldestReadyOfAll")["Metrics"]
    page = (ROOT / "docs" / "reference" / "metrics.md").read_text(encoding="utf-8")
    assert query["Expression"] in page
    assert query["Expression"].startswith(f"SELECT MAX({metrics.OLDEST_READY_AGE.cloudwatch})")
    assert "OldestReadyOfQueue" not in made.resources
    assert "OldestReadyOfAll" not in Rendered("table", {"AlarmQueue": "reports"}).resources
    assert "OldestReadyOfAll" not in Rendered("table", {"Endpoint": "http://127.0.0.1:4566"}).resources


def test_throttles_are_watched_on_the_table_and_on_its_index() -> None:
    watched = {
        (one["MetricName"], tuple(sorted(d["Value"] for d in one["Dimensions"])))
        for one in Rendered("table", {}).of_type("AWS::CloudWatch::Alarm")
        if one.get("Namespace") == "AWS/DynamoDB"
    }
    both = (("TaskTable",), ("TaskTable", INDEX))
    assert watched == {(f"{kind}ThrottleEvents", where) for kind in ("Read", "Write") for where in both}


@pytest.mark.parametrize("name", ["agents", "containers", "doorbell", "failover", "table"])
def test_every_alarm_tells_the_topic_both_ways_if_there_is_one(name: str) -> None:
    topic = f"arn:aws:sns:eu-central-1:{ACCOUNT}:on-call"
    for one in Rendered(name, {**given(name), "AlarmTopic": topic}).of_type("AWS::CloudWatch::Alarm"):
        assert one["AlarmActions"] == one["OKActions"] == [topic]
    for one in Rendered(name, given(name)).of_type("AWS::CloudWatch::Alarm"):
        assert "AlarmActions" not in one


def query_behind(description: str) -> tuple[str, str]:
    """The query that the link of an alarm opens in Logs Insights, and the log group that it reads."""
    link = description.split()[-1]
    assert link.startswith("https://console.aws.amazon.com/cloudwatch/home?region=eu-central-1#logsV2:logs-insights$3F")
    opened = unquote(unquote(link.partition("queryDetail$3D")[2].replace("$", "%")))
    found = re.fullmatch(r"~\(editorString~'([\w.*-]+)~source~\(~'(.+)\)\)", opened, re.ASCII)
    assert found, opened
    return unquote(found[1].replace("*", "%")), found[2]


FLEETS: Final = ("agents", "containers")
OF_AGENTS: Final = {
    "Unhealthy": (fleet_events.HealthChanged,),
    "StoreFailures": (events.StoreFailed,),
    "ThreadsDied": (events.ThreadDied,),
    "Errors": (events.TaskFailed, fleet_events.AgentFailed),
}


@pytest.mark.parametrize(
    ("template", "logical", "group", "lines"),
    [
        *((fleet, logical, "Log", lines) for fleet in FLEETS for logical, lines in OF_AGENTS.items()),
        ("agents", "MachinesFailed", "Log", ()),
        ("doorbell", "EventsLost", "RouterLog", (edge_events.EventRefused, edge_events.EventFailed)),
        ("failover", "CanaryAlarm", "CanaryLog", (fleet_events.CanaryDown,)),
        ("failover", "BlindAlarm", "CanaryLog", (fleet_events.CanaryBlind,)),
    ],
)
def test_an_alarm_links_to_the_log_lines_with_the_reason(
    template: str, logical: str, group: str, lines: tuple[type[Event], ...]
) -> None:
    made = Rendered(template, given(template))
    description = made.properties(logical)["AlarmDescription"]
    query, read = query_behind(description)
    assert f"Logs Insights: {query} https" in description
    assert (read, made.resources[group]["Type"]) == (f"<{group}>", "AWS::Logs::LogGroup")
    assert len(description) < 1024 - 200  # CloudWatch's limit, less the name of the group
    for line in lines:
        assert set(LEVELS[line]) & set(re.findall(r"'([^']+)'", query)), line


# Logs and traces


@pytest.mark.parametrize("name", FLEETS)
def test_every_error_of_an_agent_is_counted_and_over_the_limit_an_alarm(name: str) -> None:
    made = Rendered(name, {**given(name), "Namespace": "Shop", "ErrorLines": "3", "LogDays": "90"})
    assert made.properties("Log") == {"RetentionInDays": "90"}
    counted = made.properties("ErrorFilter")
    levels = re.findall(r'\(\$\.level = "(\w+)"\)', counted["FilterPattern"])
    assert counted["FilterPattern"] == "{ " + " || ".join(f'($.level = "{level}")' for level in levels) + " }"
    assert (
        set(levels) == {"ERROR", "CRITICAL"} >= {level for level, _ in LEVELS.values()} - {"DEBUG", "INFO", "WARNING"}
    )
    alarm = made.properties("Errors")
    assert (counted["LogGroupName"], alarm["Threshold"]) == ("<Log>", "3")
    [told] = counted["MetricTransformations"]
    assert told == {"MetricNamespace": "Shop", "MetricName": alarm["MetricName"], "MetricValue": "1"}
    assert alarm["Namespace"] == "Shop"


@pytest.mark.parametrize("name", FLEETS)
def test_the_log_of_agents_outlives_them_and_a_stack_that_could_not_be_made(name: str) -> None:
    group = Rendered(name, given(name)).resources["Log"]
    assert (group["DeletionPolicy"], group["UpdateReplacePolicy"]) == ("Retain", "Retain")


@pytest.mark.parametrize("name", ["doorbell", "failover", "wsapi"])
@pytest.mark.parametrize("traced", ["true", "false"])
def test_functions_have_logs_that_end_and_are_traced_when_wanted(name: str, traced: str) -> None:
    made = Rendered(name, {**given(name), "Tracing": traced})
    functions = made.of_type("AWS::Lambda::Function")
    assert functions
    for function in functions:
        group = made.properties(function["LoggingConfig"]["LogGroup"].strip("<>"))
        assert group["RetentionInDays"] == 30
        assert function["TracingConfig"] == {"Mode": "Active" if traced == "true" else "PassThrough"}
        policies = documents(made.properties(function["Role"].strip("<>").removesuffix(".Arn")))
        assert ("traces" in policies) is (traced == "true")
        if traced == "true":
            assert policies["traces"]["Statement"] == [TRACES]


TRACES: Final = {
    "Sid": "Traces",
    "Effect": "Allow",
    "Action": ["xray:PutTelemetryRecords", "xray:PutTraceSegments"],
    "Resource": "*",
}


# Permissions


def documents(properties: Mapping[str, Any]) -> dict[str, Any]:
    """The policies of a role by their names."""
    return {one["PolicyName"]: one["PolicyDocument"] for one in properties["Policies"]}


@pytest.mark.parametrize(
    "more",
    [
        {},
        WITH_ALL,
        {"BlobBucket": "texts"},
        {"ArbiterRegion": "eu-north-1"},
        {"RegionalUrl": "wss://a", "TokenSecretArn": SECRET},
    ],
)
def test_machines_may_do_what_thunderagent_iam_prints_for_agents(more: dict[str, str]) -> None:
    made = Rendered("agents", {**AGENTS, **more})
    wanted = policy(
        Role.AGENT,
        Resources(
            table=made.parameters["TableName"],
            region="eu-central-1",
            account=ACCOUNT,
            queue_url=made.parameters["WakeQueueUrl"] or None,
            bucket=made.parameters["BlobBucket"] or None,
            namespace=made.parameters["Namespace"],
            arbiter="dynamodb://ThunderAgentArbiter?region=eu-north-1" if "ArbiterRegion" in more else None,
            secrets=(SECRET,) if "TokenSecretArn" in more else (),
        ),
    )
    assert documents(made.properties("Role"))["agent"] == wanted


def test_beside_that_a_machine_may_fetch_its_code_and_complete_its_hooks() -> None:
    made = Rendered("agents", AGENTS)
    role = made.properties("Role")
    assert documents(role).keys() == {"agent", "forwarder", "machine"}
    log = {"Sid": "Log", "Effect": "Allow", "Action": ["logs:CreateLogStream", "logs:PutLogEvents"]}
    assert documents(role)["forwarder"]["Statement"] == [{**log, "Resource": "<Log.Arn>"}]
    traced = Rendered("agents", {**AGENTS, "Tracing": "true"}).properties("Role")
    assert documents(traced)["forwarder"]["Statement"][1:] == [TRACES]
    told = {one["Sid"]: (one["Action"], one["Resource"]) for one in documents(role)["machine"]["Statement"]}
    group = f"arn:aws:autoscaling:eu-central-1:{ACCOUNT}:autoScalingGroup:*:autoScalingGroupName/ThunderAgent-agents"
    assert told == {
        "Artefact": (["s3:GetObject"], "arn:aws:s3:::artefacts/thunderagent/agents/*"),
        "Hooks": (["autoscaling:CompleteLifecycleAction"], group),
    }
    assert made.properties("Agents")["AutoScalingGroupName"] == "ThunderAgent-agents"
    assert role["ManagedPolicyArns"] == []
    shell = Rendered("agents", {**AGENTS, "SessionManager": "true"}).properties("Role")["ManagedPolicyArns"]
    assert shell == ["arn:aws:iam::aws:policy/AmazonSSMManagedInstanceCore"]


def test_the_function_may_do_what_thunderagent_iam_prints_for_producers() -> None:
    made = documents(Rendered("doorbell", DOORBELL).properties("RouterRole"))
    found = Resources(table="TaskTable", region="eu-central-1", account=ACCOUNT, queue_url=WITH_ALL["WakeQueueUrl"])
    wanted = policy(Role.PRODUCER, found)
    for statement in wanted["Statement"]:
        if statement["Sid"] == "WakeQueue":
            statement["Resource"] = "<WakeQueue.Arn>"
    assert made["tasks"] == wanted
    told = {one["Sid"]: (one["Action"], one["Resource"]) for one in made["function"]["Statement"]}
    assert told == {
        "LostEvents": (["sqs:SendMessage"], "<LostEvents.Arn>"),
        "Log": (["logs:CreateLogStream", "logs:PutLogEvents"], "<RouterLog.Arn>"),
    }


# The doorbell


def test_the_wake_queue_is_the_one_that_the_page_of_the_doorbell_makes() -> None:
    queue = Rendered("doorbell", DOORBELL).properties("WakeQueue")
    page = (ROOT / "docs" / "guides" / "doorbell.md").read_text(encoding="utf-8")
    for name in ("MessageRetentionPeriod", "ReceiveMessageWaitTimeSeconds"):
        assert f"{name}={queue[name]}" in page
    assert "RedrivePolicy" not in queue
    assert queue["SqsManagedSseEnabled"] is True


def test_an_event_that_became_no_task_is_kept_whoever_lost_it() -> None:
    made = Rendered("doorbell", DOORBELL)
    [target] = made.properties("Rule")["Targets"]
    assert target["DeadLetterConfig"] == {"Arn": "<LostEvents.Arn>"}
    destination = made.properties("RouterFailures")["DestinationConfig"]["OnFailure"]["Destination"]
    assert destination == "<LostEvents.Arn>"
    [statement] = made.properties("LostEventsPolicy")["PolicyDocument"]["Statement"]
    assert statement["Principal"] == {"Service": "events.amazonaws.com"}
    assert statement["Condition"] == {"ArnEquals": {"aws:SourceArn": "<Rule.Arn>"}}
    assert made.properties("EventsLost")["Dimensions"] == [{"Name": "QueueName", "Value": "<LostEvents.QueueName>"}]


def test_the_rule_takes_what_the_deployed_router_has_a_route_for() -> None:
    made = Rendered("doorbell", DOORBELL)
    pattern = made.properties("Rule")["EventPattern"]
    assert pattern == {"detail-type": [DETAIL_TYPE]}
    assert Rendered("doorbell", {**DOORBELL, "EventSources": "shop"}).properties("Rule")["EventPattern"]["source"] == [
        "shop"
    ]
    assert made.properties("Router")["Handler"] == "thunderagent.router.function.handler"
    assert made.properties("RulePermission")["SourceArn"] == "<Rule.Arn>"


# Machines


def test_machines_have_no_open_door_and_their_metadata_needs_a_token() -> None:
    data = Rendered("agents", AGENTS).properties("Template")["LaunchTemplateData"]
    assert data["MetadataOptions"]["HttpTokens"] == "required"
    assert data["MetadataOptions"]["HttpPutResponseHopLimit"] == 1
    assert "KeyName" not in data
    [disk] = data["BlockDeviceMappings"]
    assert disk["Ebs"]["Encrypted"] is True


def test_scaling_follows_the_metrics_that_agents_send() -> None:
    made = Rendered("agents", {**AGENTS, "Namespace": "Shop"})
    connections = made.properties("FollowConnections")["TargetTrackingConfiguration"]
    metric = connections["CustomizedMetricSpecification"]
    assert (metric["Namespace"], metric["MetricName"]) == ("Shop", metrics.ACTIVE_CONNECTIONS.cloudwatch)
    assert metric["Unit"] == metrics.ACTIVE_CONNECTIONS.unit
    assert (metric["Statistic"], connections["TargetValue"]) == ("Average", 700)
    backlog = made.properties("FollowBacklog")["TargetTrackingConfiguration"]
    by_id = {one["Id"]: one for one in backlog["CustomizedMetricSpecification"]["Metrics"]}
    stats = {name: one["MetricStat"] for name, one in by_id.items() if "MetricStat" in one}
    assert {name: (one["Metric"]["MetricName"], one["Stat"]) for name, one in stats.items()} == {
        "backlog": (metrics.BACKLOG.cloudwatch, "Maximum"),
        "agents": (metrics.HEALTHY.cloudwatch, "SampleCount"),
    }
    assert {one["Metric"]["Namespace"] for one in stats.values()} == {"Shop"}
    assert [one["Expression"] for one in by_id.values() if one["ReturnData"]] == ["backlog / agents"]


def test_a_machine_that_goes_has_longer_than_its_service_takes_to_stop() -> None:
    unit = (ROOT / "systemd" / "thunderagent.service").read_text(encoding="utf-8")
    [stop_s] = [int(line.partition("=")[2]) for line in unit.splitlines() if line.startswith("TimeoutStopSec=")]
    hook = Rendered("agents", AGENTS).properties("Drain")
    assert hook["HeartbeatTimeout"] >= stop_s + 30
    assert (hook["LifecycleTransition"], hook["DefaultResult"]) == ("autoscaling:EC2_INSTANCE_TERMINATING", "CONTINUE")
    assert hook["LifecycleHookName"] == "drain"


def test_a_machine_is_in_service_only_when_it_says_that_its_agents_run() -> None:
    agents = Rendered("agents", {**AGENTS, "MinSize": "3"}).resources["Agents"]
    assert agents["CreationPolicy"] == {"ResourceSignal": {"Count": "3", "Timeout": "PT15M"}}
    assert agents["UpdatePolicy"]["AutoScalingRollingUpdate"]["PauseTime"] == "PT15M"
    [hook] = agents["Properties"]["LifecycleHookSpecificationList"]
    assert (hook["LifecycleTransition"], hook["DefaultResult"]) == ("autoscaling:EC2_INSTANCE_LAUNCHING", "ABANDON")
    assert hook["HeartbeatTimeout"] == 15 * 60
    unasked = Rendered("agents", {**AGENTS, "WaitForSignals": "false"}).resources["Agents"]
    assert unasked["CreationPolicy"]["ResourceSignal"]["Count"] == 0
    assert unasked["Properties"]["LifecycleHookSpecificationList"] == [hook]


def test_a_group_without_room_for_one_more_lets_a_machine_go_first() -> None:
    for most, kept in (("3", "2"), ("2", 0)):
        policy = Rendered("agents", {**AGENTS, "MinSize": "2", "MaxSize": most}).resources["Agents"]["UpdatePolicy"]
        assert policy["AutoScalingRollingUpdate"]["MinInstancesInService"] == kept  # AWS refuses it at MaxSize


# What was tried


def test_the_page_says_of_every_resource_what_was_tried_of_it() -> None:
    page = (ROOT / "docs" / "reference" / "aws-resources.md").read_text(encoding="utf-8")
    table = page.partition("<!-- types and stacks")[2].partition("<!-- end -->")[0]
    rows = re.findall(r"^\| `(\S+)` \| ([a-z, ]+) \| (used|made|rendered)\b", table, flags=re.MULTILINE)
    told = {kind: (stacks.split(", "), how == "rendered") for kind, stacks, how in rows}
    assert len(rows) == table.count("\n| `"), "each row begins with used, made or rendered"

    everything = {"failover": {**NAMES, "KeepAway": "true"}, "wsapi": DOMAIN, "table": PROVISIONED}
    stacks: dict[str, list[str]] = {}
    deployed = set()
    for path in sorted(INFRA.glob("[a-z]*.yaml")):
        name = path.stem
        template = Rendered.template_of(name)
        for kind in {str(one["Type"]) for one in template["Resources"].values()}:
            stacks.setdefault(kind.removeprefix("AWS::"), []).append(name)
        local = {"Endpoint": "http://127.0.0.1:4566"} if "Endpoint" in template["Parameters"] else {}
        for more in ({}, {"Global": "true"} if "Global" in template["Parameters"] else {}):
            made = Rendered(name, {**given(name), **everything.get(name, {}), **local, **more})
            deployed |= {one["Type"].removeprefix("AWS::") for one in made.resources.values()}
    assert told == {kind: (names, kind not in deployed) for kind, names in stacks.items()}
