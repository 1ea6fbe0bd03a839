"""Opens the store that the settings name."""

from __future__ import annotations

from thunderagent.settings import Settings
from thunderagent.store import TaskStore
from thunderagent.stores import open_engine


def open_store(settings: Settings) -> TaskStore:
    """The store of `settings.store`, with the bucket for large texts if one is set. Nothing is contacted yet.

    Raises:
        ConfigurationError: the URL cannot be understood.
    """
    blobs = None
    if settings.blob_bucket:
        from thunderagent.blobs import (
            S3Blobs,
        )  # boto3 is slow to import and an embedded store does not need it

        blobs = S3Blobs(settings.blob_bucket)
    return TaskStore(open_engine(settings.store), blobs=blobs)
