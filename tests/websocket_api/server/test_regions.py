"""The WebSocket API in two regions over a global table, when one of them is lost."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.websocket_api.server.support import Api
from thunderagent.testing import FakeClock, GlobalTableSim

HERE, THERE = "eu-central-1", "eu-west-1"


class World:
    """An API in each region; states are replicated, connections are not."""

    def __init__(self, mode: str = "MREC") -> None:
        self.clock = FakeClock()
        self.table = GlobalTableSim([HERE, THERE], mode=mode, lag_s=1.0, clock=self.clock)  # type: ignore[arg-type]
        self.here, self.there = (Api(states=self.table.engine(region), region=region) for region in (HERE, THERE))
        for api in (self.here, self.there):
            api.connect()


@pytest.fixture
def world() -> Iterator[World]:
    one = World()
    yield one
    one.table.close()


def test_a_state_is_in_the_other_region_and_each_reply_tells_its_own(world: World) -> None:
    assert world.here.save(0, {"a": 1}, "c1")["region"] == HERE
    world.table.settle()
    reply = world.there.ask("getState", known_version=1)
    assert (reply["state"], reply["version"], reply["region"], reply["client_ahead"]) == ({"a": 1}, 1, THERE, False)


def test_changes_that_a_lost_region_did_not_replicate_are_sent_again_and_stay_when_it_is_back(world: World) -> None:
    world.here.save(0, {"a": 1}, "c1")
    world.table.settle()
    world.clock.advance(1)
    assert world.here.save(1, {"b": 2}, "c2")["version"] == 2
    world.table.isolate(HERE)
    assert world.here.ask("getState")["error"] == "unavailable"

    ahead = world.there.ask("getState", known_version=2)
    assert (ahead["version"], ahead["client_ahead"]) == (1, True)
    world.clock.advance(5)
    assert world.there.save(1, {"b": 2}, "c2")["version"] == 2
    assert world.there.save(2, {"c": 3}, "c3")["version"] == 3

    world.table.rejoin(HERE)
    world.clock.advance(60)
    world.table.settle()
    for api in (world.here, world.there):
        reply = api.ask("getState", known_version=3)
        assert (reply["state"], reply["version"], reply["client_ahead"]) == ({"a": 1, "b": 2, "c": 3}, 3, False)
    assert world.here.save(9, {"b": 2}, "c2")["version"] == 2  # known in both


def test_a_change_that_was_replicated_before_its_reply_was_lost_is_not_made_twice_elsewhere(world: World) -> None:
    world.here.save(0, {"n": 1}, "c1")
    world.table.settle()
    world.table.isolate(HERE)
    assert world.there.save(0, {"n": 1}, "c1") == {"type": "saved", "id": 1, "version": 1, "region": THERE}
    assert world.there.ask("getState")["version"] == 1


def test_on_a_strongly_consistent_table_no_change_is_lost_with_its_region() -> None:
    world = World("MRSC")
    try:
        world.here.save(0, {"a": 1}, "c1")
        world.table.isolate(HERE)
        reply = world.there.ask("getState", known_version=1)
        assert (reply["version"], reply["client_ahead"]) == (1, False)
        assert world.there.save(1, {"b": 2}, "c2")["error"] == "unavailable"  # it meets the write of the other region
        world.clock.advance(2)
        assert world.there.save(1, {"b": 2}, "c2")["version"] == 2
    finally:
        world.table.close()
