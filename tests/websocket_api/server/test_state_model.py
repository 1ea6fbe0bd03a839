"""Clients that change one state at once while replies are lost: every change is made once, in one order.

First one handler against senders of patches; then the clients of this package, several of one user, over connections
that are lost and replaced, with computed values. `THUNDER_TEST_STATES=50` plays so many random seeds of these instead
of the few that are the same in every run.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import selectors
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from websockets.exceptions import ConnectionClosedError

from tests.websocket_api.server.support import Api
from thunderagent.model.errors import ChangeRefused, VersionConflict
from thunderagent.stores.sqlite.engine import MEMORY, SqliteEngine
from thunderagent.streams.connection.ending import State
from thunderagent.streams.connection.governor import Governor
from thunderagent.testing.faulty_engine import Fault, FaultyEngine
from thunderagent.websocket_api.client import Client, ClientOptions
from thunderagent.websocket_api.gateway import events as gateway_events
from thunderagent.websocket_api.protocol import CHANGES_KEPT, merge_patch
from thunderagent.websocket_api.records import state_id
from thunderagent.websocket_api.server.handler import WebSocketApi
from thunderagent.websocket_api.server.throttle import Rates

pytestmark = pytest.mark.slow

VERBS = ("get", "put", "save state")
FAULTS = (Fault.LOST_REQUEST, Fault.LOST_REPLY, Fault.REPEATED, Fault.BROKEN_CALL)


@dataclass
class Sender:
    """A client that sends each change until it is acknowledged, as the clients of this package do."""

    name: str
    api: Api
    version: int = 0
    state: dict[str, Any] = field(default_factory=dict)
    made: int = 0
    waiting: tuple[str, dict[str, Any]] | None = None
    saved: dict[str, tuple[int, dict[str, Any]]] = field(default_factory=dict)

    def step(self, patch: dict[str, Any]) -> None:
        """Send the change that waits, or a new one."""
        if self.waiting is None:
            self.made += 1
            self.waiting = f"{self.name}{self.made}", patch
        change, patch = self.waiting
        reply = self.api.save(self.version, patch, change)
        match reply["type"]:
            case "saved":
                self.saved[change] = reply["version"], patch
                self.waiting = None
                self.look()
            case "conflict":
                assert reply["version"] >= self.version, "what was shown is gone"
                self.version, self.state = reply["version"], reply["state"]
            case _:
                assert reply["error"] == "unavailable", reply

    def look(self) -> None:
        reply = self.api.ask("getState", known_version=self.version)
        if reply["type"] == "state":
            assert not reply["client_ahead"]
            assert reply["version"] >= self.version
            self.version, self.state = reply["version"], reply["state"]

    def again(self, change: str) -> None:
        """Deliver a change once more that was acknowledged."""
        made, patch = self.saved[change]
        reply = self.api.save(made - 1, patch, change)
        assert reply.get("version", made) == made, reply
        assert reply["type"] == "saved" or reply["error"] == "unavailable"


PATCHES = st.dictionaries(st.sampled_from("abc"), st.none() | st.integers(0, 9) | st.just({"x": 1}), max_size=2)
STEPS = st.tuples(
    st.integers(0, 2),
    PATCHES,
    st.none() | st.tuples(st.sampled_from(VERBS), st.sampled_from(FAULTS)),
    st.booleans(),
)


@given(st.lists(STEPS, max_size=25))
@settings(max_examples=60, deadline=None)
def test_every_change_is_made_once_and_the_state_is_what_they_make_in_their_order(steps: list[Any]) -> None:
    engine = FaultyEngine(SqliteEngine(MEMORY))
    apis = [Api(states=engine), Api(states=engine)]  # two processes
    senders = [Sender(name, apis[number % 2]) for number, name in enumerate("pqr")]
    for number, patch, fault, repeat in steps:
        if fault is not None:
            engine.fail(*fault)
        one = senders[number]
        one.step(patch)
        if repeat and one.saved:
            one.again(next(iter(one.saved)))
    for one in senders:
        for _ in range(40):
            if one.waiting is not None:
                one.step({})
        assert one.waiting is None
    saved = {change: made for one in senders for change, made in one.saved.items()}
    assert sorted(version for version, _ in saved.values()) == list(range(1, len(saved) + 1))
    state: Any = {}
    for _, patch in sorted(saved.values(), key=lambda one: one[0]):
        state = merge_patch(state, patch)
    for _ in range(9):  # faults that are left
        reply = apis[0].ask("getState")
    assert (reply["state"], reply["version"]) == (state, len(saved))


# Many clients of one user, whose connections are lost

SEEDS: Final = int(os.environ.get("THUNDER_TEST_STATES", "0"))
SEATS: Final = 4
LONGEST_S: Final = 100_000.0


class Full(Exception):
    """An update calls itself off."""


class Instant(asyncio.SelectorEventLoop):
    """Time passes when nothing else is to be done, and in no other way: a seed gives the same order each time."""

    def __init__(self) -> None:
        self.at = 0.0
        super().__init__(_Selector(self))

    def time(self) -> float:
        return self.at


class _Selector(selectors.DefaultSelector):
    def __init__(self, loop: Instant) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        assert timeout is not None, "everything waits for something that will not happen"
        self._loop.at += timeout
        assert self._loop.at < LONGEST_S, "it comes to no end"
        return super().select(0)


class Wire:
    """A connection of a client: texts take their time, in both directions, and overtake each other."""

    def __init__(self, world: World, api: WebSocketApi, name: str) -> None:
        self.world = world
        self.api = api
        self.name = name
        self.inbox: asyncio.Queue[str] = asyncio.Queue()
        self.is_open = True

    async def send(self, text: str) -> None:
        if not self.is_open:
            raise ConnectionClosedError(None, None)
        self.world.later(lambda: self.world.arrive(self, text))

    async def recv(self) -> str:
        return await self.inbox.get()

    def deliver(self, text: str) -> None:
        if self.is_open:
            self.inbox.put_nowait(text)

    async def close(self) -> None:
        self.is_open = False


class Line:
    """Takes the place of a client's pump: connections that are lost, replaced, and opened again."""

    def __init__(self, world: World, tab: Tab) -> None:
        self.world = world
        self.tab = tab
        self.connection: Any = None
        self._reader: asyncio.Task[None] | None = None

    async def run(self) -> None:
        world, session = self.world, self.tab.client._session
        while True:
            wire = await self._open()
            self.connection, old = wire, self.connection
            session._moved(State.LIVE, "" if old is None else "rotated")
            if old is not None:
                self._leave(old)
            self._reader = asyncio.create_task(self._read(wire))
            await world.pause(40.0)
            while world.is_calm:
                await world.pause(40.0)
            if world.rng.random() < 0.7:  # or it is replaced while it works
                self.connection = None
                self._leave(wire)
                session._moved(State.BACKOFF, "lost")
                await world.pause(10.0 if world.rng.random() < 0.9 else 300.0)

    def abort(self) -> None:
        if self._reader is not None:
            self._reader.cancel()

    async def _open(self) -> Wire:
        while True:
            wire = self.world.connect(self.tab)
            try:
                async with asyncio.timeout(10.0):
                    await self.tab.client._session._greet(wire, None)  # type: ignore[arg-type]
                return wire
            except (TimeoutError, ConnectionError):
                self.world.disconnect(wire)

    async def _read(self, wire: Wire) -> None:
        while True:
            self.tab.client._session._receive(await wire.recv())

    def _leave(self, wire: Wire) -> None:
        if self._reader is not None:
            self._reader.cancel()
        self.world.disconnect(wire)


