"""The least AWS permissions of each role, as IAM policies for the resources of the settings."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final
from urllib.parse import parse_qs, urlsplit

from thunderagent.jobs.extension import extension
from thunderagent.model.canary_targets import From, TokenSource
from thunderagent.model.errors import ConfigurationError
from thunderagent.settings import Settings
from thunderagent.stores.dynamo.expressions import INDEX

BLOBS: Final = "thunderagent/*"
"""Names of the objects in a bucket."""


class Role(StrEnum):
    PRODUCER = "producer"
    """An application: enqueues, reads by id, waits, cancels, retries; it does not list tasks."""
    AGENT = "agent"
    OPERATOR = "operator"
    """A person with the command line."""
    DOCTOR = "doctor"
    """The command `doctor --aws`, which reads the installation and no task."""


_PRODUCER: Final = frozenset({"BatchGetItem", "DeleteItem", "GetItem", "PartiQLInsert", "PutItem", "UpdateItem"})
_OPERATOR: Final = frozenset(
    {
        "CreateTable",
        "DeleteTable",
        "DescribeContinuousBackups",
        "DescribeTimeToLive",
        "UpdateContinuousBackups",
        "UpdateTable",
        "UpdateTimeToLive",
    }
)
TABLE_ACTIONS: Final[Mapping[Role, frozenset[str]]] = {
    Role.PRODUCER: _PRODUCER,
    Role.AGENT: _PRODUCER | {"DescribeTable"},
    Role.OPERATOR: _PRODUCER | {"DescribeTable"} | _OPERATOR,
}
"""Actions of DynamoDB on the table."""

INDEX_ACTIONS: Final[Mapping[Role, frozenset[str]]] = {
    Role.PRODUCER: frozenset(),
    Role.AGENT: frozenset({"Query"}),
    Role.OPERATOR: frozenset({"Query"}),
}
"""Actions of DynamoDB on the index, which lists tasks. The table itself is read by ids."""

QUEUE_ACTIONS: Final[Mapping[Role, frozenset[str]]] = {
    Role.PRODUCER: frozenset({"SendMessage"}),
    Role.AGENT: frozenset({"ChangeMessageVisibility", "DeleteMessage", "ReceiveMessage", "SendMessage"}),
    Role.OPERATOR: frozenset(
        {"ChangeMessageVisibility", "DeleteMessage", "GetQueueAttributes", "ReceiveMessage", "SendMessage"}
    ),
}
"""Actions of SQS on the wake queue; an operator's `doctor` tries all of them."""

BUCKET_ACTIONS: Final[Mapping[Role, frozenset[str]]] = dict.fromkeys(
    TABLE_ACTIONS, frozenset({"GetObject", "PutObject"})
)
"""Actions of S3 on the objects of the bucket."""

ARBITER_ACTIONS: Final[Mapping[Role, frozenset[str]]] = {
    Role.PRODUCER: frozenset({"BatchGetItem"}),
    Role.AGENT: frozenset({"BatchGetItem", "GetItem", "PutItem", "UpdateItem"}),
    Role.OPERATOR: frozenset({"BatchGetItem", "GetItem", "UpdateItem"}),
}
"""Actions of DynamoDB on the arbiter's table, which is in another region. An application asks it before it changes rows
that agents change too."""

