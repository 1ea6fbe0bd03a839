"""What the account allows: permissions of agents, public access of buckets, tokens of canaries, quotas."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from thunderagent.jobs.extension import extension
from thunderagent.ops.doctor.account import FUNCTION, GROUP, SERVICE, Account
from thunderagent.ops.doctor.findings import Finding, State
from thunderagent.ops.doctor.services import Unanswered
from thunderagent.ops.iam import Resources, Role, policy, resources

BLOCKS: Final = ("BlockPublicAcls", "IgnorePublicAcls", "BlockPublicPolicy", "RestrictPublicBuckets")
STANDARD: Final = frozenset("acdhimrtz")
"""First letters of the machine types that the quota of EC2 counts."""
QUOTAS: Final = (
    ("lambda", "L-B99A9384", "functions that run at once", FUNCTION),
    ("apigateway", "L-9ED1E49A", "new WebSocket connections a second", "AWS::ApiGatewayV2::Api"),
    ("dynamodb", "L-AB614373", "write units a second of each table", None),
    ("dynamodb", "L-CF0CBE56", "read units a second of each table", None),
    ("ec2", "L-1216C47A", "virtual processors of standard machines", GROUP),
    ("fargate", "L-3032A538", "virtual processors of containers", SERVICE),
)
"""Service, code and words of each quota, and the type of resource that needs it."""


# Permissions, buckets, secrets


def look_at_permissions(account: Account) -> Iterator[Finding]:
    """Whether the agents' roles, or else these credentials, may do what `thunderagent iam agent` prints."""
    roles: list[tuple[str, Mapping[str, str]]] = [
        (stack.outputs[name], stack.parameters)
        for stack in account.stacks
        for name in ("RoleArn", "TaskRoleArn")
        if name in stack.outputs
    ]
    if not roles and account.place.table and not account.who.endswith(":root"):
        roles = [(_principal(account.who), {})]
    for arn, given in roles:
        denied: list[str] = []
        for statement in policy(Role.AGENT, _used(account, arn, given))["Statement"]:
            names, condition = statement["Action"], statement.get("Condition", {}).get("StringEquals", {})
            if (condition and account.is_local) or ":*/*/" in statement["Resource"]:
                continue  # a local engine knows no conditions; the API behind a custom domain is not known
            reply = account.ask(
                "iam",
                "SimulatePrincipalPolicy",
                PolicySourceArn=arn,
                ActionNames=[names] if isinstance(names, str) else names,
                ResourceArns=[statement["Resource"]],
                ContextEntries=[
                    {"ContextKeyName": key, "ContextKeyValues": [value], "ContextKeyType": "string"}
                    for key, value in condition.items()
                ],
            )
            results = reply["EvaluationResults"]
            lacking = [one["EvalActionName"] for one in results if one["EvalDecision"] != "allowed"]
            denied += [f"{one} on {statement['Resource']}" for one in lacking]
        state, role = State.WRONG if denied else State.OK, arn.rpartition("/")[2]
        what = (
            f"{role} may not {'; '.join(denied)}" if denied else f"{role} may do what `thunderagent iam agent` prints"
        )
        yield Finding("permissions", state, what, "compare its policy with: thunderagent iam agent" if denied else "")


def _principal(arn: str) -> str:
    """The role of credentials, else their user."""
    parts = arn.replace(":sts:", ":iam:").replace(":assumed-role/", ":role/")
    return "/".join(parts.split("/")[:2]) if ":role/" in parts else parts


def _used(account: Account, arn: str, given: Mapping[str, str]) -> Resources:
    """The resources of agents, by the parameters of their stack, or else by the settings."""
    _, partition, _, _, number, _ = arn.split(":", 5)
    if not given:
        return resources(account.settings, account=number, region=account.region, partition=partition)

    def value(name: str, needs: str | None = None) -> str | None:
        return given.get(name) or None if given.get(needs or name) else None

    secret = value("TokenSecretArn", needs="RegionalUrl")
    arbiter = f"dynamodb://{given.get('ArbiterName')}?region={given.get('ArbiterRegion')}"
    return Resources(
        table=given["TableName"],
        region=str(account.region),
        account=number,
        partition=partition,
        queue_url=value("WakeQueueUrl"),
        bucket=value("BlobBucket"),
        namespace=value("Namespace"),
        arbiter=arbiter if given.get("ArbiterRegion") else None,
        push_endpoint=value("PushEndpoint", needs="PushPolicyArn"),
        push_connections=value("ConnectionStore", needs="PushPolicyArn"),
        secrets=(secret,) if secret else (),
    )


