"""One attempt of the canary: every step that can fail is named, with a reason, and nothing raises."""

from __future__ import annotations

import asyncio
import base64
import json
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tests.websocket_api.canary.support import REGION, Api, an_api, run, until
from thunderagent.testing import ChaosServer
from thunderagent.testing.chaos.behaviours import Garbage, HangUp, Refuse, Silence
from thunderagent.websocket_api.canary.probe import SAVES, SLOTS, Prober, ProbeResult, Step, Unjudged
from thunderagent.websocket_api.canary.tokens import Tokens

pytestmark = pytest.mark.slow

ALL = [Step.TOKEN, Step.CONNECT, Step.AUTH, Step.PING, Step.SET, Step.GET, Step.CLOSE]


@pytest.fixture
def api() -> Iterator[Api]:
    with an_api() as one:
        yield one


def a_prober(*, who: str = "me", budget_s: float = 10.0, source: str | None = None) -> Prober:
    return Prober("eu-west-1", Tokens(source), who=who, budget_s=budget_s)


def probe(api: Api, *, target: str = REGION, version: int = 0, **options: Any) -> ProbeResult:
    return run(a_prober(**options).probe(target, api.url, version=version))


def test_a_healthy_api_does_every_step_in_its_order_and_each_has_its_time(api: Api) -> None:
    found = probe(api)
    assert (found.ok, found.failed, found.reason) == (True, None, "")
    assert list(found.steps) == ALL
    assert all(seconds >= 0 for seconds in found.steps.values())
    assert 0 < found.seconds < 5
    assert (found.region, found.version) == (REGION, 1)
    assert found.as_data()["steps"].keys() == {str(step) for step in ALL}


def test_it_asks_in_the_words_of_the_protocol(api: Api) -> None:
    probe(api)
    assert [asked["action"] for asked in api.seen] == ["ping", "setState", "getState"]
    ping, change, state = api.seen
    assert set(ping) == {"action", "id"}
    assert set(change) == {"action", "id", "version", "patch", "change"}
    assert set(state) == {"action", "id", "known_version"}
    assert len({asked["id"] for asked in api.seen}) == 3


def test_the_version_of_the_last_attempt_saves_the_next_a_conflict(api: Api) -> None:
    first = probe(api)
    second = probe(api, version=first.version)
    assert (first.version, second.version) == (1, 2)
    assert [asked["action"] for asked in api.seen].count("setState") == 2
    third = probe(api)  # a new prober knows nothing, and learns it by the conflict
    assert third.ok
    assert [asked["version"] for asked in api.seen if asked["action"] == "setState"] == [0, 1, 0, 2]


def test_the_state_of_its_user_does_not_grow_however_many_probers_there_are(api: Api) -> None:
    for number in range(3 * SLOTS):
        assert probe(api, who=f"agent {number}", version=api.version).ok
    assert len(api.state["canary"]) <= SLOTS
    assert len(json.dumps(api.state)) < 2000


def test_what_else_is_in_the_state_stays(api: Api) -> None:
    api.state, api.version = {"mine": 1, "canary": {"other.3": "x"}}, 7
    assert probe(api).ok
    assert api.state["mine"] == 1
    assert api.state["canary"]["other.3"] == "x"


def test_four_probers_of_one_user_at_once_do_not_take_each_other_for_a_fault(api: Api) -> None:
    async def all_of_them() -> list[ProbeResult]:
        probers = [a_prober(who=f"agent {number}") for number in range(4)]
        return await asyncio.gather(*(one.probe(REGION, api.url) for one in probers))

    found = run(all_of_them())
    assert [one.reason for one in found if not one.ok] == []


def test_without_a_source_no_token_is_sent(api: Api) -> None:
    assert probe(api).ok
    assert api.authorizations == [None]


