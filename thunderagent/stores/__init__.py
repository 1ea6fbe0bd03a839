"""Stores: the places that keep the rows. `open_engine` picks one by its URL, `open_store` by the settings."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Final, Literal
from urllib.parse import parse_qsl, urlsplit

from thunderagent.model.errors import ConfigurationError
from thunderagent.stores.engine import Engine
from thunderagent.stores.tasks import TaskStore

if TYPE_CHECKING:
    from thunderagent.settings import Settings  # slow to import, and Lambda functions have no settings

SQLITE_EXAMPLE: Final = "sqlite:///thunderagent.db"
DYNAMODB_EXAMPLE: Final = "dynamodb://TaskTable?region=eu-central-1"
_FILE: Final = "sqlite:///"
_TABLE_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{3,255}")
_DYNAMODB_KEYS: Final = ("region", "endpoint")


def open_store(settings: Settings, *, for_agent: bool = False) -> TaskStore:
    """The store of `settings.store`, with the bucket for large texts if one is set. Nothing is contacted yet.

    `for_agent`: short timeouts and few attempts by the SDK, as an agent tries again by itself and must stop in time.

    Raises:
        ConfigurationError: the URL cannot be understood.
    """
    blobs = None
    if settings.blob_bucket:
        from thunderagent.stores.s3 import S3Texts  # boto3 is slow to import and an embedded store does not need it

        blobs = S3Texts(settings.blob_bucket, hasty=for_agent)
    return TaskStore(open_engine(settings.store, hasty=for_agent), blobs=blobs)


def open_engine(url: str, *, hasty: bool = False) -> Engine:
    """The engine of a store's URL. Nothing is read yet, except that DynamoDB makes its client.

    * `sqlite:///thunderagent.db`: a file, relative to the working directory of this moment; `sqlite:////var/tasks.db`:
      an absolute path;
    * `sqlite://:memory:`: gone with the process, for tests;
    * `dynamodb://TaskTable?region=eu-central-1`, with `&endpoint=http://127.0.0.1:4566` for a local engine.

    `hasty` is for agents, which try again by themselves: requests of DynamoDB fail within seconds, and their capacity
    is counted.

    Raises:
        ConfigurationError: the URL is not one of these; or no region is known.
    """
    scheme, mark, rest = url.partition("://")
    if mark and scheme == "sqlite":
        return _open_sqlite(url, rest)
    if mark and scheme == "dynamodb":
        return _open_dynamodb(url, hasty)
    raise ConfigurationError(
        f"the store {url!r} is neither sqlite:// nor dynamodb://; "
        f"write for example {SQLITE_EXAMPLE} or {DYNAMODB_EXAMPLE}"
    )


def fixed(url: str) -> str:
    """The URL of a store that is opened later, with an absolute path."""
    path = url.removeprefix(_FILE)
    return url if path in (url, "", "/") else _FILE + os.path.abspath(path)


def _open_sqlite(url: str, rest: str) -> Engine:
    from thunderagent.stores.sqlite.engine import MEMORY, SqliteEngine

    if rest == MEMORY:
        return SqliteEngine(MEMORY)
    if "?" in rest:
        raise ConfigurationError(
            f"the store {url!r} has parameters, SQLite has none; write for example {SQLITE_EXAMPLE}"
        )
    path = rest.removeprefix("/")
    if not rest.startswith("/") or path in ("", "/"):
        raise ConfigurationError(
            f"the store {url!r} names no file; write for example {SQLITE_EXAMPLE} (relative), "
            f"sqlite:////var/lib/thunderagent.db (absolute) or sqlite://{MEMORY}"
        )
    return SqliteEngine(path)


def _open_dynamodb(url: str, hasty: bool) -> Engine:
    parts = urlsplit(url)
    if not _TABLE_NAME.fullmatch(parts.netloc) or parts.path not in ("", "/") or parts.fragment:
        raise ConfigurationError(
            f"the store {url!r} does not name a table (3 to 255 letters, digits, '_', '.' or '-'); "
            f"write for example {DYNAMODB_EXAMPLE}"
        )
    query = dict(parse_qsl(parts.query, keep_blank_values=True))
    for name, value in query.items():
        if name not in _DYNAMODB_KEYS or not value:
            problem = f"an empty {name}" if name in _DYNAMODB_KEYS else f"the unknown parameter {name!r}"
            raise ConfigurationError(
                f"the store {url!r} has {problem}; known are region and endpoint, "
                f"for example {DYNAMODB_EXAMPLE}&endpoint=http://127.0.0.1:4566"
            )
    endpoint = query.get("endpoint")
    if endpoint and urlsplit(endpoint).scheme not in ("http", "https"):
        raise ConfigurationError(
            f"the store {url!r} has an endpoint that is not a URL; write for example "
            f"{DYNAMODB_EXAMPLE}&endpoint=http://127.0.0.1:4566"
        )
    from thunderagent.stores.dynamo.consumed import Consumed
    from thunderagent.stores.dynamo.engine import DynamoEngine

    purpose: Literal["work", "lease"] = "lease" if hasty else "work"
    consumed = Consumed(enabled=hasty)
    return DynamoEngine(parts.netloc, region=query.get("region"), endpoint=endpoint, purpose=purpose, consumed=consumed)
