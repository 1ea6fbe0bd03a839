"""`thunderagent doctor --aws`: compares the deployed stacks with the account. It only reads.

Resources, parameters and outputs of the stacks say what should be there. A new alarm or log group of a template needs
no change here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final

from thunderagent.model.errors import TableMissing, ThunderAgentError
from thunderagent.ops.doctor.account import FUNCTION, GROUP, SERVICE, Account, Stack
from thunderagent.ops.doctor.allowances import look_at_buckets, look_at_permissions, look_at_quotas, look_at_secrets
from thunderagent.ops.doctor.checks import judge_clock
from thunderagent.ops.doctor.dynamo import look_at_table
from thunderagent.ops.doctor.findings import Finding, State
from thunderagent.ops.doctor.services import SIGN_IN, Unanswered
from thunderagent.stores.dynamo.table import describe, index_of, of_backups, of_expiry

TABLES: Final = ("AWS::DynamoDB::Table", "AWS::DynamoDB::GlobalTable")
TABLE_UNITS, INDEX_UNITS = 3, 5
"""Write units of a task that is put, claimed and done, of the table and of its index; see docs/inside/benchmarks.md."""
NEW_S: Final = 900.0
"""Age up to which an alarm may have no data."""


def _gone(account: Account, check: str, stack: Stack, what: str) -> Finding:
    remedy = account.deploy(stack, "--revert-drift")
    return Finding(check, State.WRONG, f"{what} of {stack.name} does not exist any more", remedy)


# The stacks


def look_at_stacks(account: Account) -> Iterator[Finding]:
    """The account, and its stacks."""
    sent = account.clock.monotonic()
    try:
        reply = account.ask("sts", "GetCallerIdentity")
    except Unanswered as unanswered:
        account.is_reachable = False
        remedy = f"is there a region {account.region}? Give --region; check the route of this host"
        what = f"AWS cannot be asked in {account.region}: {unanswered}"
        yield Finding("account", State.WRONG, what, remedy if unanswered.is_away else SIGN_IN)
        return
    date = reply["ResponseMetadata"]["HTTPHeaders"].get("date")
    account.clock.observe(date, sent=sent, received=account.clock.monotonic())
    account.who = reply["Arn"]
    yield Finding("account", State.OK, f"{account.who} in {account.region}")
    try:
        found = list(account.pages("cloudformation", "DescribeStacks", "Stacks"))
        for one in sorted(found, key=lambda one: str(one["StackName"])):
            name = one["StackName"]
            if name.rpartition("-")[0] == account.prefix:
                made = account.pages("cloudformation", "ListStackResources", "StackResourceSummaries", StackName=name)
                account.stacks.append(stack := Stack.of(one, made))
                yield _of_stack(account, stack)
    except Unanswered as unanswered:  # without the list nothing is examined, and nothing would be wrong
        account.is_reachable = False
        yield unanswered.finding("stacks")
        return
    if account.stacks:
        return
    where = f"there are no stacks {account.prefix}-* in {account.region}"
    if account.place.table:
        yield Finding("stacks", State.WARNING, f"{where}, so there are no alarms", account.deploy(None))
    else:
        account.is_reachable = False
        remedy = f"give --region, --prefix or --store dynamodb://TABLE; or deploy them: {account.deploy(None)}"
        yield Finding("stacks", State.WRONG, where, remedy)


def _of_stack(account: Account, stack: Stack) -> Finding:
    check, status = f"stack {stack.name}", stack.status.partition(" ")[0]
    drifted = [
        f"{one['LogicalResourceId']} ({drift.lower()})"
        for one in stack.resources
        if (drift := one.get("DriftInformation", {}).get("StackResourceDriftStatus")) in ("MODIFIED", "DELETED")
    ]
    if status.endswith("_FAILED") or status == "ROLLBACK_COMPLETE":
        return Finding(check, State.WRONG, stack.status, account.deploy(stack))
    if status.endswith("_IN_PROGRESS") or "ROLLBACK" in status:
        return Finding(check, State.WARNING, stack.status, account.deploy(stack))
    if drifted:
        see = account.aws(f"cloudformation describe-stack-resource-drifts --stack-name {stack.name}")
        what = f"the account differs from its template in {', '.join(drifted)}"
        remedy = f"{see}; put it back: {account.deploy(stack, '--revert-drift')}"
        return Finding(check, State.WARNING, what, remedy)
    return Finding(check, State.OK, f"{stack.status}, with {len(stack.resources)} of its resources")


# Tables


def look_at_tables(account: Account) -> Iterator[Finding]:
    """The tables of the stacks, and the table of the settings, which needs no stack."""
    queues = {
        stack.parameters["TableName"]: stack
        for stack in account.stacks
        if {"TableName", "CreateTable"} <= stack.parameters.keys()
    }
    wanted: dict[str, Stack | None] = {**queues, **{name: stack for stack, name in account.ids(*TABLES)}}
    if account.place.table:
        wanted.setdefault(account.place.table, None)
    for name, stack in wanted.items():
        place = replace(account.place, table=name)
        engine: Any = account.opening(place.url)
        try:
            table = describe(engine)
            if name in queues or name == account.place.table:
                yield from _of_queue(account, engine, table, stack)
            else:
                yield from _of_other(account, engine, is_kept=stack is None or name in stack.parameters.values())
            yield from _promised(account, name, table, stack)
        except TableMissing as error:
            remedy = "restore it from a backup, see docs/guides/disaster-recovery.md" if stack else str(error)
            yield Finding("table", State.WRONG, f"{place} does not exist", remedy)
        except ThunderAgentError as error:
            yield Finding(
                "table", State.UNKNOWN, f"cannot tell: {error}", "allowed is all with: thunderagent iam doctor"
            )
        finally:
            engine.close()


def _of_queue(account: Account, engine: Any, table: dict[str, Any], stack: Stack | None) -> Iterator[Finding]:
    """Keys, index, billing, time to live, backups, and the throughput of the table."""
    create = "thunderagent table create"
    for one in look_at_table(engine):
        if one.check == "billing" and stack and "BillingMode" in stack.parameters:
            yield _of_capacity(account, table, stack)
            continue
        yield replace(one, remedy=one.remedy.replace(create, f"{create} --store '{engine.url}'"))
    warm, of_index = table.get("WarmThroughput") or {}, (index_of(table) or {}).get("WarmThroughput") or {}
    if writes := warm.get("WriteUnitsPerSecond"):
        tasks = min(writes / TABLE_UNITS, of_index.get("WriteUnitsPerSecond", writes) / INDEX_UNITS)
        what = f"{writes:,} write and {warm.get('ReadUnitsPerSecond', 0):,} read units a second"
        yield Finding("warm throughput", State.OK, f"{what}, which is about {tasks:,.0f} tasks a second at once")


def _of_capacity(account: Account, table: Mapping[str, Any], stack: Stack) -> Finding:
    """Billing and throughput of the table, against the parameters of its stack."""
    given, caps, warm = stack.parameters, table.get("OnDemandThroughput", {}), table.get("WarmThroughput", {})
    mode = table.get("BillingModeSummary", {}).get("BillingMode", "PROVISIONED")
    differ = [f"BillingMode {mode}"] if mode != given["BillingMode"] else []
    for kind in ("Read", "Write"):
        most, has = given.get(f"Max{kind}Units"), max(0, caps.get(f"Max{kind}RequestUnits", 0))
        if mode == given["BillingMode"] == "PAY_PER_REQUEST" and int(most or 0) != has:
            differ.append(f"Max{kind}Units {has or 'none'}")
        least, has = given.get(f"Warm{kind}Units"), warm.get(f"{kind}UnitsPerSecond", 0)
        if least and int(least) > has:
            differ.append(f"Warm{kind}Units {has}")
    if differ:
        what = f"{', '.join(differ)}, which is not what {stack.name} says"
        return Finding("billing", State.WARNING, what, account.deploy(stack, "--revert-drift"))
    most = given.get("MaxWriteUnits")
    how = "on demand" if mode == "PAY_PER_REQUEST" else "provisioned"
    return Finding("billing", State.OK, how + (f", at most {most} write units a second" if most else ""))


def _of_other(account: Account, engine: Any, *, is_kept: bool) -> Iterator[Finding]:
    """Backups of a table that is kept, such as the arbiter's; the time to live of others, such as connections."""
    name = engine.table
    found = list(of_backups(engine) if is_kept else of_expiry(engine))
    words = (
        f"update-continuous-backups --table-name {name}"
        " --point-in-time-recovery-specification PointInTimeRecoveryEnabled=true"
        if is_kept
        else f"update-time-to-live --table-name {name} --time-to-live-specification Enabled=true,AttributeName=expireAt"
    )
    for one in found:
        yield Finding("table", State.WARNING, f"{name}: {one.what.partition(':')[0]}", account.aws(f"dynamodb {words}"))
    if not found:
        yield Finding("table", State.OK, f"{engine.connection.place} is there")


