"""The handler of all routes, with events as API Gateway makes them."""

from __future__ import annotations

import base64
import json
import threading
import time
from typing import Any

import pytest

from tests.websocket_api.server.support import LONG_S, Api
from thunderagent.model.edge_events import (
    ConnectionOpened,
    ConnectionRefused,
    MessageFailed,
    MessageRefused,
    NotificationFailed,
)
from thunderagent.model.events import StoreFailed
from thunderagent.stores.sqlite.engine import MEMORY, SqliteEngine
from thunderagent.testing.faulty_engine import ANY, Fault, FaultyEngine
from thunderagent.websocket_api.protocol import FRAME_BYTES, MESSAGE_BYTES, STATE_BYTES, encode, frames, size
from thunderagent.websocket_api.records import MOST_CONNECTIONS, connections_id, holders_of, state_id
from thunderagent.websocket_api.server.handler import NOTIFY_S


@pytest.fixture
def api() -> Api:
    one = Api()
    one.connect()
    return one


# Connecting


def test_a_connect_with_a_user_is_accepted_and_its_subprotocol_is_echoed() -> None:
    api = Api()
    assert api.connect() == {"statusCode": 200}
    offered = api.connect(connection="c2", **{"Sec-WebSocket-Protocol": "other, thunderagent.v1, bearer.secret"})
    assert offered == {"statusCode": 200, "headers": {"Sec-WebSocket-Protocol": "thunderagent.v1"}}
    lower = api.connect(connection="c3", **{"sec-websocket-protocol": "thunderagent.v1"})
    assert lower["headers"] == {"Sec-WebSocket-Protocol": "thunderagent.v1"}
    assert api.connect(connection="c4", **{"Sec-WebSocket-Protocol": "other"}) == {"statusCode": 200}
    assert [one.user for one in api.told if isinstance(one, ConnectionOpened)] == ["ada"] * 4


def test_a_connect_without_a_user_is_refused() -> None:
    api = Api()
    assert api.connect(user=None) == {"statusCode": 401}
    assert api.connect(user="") == {"statusCode": 401}
    assert api.connections.get([connections_id("")]) == {}


def test_one_connection_too_many_of_a_user_is_refused_and_the_reason_is_told() -> None:
    api = Api()
    for number in range(MOST_CONNECTIONS):
        assert api.connect(connection=f"c{number}")["statusCode"] == 200
    assert api.connect(connection="more") == {"statusCode": 429}
    assert [one.reason for one in api.told if isinstance(one, ConnectionRefused)] == [
        "the user 'ada' has 50 connections, which is all that one may have"
    ]
    api.disconnect(connection="c7")
    assert api.connect(connection="more") == {"statusCode": 200}


def test_a_connect_that_the_store_does_not_take_is_refused_for_now() -> None:
    engine = FaultyEngine(SqliteEngine(MEMORY))
    engine.fail("put", Fault.LOST_REQUEST)
    api = Api(connections=engine)
    assert api.connect() == {"statusCode": 503}
    assert api.connect() == {"statusCode": 200}


def test_a_disconnect_is_always_good(api: Api) -> None:
    assert api.disconnect() == {"statusCode": 200}
    assert api.disconnect() == {"statusCode": 200}
    assert holders_of(api.connections.get([connections_id("ada")])[connections_id("ada")]) == set()
    engine = FaultyEngine(SqliteEngine(MEMORY))
    engine.fail(ANY, Fault.LOST_REQUEST, Fault.LOST_REQUEST)
    assert Api(connections=engine).disconnect() == {"statusCode": 200}


# Messages


def test_the_state_of_a_new_user_is_empty(api: Api) -> None:
    assert api.ask("getState") == {
        "type": "state",
        "id": 1,
        "state": {},
        "version": 0,
        "region": "eu-central-1",
        "client_ahead": False,
    }


def test_state_belongs_to_the_user_and_not_to_the_connection(api: Api) -> None:
    assert api.save(0, {"a": 1}, "c1") == {"type": "saved", "id": 1, "version": 1, "region": "eu-central-1"}
    api.disconnect()
    api.connect(connection="c2")
    assert api.ask("getState", connection="c2")["state"] == {"a": 1}
    assert api.ask("getState", connection="c1", user="bob")["state"] == {}


def test_a_client_that_has_seen_more_than_the_server_is_told(api: Api) -> None:
    api.save(0, {"a": 1}, "c1")
    assert [api.ask("getState", known_version=number)["client_ahead"] for number in (0, 1, 2)] == [False, False, True]


