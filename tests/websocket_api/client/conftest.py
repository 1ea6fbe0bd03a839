"""What tests of the clients share with those of the API."""

from __future__ import annotations

from tests.websocket_api.server.conftest import unhurried as unhurried