def _promised(account: Account, name: str, table: Mapping[str, Any], stack: Stack | None) -> Iterator[Finding]:
    """Deletion protection, replicas, and the stream that replication reads."""
    given = stack.parameters if stack else {"DeletionProtection": "true", "TableName": name}
    if table.get("DeletionProtectionEnabled"):
        yield Finding("deletion protection", State.OK, f"{name}: on")
    elif given.get("DeletionProtection") == "true" and name in given.values():
        remedy = account.aws(f"dynamodb update-table --table-name {name} --deletion-protection-enabled")
        yield Finding("deletion protection", State.WARNING, f"{name}: off, so one request deletes it", remedy)
    has = {one["RegionName"]: one.get("ReplicaStatus", "ACTIVE") for one in table.get("Replicas", ())}
    for parameter in ("ReplicaRegion", "SecondReplicaRegion"):
        if (region := given.get(parameter)) and region not in has:
            yield Finding("replicas", State.WRONG, f"{name}: none in {region}", account.deploy(stack, "--revert-drift"))
    for region, status in has.items():
        is_on = status == "ACTIVE"
        remedy = "" if is_on else f"see: {account.aws(f'dynamodb describe-table --table-name {name}')}"
        yield Finding("replicas", State.OK if is_on else State.WARNING, f"{name}: that in {region} is {status}", remedy)
    is_strong = table.get("MultiRegionConsistency") == "STRONG"
    if has and not is_strong and not table.get("StreamSpecification", {}).get("StreamEnabled"):
        remedy = account.deploy(stack, "--revert-drift")
        yield Finding("replicas", State.WRONG, f"{name}: it has no stream, which replication reads", remedy)


