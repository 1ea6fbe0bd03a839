"""Large texts in a bucket."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore import exceptions as aws
from botocore.stub import Stubber
from moto import mock_aws

from tests.support.stands import Stand, only, open_stand
from thunderagent.model.errors import (
    AccessDenied,
    ConfigurationError,
    CredentialsExpired,
    CredentialsMissing,
    StoreError,
    StoreUnavailable,
    TextGone,
    ThunderAgentError,
)
from thunderagent.stores.engine import MAX_TEXT_BYTES
from thunderagent.stores.s3 import S3Texts
from thunderagent.stores.tasks import TaskStore


@pytest.fixture
def client() -> Iterator[Any]:
    with mock_aws():
        made = boto3.client("s3", region_name="us-east-1")
        made.create_bucket(Bucket="large")
        yield made
        made.close()


def test_a_text_comes_back_by_its_reference(client: Any) -> None:
    blobs = S3Texts("large", client)
    text = '"' + "ü" * 400_000 + '"'
    ref = blobs.put("t1#payload", text)
    assert ref.startswith("s3://large/thunderagent/t1")
    assert blobs.get(ref).text == text
    assert S3Texts("another", client).get(ref).text == text, "the reference names its bucket"


def test_a_task_of_any_size_goes_through_the_store(client: Any, tmp_path: Path) -> None:
    with open_stand("sqlite-file", tmp_path) as stand:
        _goes_through(stand, S3Texts("large", client))


def _goes_through(stand: Stand, blobs: S3Texts) -> None:
    task = stand.task(payload_text='"' + "x" * MAX_TEXT_BYTES + '"')
    store = TaskStore(stand.store.engine, blobs=blobs)
    assert only(store.enqueue([task])).created
    assert store.get([task.task_id])[task.task_id].payload_text == task.payload_text
    with pytest.raises(StoreUnavailable, match="THUNDERAGENT_BLOB_BUCKET"):
        _ = stand.now().payload


@pytest.mark.slow
@pytest.mark.parametrize("ref", ["item:t1#payload", "s3://", "s3://large", "s3://large/", "http://large/x"])
def test_what_is_no_reference_is_refused(client: Any, ref: str) -> None:
    with pytest.raises(StoreError, match="not a reference"):
        S3Texts("large", client).get(ref)


def test_a_missing_bucket_and_a_missing_object_are_told(client: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"s3://nowhere/.*does not exist.*THUNDERAGENT_BLOB_BUCKET"):
        S3Texts("nowhere", client).put("k", "x")
    with pytest.raises(TextGone, match="s3://large/gone is gone"):
        S3Texts("large", client).get("s3://large/gone")
    with pytest.raises(ConfigurationError, match="does not exist"):
        S3Texts("nowhere", client).get("s3://nowhere/gone")


@pytest.mark.slow
def test_an_object_expires_a_year_after_it_was_written_last(client: Any) -> None:
    blobs = S3Texts("large", client)
    ref = blobs.put("k", "text")
    expire_at = blobs.get(ref).expire_at
    assert expire_at is not None
    assert abs(expire_at - time.time() - 365 * 86400) < 60


def test_a_refusal_of_s3_names_both_of_its_causes(client: Any) -> None:
    """Where `s3:ListBucket` is missing, a missing object is a 403 as well."""
    with Stubber(client) as stub:
        stub.add_client_error("get_object", "AccessDenied", "told", 403)
        with pytest.raises(AccessDenied, match=r"not allowed: s3:GetObject on s3://a/b, or there is no such object"):
            S3Texts("large", client).get("s3://a/b")


def test_an_object_that_is_no_text_is_told(client: Any) -> None:
    client.put_object(Bucket="large", Key="odd", Body=b"\xff")
    with pytest.raises(StoreError, match="s3://large/odd is not a text that was stored here"):
        S3Texts("large", client).get("s3://large/odd")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "status", "kind"),
    [
        ("AccessDenied", 403, AccessDenied),
        ("ExpiredToken", 400, CredentialsExpired),
        ("SlowDown", 503, StoreUnavailable),
        ("Strange", 500, StoreUnavailable),
        ("Strange", 400, StoreError),
    ],
)
def test_each_refusal_has_its_kind(client: Any, code: str, status: int, kind: type[ThunderAgentError]) -> None:
    blobs = S3Texts("large", client)
    with Stubber(client) as stub:
        calls: dict[str, Callable[[], object]] = {
            "put_object": lambda: blobs.put("k", "x"),
            "get_object": lambda: blobs.get("s3://a/b"),
        }
        for action, call in calls.items():
            stub.add_client_error(action, code, "told", status)
            with pytest.raises(kind) as caught:
                call()
            assert type(caught.value) is kind
            assert "s3://" in str(caught.value)


@pytest.mark.parametrize(
    ("raised", "kind"),
    [
        (aws.NoCredentialsError(), CredentialsMissing),
        (aws.NoRegionError(), CredentialsMissing),
        (aws.EndpointConnectionError(endpoint_url="http://x"), StoreUnavailable),
        (aws.ReadTimeoutError(endpoint_url="http://x"), StoreUnavailable),
        (aws.ParamValidationError(report="a wrong name of a bucket"), StoreUnavailable),
    ],
)
def test_a_bucket_that_cannot_be_reached_is_told(raised: Exception, kind: type[ThunderAgentError]) -> None:
    class Broken:
        def put_object(self, **_: Any) -> None:
            raise raised

        get_object = put_object

    blobs = S3Texts("large", Broken())
    with pytest.raises(kind, match="s3://large/thunderagent/k"):
        blobs.put("k", "x")
    with pytest.raises(kind, match="s3://large/k"):
        blobs.get("s3://large/k")


def test_without_a_client_one_is_made_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    with mock_aws():
        boto3.client("s3", region_name="us-east-1").create_bucket(Bucket="large")
        blobs = S3Texts("large")
        assert blobs.get(blobs.put("k", "text")).text == "text"
        assert blobs._client is blobs._client
