"""What `thunderagent doctor --aws` finds out about the tokens of canaries. No text of a secret is in it."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

from thunderagent.model.errors import ConfigurationError, ThunderAgentError
from thunderagent.model.rows import as_map
from thunderagent.ops.doctor.account import Account
from thunderagent.ops.doctor.findings import Finding, State
from thunderagent.websocket_api.canary.tokens import WARN_DAYS, days_left, secret_text


def look_at_tokens(account: Account) -> Iterator[Finding]:
    """How long the tokens of the canaries last."""
    names = dict.fromkeys(account.given("TokenSecretArn"))
    for name, stack in account.given("TokenSecret").items():
        names |= {f"{name}-{one}": None for one in (account.region, stack.parameters.get("OtherRegion")) if one}
    for name in names:
        region = None if name.startswith("arn:") else account.region
        try:
            token = _token_in(secret_text(name, region=region, endpoint=account.local_endpoint))
        except ConfigurationError as error:
            yield Finding("canary token", State.WRONG, str(error), "see docs/guides/canary.md, The token")
        except ThunderAgentError as error:
            remedy = f"allow secretsmanager:GetSecretValue on {name}"
            yield Finding("canary token", State.UNKNOWN, f"cannot tell: {error}", remedy)
        else:
            yield _of_token(account, name, days_left(token, time.time()))


def _of_token(account: Account, name: str, days: float | None) -> Finding:
    if days is None:
        return Finding("canary token", State.OK, f"{name} tells of no end, or something replaces it in time")
    if days >= WARN_DAYS:
        return Finding("canary token", State.OK, f"{name} ends in {days:.0f} days")
    remedy = account.aws(f"secretsmanager put-secret-value --secret-id {name} --secret-string file://TOKEN")
    if days > 0:
        return Finding("canary token", State.WARNING, f"{name} ends in {days:.1f} days", remedy)
    what = f"{name} ended {-days:.1f} days ago: the canary cannot judge, and no region moves"
    return Finding("canary token", State.WRONG, what, remedy)


def _token_in(text: str) -> str:
    """The token in a secret; empty for a secret with which a server is asked for tokens."""
    if not text.lstrip().startswith("{"):
        return text.strip()
    try:
        return str(as_map(json.loads(text)).get("token", ""))
    except ValueError:  # it may hold the secret
        return ""