class Tab:
    """A client of the user, what it does, and what it was told of that."""

    def __init__(self, world: World, number: int) -> None:
        self.world = world
        self.name = f"t{number}-"
        self.api = world.apis[number % len(world.apis)]
        rng = random.Random(world.rng.random())
        self.client = Client("ws://api.test", "good", options=ClientOptions(), governor=Governor(rng=rng))
        self.line = Line(world, self)
        self.client._session.pump = self.line  # type: ignore[assignment]
        self.made = set[str]()
        self.refused = set[str]()
        self.doubtful = set[str]()
        self.overwritten = set[str]()
        self._doing: list[asyncio.Task[None]] = []

    async def act(self, changes: int, pause_s: float) -> None:
        for number in range(changes):
            await self.world.pause(pause_s)
            does = self.world.rng.choice((self.append, self.append, self.sit, self.only_upon, self.overwrite))
            self._doing.append(asyncio.create_task(self.note(f"{self.name}{number}", does)))
        await asyncio.gather(*self._doing)

    async def note(self, token: str, does: Callable[[str], Awaitable[object]]) -> None:
        """Do it, and note what came of it."""
        try:
            await does(token)
        except (Full, VersionConflict):
            self.refused.add(token)
        except ChangeRefused as error:
            assert "not known" in str(error)
            self.doubtful.add(token)
        else:
            self.made.add(token)

    async def append(self, token: str) -> None:
        await self.client.update(
            lambda state: {"all": [*state.get("all", []), token], "count": state.get("count", 0) + 1}
        )

    async def sit(self, token: str) -> None:
        def take(state: dict[str, Any]) -> dict[str, Any]:
            if len(state.get("seats", [])) == SEATS:
                raise Full
            return {"seats": [*state.get("seats", []), token]}

        await self.client.update(take)

    async def only_upon(self, token: str) -> None:
        version = self.client.version
        assert await self.client.set({"upon": {token: version}}, version=version) == version + 1

    async def overwrite(self, token: str) -> None:
        await self.client.set({"own": {self.name: token}, "last": token})
        self.overwritten.add(token)


