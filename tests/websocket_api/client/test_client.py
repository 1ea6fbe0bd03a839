"""The client against an API in the same loop that fails as it is told to; waits cost nothing, as the clock jumps."""

from __future__ import annotations

import asyncio
import copy
import http
import json
import random
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import pytest

from tests.websocket_api.client.server import Api, Message, Row, throttled
from tests.websocket_api.client.support import PROMPT, connected, governor, run, until
from thunderagent.model.errors import (
    ChangeRefused,
    ClientClosed,
    ConfigurationError,
    MessageTooLarge,
    TooManyChanges,
    VersionConflict,
)
from thunderagent.streams.connection.endpoint import Attempt
from thunderagent.websocket_api.client import (
    Client,
    ClientOptions,
    Connected,
    Disconnected,
    Dropped,
    Ended,
    Resubmitted,
    Throttled,
)
from thunderagent.websocket_api.client.talk import LONGEST_PAUSE_S
from thunderagent.websocket_api.protocol import CHANGES_KEPT

pytestmark = pytest.mark.slow

Main = Callable[[], Coroutine[Any, Any, None]]


def fast(main: Main) -> Callable[[], None]:
    """A test that is a coroutine, on a clock that jumps."""

    def test() -> None:
        run(main(), fast=True)

    test.__name__, test.__doc__ = main.__name__, main.__doc__
    return test


def now() -> float:
    return asyncio.get_running_loop().time()


def kinds(client: Client) -> list[str]:
    """Names of the events of the connection."""
    return [type(event).__name__ for event in client.story]


# The state


@fast
async def test_a_change_is_answered_with_the_version_that_it_made() -> None:
    async with Api() as api, connected(api) as client:
        assert (client.state, client.version, client.region) == ({}, 0, "eu-central-1")
        assert await client.set({"theme": "dark", "list": {"a": 1}}) == 1
        assert await client.set({"list": {"b": 2}}) == 2
        assert client.state == {"theme": "dark", "list": {"a": 1, "b": 2}} == api.row.state


@fast
async def test_get_asks_the_server_again() -> None:
    async with Api() as api, connected(api) as client:
        api.row.save({"a": 1}, "x")
        assert client.state == {}
        assert await client.get() == {"a": 1}
        assert client.version == 1


@fast
async def test_what_is_set_while_there_is_no_server_is_seen_at_once_and_sent_later_in_its_order() -> None:
    states: list[tuple[Any, int]] = []
    async with Api() as api, connected(api, on_state=lambda *state: states.append(state)) as client:
        await client.set({"a": 0})
        await api.cut()
        await until(lambda: not client.is_connected)
        answers = [client.submit({"a": number, f"n{number}": True}) for number in range(1, 6)]
        assert client.state["a"] == 5
        assert client.version == 1
        with pytest.raises(TimeoutError, match="stays"):
            await client.set({"late": True}, timeout_s=5.0)
        await api.mend()
        assert await asyncio.gather(*answers) == [2, 3, 4, 5, 6]
        await client.flush(10.0)
        assert api.row.state == client.state == {"a": 5, "late": True} | {f"n{number}": True for number in range(1, 6)}
        await until(lambda: bool(states) and states[-1] == (api.row.state, 7))
        assert [change["patch"]["a"] for change in api.actions("setState")[1:6]] == [1, 2, 3, 4, 5]


@fast
async def test_a_state_that_is_handed_out_is_a_copy() -> None:
    told: list[int] = []

    def spoil(state: Any, version: int) -> None:
        state["list"]["a"] = 5
        told.append(version)

    async with Api() as api, connected(api, on_state=spoil) as client:
        await client.set({"list": {"a": 1}})
        client.state["list"]["a"] = 5
        await until(lambda: told[-1:] == [1])
        assert client.state == {"list": {"a": 1}}


@fast
async def test_a_conflict_is_answered_with_the_same_change_upon_the_new_state() -> None:
    async with Api() as api, connected(api) as client:
        api.row.save({"theirs": 1}, "x")
        assert await client.set({"ours": 2}) == 2
        assert api.row.state == client.state == {"theirs": 1, "ours": 2}
        assert len({message["change"] for message in api.actions("setState")}) == 1


@fast
async def test_a_change_whose_answer_was_lost_with_the_connection_is_made_once() -> None:
    async with Api() as api, connected(api) as client:
        api.lose_answer("setState")
        assert await client.set({"a": 1}) == 1
        assert (api.row.version, len(api.actions("setState"))) == (1, 2)


@fast
async def test_a_change_that_is_not_answered_is_sent_again_and_made_once() -> None:
    async with Api() as api, connected(api) as client:

        def forget(number: int, message: Message) -> Message | None:
            reply = api.reply(number, message)
            if message["action"] == "setState":
                api.answer = api.reply
                return None
            return reply

        api.answer = forget
        began = now()
        assert await client.set({"a": 1}) == 1
        assert PROMPT.request_timeout_s <= now() - began < PROMPT.request_timeout_s + 1
        assert (api.row.version, api.opened) == (1, 1)