# Alarms


def look_at_alarms(account: Account) -> Iterator[Finding]:
    """Whether each alarm exists, is quiet, and notifies a topic."""
    wanted = {name: stack for stack, name in account.ids("AWS::CloudWatch::Alarm")}
    names, found = list(wanted), dict[str, dict[str, Any]]()
    for at in range(0, len(names), 100):
        reply = account.ask("cloudwatch", "DescribeAlarms", AlarmNames=names[at : at + 100], MaxRecords=100)
        found |= {one["AlarmName"]: one for one in reply["MetricAlarms"]}
    silent: dict[str, Stack] = {}
    for name, stack in wanted.items():
        if (one := found.get(name)) is None:
            yield _gone(account, "alarms", stack, f"the alarm {name}")
            continue
        state, age_s = one["StateValue"], (datetime.now(UTC) - one["StateUpdatedTimestamp"]).total_seconds()
        if state == "ALARM" or (state != "OK" and age_s > NEW_S):
            see = account.aws(f"cloudwatch describe-alarm-history --alarm-name {name}")
            yield Finding("alarms", State.WARNING, f"{name} is {state}: {one.get('AlarmDescription', '')}", see)
        topic, actions = stack.parameters.get("AlarmTopic"), one.get("AlarmActions", ())
        if not one.get("ActionsEnabled", True):
            remedy = account.aws(f"cloudwatch enable-alarm-actions --alarm-names {name}")
            yield Finding("alarms", State.WARNING, f"the actions of {name} are switched off", remedy)
        elif topic and topic not in actions:
            remedy = account.deploy(stack, "--revert-drift")
            yield Finding("alarms", State.WARNING, f"{name} does not notify {topic}, as its stack says", remedy)
        elif not actions:
            silent[stack.name] = stack
    for name, stack in silent.items():
        remedy = account.deploy(stack, "--parameter AlarmTopic=ARN")
        yield Finding("alarms", State.WARNING, f"the alarms of {name} notify no topic", remedy)
    if found:
        yield Finding("alarms", State.OK, f"{len(found)} of {len(wanted)} are there")


