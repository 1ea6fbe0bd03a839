"""Engines for the rules of the WebSocket API: each store on which several processes may race."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import stands
from tests.stands import Stand


@pytest.fixture(params=["sqlite-file", pytest.param("ministack", marks=pytest.mark.ministack)])
def stand(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Stand]:
    """Each engine in turn; `stand.open()` is another process on the same rows."""
    endpoint = request.getfixturevalue("ministack_endpoint") if request.param == "ministack" else ""
    with stands.open_stand(request.param, tmp_path, endpoint) as stand:
        yield stand
