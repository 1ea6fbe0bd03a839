"""Opens the doorbell that the settings mean."""

from __future__ import annotations

from thunderagent.queue.doorbell.port import Doorbell
from thunderagent.settings import Settings

_FILE = "sqlite:///"


def open_doorbell(settings: Settings) -> Doorbell | None:
    """The doorbell of the store: sockets beside a SQLite file, which need no setting; for DynamoDB the queue of
    `wake_queue_url`, if one is set. None: agents poll. Nothing is contacted yet.

    The embedded store ignores the queue: an environment may be shared.
    """
    if settings.store.startswith(_FILE):
        from thunderagent.queue.doorbell.unix import LocalDoorbell

        return LocalDoorbell(settings.store.removeprefix(_FILE))
    if settings.wake_queue_url and settings.store.startswith("dynamodb://"):
        from thunderagent.queue.doorbell.sqs import SqsDoorbell  # boto3 is slow to import

        return SqsDoorbell(settings.wake_queue_url)
    return None