@fast
async def test_a_server_that_has_lost_changes_gets_them_again_before_what_is_new() -> None:
    async with Api() as first, Api(region="eu-west-1") as second:
        urls = [first.url]
        async with connected(lambda _: urls[0]) as client:
            await client.set({"a": 1})
            second.row = first.row.copy()
            await client.set({"b": 2})
            await client.set({"c": 3})
            urls[0] = second.url
            await first.cut()
            await until(lambda: not client.is_connected)
            late = client.submit({"d": 4})
            assert await late == 4
            assert second.row.state == client.state == {"a": 1, "b": 2, "c": 3, "d": 4}
            assert list(second.row.changes) == [message["change"] for message in first.actions("setState")] + [
                second.actions("setState")[-1]["change"]
            ]
            assert (client.region, client.version) == ("eu-west-1", 4)
            [again] = [event for event in client.story if isinstance(event, Resubmitted)]
            assert (again.changes, again.is_certain, again.region) == (2, True, "eu-west-1")


@fast
async def test_a_server_whose_table_was_set_back_gets_its_changes_again() -> None:
    async with Api() as api, connected(api) as client:
        await client.set({"a": 1})
        before = api.row.copy()
        await client.set({"b": 2})
        api.row = before
        api.drop()
        await until(lambda: any(isinstance(event, Resubmitted) for event in client.story))
        await client.flush(10.0)
        assert api.row.state == client.state == {"a": 1, "b": 2}


@fast
async def test_a_loss_that_hides_behind_the_same_version_is_made_good_too() -> None:
    async with Api() as first, Api(region="eu-west-1") as second:
        urls = [first.url]
        async with connected(lambda _: urls[0]) as client:
            second.row = first.row.copy()
            await client.set({"ours": 1})
            second.row.save({"theirs": 2}, "x")
            urls[0] = second.url
            await first.cut()
            await until(lambda: second.row.version == 2 and client.version == 2)
            assert second.row.state == client.state == {"ours": 1, "theirs": 2}


# Changes of others, and values that are computed from the state


def count(state: dict[str, Any]) -> dict[str, Any]:
    """One more."""
    return {"count": state.get("count", 0) + 1}


@fast
async def test_a_change_of_another_connection_is_heard_without_asking() -> None:
    states: list[tuple[Any, int]] = []
    async with Api() as api, connected(api, on_state=lambda *state: states.append(state)) as client:
        await client.set({"a": {"x": 1}})
        asked = len(api.actions("getState"))
        await api.changed({"a": {"y": 2}, "b": 1})
        await until(lambda: client.version == 2)
        assert client.state == {"a": {"x": 1, "y": 2}, "b": 1} == api.row.state
        await until(lambda: states[-1:] == [(api.row.state, 2)])
        assert len(api.actions("getState")) == asked


@pytest.mark.parametrize(("whole", "skip"), [(False, 0), (True, 1), (False, 3)])
def test_a_change_that_was_told_without_what_is_needed_makes_the_client_ask_once(whole: bool, skip: int) -> None:
    async def main() -> None:
        async with Api() as api, connected(api) as client:
            asked = len(api.actions("getState"))
            await api.changed({"a": 1}, whole=whole, skip=skip)
            await until(lambda: client.version == 1 + skip)
            assert client.state == api.row.state
            assert len(api.actions("getState")) == asked + 1

    run(main(), fast=True)


@fast
async def test_a_state_that_cannot_be_read_now_is_asked_for_again() -> None:
    async with Api() as api, connected(api) as client:
        unavailable = {"type": "error", "error": "unavailable", "message": "because"}
        left = [unavailable, unavailable]

        def answer(number: int, message: Message) -> Message | None:
            if message["action"] == "getState" and left:
                return {"id": message["id"], **left.pop()}
            return api.reply(number, message)

        api.answer = answer
        await api.changed({"a": 1}, whole=False)
        await until(lambda: client.version == 1)
        assert not left


@fast
async def test_what_makes_no_change_is_left_alone() -> None:
    async with Api() as api, connected(api) as client:
        await client.set({"a": 1})
        for told in ({"version": 1}, {"version": "2", "change": "x"}, {"version": 2, "change": 7}, {}):
            await api.live[0].send(json.dumps({"type": "changed", "region": api.region, "patch": {"a": 9}, **told}))
        for version in (0, 1):  # what is known already, late
            text = {"type": "changed", "region": api.region, "patch": {"a": 9}, "version": version, "change": "x"}
            await api.live[0].send(json.dumps(text))
        await client.set({"b": 1})
        assert (client.state, client.version, api.opened) == ({"a": 1, "b": 1}, 2, 1)


@fast
async def test_an_update_is_made_again_upon_what_others_have_made() -> None:
    async with Api() as api, connected(api) as client:
        api.row.save({"count": 5, "list": ["theirs"]}, "x")  # and nobody was told
        seen: list[dict[str, Any]] = []

        def add(state: dict[str, Any]) -> dict[str, Any]:
            seen.append(copy.deepcopy(state))
            state["spoilt"] = True
            return {**count(state), "list": [*state.get("list", []), "ours"]}

        assert await client.update(add) == 2
        assert client.state == api.row.state == {"count": 6, "list": ["theirs", "ours"]}
        assert seen == [{}, {"count": 5, "list": ["theirs"]}]
        assert len({message["change"] for message in api.actions("setState")}) == 1


