"""Events of EventBridge, SNS, SQS, S3 and HTTP become tasks: a handler for AWS Lambda, made of typed routes."""

from thunderagent.model.errors import EventRejected
from thunderagent.router.answers import Tasks
from thunderagent.router.enqueue import Enqueue
from thunderagent.router.events import (
    EventBridgeEvent,
    HttpRequest,
    Invocation,
    S3Event,
    S3Object,
    SnsRecord,
    SqsMessage,
)
from thunderagent.router.handler import Router

__all__ = [
    "Enqueue",
    "EventBridgeEvent",
    "EventRejected",
    "HttpRequest",
    "Invocation",
    "Router",
    "S3Event",
    "S3Object",
    "SnsRecord",
    "SqsMessage",
    "Tasks",
]