def test_the_token_goes_in_a_header_and_in_nothing_that_is_told(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    api.token = "s3cret-token"
    monkeypatch.setenv("CANARY", "s3cret-token")
    assert probe(api, source="env:CANARY").ok
    assert api.authorizations == ["Bearer s3cret-token"]
    monkeypatch.setenv("CANARY", "0ld-token")
    found = probe(api, source="env:CANARY")
    assert "0ld-token" not in repr(found)


def test_a_token_that_is_over_fails_the_step_auth(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    api.token = "new"
    monkeypatch.setenv("CANARY", "old")
    found = probe(api, source="env:CANARY")
    assert found.failed is Step.AUTH
    assert found.reason == "refused with 401: the token is over, or not one for this API"
    assert list(found.steps) == [Step.TOKEN, Step.CONNECT, Step.AUTH]


@pytest.mark.parametrize("status", [401, 403, 500])
def test_where_no_token_was_sent_the_setting_that_lacks_is_told(api: Api, status: int) -> None:
    api.status = status
    found = probe(api)
    assert found.failed is Step.AUTH
    assert f"{status}: no token was sent; say where it comes from in THUNDERAGENT_CANARY_TOKEN_FROM" in found.reason


@pytest.mark.parametrize(("status", "dropped"), [(401, [REGION]), (403, [REGION]), (503, [])])
def test_a_token_that_was_refused_is_not_used_again(api: Api, status: int, dropped: list[str]) -> None:
    class Noted(Tokens):
        def drop(self, target: str) -> None:
            seen.append(target)

    seen: list[str] = []
    api.status = status
    run(Prober("eu-west-1", Noted(None)).probe(REGION, api.url))
    assert seen == dropped


NONE, OVER = "env:NOT_SET_ANYWHERE", "env:OVER"


@pytest.mark.parametrize(
    ("source", "status", "failed", "unjudged"),
    [
        (NONE, None, Step.TOKEN, Unjudged.TOKEN),  # let in without one
        (NONE, 401, Step.TOKEN, Unjudged.TOKEN),
        (NONE, 500, Step.TOKEN, Unjudged.TOKEN),
        (NONE, 429, Step.AUTH, Unjudged.THROTTLED),
        (NONE, 503, Step.AUTH, None),
        (OVER, 403, Step.AUTH, Unjudged.TOKEN),
        (OVER, 500, Step.AUTH, Unjudged.TOKEN),
        (OVER, 502, Step.AUTH, None),
        ("command:sleep 5", 403, Step.TOKEN, Unjudged.TOKEN),  # its source hangs
        ("command:sleep 5", 503, Step.AUTH, None),
    ],
)
def test_a_canary_without_a_token_tries_the_api_all_the_same(
    api: Api,
    source: str,
    status: int | None,
    failed: Step,
    unjudged: Unjudged | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    body = base64.urlsafe_b64encode(b'{"exp": 1}').decode().rstrip("=")
    monkeypatch.setenv("OVER", f"x.{body}.x")
    api.status = status
    found = probe(api, source=source, budget_s=2.0 if source.startswith("command") else 10.0)
    assert (found.failed, found.unjudged) == (failed, unjudged), found.reason
    lacks = {NONE: "env:NOT_SET_ANYWHERE: it is empty", OVER: "", "command:sleep 5": "no token within"}
    assert lacks[source] in found.reason
    assert ("is over" in found.reason) == (source is OVER and unjudged is not None)
    assert (len(api.authorizations), api.seen) == (1, [])


@pytest.mark.parametrize(
    ("status", "reason"), [(403, "refused with 403"), (502, "answered with 502"), (429, "with 429")]
)
def test_a_handshake_that_is_refused_fails_the_step_auth(api: Api, status: int, reason: str) -> None:
    api.status = status
    found = probe(api)
    assert found.failed is Step.AUTH
    assert reason in found.reason


STEPS = {"ping": Step.PING, "setState": Step.SET, "getState": Step.GET}


@pytest.mark.parametrize("action", STEPS)
def test_a_peer_that_is_mute_fails_its_step_when_the_time_is_over(api: Api, action: str) -> None:
    api.changes[action] = lambda asked, right: None
    found = probe(api, budget_s=1.0)
    assert found.failed is STEPS[action]
    assert found.reason == "no answer: the 1 s for all steps were over"
    assert 0.5 < found.seconds < 5


@pytest.mark.parametrize("action", STEPS)
@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("{not json", "what came is not JSON"),
        ("[1]", "what came is not a JSON object"),
        ({"type": "error", "error": "unavailable", "message": "try again"}, "the error 'unavailable': 'try again'"),
        ({"type": "saved_"}, "is of the type 'saved_'"),
    ],
)
def test_an_answer_that_is_wrong_fails_its_step(api: Api, action: str, answer: Any, reason: str) -> None:
    api.changes[action] = lambda asked, right: answer if isinstance(answer, str) else {"id": asked["id"], **answer}
    found = probe(api)
    assert found.failed is STEPS[action]
    assert reason in found.reason


@pytest.mark.parametrize("action", ["setState", "getState"])
@pytest.mark.parametrize("version", [None, "1", -1, True, 1.5])
def test_an_answer_without_a_version_fails_its_step(api: Api, action: str, version: Any) -> None:
    api.changes[action] = lambda asked, right: right | {"version": version}
    found = probe(api)
    assert found.failed is STEPS[action]
    assert "has no version" in found.reason


def test_a_number_that_is_not_the_one_that_was_saved_fails_the_step_get(api: Api) -> None:
    def wrong(asked: dict[str, Any], right: dict[str, Any]) -> dict[str, Any]:
        slots = dict.fromkeys(right["state"]["canary"], "0" * 32)
        return right | {"state": {"canary": slots}}

    api.changes["getState"] = wrong
    found = probe(api)
    assert found.failed is Step.GET
    assert "not what was saved" in found.reason
    assert [asked["action"] for asked in api.seen].count("getState") == 1


@pytest.mark.parametrize("state", [None, [], "text", {}, {"canary": None}, {"canary": []}])
def test_a_state_of_any_other_form_fails_the_step_get(api: Api, state: Any) -> None:
    api.changes["getState"] = lambda asked, right: right | {"state": state}
    assert probe(api).failed is Step.GET


def test_a_table_that_loses_what_was_saved_is_told_apart(api: Api) -> None:
    api.changes["getState"] = lambda asked, right: right | {"state": {}, "version": 0}
    found = probe(api)
    assert found.failed is Step.GET
    assert "what is saved gets lost" in found.reason


def test_a_write_of_another_region_that_comes_in_between_is_no_fault(api: Api) -> None:
    times = iter(range(10))

    def replicated(asked: dict[str, Any], right: dict[str, Any]) -> dict[str, Any]:
        if next(times) < 2:
            api.state, api.version = {"canary": {"eu-central-1.0": "theirs"}}, api.version + 5
            return right | {"state": api.state, "version": api.version}
        return right

    api.changes["getState"] = replicated
    found = probe(api)
    assert found.ok, found.reason
    assert [asked["action"] for asked in api.seen].count("getState") == 3


def test_a_user_whose_state_others_save_all_the_time_is_told(api: Api) -> None:
    def busy(asked: dict[str, Any], right: dict[str, Any]) -> dict[str, Any]:
        api.version += 1
        return {"type": "conflict", "id": asked["id"], "state": {}, "version": api.version}

    api.changes["setState"] = busy
    found = probe(api)
    assert found.failed is Step.SET
    assert "a user of its own" in found.reason
    assert [asked["action"] for asked in api.seen].count("setState") == SAVES


def test_what_is_pushed_in_between_is_left_alone(api: Api) -> None:
    api.extra = [json.dumps({"type": "push", "message": {"type": "error", "id": "canary-1"}})]
    assert probe(api).ok


def test_an_answer_in_pieces_is_put_together(api: Api) -> None:
    def in_pieces(asked: dict[str, Any], right: dict[str, Any]) -> dict[str, Any]:
        text = json.dumps(right)
        parts = (text[:20], text[20:])
        first, second = ({"type": "chunk", "id": "c", "index": n, "of": 2, "data": one} for n, one in enumerate(parts))
        api.extra = [json.dumps(first)]
        return second

    api.changes["getState"] = in_pieces
    assert probe(api).ok
    api.changes["getState"] = lambda asked, right: {"type": "chunk", "id": "c", "index": 3, "of": 2, "data": ""}
    assert "a chunk needs an index" in probe(api, version=api.version).reason


def test_a_peer_that_only_talks_is_given_up(api: Api) -> None:
    api.extra = [json.dumps({"type": "push", "message": number}) for number in range(150)]
    found = probe(api)
    assert found.failed is Step.PING
    assert "100 messages came" in found.reason


def test_a_peer_that_does_not_answer_the_close_fails_the_last_step(api: Api) -> None:
    api.is_deaf_at_end = True
    found = probe(api, budget_s=2.0)
    assert found.failed is Step.CLOSE
    assert "did not answer the close" in found.reason


def test_another_region_that_answers_is_no_health_of_this_one(api: Api) -> None:
    found = probe(api, target="eu-west-1")
    assert found.failed is Step.PING
    assert "the region eu-central-1 answered in its place" in found.reason
    assert found.region == "eu-central-1"
    assert probe(api, target="everybody").ok  # a name that follows a failover


def test_a_target_without_anybody_there_fails_the_step_connect() -> None:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        found = run(a_prober(source=NONE).probe(REGION, f"ws://127.0.0.1:{reserved.getsockname()[1]}/"))
    assert (found.failed, found.unjudged) == (Step.CONNECT, None)
    assert "ConnectionRefusedError" in found.reason or "Connect call failed" in found.reason


def test_a_name_that_does_not_exist_fails_the_step_connect() -> None:
    found = run(a_prober().probe(REGION, "wss://no-such-name.invalid/"))
    assert found.failed is Step.CONNECT
    assert found.reason


def test_a_name_server_that_is_mute_is_the_reason_of_each_attempt(monkeypatch: pytest.MonkeyPatch, api: Api) -> None:
    may_end = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: may_end.wait(20) and [])
    prober = a_prober(budget_s=0.4)
    url = api.url.replace("127.0.0.1", "ws.example")
    try:
        found = [run(prober.probe(REGION, url)) for _ in range(2)]  # each in an event loop of its own
        assert [one.failed for one in found] == [Step.CONNECT] * 2
        assert all(one.reason.startswith(("TimeoutError: the name ws.example was", "no answer")) for one in found)
    finally:
        may_end.set()


