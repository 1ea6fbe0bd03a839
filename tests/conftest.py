"""Fixtures that all tests share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec

import pytest
from hypothesis import HealthCheck, settings

from tests import lanes, stands

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


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Deal the tests to the workers of pytest-xdist, see `lanes`; one process alone runs them as they are written."""
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
