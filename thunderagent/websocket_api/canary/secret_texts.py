"""Reads a secret from AWS Secrets Manager. Its text is never told, not even in part."""

from __future__ import annotations

from typing import Any, Final

from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from thunderagent.model.errors import ConfigurationError
from thunderagent.stores.aws import build, code_of, is_loopback, new_session, translate

_HASTY: Final = Config(connect_timeout=1, read_timeout=2, retries={"mode": "standard", "total_max_attempts": 2})


def secret_text(name: str, *, region: str | None = None, endpoint: str | None = None) -> str:
    """The text of a secret as it is now.

    Args:
        name: its name or its ARN.
        region: AWS region; None: that of the ARN, else the one of the environment.
        endpoint: of a local engine; None: AWS.

    Raises:
        AccessDenied: `secretsmanager:GetSecretValue` is not allowed.
        ConfigurationError: there is no such secret, it is no text, or no region is known.
        CredentialsMissing: there are no credentials.
        CredentialsExpired: they are over.
        StoreError: Secrets Manager did not answer.
    """
    where = region or (name.split(":")[3] if name.startswith("arn:") and name.count(":") >= 6 else None)
    try:
        found = build(lambda: _client(where, endpoint)).get_secret_value(SecretId=name)
    except (ClientError, BotoCoreError) as error:
        if code_of(error) == "ResourceNotFoundException":
            raise ConfigurationError(f"there is no secret {name} in this region") from error
        place, remedy = f"the secret {name}", "write secret:NAME?region=eu-central-1"
        permission = "secretsmanager:GetSecretValue"
        raise translate(error, "GetSecretValue", place, permission=permission, region=remedy) from error
    text = found.get("SecretString")
    if not isinstance(text, str) or not text.strip():
        raise ConfigurationError(f"the secret {name} has no text: put one with aws secretsmanager put-secret-value")
    return text


def _client(region: str | None, endpoint: str | None) -> Any:
    session = new_session(local=is_loopback(endpoint))
    where = region or session.region_name
    return session.client("secretsmanager", region_name=where, endpoint_url=endpoint, config=_HASTY)
