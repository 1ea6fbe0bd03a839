"""The doorbell: how an enqueue, a cancel or a change of pauses reaches agents before their next poll."""

from __future__ import annotations

from thunderagent.queue.doorbell.port import Doorbell
from thunderagent.settings import Settings


def open_doorbell(settings: Settings) -> Doorbell | None:
    """Open the doorbell that belongs to the store; nothing is contacted yet.

    SQLite has sockets beside its file and ignores the queue, as an environment may be shared. DynamoDB has the SQS
    queue of `wake_queue_url`, if one is set.

    Returns:
        None: agents poll.
    """
    if settings.store.startswith("sqlite:///"):
        from thunderagent.queue.doorbell.unix import LocalDoorbell

        return LocalDoorbell(settings.store.removeprefix("sqlite:///"))
    if settings.wake_queue_url and settings.store.startswith("dynamodb://"):
        from thunderagent.queue.doorbell.sqs import SqsDoorbell  # boto3 is slow to import

        return SqsDoorbell(settings.wake_queue_url)
    return None