@fast
async def test_updates_that_wait_are_seen_at_once_and_made_again_in_their_order() -> None:
    async with Api() as api, connected(api) as client:
        await api.cut()
        await until(lambda: not client.is_connected)
        updates = [asyncio.create_task(client.update(count)) for _ in range(3)]
        await asyncio.sleep(0)
        assert client.state == {"count": 3}
        api.row.save({"count": 10}, "x")
        await api.mend()
        assert await asyncio.gather(*updates) == [2, 3, 4]
        assert client.state == api.row.state == {"count": 13}
        assert [message["patch"]["count"] for message in api.actions("setState")] == [11, 12, 13]


@fast
async def test_an_update_may_call_itself_off_upon_what_others_have_made() -> None:
    async with Api() as api, connected(api) as client:

        def take(state: dict[str, Any]) -> dict[str, Any]:
            if state.get("seat"):
                raise LookupError(f"taken by {state['seat']}")
            return {"seat": "ours"}

        api.row.save({"seat": "theirs"}, "x")
        with pytest.raises(LookupError, match="by theirs"):
            await client.update(take)
        assert client.state == api.row.state == {"seat": "theirs"}
        with pytest.raises(LookupError):  # at once, upon what is known
            await client.update(take)
        assert client.unacknowledged == ()
        assert await client.update(count) == 2

        api.row.save({"seat": None}, "y")
        api.row.save({"seat": "others"}, "z")
        with pytest.raises(RuntimeError, match="StopIteration"):  # which no future takes
            await client.update(lambda state: {"seat": next(one for one in ["a"] if state["seat"] == "theirs")})


@fast
async def test_an_update_whose_answer_was_lost_is_made_though_it_could_not_be_made_upon_itself() -> None:
    async with Api() as api, connected(api) as client:

        def once(state: dict[str, Any]) -> dict[str, Any]:
            if "ours" in state.get("list", []):
                raise LookupError("it is there")
            return {"list": [*state.get("list", []), "ours"]}

        def meanwhile(message: Message) -> None:
            api.row.save({"more": 1}, "x")

        api.lose_answer("setState", meanwhile)
        assert await client.update(once) == 1
        assert client.state == api.row.state == {"list": ["ours"], "more": 1}
        assert api.row.version == 2


@fast
async def test_an_update_of_which_nobody_knows_any_more_whether_it_was_made_is_not_made_twice() -> None:
    async with Api() as api, connected(api) as client:

        def meanwhile(message: Message) -> None:
            for other in range(CHANGES_KEPT):
                api.row.save({"other": other}, f"x{other}")
            api.row.changes.pop(message["change"])  # the last fifty are known

        api.lose_answer("setState", meanwhile)
        plain = client.submit({"plain": 1})
        assert await plain == CHANGES_KEPT + 2  # of a patch twice is once
        api.lose_answer("setState", meanwhile)
        with pytest.raises(ChangeRefused, match="not known"):
            await client.update(count)
        assert api.row.state["count"] == 1
        assert await client.update(count) > 100
        assert api.row.state["count"] == client.state["count"] == 2


@fast
async def test_an_update_that_a_region_has_lost_is_made_again_upon_what_the_other_has() -> None:
    async with Api() as first, Api(region="eu-west-1") as second:
        urls = [first.url]
        async with connected(lambda _: urls[0]) as client:
            await client.update(count)
            second.row = first.row.copy()
            await client.update(count)
            second.row.save({"count": 10}, "theirs")
            urls[0] = second.url
            await first.cut()
            await until(lambda: second.row.version == 3 and not client.unacknowledged)
            assert second.row.state == client.state == {"count": 11}


@fast
async def test_a_function_that_gives_no_patch_is_refused_with_a_reason() -> None:
    async with Api() as api, connected(api, options=replace(PROMPT, max_unacknowledged=2)) as client:
        with pytest.raises(TypeError, match="a NoneType"):
            await client.update(lambda state: None)  # type: ignore[arg-type,return-value]
        with pytest.raises(TypeError, match="takes a function"):
            await client.update({"a": 1})  # type: ignore[arg-type]
        with pytest.raises(MessageTooLarge):
            await client.update(lambda state: {"a": "x" * 131_000})
        assert (client.unacknowledged, client.state) == ((), {})
        assert await client.update(count) == 1


@fast
async def test_a_change_for_a_version_is_made_upon_that_version_alone() -> None:
    async with Api() as api, connected(api) as client:
        assert await client.set({"a": 1}, version=client.version) == 1
        api.row.save({"theirs": 1}, "x")
        with pytest.raises(VersionConflict, match="version 2 and not 1"):
            await client.set({"a": 2}, version=client.version)
        assert client.state == api.row.state == {"a": 1, "theirs": 1}
        assert await client.set({"a": 2}, version=client.version) == 3
        for version in (-1, True, "3"):
            with pytest.raises(ValueError, match="version is"):
                await client.set({"a": 3}, version=version)  # type: ignore[arg-type]
        assert len(api.actions("setState")) == 3


