"""DynamoDB's own errors: a refused write, a missing table or index, a request that it does not take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlsplit

from botocore import exceptions as botocore_errors

from thunderagent.model.errors import StoreError, StoreRejected, TableMissing, ThunderAgentError
from thunderagent.stores import aws
from thunderagent.stores.dynamo.expressions import INDEX

_MISSING: Final = ("ValidationException", "ResourceNotFoundException")
_DUPLICATE: Final = ("DuplicateItem", "DuplicateItemException")
_PERMISSIONS: Final = {"BatchExecuteStatement": "PartiQLInsert"}
"""Names of actions that a policy has under another name."""


class Refused(Exception):
    """The condition of a write did not hold. `item` refused it, None when the reply did not say."""

    def __init__(self, item: Mapping[str, Any] | None) -> None:
        super().__init__("the condition did not hold")
        self.item = item


@dataclass(frozen=True, slots=True)
class Place:
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


def translate(error: Exception, action: str, place: Place) -> ThunderAgentError:
    """The error of ours for what botocore raised."""
    return _of_reply(error, action, place) or aws.translate(
        error,
        action,
        place,
        permission=f"dynamodb:{_PERMISSIONS.get(action, action)}" if action.isalpha() else "DynamoDB",
        region=f"add it to the URL (dynamodb://{place.table}?region=eu-central-1) or set AWS_DEFAULT_REGION",
    )


def is_duplicate(member: Mapping[str, Any]) -> bool:
    """Whether a statement of a batch of INSERTs was refused because the id is taken."""
    return member.get("Error", {}).get("Code") in _DUPLICATE


def of_member(member: Mapping[str, Any], place: Place) -> Refused | StoreError | None:
    """The outcome of one statement of a batch of INSERTs; None: it was done."""
    detail = member.get("Error")
    if detail is None:
        return None
    if is_duplicate(member):
        return Refused(None)
    action = "BatchExecuteStatement"
    error = translate(botocore_errors.ClientError({"Error": detail}, action), action, place)
    assert isinstance(error, StoreError)
    return error


def _of_reply(error: Exception, action: str, place: Place) -> StoreError | None:
    """The error for a reply that only DynamoDB gives; None for all others."""
    if not isinstance(error, botocore_errors.ClientError):
        return None
    code, message = aws.code_of(error), error.response.get("Error", {}).get("Message", "") or str(error)
    if code in _MISSING and "specified index" in message.lower():
        return TableMissing(
            f"{place} has no index {INDEX!r}; see what is missing with: thunderagent table check ({message})"
        )
    if code in ("ResourceNotFound", "ResourceNotFoundException", "TableNotFoundException"):
        return TableMissing(f"{place} does not exist; create it with: thunderagent table create")
    if error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0) >= 500:  # no answer, whatever it says
        return None
    if code in ("ValidationError", "ValidationException"):
        if "item size" in message.lower():
            return StoreRejected(
                f"the row is too large for {place} ({message}): keep the data elsewhere, store a reference to it"
            )
        return StoreRejected(f"{action} was not accepted by {place} ({message})")
    if code == "UnknownOperationException":
        return StoreRejected(f"{place} does not know {action} ({message})")
    return None
