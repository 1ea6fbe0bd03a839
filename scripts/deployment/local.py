"""What a local engine has in place of an account: values that nobody has to give, and what it does not know."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Final

from deployment.cloud import Cloud
from deployment.errors import DeploymentError, told

ISSUER: Final = "https://localhost/"
AUDIENCE: Final = "thunderagent"


def made_locally(cloud: Cloud, before: Mapping[str, str]) -> dict[str, str]:
    """Parameters for a local engine: what the engine says, and a stand-in for what nobody ever gave.

    Args:
        cloud: the engine.
        before: what the stack has now; a stand-in does not take the place of a value in it.
    """
    assert cloud.endpoint is not None
    stand_ins = {
        # Its machines are entries in a list, which run nothing and say nothing.
        "WaitForSignals": "false",
        "TokenIssuer": ISSUER,
        "TokenAudience": AUDIENCE,
        "Jwks": json.dumps({"keys": []}),
    }
    kept = {name: value for name, value in stand_ins.items() if name not in before}
    return {"Endpoint": cloud.endpoint, "Local": "true", **kept}


def default_subnets(cloud: Cloud) -> str:
    """The subnets of the default VPC of the region, with commas between; nothing if there is none.

    Raises:
        DeploymentError: they may not be listed.
    """
    with told("looking for the default VPC"):
        ec2 = cloud.client("ec2")
        found = ec2.describe_subnets(Filters=[{"Name": "default-for-az", "Values": ["true"]}])["Subnets"]
    return ",".join(sorted(one["SubnetId"] for one in found))


def start_engine(folder: str) -> str:
    """Start the engine of a folder unless it runs; its endpoint.

    Raises:
        DeploymentError: it does not start.
    """
    from thunderagent.model.errors import ThunderAgentError
    from thunderagent.ops import local_engine as local

    try:
        return local.start(folder).endpoint
    except ThunderAgentError as error:
        raise DeploymentError(str(error)) from error


def running_engine(folder: str) -> str:
    """The endpoint of the engine of a folder.

    Raises:
        DeploymentError: it does not run.
    """
    from thunderagent.ops import local_engine as local

    engine = local.status(folder)
    if engine is None:
        raise DeploymentError(f"no local engine runs in {folder}; start it with: scripts/deploy --local")
    return engine.endpoint