DOCTOR_ACTIONS: Final[Mapping[str, tuple[str, frozenset[str]]]] = {
    "autoscaling": ("", frozenset({"DescribeAutoScalingGroups", "DescribeScalingActivities"})),
    "cloudformation": ("", frozenset({"DescribeStacks", "ListStackResources"})),
    "cloudwatch": ("", frozenset({"DescribeAlarms"})),
    "dynamodb": ("table/*", frozenset({"DescribeContinuousBackups", "DescribeTable", "DescribeTimeToLive"})),
    "ec2": ("", frozenset({"DescribeInstanceTypes"})),
    "ecs": ("", frozenset({"DescribeServices"})),
    "iam": ("", frozenset({"SimulatePrincipalPolicy"})),
    "lambda": ("function:*", frozenset({"GetFunctionConfiguration"})),
    "logs": ("", frozenset({"DescribeLogGroups"})),
    "s3": ("", frozenset({"GetBucketPublicAccessBlock"})),
    "servicequotas": ("", frozenset({"GetAWSDefaultServiceQuota", "GetServiceQuota"})),
    "sqs": ("*", frozenset({"GetQueueAttributes"})),
}
"""Actions of the doctor by service, and the resources of the account and region; an empty text stands for all."""

METRICS_ACTION: Final = "cloudwatch:PutMetricData"
METRICS_ROLES: Final = frozenset({Role.AGENT, Role.OPERATOR})
"""Roles that send metrics, and whose canary reads its token."""

