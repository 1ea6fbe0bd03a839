"""Reads a secret from AWS Secrets Manager. Its text is never told, not even in part."""

from __future__ import annotations

from typing import Any, Final

from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError, NoRegionError, PartialCredentialsError

from thunderagent.model.errors import (
    AccessDenied,
    ConfigurationError,
    CredentialsExpired,
    CredentialsMissing,
    StoreError,
    StoreThrottled,
    StoreUnavailable,
    ThunderAgentError,
)
from thunderagent.stores.dynamo.connection import build, is_loopback, new_session
from thunderagent.stores.dynamo.errors import DENIED, EXPIRED, THROTTLES, code_of

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
        raise _problem(error, name) from error
    text = found.get("SecretString")
    if not isinstance(text, str) or not text.strip():
        raise ConfigurationError(f"the secret {name} has no text: put one with aws secretsmanager put-secret-value")
    return text


def _client(region: str | None, endpoint: str | None) -> Any:
    session = new_session(local=is_loopback(endpoint))
    where = region or session.region_name
    return session.client("secretsmanager", region_name=where, endpoint_url=endpoint, config=_HASTY)


def _problem(error: ClientError | BotoCoreError, name: str) -> ThunderAgentError:
    if isinstance(error, NoRegionError):
        return ConfigurationError(f"no AWS region for the secret {name}: write secret:NAME?region=eu-central-1")
    if isinstance(error, (NoCredentialsError, PartialCredentialsError)):
        return CredentialsMissing(f"no usable AWS credentials for the secret {name} ({error}): give an instance role")
    if not isinstance(error, ClientError):
        return StoreUnavailable(f"no answer from Secrets Manager for the secret {name}: {error}")
    code = code_of(error)
    if code == "ResourceNotFoundException":
        return ConfigurationError(f"there is no secret {name} in this region")
    if code in DENIED:
        return AccessDenied(f"not allowed: secretsmanager:GetSecretValue of the secret {name} ({code})")
    if code in EXPIRED or code == "InvalidClientTokenId":
        return CredentialsExpired(f"the AWS credentials for the secret {name} are expired or unknown ({code})")
    if code in THROTTLES:
        return StoreThrottled(f"Secrets Manager has too many requests for the secret {name} ({code})")
    return StoreError(f"Secrets Manager did not give the secret {name} ({code})")