def test_a_change_of_an_old_version_is_answered_with_the_present_state(api: Api) -> None:
    api.save(0, {"a": 1}, "c1")
    assert api.save(0, {"a": 2}, "c2", connection="c9") == {
        "type": "conflict",
        "id": 1,
        "state": {"a": 1},
        "version": 1,
        "region": "eu-central-1",
    }
    assert api.save(0, {"a": 1}, "c1")["version"] == 1


def test_a_ping_is_answered_without_the_store() -> None:
    engine = FaultyEngine(SqliteEngine(MEMORY))
    engine.fail(ANY, *[Fault.LOST_REQUEST] * 9)
    assert Api(states=engine).ask("ping", id="p") == {"type": "pong", "id": "p", "region": "eu-central-1"}


@pytest.mark.parametrize(
    ("text", "error", "message_id", "says"),
    [
        ("", "bad_request", None, "no JSON"),
        ("hello", "bad_request", None, "getState"),
        ("[" * 60_000, "bad_request", None, "no JSON"),
        ("[1]", "bad_request", None, "no JSON object"),
        ("null", "bad_request", None, "no JSON object"),
        ('{"action":"setState","version":NaN}', "bad_request", None, "NaN is no JSON"),
        ('{"id":1}', "unknown_route", 1, "getState, setState, ping, chunk"),
        ('{"action":"dance","id":"x"}', "unknown_route", "x", "'dance'"),
        ('{"action":["ping"],"id":2}', "unknown_route", 2, "none"),
        ('{"action":"\\ud800","id":2}', "unknown_route", 2, "known are"),
        ('{"action":"ping","id":{}}', "bad_request", None, "id:"),
        ('{"action":"ping","id":true}', "bad_request", None, "id:"),
        ('{"action":"ping","id":1.5}', "bad_request", None, "id:"),
        ('{"action":"ping","id":"\\ud800"}', "bad_request", None, "surrogate"),
        ('{"action":"ping","id":"' + "x" * 129 + '"}', "bad_request", None, "128"),
        ('{"action":"getState","id":1,"known_version":-1}', "bad_request", 1, "known_version"),
        ('{"action":"getState","id":1,"known_version":"1"}', "bad_request", 1, "known_version"),
        ('{"action":"getState","id":1,"known_version":true}', "bad_request", 1, "known_version"),
        ('{"action":"setState","id":1}', "bad_request", 1, "version: Field required; change: Field required; patch"),
        ('{"action":"setState","id":1,"version":0,"change":"c","patch":[]}', "bad_request", 1, "patch"),
        ('{"action":"setState","id":1,"version":0,"change":"","patch":{}}', "bad_request", 1, "change"),
        ('{"action":"setState","id":1,"version":0,"change":"\\udfff","patch":{}}', "bad_request", 1, "change"),
        ('{"action":"setState","id":1,"version":1e3,"change":"c","patch":{}}', "bad_request", 1, "version"),
        ('{"action":"setState","id":1,"version":0,"change":"c","patch":{"a":"\\ud800"}}', "bad_request", 1, "JSON"),
        ('{"action":"setState","id":1,"version":0,"change":"c","patch":{"a":1e999}}', "bad_request", 1, "JSON"),
        ('{"action":"setState","id":1,"version":' + "9" * 5000 + "}", "bad_request", None, "no JSON"),
        (
            '{"action":"setState","id":1,"version":0,"change":"c","patch":' + '{"a":' * 65 + "1" + "}" * 65 + "}",
            "bad_request",
            1,
            "64 deep",
        ),
        ('{"action":"chunk","id":"m","index":2,"of":2,"data":""}', "bad_request", "m", "index"),
        ("x" * (MESSAGE_BYTES + 1), "too_large", None, "131073 bytes"),
    ],
)  # fmt: skip
def test_bad_input_is_answered_with_one_clear_error(
    api: Api, text: str, error: str, message_id: Any, says: str
) -> None:
    reply = api.send(text)
    assert reply is not None
    assert (reply["type"], reply["error"], reply["id"]) == ("error", error, message_id)
    assert says in reply["message"]
    assert len(reply["message"]) < 500
    assert [one.error for one in api.told if isinstance(one, MessageRefused)] == [error]
    assert api.ask("ping")["type"] == "pong"


def test_a_message_that_is_no_text_is_answered_with_an_error(api: Api) -> None:
    reply = api.send(b"\xff\xfe")
    assert reply is not None and reply["error"] == "bad_request"
    assert api.send(b'{"action":"ping"}') == {"type": "pong", "id": None, "region": "eu-central-1"}