# Resources of one type, one at a time


def look_at_log(account: Account, stack: Stack, name: str) -> Iterator[Finding] | None:
    """Whether a log group is kept for the days of its stack."""
    groups = account.ask("logs", "DescribeLogGroups", logGroupNamePrefix=name)["logGroups"]
    if not (found := [one for one in groups if one["logGroupName"] == name]):
        return None
    days, wanted = found[0].get("retentionInDays"), stack.parameters.get("LogDays")
    if days is not None and wanted in (None, str(days)):
        return iter([Finding("logs", State.OK, f"{name} is kept for {days} days")])
    lasts = "for ever, at a price" if days is None else f"for {days} days"
    remedy = account.aws(f"logs put-retention-policy --log-group-name {name} --retention-in-days {wanted or 30}")
    return iter([Finding("logs", State.WARNING, f"{name} is kept {lasts}, not for {wanted or 30} days", remedy)])


def look_at_queue(account: Account, stack: Stack, url: str) -> Iterator[Finding]:
    """Whether lost events wait in a queue that is not the wake queue."""
    name, what = url.rpartition("/")[2], ["ApproximateNumberOfMessages"]
    number = account.ask("sqs", "GetQueueAttributes", QueueUrl=url, AttributeNames=what)["Attributes"][what[0]]
    if int(number) and url != stack.outputs.get("WakeQueueUrl"):
        remedy = account.aws(f"sqs receive-message --queue-url {url} --max-number-of-messages 10")
        yield Finding("queues", State.WARNING, f"{name} has {number} lost events, each with its reason", remedy)
    else:
        yield Finding("queues", State.OK, f"{name}: about {number} messages")


def look_at_function(account: Account, stack: Stack, name: str) -> Iterator[Finding]:
    """Whether the last update of a function went well."""
    one = account.ask("lambda", "GetFunctionConfiguration", FunctionName=name)
    if one.get("State") == "Failed" or one.get("LastUpdateStatus") == "Failed":
        reason = one.get("LastUpdateStatusReason") or one.get("StateReason") or "no reason given"
        yield Finding("functions", State.WRONG, f"{name}: its last update failed: {reason}", account.deploy(stack))
    else:
        yield Finding("functions", State.OK, f"{name}: last update {one['LastModified'][:19]}Z")


def look_at_group(account: Account, stack: Stack, name: str) -> Iterator[Finding] | None:
    """Whether the machines of a group are in service, and why the last one did not start."""
    groups = account.ask("autoscaling", "DescribeAutoScalingGroups", AutoScalingGroupNames=[name])["AutoScalingGroups"]
    reply = account.ask("autoscaling", "DescribeScalingActivities", AutoScalingGroupName=name, MaxRecords=20)
    return _of_group(account, stack, groups[0], reply["Activities"]) if groups else None


