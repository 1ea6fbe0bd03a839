"""What one user may send: counted over all instances of the function, cheap, and no matter of anybody else."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

from tests.support.stands import Stand
from tests.websocket_api.server.support import LONG_S, Api, asking, make_gateway, until
from thunderagent.model.bus import Event
from thunderagent.model.conditions import Present, Write
from thunderagent.model.edge_events import ConnectionFlooded, MessageRefused
from thunderagent.model.events import StoreFailed
from thunderagent.model.task import Row
from thunderagent.stores.engine import Applied
from thunderagent.stores.sqlite.engine import MEMORY, SqliteEngine
from thunderagent.testing import FakeClock
from thunderagent.testing.faulty_engine import Fault, FaultyEngine
from thunderagent.websocket_api.canary.probe import Prober
from thunderagent.websocket_api.canary.tokens import Tokens
from thunderagent.websocket_api.gateway.events import Limits
from thunderagent.websocket_api.gateway.issuer import Issuer
from thunderagent.websocket_api.records import connection_id_of, connections_id
from thunderagent.websocket_api.server.connections import FLOOD_CONNECTS, Connections
from thunderagent.websocket_api.server.throttle import CONNECT_BURST, FLOOD, FORGET_S, LOT, Throttle, Throttled


class Counting(SqliteEngine):
    """Counts the writes that DynamoDB would bill."""

    def __init__(self, clock: FakeClock) -> None:
        super().__init__(MEMORY, clock=clock)
        self.writes = 0

    def apply(self, batch: Sequence[Write]) -> list[Applied]:
        self.writes += len(batch)
        return super().apply(batch)

    def put(self, rows: Sequence[Row], *, fresh: bool = False) -> list[Applied]:
        self.writes += len(rows)
        return super().put(rows, fresh=fresh)


def taken(throttle: Throttle, connection: str, user: str, times: int = 1) -> int:
    """How many of some messages are taken."""
    number = 0
    for _ in range(times):
        try:
            throttle.check(connection, user)
            number += 1
        except Throttled:
            pass
    return number


@pytest.mark.slow
def test_the_limits_hold_over_instances_of_the_function(stand: Stand) -> None:
    clock, user = FakeClock(), stand.id("ada")
    connections = [stand.id(f"c{number}") for number in range(4)]
    for name in (*connections, other := stand.id("other")):
        Connections(stand.store.engine, clock.now).open(name, user if name in connections else stand.id("bob"))
    instances = [Throttle(stand.open().engine, clock.now, rate=20, burst=60) for _ in range(3)]

    def sent(name: str, each: int, of: str = user) -> int:
        return sum(taken(one, name, of) for _ in range(each) for one in instances)

    slack = len(instances) * (LOT - 1)
    assert 30 <= sent(connections[0], 40) <= 30 + slack  # half of what its user may send
    assert 30 - LOT <= sum(sent(name, 20) for name in connections[1:]) <= 30 + 3 * slack
    assert sent(other, 3, stand.id("bob")) == 9  # nobody else is refused
    clock.advance(1.0)  # 20 tokens more of the user, 10 of each connection
    assert 10 <= sent(connections[1], 20) + sent(connections[2], 20) <= 20 + 2 * slack


def test_who_sends_little_costs_nothing_and_a_lot_costs_two_writes() -> None:
    clock = FakeClock()
    engine = Counting(clock)
    Connections(engine, clock.now).open("c1", "ada")
    throttle, engine.writes = Throttle(engine, clock.now, rate=50, burst=250), 0
    for _ in range(100):  # more than a client that pings and saves
        assert taken(throttle, "c1", "ada", LOT - 1) == LOT - 1
        clock.advance(FORGET_S)
    assert engine.writes == 0
    assert taken(throttle, "c1", "ada", 10 * LOT) == 10 * LOT
    assert engine.writes <= 2 * 10 + 2  # the first lot of a burst finds the bucket full
    assert taken(throttle, "c1", "ada", 1000) <= 125
    engine.writes = 0
    assert taken(throttle, "c1", "ada", 1000) == engine.writes == 0  # what is refused costs nothing
    others = [f"c{number}" for number in range(2, 6)]
    for name in others:
        Connections(engine, clock.now).open(name, "ada")
    assert sum(taken(throttle, name, "ada", 100) for name in others) <= 125 + LOT
    engine.writes = 0
    assert sum(taken(throttle, name, "ada", 100) for name in ("c1", *others)) == engine.writes == 0
    clock.advance(1.0)  # what was refused for the user has cost a connection no tokens
    assert taken(throttle, others[-1], "ada", 50) == 50


def test_instances_whose_clocks_differ_lock_nobody_out_however_small_the_burst() -> None:
    clock = FakeClock()
    engine = SqliteEngine(MEMORY, clock=clock)
    clocks = [clock.now, lambda: clock.now() - 1.0]
    for name in (names := ["c1", "c2"]):
        Connections(engine, clock.now).open(name, "ada")
    instances = [Throttle(engine, now, rate=50, burst=10) for now in clocks]
    number = 0
    for _ in range(100):  # 40 a second
        number += sum(taken(one, name, "ada") for one in instances for name in names)
        clock.advance(0.1)
    assert number == 400


def test_what_is_refused_is_answered_and_taken_after_the_pause_and_a_flood_ends_the_connection() -> None:
    api = Api(user_rate=20, user_burst=60)
    api.connect()
    api.connect("bob", "c9")
    replies = [api.ask("ping") for _ in range(30 + FLOOD - 1)]
    refused = [one for one in replies if one["type"] == "error"]
    assert 30 <= len(replies) - len(refused) < 30 + LOT
    assert all((one["error"], one["id"], one["retry_after_s"]) == ("throttled", 1, 1.0) for one in refused)
    assert len([one for one in api.told if isinstance(one, MessageRefused)]) == 1  # no flood of lines
    assert api.ended == []
    api.clock.advance(refused[0]["retry_after_s"])
    assert api.ask("ping")["type"] == "pong"
    for _ in range(2 * FLOOD + 50):
        if not api.ended:
            api.send('{"action":"ping","id":2}')
    assert api.ended == ["c1"]
    assert json.loads(api.pushed[-1][1])["error"] == "throttled"
    assert [one.user for one in api.told if isinstance(one, ConnectionFlooded)] == ["ada"]
    assert api.ask("ping", user="bob", connection="c9")["type"] == "pong"


def test_connects_are_bounded_and_a_flood_costs_many() -> None:
    engine = Counting(FakeClock())
    api = Api(connections=engine, connect_rate=5)

    def connects(user: str = "ada") -> list[int]:
        found = []
        for number in range(2 * round(CONNECT_BURST)):
            found.append(api.connect(user, f"{user}{number}")["statusCode"])
            api.disconnect(user, f"{user}{number}")
        return found

    assert connects() == [200] * round(CONNECT_BURST) + [429] * round(CONNECT_BURST)
    engine.writes = 0
    assert [api.connect("ada", f"more{number}")["statusCode"] for number in range(100)] == [429] * 100
    assert engine.writes == 0  # what is refused costs nothing
    assert api.connect("bob", "b1")["statusCode"] == 200
    api.clock.advance(1.0)
    assert connects().count(200) == 5
    api.clock.advance(1.0)
    api.api._connections.flooded("ada")
    assert connects().count(200) == 0
    api.clock.advance((FLOOD_CONNECTS - 5) / 5 + 1.0)
    assert connects().count(200) == 5


def test_a_table_that_does_not_answer_refuses_nobody_and_neither_does_a_number_that_cannot_be() -> None:
    engine = FaultyEngine(SqliteEngine(MEMORY))
    api = Api(connections=engine, user_rate=3, user_burst=10)
    api.connect()
    with engine.outage():
        assert {api.ask("ping")["type"] for _ in range(4 * LOT)} == {"pong"}
    assert {one.during for one in api.told if isinstance(one, StoreFailed)} == {"a look at the limits"}
    engine.fail("apply", Fault.LOST_REPLY)
    assert api.ask("ping")["type"] == "pong"
    far = [
        Write(verb="x", task_id=name, set={"lockTime": 9e15}, require=(Present("taskId"),))
        for name in (connection_id_of("c1"), connections_id("ada"))
    ]
    assert [one.won for one in engine.behind.apply(far)] == [True, True]
    assert {api.ask("ping")["type"] for _ in range(LOT)} == {"pong"}


@pytest.mark.slow
def test_a_client_that_floods_is_disconnected_while_the_canary_and_others_notice_nothing(tmp_path: Path) -> None:
    issuer, told = Issuer(), list[Event]()
    gateway = make_gateway(issuer, region="eu-central-1", limits=Limits(user_rate=4, user_burst=40))
    gateway.bus.subscribe(told.append)
    (tmp_path / "token").write_text(issuer.token("canary"))

    async def flood() -> int:
        """Sends whatever it is answered, until it is disconnected."""
        headers = {"Authorization": f"Bearer {issuer.token('mallory')}"}
        sent = 0
        async with connect(gateway.url, additional_headers=headers, compression=None) as socket:
            try:
                while True:
                    for _ in range(10):
                        await socket.send('{"action":"ping","id":1}')
                        sent += 1
                    for _ in range(10):
                        await socket.recv()
            except ConnectionClosed:
                return sent

    async def main() -> None:
        async with gateway, asking(gateway, issuer.token("ada")) as ada:
            floods = [asyncio.create_task(flood()) for _ in range(2)]
            prober = Prober("eu-central-1", Tokens(f"file://{tmp_path}/token"), budget_s=6 * LONG_S)
            while not all(one.done() for one in floods):
                found = await prober.probe("eu-central-1", gateway.url)
                assert found.ok, found.reason
                assert (await ada.ask("ping", id=1))["type"] == "pong"
                await asyncio.wait(floods, timeout=1.0)  # the canary does not flood
            assert all(one.result() > FLOOD for one in floods)
            await until(lambda: gateway.connections == 1)

    asyncio.run(asyncio.wait_for(main(), 12 * LONG_S))
    assert [one.user for one in told if isinstance(one, ConnectionFlooded)].count("mallory") >= 2