@fast
async def test_a_change_for_a_version_whose_answer_was_lost_is_no_conflict() -> None:
    async with Api() as api, connected(api) as client:
        api.lose_answer("setState")
        assert await client.set({"a": 1}, version=0) == 1
        assert api.row.version == 1


@fast
async def test_our_own_change_that_is_told_over_a_second_connection_is_not_shown_twice() -> None:
    shown: list[int] = []
    async with Api() as api, connected(api, on_state=lambda state, _: shown.append(state["count"])) as client:

        def tell(number: int, message: Message) -> list[Message] | None:
            reply = api.reply(number, message)
            about = {"type": "changed", "version": 1, "change": message["change"], "region": api.region}
            return [{**about, "patch": message["patch"]}, reply] if reply else None

        api.answer = tell
        assert await client.update(count) == 1
        await until(lambda: shown[-1:] == [1])
        assert set(shown) == {1}


# Credentials


@fast
async def test_each_attempt_has_a_token_of_its_own_and_a_refused_one_is_not_used_again() -> None:
    attempts: list[Attempt] = []

    async def token(attempt: Attempt) -> str:
        attempts.append(attempt)
        return f"token{len(attempts)}"

    async with Api() as api:
        api.good = lambda token: token != "token2"
        async with connected(api, token=token) as client:
            api.drop()
            await api.until(lambda: len(api.tokens) == 3)
            await client.set({"a": 1})
    assert api.tokens == ["token1", "token2", "token3"]
    assert [attempt.auth_failed for attempt in attempts] == [False, False, True]


@fast
async def test_a_server_that_closes_as_the_token_has_expired_is_met_with_a_fresh_one() -> None:
    seen: list[bool] = []

    def token(attempt: Attempt) -> str:
        seen.append(attempt.auth_failed)
        return f"token{len(seen)}"

    async with Api() as api, connected(api, token=token) as client:
        await api.close_all(4401, "token expired")
        await until(lambda: len(seen) == 2)
        await client.set({"a": 1})
        assert seen == [False, True]
        await api.close_all(1008, "token expired")
        await until(lambda: len(seen) == 3)
        await client.set({"a": 2})
    assert seen == [False, True, True]


@fast
async def test_credentials_that_are_refused_for_minutes_end_the_client_with_a_reason() -> None:
    async with Api() as api:
        api.good = lambda token: False
        options = replace(PROMPT, backoff_cap_s=60.0)
        client = Client(api.url, "secret-token", options=options, governor=governor())
        client.start()
        answer = client.submit({"a": 1})
        began = now()
        reason = await client.wait_closed()
        assert now() - began > 150, "a fail-over takes less"
        assert len(api.tokens) == options.refusals
        assert (reason.ended, reason.unacknowledged) == (Ended.REFUSED, 1)
        assert "expiry of the token" in str(reason)
        assert "secret-token" not in f"{reason} {client.story}"
        with pytest.raises(ClientClosed, match="refused"):
            await answer
        for call in (client.ready(), client.get(), client.set({})):
            with pytest.raises(ClientClosed, match="refused"):
                await call
        assert [dict(change.patch) for change in client.unacknowledged] == [{"a": 1}]
        assert await client.close() == reason


@pytest.mark.parametrize("token", ["", "two words", "line\nbreak", "schlüssel", None])
def test_a_token_that_no_header_can_carry_ends_the_client_without_showing_it(token: Any) -> None:
    async def main() -> None:
        client = Client("ws://127.0.0.1:1", lambda attempt: token, options=PROMPT)
        client.start()
        reason = await client.wait_closed()
        assert reason.ended is Ended.CONFIGURATION
        assert "token" in reason.detail
        assert not token or token not in str(reason)

    run(main(), fast=True)


@fast
async def test_a_token_function_that_fails_or_hangs_is_asked_again() -> None:
    calls = 0

    async def token(attempt: Attempt) -> str:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise OSError("the issuer is away")
        if calls == 2:
            await asyncio.Event().wait()
        return "good"

    async with Api() as api, connected(api, token=token) as client:
        assert calls == 3
        reasons = [event.reason for event in client.story if isinstance(event, Disconnected)]
        assert ["issuer is away" in reasons[0], "longer than 10 s" in reasons[1]] == [True, True]


# Liveness


@fast
async def test_a_half_open_connection_is_left_within_two_heartbeats() -> None:
    async with Api() as api, connected(api) as client:
        api.is_mute = True
        began = now()
        await until(lambda: not client.is_connected, 100.0)
        assert now() - began <= 2 * PROMPT.heartbeat_s + 1
        assert len(api.actions("ping")) >= 1
        api.is_mute = False
        await client.set({"a": 1})
        assert any("pings were not answered" in getattr(event, "reason", "") for event in client.story)


@fast
async def test_a_function_that_fails_is_no_answer_though_the_gateway_goes_on_sending() -> None:
    async with Api() as api, connected(api) as client:
        api.is_broken = True
        began = now()
        chatter = asyncio.create_task(pushing(api, 1.7))
        await until(lambda: not client.is_connected, 200.0)
        chatter.cancel()
        await asyncio.wait((chatter,))
        assert now() - began <= 2 * PROMPT.heartbeat_s + 1
        api.is_broken = False
        await client.set({"a": 1})