def test_an_event_that_is_nothing_is_answered(api: Api) -> None:
    for event in ({}, {"requestContext": None}, {"requestContext": {"eventType": "MESSAGE"}, "body": 7}):
        assert json.loads(api.api.handle(event)["body"])["error"] == "bad_request"
    event = {"requestContext": {"authorizer": {"principalId": "ada"}}, "body": "%%%", "isBase64Encoded": True}
    assert json.loads(api.api.handle(event)["body"])["error"] == "bad_request"
    event = event | {"body": base64.b64encode(b'{"action":"ping"}').decode()}
    assert json.loads(api.api.handle(event)["body"])["type"] == "pong"


def test_a_state_that_would_be_too_large_is_refused_with_the_sizes(api: Api) -> None:
    text = encode({"action": "setState", "id": 5, "version": 0, "change": "c", "patch": {"a": "x" * STATE_BYTES}})
    replies = [api.send(one) for one in frames(text, "m", to_server=True)]
    assert replies[:-1] == [None] * (len(replies) - 1)
    assert replies[-1] is not None
    assert (replies[-1]["error"], replies[-1]["id"]) == ("too_large", 5)
    assert "122888 bytes; at most 122880" in replies[-1]["message"]


def test_a_store_that_does_not_answer_is_told_with_when_to_try_again() -> None:
    engine = FaultyEngine(SqliteEngine(MEMORY))
    api = Api(states=engine)
    for verb in ("get", "put", "save state"):
        engine.fail(verb, Fault.LOST_REPLY)
        if verb == "save state":
            assert api.save(0, {"a": 1}, "c1")["type"] == "saved"
        reply = api.save(0 if verb != "save state" else 1, {"a": 1}, "c1" if verb != "save state" else "c2")
        assert (reply["type"], reply["error"], reply["id"]) == ("error", "unavailable", 1)
        assert reply["retry_after_s"] > 0
        assert "try again" in reply["message"]
    assert api.save(1, {"a": 1}, "c2")["version"] == 2
    assert len([one for one in api.told if isinstance(one, StoreFailed)]) == 3


def test_a_state_that_cannot_be_read_is_an_error_that_is_not_the_clients(api: Api) -> None:
    api.states.put([{"taskId": state_id("ada"), "payload": "{", "fence": 1}])
    for reply in (api.ask("getState"), api.save(1, {}, "c")):
        assert (reply["error"], reply["id"]) == ("internal", 1)
        assert "user:ada" not in reply["message"]
    assert "user:ada" in next(one.error for one in api.told if isinstance(one, MessageFailed))


def test_a_reply_over_one_frame_is_pushed_in_chunks_and_is_whole(api: Api) -> None:
    for number in range(4):
        assert api.save(number, {f"k{number}": "ä" * 12_000}, f"c{number}")["type"] == "saved"
    reply = api.ask("getState")
    assert len(api.pushed) == 4
    assert reply["state"] == {f"k{number}": "ä" * 12_000 for number in range(4)}
    assert api.save(0, {}, "other")["type"] == "conflict"  # in chunks too


def test_a_client_that_goes_while_it_is_answered_harms_nobody(api: Api) -> None:
    api.save(0, {"a": "x" * 25_000}, "c0")
    api.save(1, {"b": "x" * 25_000}, "c1")
    api.gone.add("c1")
    assert api.send('{"action":"getState"}') is None


# Changes are told


def test_a_change_is_told_to_the_users_other_connections_by_one_post_each(api: Api) -> None:
    api.connect(connection="c2")
    api.connect(connection="c3")
    api.connect(connection="b1", user="bob")
    assert api.save(0, {"a": 1, "b": None}, "ch1")["type"] == "saved"
    told = {"type": "changed", "version": 1, "change": "ch1", "region": "eu-central-1", "patch": {"a": 1, "b": None}}
    assert sorted(one for one, _ in api.pushed) == ["c2", "c3"]
    assert api.changes("c2") == api.changes("c3") == [told]
    assert api.save(0, {"a": 2}, "ch2", connection="c2")["type"] == "conflict"  # nothing is changed, nothing is told
    api.ask("getState", connection="c3")
    assert len(api.pushed) == 2


def test_a_change_that_does_not_fit_into_one_frame_is_told_without_its_patch(api: Api) -> None:
    api.connect(connection="c2")
    about = {"type": "changed", "version": 1, "change": "c1", "region": "eu-central-1"}
    room = FRAME_BYTES - size(encode({**about, "patch": {"a": ""}}))
    api.save(0, {"a": "x" * room}, "c1")
    api.save(1, {"a": "x" * (room + 1)}, "c2")
    assert [set(one) - set(about) for one in api.changes("c2")] == [{"patch"}, set()]
    assert [one["version"] for one in api.changes("c2")] == [1, 2]
    assert all(size(text) <= FRAME_BYTES for _, text in api.pushed)