_ACCOUNT: Final = re.compile(r"\d{12}|\*")
_REGION: Final = re.compile(r"[a-z]{2}(-[a-z]+)+-\d|\*")
_PARTITION: Final = re.compile(r"aws(-[a-z]+)*")
_QUEUE_REGION: Final = re.compile(r"(?:^|\.)sqs(?:-fips)?\.([a-z]{2}[a-z0-9-]*-\d)\.|^([a-z]{2}[a-z0-9-]*-\d)\.queue\.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """The resources of a policy. The region or account `*` means any, and is legal in an ARN."""

    table: str
    region: str = "*"
    account: str = "*"
    partition: str = "aws"
    queue_url: str | None = None
    bucket: str | None = None
    namespace: str | None = None
    arbiter: str | None = None
    """URL of the arbiter's table."""
    push_endpoint: str | None = None
    """URL of the management API of the WebSocket API."""
    push_connections: str | None = None
    """URL of its table of connections."""
    secrets: tuple[str, ...] = ()
    """ARNs of the secrets that the canary's token comes from."""


def resources(
    settings: Settings, *, account: str | None = None, region: str | None = None, partition: str | None = None
) -> Resources:
    """The resources that the settings name.

    Args:
        settings: store, wake queue, bucket, namespace and arbiter.
        account: 12 digits; None: any.
        region: None: that of the store's URL, else any.
        partition: `aws`, `aws-cn` or `aws-us-gov`; None: that of the region.

    Raises:
        ConfigurationError: the store is not in DynamoDB, or one of the values is none.
    """
    parts = urlsplit(settings.store)
    if parts.scheme != "dynamodb" or not parts.netloc:
        raise ConfigurationError(
            f"the store {settings.store} is a file and needs no IAM policy: name a table with --store "
            "dynamodb://TaskTable?region=eu-central-1, or in THUNDERAGENT_STORE"
        )
    region = region or (parse_qs(parts.query).get("region") or ["*"])[0]
    account = account or "*"
    partition = partition or _partition_of(region)
    for name, value, allowed, example in (
        ("account", account, _ACCOUNT, "123456789012"),
        ("region", region, _REGION, "eu-central-1"),
        ("partition", partition, _PARTITION, "aws"),
    ):
        if not allowed.fullmatch(value):
            raise ConfigurationError(f"the {name} is {value!r}; write for example {example}")
    return Resources(
        table=parts.netloc,
        region=region,
        account=account,
        partition=partition,
        queue_url=settings.wake_queue_url,
        bucket=settings.blob_bucket,
        namespace=settings.cloudwatch_namespace,
        arbiter=settings.region_arbiter,
        push_endpoint=settings.push_endpoint,
        push_connections=settings.push_connections,
        secrets=tuple(_secret_arns(settings, region, account, partition)),
    )


def policy(role: Role, to: Resources) -> dict[str, Any]:
    """The policy document of a role, for `aws iam put-role-policy`."""
    if role is Role.DOCTOR:
        secrets = extension("canary.permissions")(to) if to.secrets else []
        return {"Version": "2012-10-17", "Statement": [*_looks(to), *secrets]}
    table = f"arn:{to.partition}:dynamodb:{to.region}:{to.account}:table/{to.table}"
    statements = [
        allow("Tasks", "dynamodb", TABLE_ACTIONS[role], table),
    ]
    if INDEX_ACTIONS[role]:
        statements.append(allow("Index", "dynamodb", INDEX_ACTIONS[role], f"{table}/index/{INDEX}"))
    if to.queue_url:
        statements.append(allow("WakeQueue", "sqs", QUEUE_ACTIONS[role], _queue_arn(to.queue_url, to)))
    if to.bucket:
        statements.append(
            allow("LargeTexts", "s3", BUCKET_ACTIONS[role], f"arn:{to.partition}:s3:::{to.bucket}/{BLOBS}")
        )
    if to.arbiter and ARBITER_ACTIONS[role] and (arn := table_arn(to.arbiter, to)) is not None:
        statements.append(allow("Arbiter", "dynamodb", ARBITER_ACTIONS[role], arn))
    if to.push_endpoint and role is Role.AGENT:
        statements += extension("push.permissions")(to)
    if to.namespace and role in METRICS_ROLES:
        only = {"StringEquals": {"cloudwatch:namespace": to.namespace}}
        metrics = {"Sid": "Metrics", "Effect": "Allow", "Action": METRICS_ACTION, "Resource": "*", "Condition": only}
        statements.append(metrics)
    if to.secrets and role in METRICS_ROLES:
        statements += extension("canary.permissions")(to)
    return {"Version": "2012-10-17", "Statement": statements}


def _looks(to: Resources) -> Iterator[dict[str, Any]]:
    for service, (which, actions) in DOCTOR_ACTIONS.items():
        arn = f"arn:{to.partition}:{service}:{to.region}:{to.account}:{which}" if which else "*"
        yield allow(f"Look{service.capitalize()}", service, actions, arn)


def _secret_arns(settings: Settings, region: str, account: str, partition: str) -> Iterator[str]:
    """The secrets of the canary, at most one for each target. AWS adds six letters to the name of a secret."""
    if settings.canary_token_from is None or not settings.canary_targets:
        return
    sources = {TokenSource.parse(settings.canary_token_from, target): None for target in settings.canary_targets}
    for source in sources:
        if source.kind is From.SECRET and source.place.startswith("arn:"):
            yield source.place
        elif source.kind is From.SECRET:
            yield f"arn:{partition}:secretsmanager:{source.region or region}:{account}:secret:{source.place}-??????"


def allow(name: str, service: str, actions: frozenset[str], resource: str) -> dict[str, Any]:
    return {
        "Sid": name,
        "Effect": "Allow",
        "Action": [f"{service}:{action}" for action in sorted(actions)],
        "Resource": resource,
    }


def _partition_of(region: str) -> str:
    return next((f"aws-{name}" for name in ("cn", "us-gov") if region.startswith(f"{name}-")), "aws")


def table_arn(url: str, to: Resources) -> str | None:
    """The ARN of a URL's table; None for a file."""
    parts = urlsplit(url)
    region = (parse_qs(parts.query).get("region") or ["*"])[0]
    return (
        f"arn:{to.partition}:dynamodb:{region}:{to.account}:table/{parts.netloc}"
        if parts.scheme == "dynamodb"
        else None
    )


def _queue_arn(url: str, to: Resources) -> str:
    """The ARN of a queue. Its URL has the name and the account, and mostly the region."""
    parts = urlsplit(url)
    account, _, name = parts.path.strip("/").partition("/")
    found = _QUEUE_REGION.search(parts.hostname or "")
    region = (found[1] or found[2]) if found else to.region
    if account == "queue" or not _ACCOUNT.fullmatch(account):
        account = to.account
    return f"arn:{to.partition}:sqs:{region}:{account}:{name}"
