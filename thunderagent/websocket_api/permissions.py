"""The AWS permissions of pushes and of the canary, for `thunderagent iam`."""

from __future__ import annotations

import re
from typing import Any, Final
from urllib.parse import urlsplit

from thunderagent.ops.iam import Resources, allow, table_arn

PUSH_ACTIONS: Final = frozenset({"ManageConnections"})
"""Actions of API Gateway on the connections of the WebSocket API."""
CONNECTION_ACTIONS: Final = frozenset({"BatchGetItem", "DeleteItem", "GetItem", "UpdateItem"})
"""Actions of DynamoDB on the table of connections, of agents whose jobs push."""
SECRET_ACTIONS: Final = frozenset({"GetSecretValue"})
"""Actions of Secrets Manager on the secrets that the canary's token comes from."""

_API: Final = re.compile(r"([a-z0-9]+)\.execute-api\.([a-z0-9-]+)\.amazonaws\.")


def push_permissions(to: Resources) -> list[dict[str, Any]]:
    """The extension `push.permissions`."""
    statements = [allow("Push", "execute-api", PUSH_ACTIONS, _push_arn(to.push_endpoint or "", to))]
    if to.push_connections and (arn := table_arn(to.push_connections, to)) is not None:
        statements.append(allow("Connections", "dynamodb", CONNECTION_ACTIONS, arn))
    return statements


def canary_permissions(to: Resources) -> list[dict[str, Any]]:
    """The extension `canary.permissions`."""
    numbered = enumerate(to.secrets, start=1)
    return [allow(f"CanaryToken{number}", "secretsmanager", SECRET_ACTIONS, arn) for number, arn in numbered]


def _push_arn(endpoint: str, to: Resources) -> str:
    """AWS's name of an endpoint has the API, the region and the stage; a domain of one's own says nothing."""
    parts = urlsplit(endpoint)
    found = _API.match(parts.hostname or "")
    api, region = (found[1], found[2]) if found else ("*", to.region)
    stage = parts.path.strip("/") if found else "*"
    return f"arn:{to.partition}:execute-api:{region}:{to.account}:{api}/{stage or '*'}/POST/@connections/*"
