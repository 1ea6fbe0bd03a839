"""What botocore raises becomes an error of ours that says where, what and what to do."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest
from botocore import exceptions as aws
from botocore.stub import Stubber

from tests.support.stands import patience
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
from thunderagent.stores.aws import is_loopback
from thunderagent.stores.dynamo.connection import Connection, client_config
from thunderagent.stores.dynamo.engine import DynamoEngine
from thunderagent.stores.dynamo.errors import Place, translate

PLACE = Place("TaskTable", "eu-central-1")
LOCAL = "http://127.0.0.1:9"


def _reply(code: str, message: str = "told", status: int = 400, **members: Any) -> aws.ClientError:
    response: Any = {
        "Error": {"Code": code, "Message": message},
        "ResponseMetadata": {"HTTPStatusCode": status},
        **members,
    }
    return aws.ClientError(response, "UpdateItem")


REASONS = [{"reason": "TableWriteAccountLimitExceeded", "resource": "arn:table"}]
CASES: list[tuple[Exception, type[ThunderAgentError], str]] = [
    (
        _reply("ResourceNotFoundException"),
        TableMissing,
        "eu-central-1 does not exist; create it with: thunderagent table",
    ),
    (
        _reply("ValidationException", "The table does not have the specified index: status-createdAt-index"),
        TableMissing,
        "has no index 'status-createdAt-index'; see what is missing with: thunderagent table check",
    ),
    (_reply("AccessDeniedException"), AccessDenied, "dynamodb:UpdateItem on the table 'TaskTable'"),
    (_reply("InvalidSignatureException"), AccessDenied, "InvalidSignatureException"),
    (_reply("ProvisionedThroughputExceededException"), StoreThrottled, "throttled"),
    (
        _reply("ThrottlingException", ThrottlingReasons=REASONS),
        StoreThrottled,
        "TableWriteAccountLimitExceeded arn:table",
    ),
    (_reply("RequestLimitExceeded"), StoreThrottled, "throttled"),
    (_reply("ExpiredTokenException"), CredentialsExpired, "renew them"),
    (_reply("ExpiredToken"), CredentialsExpired, "renew them"),
    (_reply("UnrecognizedClientException"), CredentialsExpired, "expired or unknown"),
    (_reply("RequestExpired"), CredentialsExpired, "clock of this machine"),
    (_reply("InternalServerError", status=500), StoreUnavailable, "InternalServerError"),
    (_reply("", "", status=503), StoreUnavailable, "cannot do UpdateItem now"),
    (_reply("TransactionConflictException"), StoreUnavailable, "TransactionConflict"),
    (_reply("ReplicatedWriteConflictException"), StoreUnavailable, "ReplicatedWriteConflict"),
    (
        _reply("ValidationException", "Item size to update has exceeded the maximum allowed size"),
        StoreRejected,
        "too large for the table",
    ),
    (_reply("ValidationError", "wrong statement"), StoreRejected, "wrong statement"),
    (_reply("UnknownOperationException"), StoreRejected, "does not know UpdateItem"),
    (_reply("UnknownOperationException", status=501), StoreUnavailable, "cannot do UpdateItem now"),
    (_reply("ValidationException", "wrong expression"), StoreRejected, "wrong expression"),
    (_reply("SomethingNew"), StoreError, "SomethingNew: told"),
    (aws.NoCredentialsError(), CredentialsMissing, "AWS_ACCESS_KEY_ID"),
    (aws.PartialCredentialsError(provider="env", cred_var="x"), CredentialsMissing, "AWS_PROFILE"),
    (aws.NoRegionError(), ConfigurationError, r"dynamodb://TaskTable\?region="),
    (aws.ProfileNotFound(profile="x"), ConfigurationError, "profile"),
    (aws.UnauthorizedSSOTokenError(), CredentialsExpired, "aws sso login"),
    (aws.CredentialRetrievalError(provider="x", error_msg="gone"), CredentialsExpired, "gone"),
    (aws.EndpointConnectionError(endpoint_url=LOCAL), StoreUnavailable, "127.0.0.1:9"),
    (aws.ConnectTimeoutError(endpoint_url=LOCAL), StoreUnavailable, "no answer to UpdateItem"),
    (aws.ReadTimeoutError(endpoint_url=LOCAL), StoreUnavailable, "no answer to UpdateItem"),
    (aws.ConnectionClosedError(endpoint_url=LOCAL), StoreUnavailable, "no answer to UpdateItem"),
    (aws.SSLError(endpoint_url=LOCAL, error=OSError("x")), StoreUnavailable, "no answer to UpdateItem"),
    (aws.ParamValidationError(report="bad"), StoreRejected, "bad"),
]


@pytest.mark.parametrize(("raised", "kind", "text"), CASES, ids=[str(error)[:60] for error, _, _ in CASES])
def test_each_failure_has_its_kind_place_and_remedy(
    raised: Exception, kind: type[ThunderAgentError], text: str
) -> None:
    error = translate(raised, "UpdateItem", PLACE)
    assert type(error) is kind
    with pytest.raises(kind, match=text):
        raise error
    assert "TaskTable" in str(error)


def test_a_place_is_told_without_the_secrets_of_its_endpoint() -> None:
    place = Place("TaskTable", "eu-central-1", "https://user:secret@proxy.example:8000/x")
    assert str(place) == "the table 'TaskTable' in region eu-central-1 at https://proxy.example:8000/x"
    assert place.url == "dynamodb://TaskTable?region=eu-central-1&endpoint=https://proxy.example:8000/x"


@pytest.mark.parametrize(
    ("endpoint", "expected"),
    [
        ("http://127.0.0.1:4566", True),
        ("http://127.9.9.9", True),
        ("http://localhost:8000", True),
        ("http://[::1]:8000", True),
        ("https://dynamodb.eu-central-1.amazonaws.com", False),
        ("http://10.0.0.1:8000", False),
        ("http://localhost.example.com", False),
        (None, False),
    ],
)
def test_only_this_machine_is_local(endpoint: str | None, expected: bool) -> None:
    assert is_loopback(endpoint) is expected


def test_a_local_engine_needs_neither_credentials_nor_region() -> None:
    engine = DynamoEngine("TaskTable", endpoint=LOCAL)
    assert engine.url == f"dynamodb://TaskTable?region=us-east-1&endpoint={LOCAL}"
    credentials = engine.connection.client._request_signer._credentials
    assert (credentials.access_key, credentials.secret_key) == ("local", "local")
    engine.close()


def test_credentials_of_the_environment_are_used_for_a_local_engine_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "mine")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-west-1")
    engine = DynamoEngine("TaskTable", endpoint=LOCAL)
    assert engine.connection.client._request_signer._credentials.access_key == "mine"
    assert engine.connection.place.region == "eu-west-1"
    engine.close()


def test_without_a_region_the_real_dynamodb_cannot_be_opened() -> None:
    with pytest.raises(ConfigurationError, match=r"no AWS region.*AWS_DEFAULT_REGION"):
        DynamoEngine("TaskTable")


def test_without_credentials_the_first_call_says_what_to_set() -> None:
    engine = DynamoEngine("TaskTable", region="eu-central-1")
    with pytest.raises(ConfigurationError, match="AWS_ACCESS_KEY_ID"):
        engine.get(["x"])
    engine.close()


@pytest.mark.slow
def test_nobody_at_the_endpoint_is_unavailable_soon() -> None:
    engine = DynamoEngine("TaskTable", endpoint=LOCAL, purpose="lease")
    before = time.monotonic()
    with pytest.raises(StoreUnavailable, match="'TaskTable' in region us-east-1 at http://127"):
        engine.get(["x"])
    assert time.monotonic() - before < 5 * patience()
    engine.close()


@pytest.fixture
def black_hole() -> Iterator[str]:
    """An endpoint that takes connections and never answers."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(16)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


