"""Fixtures of pytest for tests of jobs: a store in memory, time that jumps, faults by name, an agent until idle.

Installed with ThunderAgent, it needs no import. It is a module beside the package and imports nothing of the package
before a test uses a fixture: other projects pay nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import pytest

if TYPE_CHECKING:
    from thunderagent.client import Client
    from thunderagent.jobs.job import Job
    from thunderagent.jobs.registry import Registry
    from thunderagent.model.bus import EventBus
    from thunderagent.settings import Settings
    from thunderagent.stores.tasks import TaskStore
    from thunderagent.testing import FakeClock, Recorder
    from thunderagent.testing.faulty_engine import FaultyEngine

    Jobs = Registry | Job[Any] | str | list[Job[Any] | str] | tuple[Job[Any] | str, ...]

_PREFIX = "THUNDERAGENT_"
_FAST: Mapping[str, Any] = {"poll_min_s": 0.01, "poll_max_s": 0.05, "poll_idle_s": 0.05, "sweep_s": 0.2}
_SHORT: Mapping[str, Any] = {"backoff_base_s": 0.01, "backoff_cap_s": 0.05}


class RunUntilIdle(Protocol):
    """The fixture `run_until_idle`."""

    def __call__(
        self,
        jobs: Jobs | None = None,
        *,
        timeout_s: float = 30.0,
        advance: bool | None = None,
        for_s: float | None = None,
        most_runs: int = 1000,
        **settings: Any,
    ) -> Recorder:
        """Run an agent until no task is open, then stop it.

        Args:
            jobs: a job, several, a package by its name, or a registry; None: `thunder_jobs`.
            timeout_s: longest wait, in real time.
            advance: move `thunder_clock` to the next due moment whenever nothing runs; None: if the test uses it.
            for_s: let so many seconds of `thunder_clock` pass instead, with all ticks of periodic jobs in them.
            most_runs: runs of one task after which it counts as endless; not counted with `for_s`.
            settings: of this agent, instead of `thunder_settings`.

        Returns:
            the events of the agent.

        Raises:
            WaitTimeout: tasks are still open after `timeout_s`, can never run, or ran `most_runs` times; it says why.
            ConfigurationError: there are no jobs, or no clock that can be moved.
        """


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option of the configuration file."""
    parser.addini("thunder_jobs", "packages with the jobs that run_until_idle serves", type="args", default=[])


def pytest_configure(config: pytest.Config) -> None:
    """Add the marker."""
    config.addinivalue_line("markers", "thunder_jobs(*jobs): packages or jobs that run_until_idle serves in this test")


@pytest.fixture
def thunder_settings() -> Mapping[str, Any]:
    """Settings of the client and its agents, beside those that make a test fast. Override it to change them."""
    return {}


@pytest.fixture
def thunder_jobs(request: pytest.FixtureRequest) -> Jobs:
    """The jobs of `run_until_idle`: those of the marker, else of the option. Override it with a package, jobs or a
    registry."""
    marker = request.node.get_closest_marker("thunder_jobs")
    return tuple(marker.args) if marker is not None else tuple(request.config.getini("thunder_jobs"))


@pytest.fixture
def thunder_clock() -> FakeClock:
    """A clock that moves only by hand; the store of a test with this fixture uses it."""
    from thunderagent.testing import FakeClock

    return FakeClock()


@pytest.fixture
def _thunder_store(request: pytest.FixtureRequest) -> Iterator[TaskStore]:
    import time

    from thunderagent.stores.sqlite.engine import MEMORY, SqliteEngine
    from thunderagent.stores.tasks import TaskStore
    from thunderagent.testing.faulty_engine import FaultyEngine

    clock = request.getfixturevalue("thunder_clock") if "thunder_clock" in request.fixturenames else None
    engine = FaultyEngine(SqliteEngine(MEMORY, clock=clock))
    yield TaskStore(engine, monotonic=clock.monotonic if clock else time.monotonic)
    engine.close()


