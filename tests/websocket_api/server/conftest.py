"""Engines for the rules of the WebSocket API, each store on which several processes may race; and time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from tests.support import stands
from tests.support.stands import Stand
from thunderagent.websocket_api.server import handler


@pytest.fixture(params=["sqlite-file", pytest.param("ministack", marks=pytest.mark.ministack)])
def stand(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Stand]:
    """Each engine in turn; `stand.open()` is another process on the same rows."""
    endpoint = request.getfixturevalue("ministack_endpoint") if request.param == "ministack" else ""
    with stands.open_stand(request.param, tmp_path, endpoint) as stand:
        yield stand


@pytest.fixture(scope="session", autouse=True)
def unhurried() -> Iterator[None]:
    """A busy machine takes longer to notify the connections of a user; what came too late would be given up."""
    with mock.patch.object(handler, "NOTIFY_S", 60.0):
        yield