@pytest.mark.slow
def test_a_lease_call_into_a_black_hole_returns_within_its_bound(black_hole: str) -> None:
    engine = DynamoEngine("TaskTable", endpoint=black_hole).sibling()
    before = time.monotonic()
    with pytest.raises(StoreUnavailable, match="no answer to BatchGetItem"):
        engine.get(["x"])
    assert 3.9 < time.monotonic() - before < 6.5 * patience()
    engine.close()


def test_timeouts_and_attempts_are_explicit() -> None:
    work: Any = client_config("work", 24)
    lease: Any = client_config("lease", 12)
    assert (work.connect_timeout, work.read_timeout, work.max_pool_connections) == (2, 5, 24)
    assert work.retries == {"mode": "standard", "total_max_attempts": 4}
    assert (lease.connect_timeout, lease.read_timeout, lease.max_pool_connections) == (1, 2, 12)
    assert lease.retries == {"mode": "standard", "total_max_attempts": 2}
    assert work.tcp_keepalive
    assert lease.tcp_keepalive


def test_a_sibling_is_a_lease_client_of_its_own() -> None:
    engine = DynamoEngine("TaskTable", endpoint=LOCAL)
    sibling = engine.sibling()
    assert (sibling.connection.purpose, sibling.url) == ("lease", engine.url)
    assert sibling.connection.client is not engine.connection.client
    assert sibling.connection.client.meta.config.read_timeout == 2
    assert sibling.consumed is engine.consumed
    sibling.close()
    engine.close()


@pytest.mark.slow
def test_a_forked_child_makes_a_client_of_its_own() -> None:
    connection = Connection(Place("TaskTable", None, LOCAL))
    parent = connection.client
    assert connection.client is parent
    pid = os.fork()
    if pid == 0:
        try:
            os._exit(0 if connection.client is not parent and connection.client is connection.client else 1)
        finally:
            os._exit(2)
    assert os.waitpid(pid, 0)[1] == 0
    assert connection.client is parent
    connection.close()


def test_a_denied_action_is_named_in_the_error() -> None:
    engine = DynamoEngine("TaskTable", endpoint=LOCAL)
    with Stubber(engine.connection.client) as stub:
        stub.add_client_error("get_item", "AccessDeniedException", "User: x is not authorized", 400)
        with pytest.raises(AccessDenied, match=r"dynamodb:GetItem on the table 'TaskTable'.*not authorized"):
            engine.lanes()
    engine.close()
