"""Sessions and clients of AWS for every service, and botocore's errors as errors of ours."""

from __future__ import annotations

import ipaddress
import os
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

import boto3
import botocore.session
from botocore import exceptions as aws
from botocore.client import BaseClient

from thunderagent.model.errors import (
    AccessDenied,
    ConfigurationError,
    CredentialsExpired,
    CredentialsMissing,
    StoreError,
    StoreRejected,
    StoreThrottled,
    StoreUnavailable,
    ThunderAgentError,
)
from thunderagent.model.forks import renewed

T = TypeVar("T")

LOCAL_REGION: Final = "us-east-1"

_CODES: Final[Mapping[str, str]] = {
    "throttles": "ProvisionedThroughputExceededException ProvisionedThroughputExceeded ThrottlingException "
    "Throttling ThrottlingError ThrottledException RequestLimitExceeded TooManyRequestsException",
    "expired": "ExpiredToken ExpiredTokenException UnrecognizedClient UnrecognizedClientException RequestExpired "
    "RequestTimeTooSkewed InvalidAccessKeyId InvalidClientTokenId",
    "denied": "AccessDenied AccessDeniedException UnauthorizedOperation NotAuthorized InvalidSignatureException "
    "SignatureDoesNotMatch MissingAuthenticationToken MissingAuthenticationTokenException "
    "IncompleteSignature OptInRequired AllAccessDisabled Forbidden ForbiddenException 403",
    "passing": "TransactionConflict TransactionConflictException TransactionInProgressException "
    "ReplicatedWriteConflictException ResourceInUseException LimitExceededException "
    "ContinuousBackupsUnavailableException InternalServerError InternalFailure InternalError SlowDown "
    "ServiceUnavailable ServiceUnavailableException RequestTimeout RequestTimeoutException",
}
"""Error codes of the services, by what they mean."""
THROTTLES, _EXPIRED, _DENIED, _PASSING = (frozenset(codes.split()) for codes in _CODES.values())
_SIGN_INS: Final = (
    aws.CredentialRetrievalError,
    aws.TokenRetrievalError,
    aws.SSOError,
    getattr(aws, "LoginError", aws.SSOError),  # newer than the oldest botocore that we support
)

BUILDING: Final = renewed(threading.RLock())
"""Held while a session or a client is made: botocore's loaders are not safe in threads."""

_descriptions: Any = None


_clients: Final[set[weakref.ref[Any]]] = set()


def _close_idle() -> None:
    """Close idle sockets: no child inherits them, and the client goes on with others."""
    for found in list(_clients):
        if (client := found()) is not None:
            client.close()


os.register_at_fork(before=_close_idle, after_in_child=_clients.clear)


def is_loopback(endpoint: str | None) -> bool:
    """Whether an endpoint is on this machine: a local engine, which checks no credentials."""
    host = urlsplit(endpoint or "").hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def build(make: Callable[[], T]) -> T:
    """Make a session or a client while no other thread makes one; a client closes idle sockets before each fork."""
    with BUILDING:
        made = make()
    if isinstance(made, BaseClient):
        _clients.add(weakref.ref(made, _clients.discard))
    return made


def new_session(*, local: bool) -> boto3.Session:
    """A new session, with the credentials of the environment or the profile.

    A local engine checks none: `local` asks the network for none, and takes dummies if there are none. The descriptions
    of the services are read once a process, which makes every client but the first cheap.
    """
    global _descriptions
    core = botocore.session.Session()
    if _descriptions is None:
        _descriptions = core.get_component("data_loader")
    core.register_component("data_loader", _descriptions)
    session = boto3.Session(botocore_session=core)
    if local:
        resolver = core.get_component("credential_provider")
        for asks_the_network in ("container-role", "iam-role"):
            resolver.remove(asks_the_network)
        if session.get_credentials() is None:
            core.set_credentials("local", "local")
    return session


def code_of(error: BaseException) -> str:
    """The error code of a reply, or an empty text."""
    response = getattr(error, "response", None) or {}
    return str(response.get("Error", {}).get("Code", ""))


def is_denial(code: str) -> bool:
    """Whether an error code says that a permission is missing."""
    return code in _DENIED or "AccessDenied" in code


def is_expiry(code: str) -> bool:
    """Whether an error code says that the credentials are expired or unknown."""
    return code in _EXPIRED


def translate(
    error: Exception, action: str, place: object, *, permission: str, region: str = "set AWS_DEFAULT_REGION"
) -> ThunderAgentError:
    """The error of ours for what botocore raised.

    Args:
        error: what botocore raised.
        action: the request, such as `UpdateItem`.
        place: where it went, in words.
        permission: what a policy must allow for it.
        region: the remedy where no region is known.
    """
    if isinstance(error, aws.ClientError):
        return _of_reply(error, action, place, permission)
    if isinstance(error, (aws.NoCredentialsError, aws.PartialCredentialsError)):
        return CredentialsMissing(
            f"no usable AWS credentials for {place} ({error}): set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, "
            f"or AWS_PROFILE, or give this machine an instance role that allows {permission}"
        )
    if isinstance(error, aws.NoRegionError):
        return ConfigurationError(f"no AWS region for {place}: {region}")
    text = f"{place}: {error}"
    if isinstance(error, (aws.ProfileNotFound, aws.InvalidRegionError, aws.ConfigParseError)):
        return ConfigurationError(f"the AWS configuration for {text}")
    if isinstance(error, _SIGN_INS):
        return CredentialsExpired(f"no fresh credentials for {text}; sign in again, for example with: aws sso login")
    if isinstance(error, (aws.ParamValidationError, aws.UnknownEndpointError)):
        return StoreRejected(f"{action} is not a request for {text}")
    if isinstance(error, (aws.HTTPClientError, aws.BotoCoreError)):
        return StoreUnavailable(f"no answer to {action} from {text}")
    return StoreError(f"{action} failed for {text}")


def _of_reply(error: aws.ClientError, action: str, place: object, permission: str) -> StoreError:
    response: Any = error.response
    code, message = code_of(error), response.get("Error", {}).get("Message", "") or str(error)
    if is_expiry(code):
        return CredentialsExpired(
            f"the AWS credentials for {place} are expired or unknown ({code}: {message}); renew them, "
            "and check the clock of this machine"
        )
    if is_denial(code):
        return AccessDenied(
            f"not allowed: {permission} on {place}; add the action to the policy ({code}: {message}); "
            "see: thunderagent iam"
        )
    if code in THROTTLES:
        return StoreThrottled(f"{action} was throttled by {place}: {message}{_reasons(response)}")
    if code in _PASSING or response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0) >= 500:
        return StoreUnavailable(f"{place} cannot do {action} now ({code}: {message})")
    return StoreError(f"{action} failed for {place} ({code}: {message})")


def _reasons(response: dict[str, Any]) -> str:
    """Why DynamoDB throttles, if it says so: a hot index partition wants more shards, an account more quota."""
    reasons = [
        " ".join(filter(None, (reason.get("reason"), reason.get("resource"))))
        for reason in response.get("ThrottlingReasons", ())
    ]
    return f" [{'; '.join(reasons)}]" if reasons else ""