async def pushing(api: Api, every_s: float) -> None:
    while True:
        await api.push("chatter")
        await asyncio.sleep(every_s)


@fast
async def test_a_connection_lives_on_if_pongs_come() -> None:
    async with Api() as api:
        options = replace(PROMPT, rotate_after_s=100_000.0)
        async with connected(api, options=options) as client:
            await asyncio.sleep(1800.0)
            assert api.opened == 1
            assert 59 <= len(api.actions("ping")) <= 60
            assert client.latency_s is not None


@fast
async def test_pongs_that_are_lost_far_apart_do_not_end_a_healthy_connection() -> None:
    async with Api() as api, connected(api) as client:

        def lose(number: int, message: Message) -> Message | None:
            is_lost = message["action"] == "ping" and len(api.actions("ping")) in (2, 6, 11)
            return None if is_lost else api.reply(number, message)

        api.answer = lose
        await asyncio.sleep(15 * PROMPT.heartbeat_s)
        assert api.opened == 1
        assert len(api.actions("ping")) > 13
        assert not [event for event in client.story if isinstance(event, Disconnected)]
        assert len(client._session.talk) == 0  # nothing waits for the answers that were lost


@fast
async def test_a_peer_that_accepts_and_drops_is_met_ever_less_often() -> None:
    async with Api() as api:

        def drop(number: int, message: Message) -> Message | None:
            api.drop()
            return None

        api.answer = drop
        options = replace(PROMPT, backoff_base_s=0.5, backoff_cap_s=60.0)
        async with Client(api.url, "good", options=options, governor=governor()) as client:
            await asyncio.sleep(600.0)
            assert api.opened < 60
            assert client.closed is None


@fast
async def test_progress_and_not_a_handshake_sets_the_delay_back() -> None:
    async with Api() as api:
        options = replace(PROMPT, backoff_base_s=0.5, backoff_cap_s=60.0)
        async with connected(api, options=options) as client:
            for _ in range(8):  # connected, and lost after 20 s each time
                await until(lambda: client.is_connected, 100.0)
                await asyncio.sleep(20.0)
                api.drop()
                await until(lambda: not client.is_connected)
            ceilings = client._session.pump._failures
            assert ceilings == 8
            await until(lambda: client.is_connected, 100.0)
            await asyncio.sleep(PROMPT.stable_after_s + 1)
            assert client._session.pump._failures == 0


# Rotation


@fast
async def test_a_connection_is_replaced_before_its_limit_without_a_gap_a_loss_or_a_duplicate() -> None:
    pushes: list[int] = []
    async with Api() as api:
        options = replace(PROMPT, rotate_after_s=60.0)
        async with connected(api, options=options, on_push=pushes.append) as client:
            sent = 0
            answers = []
            while api.opened < 4:
                await api.push(sent, push_id=f"p{sent}")
                answers.append(client.submit({"sent": sent}))
                sent += 1
                await asyncio.sleep(0.5)
                assert client.is_connected
            await client.flush(10.0)
            await until(lambda: len(api.live) == 1)
            await until(lambda: len(pushes) == sent)
            assert pushes == list(range(sent))
            assert [answer.result() for answer in answers] == list(range(1, sent + 1))
            assert api.row.version == sent
            assert "Disconnected" not in kinds(client)
            assert [event.is_rotated for event in client.story if isinstance(event, Connected)] == [
                False,
                True,
                True,
                True,
            ]


@fast
async def test_what_was_on_its_way_over_the_old_connection_arrives_before_that_is_left() -> None:
    pushes: list[Any] = []
    async with Api() as api:

        def late(number: int, message: Message) -> Message | list[Message] | None:
            reply = api.reply(number, message)
            if number == 1 and api.opened == 2 and message["action"] == "ping" and reply is not None:
                return [{"type": "push", "id": "p1", "message": "sent before the new connection was there"}, reply]
            return reply

        api.answer = late
        async with connected(api, options=replace(PROMPT, rotate_after_s=60.0), on_push=pushes.append) as client:
            await until(lambda: kinds(client) == ["Connected", "Connected"], 100.0)
            await until(lambda: pushes == ["sent before the new connection was there"])


@fast
async def test_a_change_under_way_while_connections_are_switched_is_made_once_and_soon() -> None:
    async with Api() as api:
        options = replace(PROMPT, rotate_after_s=60.0, request_timeout_s=500.0)
        held: list[Message] = []

        def hold(number: int, message: Message) -> Message | None:
            if message["action"] == "setState" and number == 1:
                held.append(message)
                api.reply(number, message)  # made, and never answered
                return None
            return api.reply(number, message)

        api.answer = hold
        async with connected(api, options=options) as client:
            await asyncio.sleep(40.0)
            answer = client.submit({"a": 1})
            began = now()
            assert await answer == 1
            assert len(held) >= 1
            assert api.row.version == 1
            assert now() - began < 30.0