def _of_group(
    account: Account, stack: Stack, group: Mapping[str, Any], activities: list[dict[str, Any]]
) -> Iterator[Finding]:
    name, least, most, wanted = (
        group[one] for one in ("AutoScalingGroupName", "MinSize", "MaxSize", "DesiredCapacity")
    )
    see = account.aws(f"autoscaling describe-scaling-activities --auto-scaling-group-name {name}")
    launches = [one for one in activities if one.get("Description", "").startswith("Launching")]
    if launches and launches[0]["StatusCode"] in ("Failed", "Cancelled"):
        cause = launches[0].get("StatusMessage") or launches[0].get("Cause", "no reason given")
        yield Finding("machines", State.WRONG, f"the last machine of {name} did not start: {cause}", see)
    if most <= least:
        what = (
            f"{name}: MaxSize {most} is not over MinSize {least}, so new code takes a machine away before it makes one"
        )
        yield Finding("machines", State.WARNING, what, account.deploy(stack, f"--parameter MaxSize={least + 1}"))
    if suspended := [one["ProcessName"] for one in group.get("SuspendedProcesses", ())]:
        remedy = account.aws(f"autoscaling resume-processes --auto-scaling-group-name {name}")
        yield Finding("machines", State.WARNING, f"{name}: {', '.join(suspended)} suspended", remedy)
    serving = len([one for one in group["Instances"] if one["LifecycleState"] == "InService"])
    what = f"{name}: {serving} of {wanted} machines in service, {least} to {most} allowed"
    if serving >= wanted or account.is_local:
        yield Finding("machines", State.OK, what)
    else:
        yield Finding("machines", State.WARNING if serving else State.WRONG, what, see)


def look_at_service(account: Account, stack: Stack, arn: str) -> Iterator[Finding] | None:
    """Whether the containers of a service run, and whether its last deployment went well."""
    cluster = stack.outputs.get("ClusterName") or arn.split("/")[-2]
    found = account.ask("ecs", "DescribeServices", cluster=cluster, services=[arn])["services"]
    return _of_service(account, cluster, found[0]) if found and found[0]["status"] != "INACTIVE" else None


def _of_service(account: Account, cluster: str, service: Mapping[str, Any]) -> Iterator[Finding]:
    name, running, wanted = service["serviceName"], service["runningCount"], service["desiredCount"]
    see = account.aws(f"ecs describe-services --cluster {cluster} --services {name}")
    for one in service.get("deployments", ()):
        if one.get("rolloutState") == "FAILED":
            reason = one.get("rolloutStateReason", "no reason given")
            yield Finding("containers", State.WRONG, f"a deployment of {name} failed: {reason}", see)
    what = f"{name}: {running} of {wanted} containers run"
    if running >= wanted or account.is_local:
        yield Finding("containers", State.OK, what)
    else:
        last = "".join(f"; {one['message']}" for one in service.get("events", ())[:1])
        yield Finding("containers", State.WARNING if running else State.WRONG, f"{what}{last}", see)


def _each(kind: str, check: str, what: str, look: Look, account: Account) -> Iterator[Finding]:
    """Look at each resource of a type, and report missing ones."""
    for stack, name in account.ids(kind):
        try:
            found = look(account, stack, name)
            yield from [_gone(account, check, stack, f"{what} {name}")] if found is None else found
        except Unanswered as error:
            if not error.is_absent:
                raise
            yield _gone(account, check, stack, f"{what} {name}")


Look = Callable[[Account, Stack, str], Iterator[Finding] | None]
EACH: Final[tuple[tuple[str, str, str, Look], ...]] = (
    ("AWS::Logs::LogGroup", "logs", "the log group", look_at_log),
    ("AWS::SQS::Queue", "queues", "the queue", look_at_queue),
    (FUNCTION, "functions", "the function", look_at_function),
    (GROUP, "machines", "the group", look_at_group),
    (SERVICE, "containers", "the service", look_at_service),
)
"""Type of resource, its check, its words, and the function that looks at one; None: it does not exist."""


LOOKS: Final[Mapping[str, Callable[[Account], Iterator[Finding]]]] = {
    "stacks": look_at_stacks,
    "tables": look_at_tables,
    "alarms": look_at_alarms,
    **{check: partial(_each, kind, check, what, look) for kind, check, what, look in EACH},
    "permissions": look_at_permissions,
    "buckets": look_at_buckets,
    "canary tokens": look_at_secrets,
    "quotas": look_at_quotas,
    "clock": lambda account: iter([judge_clock(account.clock)]),
}
"""The checks in their order."""
