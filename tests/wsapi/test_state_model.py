"""Clients that change one state at once while replies are lost: every change is made once, in one order."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.wsapi.support import Api
from thunderagent.faults import Fault, FaultyEngine
from thunderagent.stores.sqlite import MEMORY, SqliteEngine
from thunderagent.websocket_messages import merge_patch

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