def test_a_change_that_comes_again_is_told_again_if_nothing_came_after_it(api: Api) -> None:
    api.connect(connection="c2")
    for number in (1, 2):  # the first may have ended before it told anybody
        assert api.save(0, {"a": number}, "ch1")["version"] == 1
    # Not with the patch that came the second time: an update has another one by then.
    assert [(one["change"], one.get("patch")) for one in api.changes("c2")] == [("ch1", {"a": 1}), ("ch1", None)]
    api.save(1, {"a": 2}, "ch2")
    assert api.save(1, {"a": 1}, "ch1")["version"] == 1
    assert [one["change"] for one in api.changes("c2")] == ["ch1", "ch1", "ch2"]


def test_a_connection_that_is_gone_is_dropped_when_a_change_is_told(api: Api) -> None:
    api.connect(connection="c2")
    api.connect(connection="c3")
    api.gone.add("c2")
    api.save(0, {"a": 1}, "ch1")
    assert holders_of(api.connections.get([connections_id("ada")])[connections_id("ada")]) == {"c1", "c3"}
    assert len(api.changes("c3")) == 1


def test_a_change_is_saved_whatever_becomes_of_telling_it() -> None:
    engine = FaultyEngine(SqliteEngine(MEMORY))
    api = Api(connections=engine)
    api.connect()
    api.connect(connection="c2")
    api.failing.add("c2")
    assert api.save(0, {"a": 1}, "ch1") == {"type": "saved", "id": 1, "version": 1, "region": "eu-central-1"}
    engine.fail("get", Fault.LOST_REQUEST)
    assert api.save(1, {"a": 2}, "ch2")["version"] == 2
    untold = [one for one in api.told if isinstance(one, NotificationFailed)]
    assert [(one.user, one.version) for one in untold] == [("ada", 1), ("ada", 2)]
    assert "busy" in untold[0].error


def test_a_connection_that_takes_nothing_holds_up_a_reply_for_two_seconds_at_most(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert NOTIFY_S == 2.0
    monkeypatch.setattr("thunderagent.websocket_api.server.handler.NOTIFY_S", 0.05)
    api, release = Api(), threading.Event()
    api.connect()
    api.connect(connection="c2")
    api.api._others._post = lambda connection, text: release.wait(LONG_S)
    begun = time.monotonic()
    assert api.save(0, {"a": 1}, "ch1")["type"] == "saved"
    assert time.monotonic() - begun < LONG_S / 2
    release.set()
    assert [type(one) for one in api.told if isinstance(one, NotificationFailed)] == [NotificationFailed]


def test_a_message_in_chunks_is_handled_once(api: Api) -> None:
    text = encode({"action": "setState", "id": 7, "version": 0, "change": "c", "patch": {"a": "😀" * 20_000}})
    sent = frames(text, "m1", to_server=True)
    assert len(sent) == 3
    assert [api.send(one) for one in (sent[2], sent[0], sent[0])] == [None, None, None]
    assert api.send(sent[1]) == {"type": "saved", "id": 7, "version": 1, "region": "eu-central-1"}
    assert [api.send(one) for one in sent] == [None] * 3
    assert api.ask("getState")["state"]["a"] == "😀" * 20_000


def test_a_message_in_chunks_that_is_no_message_is_an_error(api: Api) -> None:
    assert (api.send('{"action":"chunk","id":"m","index":0,"of":1,"data":"hello"}') or {})["error"] == "bad_request"
    inner = encode({"action": "chunk", "id": "n", "index": 0, "of": 1, "data": "{}"})
    outer = encode({"action": "chunk", "id": "o", "index": 0, "of": 1, "data": inner})
    reply = api.send(outer)
    assert reply is not None and "itself a chunk" in reply["message"]


def test_a_chunk_that_the_store_does_not_take_is_refused_and_the_message_must_be_sent_again() -> None:
    engine = FaultyEngine(SqliteEngine(MEMORY))
    api = Api(connections=engine)
    api.connect()
    engine.fail("put", Fault.LOST_REQUEST)
    sent = [encode({"action": "chunk", "id": "m", "index": index, "of": 2, "data": "x"}) for index in range(2)]
    reply = api.send(sent[0])
    assert reply is not None
    assert (reply["error"], reply["id"]) == ("unavailable", "m")
    assert "another id" in reply["message"]


def test_what_is_refused_and_what_fails_is_told_without_the_content_of_messages(api: Api) -> None:
    api.send('{"action":"setState","id":1,"version":"geheim","change":"geheim","patch":"geheim"}')
    api.connect(user=None, **{"Authorization": "Bearer geheim", "Sec-WebSocket-Protocol": "bearer.geheim"})
    assert api.told
    assert "geheim" not in repr(api.told)