@fast
async def test_a_replacement_that_cannot_be_opened_leaves_the_old_connection_alone() -> None:
    async with Api() as api:
        options = replace(PROMPT, rotate_after_s=60.0)
        async with connected(api, options=options) as client:
            api.status = http.HTTPStatus.SERVICE_UNAVAILABLE
            await asyncio.sleep(120.0)
            assert len(api.tokens) >= 2
            assert client.is_connected
            assert await client.set({"a": 1}) == 1
            api.status = None
            await api.until(lambda: api.opened == 2, 60.0)
            await until(lambda: kinds(client) == ["Connected", "Connected"])


# Pushes and handlers


@fast
async def test_a_push_that_comes_twice_is_told_once() -> None:
    pushes: list[Any] = []
    async with Api() as api, connected(api, on_push=pushes.append):
        for push_id, message in (("p1", "a"), ("p1", "a"), ("p2", "b"), (None, "c"), (None, "c"), ("p1", "a")):
            await api.push(message, push_id=push_id)
        await until(lambda: len(pushes) == 4)
        await asyncio.sleep(1.0)
        assert pushes == ["a", "b", "c", "c"]


@fast
async def test_a_slow_handler_costs_pushes_which_is_told_and_nothing_else() -> None:
    told: list[Any] = []
    gate = asyncio.Event()

    async def slow(message: Any) -> None:
        told.append(message)
        await gate.wait()

    async with Api() as api:
        options = replace(PROMPT, max_events=10)
        async with connected(api, options=options, on_push=slow) as client:
            events = client.events()
            reader = asyncio.ensure_future(anext(events))
            await asyncio.sleep(0)
            await api.push(0)
            await until(lambda: told == [0])
            for number in range(1, 50):
                await api.push(number)
            assert await client.set({"a": 1}, timeout_s=5.0) == 1  # answers do not wait behind handlers
            await asyncio.sleep(600.0)
            assert (client.is_connected, api.opened) == (True, 1)
            assert told == [0]
            await reader
            dropped = await anext(events)
            assert isinstance(dropped, Dropped)
            assert dropped.pushes >= 39
            gate.set()
            await until(lambda: told[-1] == 49)
            assert len(told) <= 12
            assert told == sorted(told)
            await events.aclose()


@fast
async def test_a_handler_may_change_the_state_and_may_fail() -> None:
    problems: list[Any] = []
    loop = asyncio.get_running_loop()
    before = loop.get_exception_handler()
    loop.set_exception_handler(lambda _, context: problems.append(context))
    async with Api() as api:
        done: list[int] = []

        async def handle(message: int) -> None:
            if message == 1:
                raise ValueError("a bug of the application")
            done.append(await client.set({"seen": message}))

        async with connected(api, on_push=handle) as client:
            for number in range(3):
                await api.push(number)
            await until(lambda: done == [1, 2])
    loop.set_exception_handler(before)
    [problem] = problems
    assert isinstance(problem["exception"], ValueError)


@fast
async def test_events_can_be_iterated_to_the_end() -> None:
    async with Api() as api:
        client = Client(api.url, "good", options=PROMPT, governor=governor())
        seen: list[str] = []

        async def read() -> None:
            seen.extend([type(event).__name__ async for event in client.events()])

        reader = asyncio.create_task(read())
        await asyncio.sleep(0)
        async with client:
            await client.ready()
            await client.set({"a": 1})
            api.drop()
            await until(lambda: not client.is_connected)
            await client.ready()
        await reader
        assert seen[0] == "Connected"
        assert "StateChanged" in seen
        assert [name for name in seen if name != "StateChanged"] == ["Connected", "Disconnected", "Connected", "Closed"]
        assert [type(event).__name__ async for event in client.events()] == ["Closed"]


# Limits


@fast
async def test_a_change_that_cannot_be_sent_is_refused_at_once() -> None:
    async with Api() as api, connected(api, options=replace(PROMPT, max_unacknowledged=3)) as client:
        with pytest.raises(MessageTooLarge, match="reference"):
            await client.set({"a": "x" * 131_000})
        with pytest.raises(TypeError, match="merge patch"):
            await client.set([1])  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="JSON"):
            await client.set({"a": float("nan")})
        with pytest.raises(TypeError):
            await client.set({"a": object()})
        deep: Any = 1
        for _ in range(300):
            deep = {"a": [deep]}
        with pytest.raises(ValueError, match="64 deep"):
            await client.set(deep)
        assert client.state == {}
        await api.cut()
        await until(lambda: not client.is_connected)
        for number in range(3):
            client.submit({"n": number})
        with pytest.raises(TooManyChanges, match="max_unacknowledged"):
            client.submit({"n": 4})
        await api.mend()
        await client.flush(10.0)
        assert await client.set({"n": 5}) == 4


@fast
async def test_long_messages_go_in_chunks_in_both_directions() -> None:
    pushes: list[Any] = []
    async with Api() as api, connected(api, on_push=pushes.append) as client:
        text = 'ü"\\' * 20_000
        assert await client.set({"text": text}) == 1
        assert api.row.state == {"text": text}
        client.reconnect()
        await until(lambda: kinds(client) == ["Connected", "Disconnected", "Connected"])
        assert client.state == {"text": text}
        await api.push({"long": "y" * 100_000})
        await until(lambda: len(pushes) == 1)
        assert pushes == [{"long": "y" * 100_000}]
        api.chunks_refused, began = 1, now()
        assert await client.set({"text": text[1:]}) == 2
        assert now() - began < 5.0  # an error of a chunk answers its request


