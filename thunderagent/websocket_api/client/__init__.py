"""A client of the WebSocket API that survives the loss of its connection, of its server and of a region.

client       Client: what an application talks to
session      its connections, on the engine of the streams
replica      the state as this client sees it, and its changes that a server may have lost: pure
submitter    brings changes to the server
talk         requests, answers, chunks
credentials  a URL and a token for each attempt
events       what happens, why a client ended, and how the application learns it
options      every number, and what the ends of connections mean
"""

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
