"""Texts over the limit of the table, in a bucket of Amazon S3.

Objects are under `thunderagent/`. Nothing here deletes them: give the bucket a lifecycle rule that deletes them a year
after they were written. The object of a long open task is written again before.
"""

from __future__ import annotations

import os
import threading
from typing import Any, Final, NoReturn
from urllib.parse import quote

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from thunderagent.model.errors import (
    ConfigurationError,
    CredentialsMissing,
    StoreError,
    StoreRejected,
    StoreUnavailable,
    TextGone,
)
from thunderagent.model.forks import renewed
from thunderagent.stores.aws import build, code_of, is_denial, translate
from thunderagent.stores.engine import KeptText

PREFIX: Final = "thunderagent/"
KEEP_S: Final = 365 * 86400.0
"""Age at which the lifecycle rule of the bucket may delete an object."""


class S3Texts:
    """Texts as objects of one bucket; a reference is `s3://bucket/key`. Safe in threads and after a fork.

    Args:
        bucket: name of the bucket.
        client: S3 client; None: one from the environment, made on first use in each process.
        hasty: requests fail within seconds, for callers that try again by themselves.
    """

    def __init__(self, bucket: str, client: Any = None, *, hasty: bool = False) -> None:
        self.bucket = bucket
        self._read_s, self._attempts = (5, 2) if hasty else (10, 4)
        self._given = client
        self._made: Any = None
        self._pid = 0
        self._guard = renewed(threading.Lock())

    def put(self, key: str, text: str) -> str:
        """Keep a text under a key; the answer is the reference to it.

        Raises:
            ConfigurationError: the bucket does not exist, or there are no credentials.
            AccessDenied: `s3:PutObject` is not allowed.
            StoreUnavailable: S3 did not answer.
        """
        name = PREFIX + quote(key, safe="")
        try:
            self._client.put_object(Bucket=self.bucket, Key=name, Body=text.encode(), ContentType="application/json")
        except (ClientError, BotoCoreError) as error:
            self._fail(error, "PutObject", f"s3://{self.bucket}/{name}")
        return f"s3://{self.bucket}/{name}"

    def get(self, ref: str) -> KeptText:
        """The text of a reference, from any bucket. It expires by the rule that the bucket should have.

        Raises:
            TextGone: there is no such object.
            AccessDenied: `s3:GetObject` is not allowed; without `s3:ListBucket` S3 says so of a missing object too.
            StoreUnavailable: S3 did not answer, or there are no credentials now.
            StoreError: the reference is not one of S3, its bucket does not exist, or the object is no text.
        """
        bucket, _, name = ref.removeprefix("s3://").partition("/")
        if not ref.startswith("s3://") or not name:
            raise StoreError(f"{ref!r} is not a reference to an S3 object")
        try:
            reply = self._client.get_object(Bucket=bucket, Key=name)
            text: str = reply["Body"].read().decode()
        except (ClientError, BotoCoreError) as error:
            self._fail(error, "GetObject", ref)
        except UnicodeDecodeError as error:
            raise StoreError(f"{ref} is not a text that was stored here: {error}") from error
        return KeptText(text, reply["LastModified"].timestamp() + KEEP_S)

    @property
    def _client(self) -> Any:
        if self._given is not None:
            return self._given
        with self._guard:
            if self._made is None or self._pid != os.getpid():
                config = Config(
                    connect_timeout=2,
                    read_timeout=self._read_s,
                    retries={"mode": "standard", "total_max_attempts": self._attempts},
                )
                self._made, self._pid = build(lambda: boto3.Session().client("s3", config=config)), os.getpid()
            return self._made

    def _fail(self, error: ClientError | BotoCoreError, action: str, ref: str) -> NoReturn:
        code = code_of(error)
        if code == "NoSuchBucket":
            raise ConfigurationError(
                f"the bucket of {ref} does not exist: create it, or set THUNDERAGENT_BLOB_BUCKET to one that does"
            ) from error
        if code == "NoSuchKey":
            raise TextGone(f"{ref} is gone: it was deleted, by hand or by a lifecycle rule of the bucket") from error
        gone = ", or there is no such object, as S3 says the same without s3:ListBucket" * (action == "GetObject")
        problem = translate(error, action, f"{ref}{gone if is_denial(code) else ''}", permission=f"s3:{action}")
        if isinstance(problem, ConfigurationError):  # of this moment, as the rest of the store has what it needs
            raise CredentialsMissing(str(problem)) from error
        if isinstance(problem, StoreRejected):  # a wrong setting fails no task: its text is asked for again
            raise StoreUnavailable(str(problem)) from error
        raise problem from error