def answered_with(api: Api, *answers: Message) -> Callable[[int, Message], Message | list[Message] | None]:
    """The first changes are answered with these, one after the other."""
    left = list(answers)

    def answer(number: int, message: Message) -> Message | None:
        if message["action"] == "setState" and left:
            return {"id": message["id"], **left.pop(0)}
        return api.reply(number, message)

    return answer


@fast
async def test_an_error_that_passes_is_waited_for_and_one_that_does_not_is_told() -> None:
    async with Api() as api, connected(api) as client:
        error = {"type": "error", "message": "because"}
        passing = {**error, "error": "unavailable", "retry_after_s": 2.0}
        api.answer = answered_with(api, passing, passing, {**error, "error": "internal"})
        began = now()
        assert await client.set({"a": 1}) == 1
        assert 4.0 <= now() - began < 6.0
        for problem in ("bad_request", "too_large", "unknown_route"):
            api.answer = answered_with(api, {**error, "error": problem})
            with pytest.raises(ChangeRefused, match=f"{problem}: because"):
                await client.set({"bad": True})
        api.answer = answered_with(api, *[{**error, "error": "internal"}] * 5)
        with pytest.raises(ChangeRefused, match="internal"):
            await client.set({"bad": True})
        assert client.state == {"a": 1}
        assert await client.set({"b": 2}) == 2


@fast
async def test_a_change_that_is_too_big_for_somebody_on_the_way_does_not_end_every_connection() -> None:
    async with Api() as api, connected(api) as client:
        closing: list[asyncio.Task[None]] = []

        def refuse(number: int, message: Message) -> Message | list[Message] | None:
            if message["action"] == "setState" and "big" in message["patch"]:
                closing.append(asyncio.create_task(api.close_all(1009)))
                return None
            return api.reply(number, message)

        api.answer = refuse
        big = client.submit({"big": "x" * 1000})
        small = client.submit({"small": 1})
        with pytest.raises(ChangeRefused, match="smaller"):
            await big
        assert await small == 1
        assert (len(closing), client.state) == (2, {"small": 1})
        await asyncio.wait(closing)


@fast
async def test_what_makes_no_sense_is_left_alone() -> None:
    async with Api() as api, connected(api) as client:
        for text in ("no json", "[1]", "3", '{"type":"chunk","id":"a","index":9,"of":2,"data":""}', "{}", b"\x00"):
            await api.live[0].send(text)
        await api.live[0].send('{"type":"state","id":"999","state":{"evil":1},"version":77}')
        await api.live[0].send('{"type":"later","id":null}')
        assert await client.set({"a": 1}) == 1
        assert (client.state, client.version, api.opened) == ({"a": 1}, 1, 1)


@fast
async def test_an_answer_that_is_none_is_asked_for_again() -> None:
    async with Api() as api, connected(api) as client:
        api.answer = answered_with(api, {"type": "saved", "version": "1"}, {"type": "conflict"}, {"type": "pong"})
        assert await client.set({"a": 1}) == 1


# The end


@fast
async def test_the_end_is_bounded_with_a_peer_that_says_nothing_more() -> None:
    async with Api() as api, connected(api) as client:
        api.is_mute = True
        answer = client.submit({"a": 1})
        await api.until(lambda: len(api.actions("setState")) == 1)
        began = now()
        reason = await client.close(flush_s=1.0)
        assert now() - began <= 1.0 + 4 * PROMPT.close_timeout_s
        assert (reason.ended, reason.unacknowledged) == (Ended.ASKED, 1)
        with pytest.raises(ClientClosed, match="1 changes were not acknowledged"):
            await answer
        api.is_mute = False


@fast
async def test_a_client_can_be_ended_before_it_began_and_while_it_connects_and_twice() -> None:
    client = Client("ws://127.0.0.1:1", "good", options=PROMPT)
    assert (await client.close()).ended is Ended.ASKED
    client.start()
    assert client.is_connected is False
    async with Api() as api:
        api.is_mute = True
        client = Client(api.url, "good", options=PROMPT, governor=governor())
        client.start()
        await api.until(lambda: len(api.tokens) == 1)
        began = now()
        await asyncio.gather(client.close(), client.close())
        assert now() - began <= 4 * PROMPT.close_timeout_s
        with pytest.raises(ClientClosed):
            client.submit({})
        api.is_mute = False


@fast
async def test_close_waits_for_changes_if_it_is_asked_to() -> None:
    async with Api() as api, connected(api) as client:
        for number in range(20):
            client.submit({"n": number})
        reason = await client.close(flush_s=5.0)
        assert (reason.unacknowledged, api.row.version) == (0, 20)


@fast
async def test_a_handler_may_end_the_client() -> None:
    async with Api() as api:
        reasons: list[Ended] = []

        async def handle(message: Any) -> None:
            reasons.append((await client.close()).ended)

        async with connected(api, on_push=handle) as client:
            await api.push("bye")
            assert (await client.wait_closed()).ended is Ended.ASKED
            assert reasons == [Ended.ASKED], "the handler goes on behind it"


