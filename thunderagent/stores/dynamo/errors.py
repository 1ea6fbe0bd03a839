"""Translates what botocore raises into errors of ours, each with the place and the remedy in its message."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlsplit

from botocore import exceptions as aws

from thunderagent.model.errors import (
    AccessDenied,
    ConfigurationError,
    CredentialsExpired,
    CredentialsMissing,
    StoreError,
    StoreRejected,
    StoreThrottled,
    StoreUnavailable,
    TableMissing,
    ThunderAgentError,
)
from thunderagent.stores.dynamo.expressions import INDEX

THROTTLES: Final = frozenset(
    {
        "ProvisionedThroughputExceededException",
        "ProvisionedThroughputExceeded",
        "ThrottlingException",
        "Throttling",
        "ThrottlingError",
        "ThrottledException",
        "RequestLimitExceeded",
        "TooManyRequestsException",
    }
)
EXPIRED: Final = frozenset(
    {
        "ExpiredToken",
        "ExpiredTokenException",
        "UnrecognizedClient",
        "UnrecognizedClientException",
        "RequestExpired",
    }
)
DENIED: Final = frozenset(
    {
        "AccessDenied",
        "AccessDeniedException",
        "UnauthorizedOperation",
        "NotAuthorized",
        "InvalidSignatureException",
        "SignatureDoesNotMatch",
        "MissingAuthenticationToken",
        "MissingAuthenticationTokenException",
        "IncompleteSignature",
        "OptInRequired",
    }
)
_MISSING: Final = ("ValidationException", "ResourceNotFoundException")
_DUPLICATE: Final = ("DuplicateItem", "DuplicateItemException")
_PERMISSIONS: Final = {"BatchExecuteStatement": "PartiQLInsert"}
"""What a policy calls an action of another name."""
PASSING: Final = frozenset(
    {
        "TransactionConflict",
        "TransactionConflictException",
        "TransactionInProgressException",
        "ReplicatedWriteConflictException",
        "ResourceInUseException",
        "LimitExceededException",
        "ContinuousBackupsUnavailableException",
        "InternalServerError",
        "InternalFailure",
        "ServiceUnavailable",
        "ServiceUnavailableException",
        "RequestTimeout",
        "RequestTimeoutException",
    }
)


_SIGN_INS: Final = (
    aws.CredentialRetrievalError,
    aws.TokenRetrievalError,
    aws.SSOError,
    getattr(aws, "LoginError", aws.SSOError),  # newer than the oldest botocore that we support
)


class Refused(Exception):
    """The condition of a write did not hold. `item` is what refused it, None when the reply did not say."""

    def __init__(self, item: Mapping[str, Any] | None) -> None:
        super().__init__("the condition did not hold")
        self.item = item


@dataclass(frozen=True, slots=True)
class Place:
    """Where a table is."""

    table: str
    region: str | None = None
    endpoint: str | None = None

    @property
    def url(self) -> str:
        """The URL of the store, without user and password of an endpoint."""
        query = [f"{name}={value}" for name, value in (("region", self.region),) if value]
        if self.endpoint:
            query.append(f"endpoint={_without_secrets(self.endpoint)}")
        return f"dynamodb://{self.table}" + (f"?{'&'.join(query)}" if query else "")

    def __str__(self) -> str:
        at = f" at {_without_secrets(self.endpoint)}" if self.endpoint else ""
        return f"the table {self.table!r} in region {self.region or '(none)'}{at}"


def _without_secrets(endpoint: str) -> str:
    parts = urlsplit(endpoint)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


def code_of(error: BaseException) -> str:
    """The error code of a reply, or an empty string."""
    response = getattr(error, "response", None) or {}
    return str(response.get("Error", {}).get("Code", ""))


def translate(error: Exception, action: str, place: Place) -> ThunderAgentError:
    """The error of ours for what botocore raised while it did `action` (such as `UpdateItem`) at a place."""
    if isinstance(error, aws.ClientError):
        return _of_reply(error, action, place)
    text = f"{place}: {error}"
    if isinstance(error, (aws.NoCredentialsError, aws.PartialCredentialsError)):
        return CredentialsMissing(
            f"no usable AWS credentials for {place} ({error}): set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, "
            "or AWS_PROFILE, or give this machine an instance role that allows DynamoDB"
        )
    if isinstance(error, aws.NoRegionError):
        return ConfigurationError(
            f"no AWS region for {place}: add it to the URL (dynamodb://{place.table}?region=eu-central-1) "
            "or set AWS_DEFAULT_REGION"
        )
    if isinstance(error, (aws.ProfileNotFound, aws.InvalidRegionError, aws.ConfigParseError)):
        return ConfigurationError(f"the AWS configuration for {text}")
    if isinstance(error, _SIGN_INS):
        return CredentialsExpired(f"no fresh credentials for {text}; sign in again, for example with: aws sso login")
    if isinstance(error, (aws.ParamValidationError, aws.UnknownEndpointError)):
        return StoreRejected(f"{action} is not a request for {text}")
    if isinstance(error, (aws.HTTPClientError, aws.BotoCoreError)):
        return StoreUnavailable(f"no answer to {action} from {text}")
    return StoreError(f"{action} failed for {text}")


def is_duplicate(member: Mapping[str, Any]) -> bool:
    """Whether a statement of a batch of INSERTs was refused because the id is taken."""
    return member.get("Error", {}).get("Code") in _DUPLICATE


def of_member(member: Mapping[str, Any], place: Place) -> Refused | StoreError | None:
    """What the answer to one statement of a batch of INSERTs means; None: it was done."""
    detail = member.get("Error")
    if detail is None:
        return None
    if is_duplicate(member):
        return Refused(None)
    return _of_reply(aws.ClientError({"Error": detail}, "BatchExecuteStatement"), "BatchExecuteStatement", place)


def _of_reply(error: Any, action: str, place: Place) -> StoreError:
    detail = error.response.get("Error", {})
    code, message = detail.get("Code", ""), detail.get("Message", "") or str(error)
    status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    if code in _MISSING and _is_of_index(message):
        return TableMissing(
            f"{place} has no index {INDEX!r}; see what is missing with: thunderagent table check ({message})"
        )
    if code in ("ResourceNotFound", "ResourceNotFoundException", "TableNotFoundException"):
        return TableMissing(f"{place} does not exist; create it with: thunderagent table create")
    if code in EXPIRED:
        return CredentialsExpired(
            f"the AWS credentials for {place} are expired or unknown ({code}: {message}); renew them, "
            "and check the clock of this machine"
        )
    if code in DENIED:
        return AccessDenied(
            f"not allowed: dynamodb:{_PERMISSIONS.get(action, action)} on {place}; add the action to the policy "
            f"({code}: {message})"
        )
    if code in THROTTLES:
        return StoreThrottled(f"{action} was throttled by {place}: {message}{_reasons(error.response)}")
    if code in PASSING or status >= 500:
        return StoreUnavailable(f"{place} cannot do {action} now ({code}: {message})")
    if code in ("ValidationError", "ValidationException"):
        return _of_validation(message, action, place)
    if code == "UnknownOperationException":
        return StoreRejected(f"{place} does not know {action} ({message})")
    return StoreError(f"{action} failed for {place} ({code}: {message})")


def _of_validation(message: str, action: str, place: Place) -> StoreError:
    if "item size" in message.lower():
        return StoreRejected(
            f"the row is too large for {place} ({message}): keep the data elsewhere, store a reference to it"
        )
    return StoreRejected(f"{action} was not accepted by {place} ({message})")


def _is_of_index(message: str) -> bool:
    return "specified index" in message.lower()


def _reasons(response: dict[str, Any]) -> str:
    """Why DynamoDB throttles, if it says so: a hot index partition wants more shards, an account more quota."""
    told = [
        " ".join(filter(None, (reason.get("reason"), reason.get("resource"))))
        for reason in response.get("ThrottlingReasons", ())
    ]
    return f" [{'; '.join(told)}]" if told else ""
