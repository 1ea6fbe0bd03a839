"""Opens the store that the settings name."""

from __future__ import annotations

from thunderagent.settings import Settings
from thunderagent.stores import open_engine
from thunderagent.stores.tasks import TaskStore


def open_store(settings: Settings, *, for_agent: bool = False) -> TaskStore:
    """The store of `settings.store`, with the bucket for large texts if one is set. Nothing is contacted yet.

    An agent has short timeouts and few attempts by the SDK: it tries again by itself, and must stop in time when the
    network is away.

    Raises:
        ConfigurationError: the URL cannot be understood.
    """
    blobs = None
    if settings.blob_bucket:
        from thunderagent.stores.s3 import S3Texts  # boto3 is slow to import and an embedded store does not need it

        blobs = S3Texts(settings.blob_bucket, hasty=for_agent)
    return TaskStore(open_engine(settings.store, hasty=for_agent), blobs=blobs)
