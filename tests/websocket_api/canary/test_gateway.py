"""The canary at the real API: its handlers, its tokens and its states, behind the local gateway, in two regions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.websocket_api.canary.support import run, until
from thunderagent.model.bus import EventBus
from thunderagent.stores.engine import Engine
from thunderagent.stores.sqlite.engine import MEMORY, SqliteEngine
from thunderagent.testing import FaultyEngine, GlobalTableSim
from thunderagent.websocket_api.canary.probe import SLOTS, Prober, ProbeResult, Step
from thunderagent.websocket_api.canary.tokens import Tokens
from thunderagent.websocket_api.canary.watch import CanaryWatch
from thunderagent.websocket_api.gateway.gateway import Gateway, in_thread
from thunderagent.websocket_api.gateway.issuer import Issuer

pytestmark = pytest.mark.slow

A, B = "eu-central-1", "eu-west-1"


@dataclass
class Region:
    """A gateway with the engine of its states, whose faults can be asked for."""

    gateway: Gateway
    states: FaultyEngine


@contextmanager
def regions(engine: Callable[[str], Engine], issuer: Issuer, *names: str) -> Iterator[dict[str, Region]]:
    """Gateways of regions whose states are where `engine` says."""
    with ExitStack() as stack:
        found = {}
        for name in names:
            states, connections = FaultyEngine(engine(name)), SqliteEngine(MEMORY)
            stack.callback(connections.close)
            found[name] = Region(Gateway(states, connections, region=name, authorizer=issuer.authorizer()), states)
        with in_thread(*(one.gateway for one in found.values())):
            yield found


@pytest.fixture
def issuer() -> Issuer:
    return Issuer()


@pytest.fixture
def one(issuer: Issuer) -> Iterator[Region]:
    states = SqliteEngine(MEMORY)
    with regions(lambda name: states, issuer, A) as found:
        yield found[A]
    states.close()


@pytest.fixture
def tokens(tmp_path: Path, issuer: Issuer) -> Callable[..., Tokens]:
    """Tokens that a file has for a target."""

    def made(target: str = A, *, user: str = "canary", expires_s: float = 600.0) -> Tokens:
        (tmp_path / target).write_text(issuer.token(user, expires_s=expires_s))
        return Tokens(f"file://{tmp_path}/{{target}}")

    return made


def a_prober(tokens: Tokens, *, who: str = "me", budget_s: float = 10.0) -> Prober:
    return Prober(A, tokens, who=who, budget_s=budget_s)


def test_a_healthy_region_does_every_step_and_no_connection_is_left(one: Region, tokens: Callable[..., Tokens]) -> None:
    prober, version = a_prober(tokens()), 0
    for number in (1, 2, 3):
        found = run(prober.probe(A, one.gateway.url, version=version))
        assert found.ok, found.reason
        assert (found.region, found.version) == (A, number)
        version = found.version
    run(until(lambda: one.gateway.connections == 0))


def test_a_prober_that_knows_nothing_finds_the_version_by_itself(one: Region, tokens: Callable[..., Tokens]) -> None:
    kept = tokens()
    versions = [run(a_prober(kept).probe(A, one.gateway.url)).version for _ in range(3)]
    assert versions == [1, 2, 3]


def test_a_token_that_is_over_fails_the_step_auth_until_there_is_a_new_one(
    one: Region, tokens: Callable[..., Tokens]
) -> None:
    prober = a_prober(tokens(expires_s=-3600.0))
    found = run(prober.probe(A, one.gateway.url))
    assert (found.failed, found.reason.split(":")[0]) in [
        (Step.AUTH, "refused with 401"),
        (Step.AUTH, "refused with 403"),
    ]
    tokens()
    assert run(prober.probe(A, one.gateway.url)).ok


def test_a_table_of_states_that_does_not_answer_fails_the_step_set(one: Region, tokens: Callable[..., Tokens]) -> None:
    prober = a_prober(tokens())
    with one.states.outage():
        found = run(prober.probe(A, one.gateway.url))
    assert found.failed is Step.SET
    assert "unavailable" in found.reason
    assert run(prober.probe(A, one.gateway.url)).ok


def test_a_region_that_is_cut_off_fails_and_comes_back(one: Region, tokens: Callable[..., Tokens]) -> None:
    watch = CanaryWatch({A: one.gateway.url}, a_prober(tokens(), budget_s=2.0), EventBus(), own=A)

    def turns(number: int) -> list[bool]:
        return [bool(run(watch.turn())) and watch.is_well for _ in range(number)]

    assert turns(2) == [False, True]
    one.gateway.cut()
    assert turns(2) == [True, False]
    one.gateway.mend()
    assert turns(5) == [False] * 4 + [True]


def test_twelve_probers_of_one_user_at_once_all_succeed(one: Region, tokens: Callable[..., Tokens]) -> None:
    async def main() -> list[ProbeResult]:
        probers = [a_prober(tokens(), who=f"agent {number}") for number in range(12)]
        return await asyncio.gather(*(prober.probe(A, one.gateway.url) for prober in probers))

    assert [found.reason for found in run(main()) if not found.ok] == []


def test_two_regions_with_one_table_are_tried_from_each_other(issuer: Issuer, tokens: Callable[..., Tokens]) -> None:
    table = GlobalTableSim([A, B], lag_s=0.01)
    for name in (A, B):
        kept = tokens(name, user=f"canary-{name}")
    with table, regions(table.engine, issuer, A, B) as found:
        urls = {name: region.gateway.url for name, region in found.items()}
        for _ in range(3):
            assert [one.reason for one in run(a_prober(kept).probe_all(urls)) if not one.ok] == []
        found[B].gateway.cut()
        first, second = run(a_prober(kept).probe_all(urls))
    assert (first.ok, second.ok) == (True, False)


def test_one_user_in_two_regions_is_no_fault_while_their_writes_overwrite_each_other(
    issuer: Issuer, tokens: Callable[..., Tokens]
) -> None:
    table = GlobalTableSim([A, B], lag_s=0.02)
    for name in (A, B):
        kept = tokens(name, user="canary")
    with table, regions(table.engine, issuer, A, B) as found:
        urls = {name: region.gateway.url for name, region in found.items()}
        failed = [one.reason for _ in range(15) for one in run(a_prober(kept).probe_all(urls)) if not one.ok]
    assert failed == []


def test_what_it_leaves_in_the_state_is_small(one: Region, tokens: Callable[..., Tokens]) -> None:
    kept = tokens()
    for number in range(SLOTS + 8):
        assert run(a_prober(kept, who=str(number)).probe(A, one.gateway.url)).ok
    [row] = one.states.behind.get(["user:canary"]).values()
    assert len(row["payload"]) < 1500
