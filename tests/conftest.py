"""Fixtures that all tests share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import pytest
from hypothesis import HealthCheck, settings

from tests.support import lanes, stands
from tests.support.stands import Stand

HERE: Final = Path(__file__).parent

# Slowness of a machine that others use too is no failure.
settings.register_profile("shared-machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared-machine")


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No setting of this machine reaches a test, and no test asks the network for credentials."""
    for name in [name for name in os.environ if name.startswith("THUNDERAGENT_")]:
        monkeypatch.delenv(name)
    if not stands.REAL:
        for name in [name for name in os.environ if name.startswith("AWS_") and name != "AWS_CA_BUNDLE"]:
            monkeypatch.delenv(name)
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


WHOLE_RUNS_ONLY: Final = ("acceptance", "docs", "infra", "simulation")
"""Folders that a quick run does not even read."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="only tests that need no process, no server and no sleep")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    quick = config.getoption("--quick")
    return True if quick and collection_path.parent == HERE and collection_path.name in WHOLE_RUNS_ONLY else None


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deal the tests to the workers of pytest-xdist, see `lanes`; one process alone runs them as they are written."""
    if config.getoption("--quick"):
        left = [item for item in items if any(map(item.get_closest_marker, ("processes", "ministack", "slow")))]
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item not in set(left)]
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if workers > 1:
        items[:] = lanes.dealt(items, workers, group=lambda item: item.path, waits=lanes.waits, is_long=lanes.is_long)


@pytest.fixture(scope="session")
def ministack_endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The endpoint of a local DynamoDB that runs for the whole session."""
    if find_spec("ministack") is None:
        pytest.skip("ministack is not installed; install with: pip install 'thunderagent[local]'")
    with stands.ministack(tmp_path_factory.mktemp("ministack")) as endpoint:
        yield endpoint


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