@pytest.mark.parametrize(
    ("behaviour", "step"),
    [
        (Silence(), Step.AUTH),
        (HangUp(), Step.AUTH),
        (Garbage(), Step.AUTH),
        (Refuse(status=503), Step.AUTH),
    ],
)
def test_a_peer_that_breaks_off_is_a_result(behaviour: Any, step: Step) -> None:
    async def main() -> ProbeResult:
        async with ChaosServer(behaviour) as server:
            return await a_prober(budget_s=1.0).probe(REGION, server.url)

    found = run(main())
    assert found.failed is step
    assert found.reason


def test_an_attempt_that_is_cancelled_leaves_no_connection_behind(api: Api) -> None:
    api.changes["ping"] = lambda asked, right: None

    async def main() -> None:
        attempt = asyncio.ensure_future(a_prober().probe(REGION, api.url))
        await until(lambda: api.seen)
        attempt.cancel()
        with pytest.raises(asyncio.CancelledError):
            await attempt
        await until(lambda: api.open == 0)

    run(main())


def test_several_targets_are_tried_at_once_and_one_does_not_hold_up_another(api: Api) -> None:
    with an_api("eu-west-1") as other:
        other.changes["ping"] = lambda asked, right: None
        prober = a_prober(budget_s=1.0)
        first, second = run(prober.probe_all({"eu-central-1": api.url, "eu-west-1": other.url}))
    assert first.ok
    assert (second.target, second.failed) == ("eu-west-1", Step.PING)