@pytest.fixture
def thunder_faults(_thunder_store: TaskStore) -> FaultyEngine:
    """Faults between the agent and its store, by name, as in `drop_after_commit("claim")`."""
    from thunderagent.testing.faulty_engine import FaultyEngine

    engine = _thunder_store.engine
    assert isinstance(engine, FaultyEngine)
    return engine


@pytest.fixture
def thunder_client(
    request: pytest.FixtureRequest, _thunder_store: TaskStore, thunder_settings: Mapping[str, Any]
) -> Iterator[Client]:
    """A client with a store in memory of its own; settings of the environment do not count."""
    from thunderagent.client import Client
    from thunderagent.stores.sqlite.engine import MEMORY

    short = {} if "thunder_clock" in request.fixturenames else _SHORT
    settings = _settings({"store": f"sqlite://{MEMORY}", **_FAST, **short, **thunder_settings})
    client = Client(_thunder_store, settings)
    yield client
    client.close()


@pytest.fixture
def _thunder_bus() -> EventBus:
    from thunderagent.model.bus import EventBus

    return EventBus()


@pytest.fixture
def thunder_events(_thunder_bus: EventBus) -> Iterator[Recorder]:
    """The events of the agents of `run_until_idle` in this test."""
    from thunderagent.testing import Recorder

    recorder = Recorder(_thunder_bus)
    yield recorder
    recorder.close()


@pytest.fixture
def run_until_idle(
    request: pytest.FixtureRequest, thunder_client: Client, thunder_jobs: Jobs, _thunder_bus: EventBus
) -> RunUntilIdle:
    """Runs an agent of `thunder_client`'s store until no task is open; see `RunUntilIdle`. Random numbers, such as the
    jitter of a backoff, are the same in each run of a test."""
    import random

    from thunderagent import testing
    from thunderagent.agent.loop import Agent
    from thunderagent.model.errors import ConfigurationError

    def run(
        jobs: Jobs | None = None,
        *,
        timeout_s: float = 30.0,
        advance: bool | None = None,
        for_s: float | None = None,
        most_runs: int = 1000,
        **settings: Any,
    ) -> Recorder:
        __tracebackhide__ = True
        registry = _registry(thunder_jobs if jobs is None else jobs)
        if not registry:
            raise ConfigurationError(
                "there are no jobs to serve: call run_until_idle(jobs), mark the test with "
                '@pytest.mark.thunder_jobs("myjobs"), or set the option thunder_jobs'
            )
        mine = _settings({**thunder_client.settings.model_dump(), **settings})
        rng = random.Random(request.node.nodeid)
        agent = Agent(thunder_client.store, registry, mine, bus=_thunder_bus, rng=rng, first_poll_s=0.0)
        is_movable = isinstance(thunder_client.store.clock, testing.FakeClock)
        if (advance or for_s is not None) and not is_movable:
            raise ConfigurationError("real time cannot be moved: let the test ask for the fixture thunder_clock")
        travels = is_movable if advance is None else advance
        return testing.run_until_idle(
            agent, thunder_client, timeout_s, advance=travels, for_s=for_s, most_runs=most_runs
        )

    return run


def _settings(values: Mapping[str, Any]) -> Settings:
    """These settings without those of the environment."""
    from thunderagent.settings import load_settings

    __tracebackhide__ = True
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.upper().startswith(_PREFIX)]:
            patch.delenv(name)
        return load_settings(**values)


def _registry(jobs: Jobs) -> Registry:
    from thunderagent.jobs.registry import Registry

    __tracebackhide__ = True
    if isinstance(jobs, Registry):
        return jobs
    registry = Registry()
    for one in jobs if isinstance(jobs, (list, tuple)) else (jobs,):
        for job in Registry.from_package(one).values() if isinstance(one, str) else (one,):
            registry.add(job)
    return registry
