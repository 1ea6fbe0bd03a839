"""Examines what is around the table on AWS: credentials, queue, bucket, metrics. It leaves nothing there."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, Final
from urllib.parse import urlsplit

import boto3
from botocore import xform_name
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError, ConnectionError, HTTPClientError, InvalidRegionError

from thunderagent.ops.doctor.findings import Finding, State, allow_line
from thunderagent.stores.aws import LOCAL_REGION, build, code_of, is_denial, is_expiry, is_loopback, new_session
from thunderagent.stores.dynamo.errors import Place

SOON_S: Final = 600.0
"""Rest of credentials that is worth a warning if nothing renews them."""

_HASTY: Final = Config(connect_timeout=2, read_timeout=3)
_SEND: Final = "sqs:SendMessage"
_NO_TEXT: Final = "\uffff"
"""No message may hold it, nor be delayed for 1,000 seconds: SQS always checks one of both."""
_NO_HANDLE: Final = "AQEBthunderagent-doctor"

Clients = Callable[[str], Any]
"""Makes a client of a service by its name, such as `sts`."""


def clients_at(place: Place, endpoint: str | None = None, *, attempts: int = 1) -> Clients:
    """Clients that answer within 6 s for each attempt, with the credentials of an agent here."""
    config = _HASTY.merge(Config(retries={"mode": "standard", "total_max_attempts": attempts}))

    def make(service: str) -> Any:
        def build_one() -> Any:
            local = is_loopback(endpoint)
            session: boto3.Session = new_session(local=local)
            region = place.region or session.region_name or (LOCAL_REGION if local else None)
            return session.client(service, region_name=region, endpoint_url=endpoint, config=config)

        return build(build_one)

    return make


# Requests that may be refused

_PERMISSIONS: Final = {"s3:GetPublicAccessBlock": "s3:GetBucketPublicAccessBlock"}
"""Permissions whose names differ from their requests."""
_ABSENT: Final = ("NotFound", "NonExistent", "DoesNotExist", "NoSuchBucket")


class Unanswered(Exception):
    """A request was refused, or had no answer."""

    def __init__(self, action: str, error: BotoCoreError | ClientError) -> None:
        super().__init__(str(error))
        self.action, self.error, self.code = action, error, code_of(error)

    @property
    def is_absent(self) -> bool:
        """Whether the resource does not exist."""
        return any(one in self.code for one in _ABSENT)

    @property
    def is_away(self) -> bool:
        """Whether no service was reached, as in a region that does not exist."""
        return isinstance(self.error, (ConnectionError, HTTPClientError, InvalidRegionError))

    def finding(self, check: str) -> Finding:
        """The finding that a check has no answer, with the missing permission."""
        if is_denial(self.code):
            what, remedy = "is not allowed", f"allow {self.action}; `thunderagent iam doctor` prints all that is asked"
        else:
            what, remedy = f"has no answer: {self}", "run this again in a minute"
        return Finding(check, State.UNKNOWN, f"cannot tell: {self.action} {what}", remedy)


def ask(clients: Clients, service: str, action: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """One request, such as `DescribeAlarms` of `cloudwatch`; raises `Unanswered` if it is refused or has no answer."""
    try:
        reply: dict[str, Any] = getattr(clients(service), xform_name(action))(**arguments)
    except (ClientError, BotoCoreError) as error:
        name = f"{service.replace('-', '')}:{action}"
        raise Unanswered(_PERMISSIONS.get(name, name), error) from error
    return reply


# Credentials


def identify(place: Place, clients: Clients, session: Callable[[], Any] | None = None) -> Iterator[Finding]:
    """The owner, the source and the rest of the credentials in use."""
    if is_loopback(place.endpoint):
        yield Finding("credentials", State.SKIPPED, "a local engine checks none")
        return
    try:
        made = session() if session else build(lambda: new_session(local=False))
        found = made.get_credentials()
    except BotoCoreError as error:
        yield Finding("credentials", State.WRONG, f"the AWS configuration cannot be read: {error}", SIGN_IN)
        return
    if found is None:
        yield Finding("credentials", State.WRONG, "there are no AWS credentials", SIGN_IN)
        return
    source = str(getattr(found, "method", None) or "unknown")
    try:
        who = clients("sts").get_caller_identity()
    except ClientError as error:
        code = code_of(error)
        if is_expiry(code) or is_denial(code):
            what = f"the credentials from {source} are expired or unknown ({error})"
            yield Finding("credentials", State.WRONG, what, f"{SIGN_IN}; and check the clock of this host")
        else:
            yield Finding("credentials", State.WARNING, f"from {source}; STS does not name their owner: {error}")
        return
    except BotoCoreError as error:
        what = f"from {source}; STS does not answer ({error})"
        yield Finding("credentials", State.WARNING, what, "agents do not need STS; in a VPC it wants an endpoint")
        return
    left = _left_s(found)
    lasts = "" if left is None else f", for {max(0.0, left) / 60:.0f} min more"
    if left is not None and left < SOON_S and source not in ("iam-role", "container-role"):
        what = f"{who.get('Arn')} from {source}{lasts}"
        yield Finding("credentials", State.WARNING, what, "an agent wants credentials that renew themselves: a role")
    else:
        yield Finding("credentials", State.OK, f"{who.get('Arn')} from {source}{lasts}")


SIGN_IN: Final = (
    "give this machine an instance role, or set AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY; "
    "sign in again with: aws sso login"
)


def _left_s(credentials: Any) -> float | None:
    """Seconds until credentials end; None: they do not end, or do not say."""
    ends = getattr(credentials, "_expiry_time", None)
    return (ends - datetime.now(UTC)).total_seconds() if isinstance(ends, datetime) and ends.tzinfo else None


# The wake queue


def look_at_queue(url: str, clients: Clients) -> Iterator[Finding]:
    """Whether agents may send to the queue, receive from it, and delete and release messages.

    A permitted request is refused for another reason: an impossible message, an unknown receipt.
    """
    try:
        sqs = clients("sqs")
        attributes = sqs.get_queue_attributes
        tries: tuple[tuple[str, Callable[[], object]], ...] = (
            ("sqs:ReceiveMessage", lambda: sqs.receive_message(QueueUrl=url, VisibilityTimeout=0, WaitTimeSeconds=0)),
            (_SEND, lambda: sqs.send_message(QueueUrl=url, MessageBody=_NO_TEXT, DelaySeconds=1000)),
            ("sqs:DeleteMessage", lambda: sqs.delete_message(QueueUrl=url, ReceiptHandle=_NO_HANDLE)),
            (
                "sqs:ChangeMessageVisibility",
                lambda: sqs.change_message_visibility(QueueUrl=url, ReceiptHandle=_NO_HANDLE, VisibilityTimeout=0),
            ),
        )
        waiting = ""
        with suppress(ClientError):
            found = attributes(QueueUrl=url, AttributeNames=["ApproximateNumberOfMessages"])["Attributes"]
            waiting = f", about {found['ApproximateNumberOfMessages']} messages in it"
        denied = []
        for action, attempt in tries:
            try:
                attempt()
            except ClientError as error:
                code = code_of(error)
                if "NonExistentQueue" in code or code == "QueueDoesNotExist":
                    remedy = "create it, or take THUNDERAGENT_WAKE_QUEUE_URL away: agents then poll"
                    yield Finding("wake queue", State.WRONG, f"{url} does not exist", remedy)
                    return
                if is_denial(code):
                    denied.append(action)
    except BotoCoreError as error:
        remedy = "agents poll until it answers; check the route to SQS, in a VPC its endpoint"
        yield Finding("wake queue", State.WARNING, f"{url} does not answer: {error}", remedy)
        return
    for action in denied:
        yield Finding("wake queue", State.WRONG, f"{action} is denied", allow_line(action, _queue_arn(url)))
    if not denied:
        yield Finding("wake queue", State.OK, f"{url}{waiting}")


def _queue_arn(url: str) -> str:
    account, _, name = urlsplit(url).path.strip("/").rpartition("/")
    return f"arn:aws:sqs:*:{account or '*'}:{name}"


# The bucket


def look_at_bucket(bucket: str, clients: Clients, prefix: str) -> Iterator[Finding]:
    """Whether agents may write and read objects of the bucket. The object is refused for its checksum."""
    name = f"{prefix}doctor"
    wrong = base64.b64encode(hashlib.md5(b"not it", usedforsecurity=False).digest()).decode()
    denied: list[str] = []
    unsure = False
    try:
        s3 = clients("s3")
        tries: tuple[tuple[str, Callable[[], object]], ...] = (
            ("s3:PutObject", lambda: s3.put_object(Bucket=bucket, Key=name, Body=b"it", ContentMD5=wrong)),
            ("s3:GetObject", lambda: s3.get_object(Bucket=bucket, Key=name)),
        )
        for action, attempt in tries:
            try:
                attempt()
            except ClientError as error:
                code = code_of(error)
                if code in ("NoSuchBucket", "PermanentRedirect"):
                    remedy = "create it in the region of the table, or name another in THUNDERAGENT_BLOB_BUCKET"
                    yield Finding("bucket", State.WRONG, f"s3://{bucket}: {error}", remedy)
                    return
                if is_denial(code) and action == "s3:GetObject":
                    unsure = True  # without s3:ListBucket that is also the answer for a missing object
                elif is_denial(code):
                    denied.append(action)
            else:
                if action == "s3:PutObject":  # a store that does not check checksums
                    with suppress(ClientError):
                        s3.delete_object(Bucket=bucket, Key=name)
    except BotoCoreError as error:
        remedy = "check credentials and the route to S3, in a VPC its endpoint"
        yield Finding("bucket", State.WRONG, f"s3://{bucket} does not answer: {error}", remedy)
        return
    resource = f"arn:aws:s3:::{bucket}/{prefix}*"
    for action in denied:
        yield Finding("bucket", State.WRONG, f"{action} is denied on s3://{bucket}", allow_line(action, resource))
    if denied:
        return
    if unsure:
        what = f"s3://{bucket} takes objects; whether s3:GetObject is allowed is unknown without s3:ListBucket"
        yield Finding("bucket", State.WARNING, what, allow_line("s3:GetObject", resource))
    else:
        yield Finding("bucket", State.OK, f"s3://{bucket}: s3:PutObject and s3:GetObject are allowed")


# Metrics


def look_at_metrics(namespace: str, clients: Clients) -> Iterator[Finding]:
    """Whether metrics may be sent. A permitted request is refused, because its metric contradicts itself."""
    datum = {"MetricName": "Doctor", "Value": 1.0, "StatisticValues": _NOTHING}
    try:
        clients("cloudwatch").put_metric_data(Namespace=namespace, MetricData=[datum])
    except ClientError as error:
        if is_denial(code_of(error)):
            action, only = "cloudwatch:PutMetricData", {"StringEquals": {"cloudwatch:namespace": namespace}}
            what = f"{action} is denied for the namespace {namespace}"
            yield Finding("metrics", State.WRONG, what, allow_line(action, "*", Condition=only))
            return
    except BotoCoreError as error:
        remedy = "agents run without their metrics; check the route to CloudWatch, in a VPC its endpoint"
        yield Finding("metrics", State.WARNING, f"CloudWatch does not answer: {error}", remedy)
        return
    yield Finding("metrics", State.OK, f"cloudwatch:PutMetricData is allowed for the namespace {namespace}")


_NOTHING: Final = {"SampleCount": 1.0, "Sum": 1.0, "Minimum": 1.0, "Maximum": 1.0}