class World:
    """Clients of one user, and the API in one region or two, over one table of states."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.is_calm = False
        self.states = FaultyEngine(SqliteEngine(MEMORY))
        self.lists = [FaultyEngine(SqliteEngine(MEMORY)) for _ in range(1 + seed % 2)]
        self.apis = [
            WebSocketApi(
                self.states,
                connections,
                region=region,
                post=self._post,
                end=lambda connection: True,
                rates=Rates(user_burst=1e6, connect_rate=1e6),
            )
            for region, connections in zip("ab", self.lists, strict=False)
        ]
        self.wires: dict[str, Wire] = {}
        self.history: dict[int, Any] = {0: {}}
        self.problems: list[Any] = []
        self._posted: list[tuple[str, str]] = []
        self.tabs = [Tab(self, number) for number in range(self.rng.randint(2, 6))]

    def close(self) -> None:
        for api in self.apis:
            api.close()
        for engine in (self.states, *self.lists):
            engine.close()

    async def pause(self, longest_s: float) -> None:
        await asyncio.sleep(self.rng.uniform(0.0, longest_s))

    def later(self, do: Callable[[], object]) -> None:
        """Do it after some time, or never."""
        if self.is_calm or self.rng.random() > 0.03:
            asyncio.get_running_loop().call_later(self.rng.uniform(0.0, 2.0), do)

    def connect(self, tab: Tab) -> Wire:
        if self.rng.random() < 0.1:  # the other region takes over
            tab.api = self.rng.choice(self.apis)
        wire = Wire(self, tab.api, f"{tab.name}{len(self.wires)}")
        self.wires[wire.name] = wire
        event = gateway_events.connect_event(wire.name, "/", {}, now=0.0)
        event["requestContext"]["authorizer"] = AUTHORIZER
        assert wire.api.handle(event)["statusCode"] == 200
        return wire

    def disconnect(self, wire: Wire) -> None:
        wire.is_open = False
        if self.rng.random() < 0.7:  # `$disconnect` is not sure to come
            wire.api.handle(gateway_events.disconnect_event(wire.name, AUTHORIZER, code=1000, reason="", now=0.0))

    def arrive(self, wire: Wire, text: str) -> None:
        """A message reaches the API, though its connection may be lost since."""
        faults = [(self.states, self.rng.choice(VERBS), self.rng.choice(FAULTS))]
        faults += [(one, "get", Fault.LOST_REQUEST) for one in self.lists]
        faults = [one for one in faults if not self.is_calm and self.rng.random() < 0.05]
        for engine, verb, fault in faults:
            engine.fail(verb, fault)
        answer = wire.api.handle(gateway_events.message_event(wire.name, text, AUTHORIZER, now=0.0))
        for engine, verb, fault in faults:
            engine.forget(verb, fault)
        row = self.states.get([state_id("ada")]).get(state_id("ada"))
        if row is not None:
            self.history.setdefault(row["fence"], json.loads(row["payload"]))
        for tab in self.tabs:
            replica = tab.client._replica
            if replica.confirmed != self.history[replica.version]:
                self.problems.append(f"{tab.name} believes in what never was at version {replica.version}")
        posted, self._posted = sorted(self._posted), []
        for name, told in posted:
            self.later(partial(self.wires[name].deliver, told))
        self.later(partial(wire.deliver, answer["body"]))

    def _post(self, connection: str, text: str) -> bool:
        """In a thread of the API, while the loop waits for it."""
        if not self.wires[connection].is_open:
            return False
        self._posted.append((connection, text))
        return True

    def _note(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """An error that no caller waits for: another region may have forgotten whether it has an update."""
        if len(self.apis) == 1 or "not known" not in str(context.get("exception")):
            self.problems.append(context)

    async def play(self) -> None:
        """Let everything happen, and then nothing more than what is told."""
        asyncio.get_running_loop().set_exception_handler(self._note)
        for tab in self.tabs:
            tab.client.start()
        await asyncio.gather(*(tab.act(10, 30.0) for tab in self.tabs))
        self.is_calm = True
        for tab in self.tabs:
            await tab.client.flush()
            await tab.client.get(None)
        for tab in self.tabs:
            await tab.note(f"{tab.name}last", tab.append)
        await asyncio.sleep(60.0)  # and no client asks for the state by itself
        shown = [tab.client.state for tab in self.tabs]
        for tab in self.tabs:
            await tab.client.get(None)
        self.check(shown)
        for tab in self.tabs:
            await tab.client.close()

    def check(self, shown: list[dict[str, Any]]) -> None:
        assert self.problems == []
        row = self.states.get([state_id("ada")])[state_id("ada")]
        state = json.loads(row["payload"])
        assert [tab.client.state for tab in self.tabs] == [state] * len(self.tabs)
        if len(self.apis) == 1:
            assert shown == [state] * len(self.tabs), "a client has not heard of a change"
        made, refused, doubtful = (
            set[str]().union(*(getattr(tab, name) for tab in self.tabs)) for name in ("made", "refused", "doubtful")
        )
        found = Counter([*state["all"], *state.get("seats", []), *state.get("upon", {})])
        found.update(one for one in state.get("own", {}).values())
        overwritten = {one for tab in self.tabs for one in tab.overwritten}
        assert max(found.values()) == 1, "a change is made twice"
        assert set(found) | overwritten >= made, "an acknowledged change is lost"
        assert not set(found) & refused, "a change that was refused is made"
        assert set(found) <= made | doubtful
        assert state["count"] == len(state["all"])
        assert len(state.get("seats", [])) <= SEATS


AUTHORIZER: Final = {"principalId": "ada"}


@pytest.mark.parametrize("part", range(2))
def test_every_acknowledged_update_counts_once_whatever_the_clients_of_a_user_do_at_once(part: int) -> None:
    begin = random.randrange(1 << 20) if SEEDS else 0
    doubtful = 0
    for seed in range(begin + part, begin + (SEEDS or 8), 2):
        kept = 4 if seed % 4 > 1 else CHANGES_KEPT  # few: the API forgets changes whose answer was lost
        with ExitStack() as stack:
            for module in ("server.state", "client.replica", "client.submitter"):
                stack.enter_context(mock.patch(f"thunderagent.websocket_api.{module}.CHANGES_KEPT", kept))
            runner = stack.enter_context(asyncio.Runner(loop_factory=Instant))
            world = World(seed)
            stack.callback(world.close)
            try:
                runner.run(world.play())
            except BaseException as error:
                error.add_note(f"seed {seed}")
                raise
            doubtful += sum(len(tab.doubtful) for tab in world.tabs)
    assert doubtful or SEEDS < 50, "nothing was ever in doubt"