@fast
async def test_a_part_that_dies_ends_the_client_with_a_reason() -> None:
    async with Api() as api, connected(api) as client:

        def die(*_: Any) -> None:
            raise RuntimeError("a bug")

        client._replica.saved = die  # type: ignore[method-assign,assignment]
        with pytest.raises(ClientClosed, match="a bug"):
            await client.set({"a": 1})
        assert (await client.wait_closed()).ended is Ended.INTERNAL


@fast
async def test_an_endpoint_that_is_none_ends_the_client_without_showing_it() -> None:
    client = Client("https://api.example/secret", "good", options=PROMPT)
    client.start()
    reason = await client.wait_closed()
    assert reason.ended is Ended.CONFIGURATION
    assert "ws://" in reason.detail
    assert "secret" not in str(reason)


@pytest.mark.parametrize("url", [None, 3, object(), b"ws://x", [], [None]])
def test_a_url_that_can_never_work_is_refused_when_the_client_is_made(url: Any) -> None:
    with pytest.raises(ConfigurationError, match="url"):
        Client(url, "good")


def test_options_that_cannot_work_are_told_all_at_once() -> None:
    with pytest.raises(ConfigurationError) as caught:
        ClientOptions(heartbeat_s=0, backoff_base_s=5, backoff_cap_s=1, rotate_after_s=10, fleet=-1)
    for name in ("heartbeat_s", "backoff_base_s", "rotate_after_s", "fleet"):
        assert name in str(caught.value)


# A fleet


@fast
async def test_a_client_that_is_refused_as_too_many_come_waits_for_its_turn() -> None:
    async with Api() as api:
        api.status = http.HTTPStatus.TOO_MANY_REQUESTS
        async with Client(api.url, "good", options=PROMPT, governor=governor()) as client:
            await asyncio.sleep(60.0)
            assert 2 <= len(api.tokens) <= 13
            api.status = None
            await client.ready(31.0)


def test_the_first_retry_of_a_fleet_is_spread_over_what_the_api_takes() -> None:
    async def main() -> None:
        async with Api() as api, connected(api, fleet=30_000, governor=None) as client:
            client_governor = client._session.pump._governor
            client_governor.rng = random.Random(3)
            waits = [client_governor.first_retry() for _ in range(2000)]
            assert 0 <= min(waits) < 1
            assert 59 < max(waits) <= 60.0
            began = now()
            client_governor.rng = random.Random(5)
            expected = random.Random(5).uniform(0.0, 60.0)
            api.drop()
            await until(lambda: not client.is_connected)
            await client.ready(100.0)
            assert expected <= now() - began <= expected + PROMPT.backoff_base_s + 0.5

    run(main(), fast=True)


def test_the_row_of_a_server_stays_as_it_was_replicated() -> None:
    row = Row()
    row.save({"a": 1}, "x")
    copy = row.copy()
    row.save({"a": 2}, "y")
    assert (copy.state, copy.version) == ({"a": 1}, 1)


@fast
async def test_a_pause_that_the_server_asks_for_is_kept_and_told_and_ends_no_connection() -> None:
    async with Api() as api:
        left = {"getState": 2, "setState": 2, "ping": 3}

        def answer(number: int, message: Message) -> Message | list[Message] | None:
            if not left.get(message["action"]):
                return api.reply(number, message)
            left[message["action"]] -= 1
            return throttled(message, 1.5)

        api.answer = answer
        async with connected(api, options=replace(PROMPT, heartbeat_s=2.0)) as client:
            assert await client.set({"a": 1}) == 1
            await until(lambda: client.latency_s is not None and not left["ping"])
            assert client.state == api.row.state == {"a": 1}
            assert api.opened == 1
            assert [event.pause_s for event in client.story if isinstance(event, Throttled)] == [1.5] * 7


@fast
async def test_an_update_that_was_refused_as_too_much_was_sent_is_made_whatever_others_make_meanwhile() -> None:
    async with Api() as api, connected(api) as client:

        def answer(number: int, message: Message) -> Message | None:
            if message["action"] != "setState":
                return api.reply(number, message)
            api.answer = api.reply
            for other in range(CHANGES_KEPT + 1):
                api.row.save({"other": other}, f"x{other}")
            return throttled(message, 10**400)

        api.answer = answer
        assert await client.update(count) == CHANGES_KEPT + 2
        assert [event.pause_s for event in client.story if isinstance(event, Throttled)] == [LONGEST_PAUSE_S]


@fast
async def test_a_client_that_connects_again_keeps_the_pause() -> None:
    async with Api() as api, connected(api) as client:
        times: list[float] = []

        def answer(number: int, message: Message) -> Message | None:
            times.append(now())
            return throttled(message, 5.0) if len(times) == 1 else api.reply(number, message)

        api.answer = answer
        change = client.submit({"a": 1})
        await until(lambda: "Throttled" in kinds(client))
        client.reconnect()
        assert await change == 1
        assert api.opened == 2
        assert times[1] - times[0] >= 5.0
