"""The stands of the conformance suite as fixtures."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import stands
from tests.stands import Stand


def _parameters(names: tuple[str, ...]) -> list[object]:
    return [pytest.param(name, marks=pytest.mark.ministack) if name == "ministack" else name for name in names]


def _open(request: pytest.FixtureRequest, folder: Path) -> Iterator[Stand]:
    endpoint = request.getfixturevalue("ministack_endpoint") if request.param == "ministack" else ""
    with stands.open_stand(request.param, folder, endpoint) as stand:
        yield stand


@pytest.fixture(params=_parameters(stands.NAMES))
def stand(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Stand]:
    """Each engine in turn."""
    yield from _open(request, tmp_path)


@pytest.fixture(params=_parameters(stands.ATOMIC))
def atomic_stand(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Stand]:
    """Each engine on which several threads may race."""
    yield from _open(request, tmp_path)


@pytest.fixture(params=_parameters(tuple(name for name in stands.NAMES if not name.startswith("sqlite"))))
def dynamo_stand(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Stand]:
    """Each DynamoDB."""
    yield from _open(request, tmp_path)


@pytest.fixture(params=_parameters(("ministack",)))
def wire_stand(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Stand]:
    """A DynamoDB that is reached through the network, so that requests and replies can be lost."""
    yield from _open(request, tmp_path)
