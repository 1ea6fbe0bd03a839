"""A client of the WebSocket API that survives the loss of its connection, of its server and of a region."""

from thunderagent.model.errors import ChangeRefused, ClientClosed, TooManyChanges, VersionConflict
from thunderagent.streams.connection.endpoint import Attempt
from thunderagent.websocket_api.client.client import Client
from thunderagent.websocket_api.client.events import (
    Closed,
    CloseReason,
    Connected,
    Disconnected,
    Dropped,
    Ended,
    Event,
    Pushed,
    Resubmitted,
    StateChanged,
    Throttled,
)
from thunderagent.websocket_api.client.options import ClientOptions

__all__ = [
    "Attempt",
    "ChangeRefused",
    "Client",
    "ClientClosed",
    "ClientOptions",
    "CloseReason",
    "Closed",
    "Connected",
    "Disconnected",
    "Dropped",
    "Ended",
    "Event",
    "Pushed",
    "Resubmitted",
    "StateChanged",
    "Throttled",
    "TooManyChanges",
    "VersionConflict",
]
