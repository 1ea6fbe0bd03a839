"""Events of EventBridge, SNS and HTTP become tasks: a handler for AWS Lambda that is made of typed routes."""

from thunderagent.errors import EventRejected
from thunderagent.router.answers import Tasks
from thunderagent.router.enqueue import Enqueue
from thunderagent.router.handler import Router
from thunderagent.router.shapes import EventBridgeEvent, HttpRequest, SnsRecord

__all__ = ["Enqueue", "EventBridgeEvent", "EventRejected", "HttpRequest", "Router", "SnsRecord", "Tasks"]