def look_at_buckets(account: Account) -> Iterator[Finding]:
    """Whether the buckets of code and large texts exist, and are closed to the public."""
    for name in account.given("ArtefactBucket", "CodeBucket", "BlobBucket"):
        blocks: Mapping[str, Any] = {}
        try:
            blocks = account.ask("s3", "GetPublicAccessBlock", Bucket=name)["PublicAccessBlockConfiguration"]
        except Unanswered as error:
            if error.code == "NoSuchBucket":
                yield Finding("buckets", State.WRONG, f"s3://{name} does not exist", account.deploy(None))
                continue
            if error.code != "NoSuchPublicAccessBlockConfiguration":
                raise
        if lacking := [one for one in BLOCKS if not blocks.get(one)]:
            block = ",".join(f"{one}=true" for one in BLOCKS)
            remedy = f"s3api put-public-access-block --bucket {name} --public-access-block-configuration {block}"
            what = f"s3://{name} can be made public: {', '.join(lacking)} off"
            yield Finding("buckets", State.WARNING, what, account.aws(remedy))
        else:
            yield Finding("buckets", State.OK, f"s3://{name} is closed to the public")


def look_at_secrets(account: Account) -> Iterator[Finding]:
    """How long the tokens of the canaries last, as the extension `canary.findings` says."""
    if account.given("TokenSecretArn", "TokenSecret"):
        yield from extension("canary.findings")(account)


# Quotas and clock


def look_at_quotas(account: Account) -> Iterator[Finding]:
    """Whether a quota is under AWS's default, as in new accounts, or under the needs of the stacks."""
    if account.is_local:
        yield Finding("quotas", State.SKIPPED, "a local engine has none")
        return
    for service, code, words, kind in QUOTAS:
        if kind and not list(account.ids(kind)):
            continue
        value, usual = _quota(account, ServiceCode=service, QuotaCode=code)
        needed = max(usual, _processors(account, service))
        if value < needed:
            which = f"--service-code {service} --quota-code {code} --desired-value {needed:.0f}"
            remedy = account.aws(f"service-quotas request-service-quota-increase {which}")
            yield Finding("quotas", State.WARNING, f"{words}: {value:,.0f}, and {needed:,.0f} are wanted", remedy)
        else:
            yield Finding("quotas", State.OK, f"{words}: {value:,.0f}")


def _quota(account: Account, **which: str) -> tuple[float, float]:
    """A quota of the account, and AWS's default."""
    usual = float(account.ask("service-quotas", "GetAWSDefaultServiceQuota", **which)["Quota"]["Value"])
    try:
        return float(account.ask("service-quotas", "GetServiceQuota", **which)["Quota"]["Value"]), usual
    except Unanswered as error:
        if error.code != "NoSuchResourceException":
            raise
        return usual, usual


def _processors(account: Account, service: str) -> float:
    """Virtual processors of the groups or services at their largest, for the types that the quota counts."""
    if service == "fargate":
        given = [stack.parameters for stack, _ in account.ids(SERVICE)]
        return sum(int(one.get("MaxContainers", 0)) * int(one.get("Cpu", 0)) / 1024 for one in given)
    number = 0
    for stack, _ in account.ids(GROUP) if service == "ec2" else ():
        if (kind := stack.parameters.get("InstanceType", ""))[:1] in STANDARD:
            [found] = account.ask("ec2", "DescribeInstanceTypes", InstanceTypes=[kind])["InstanceTypes"]
            number += found["VCpuInfo"]["DefaultVCpus"] * int(stack.parameters["MaxSize"])
    return float(number)
