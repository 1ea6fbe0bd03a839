"""The client against the local gateway: the real handler, authorizer and tables, on the real clock."""

from __future__ import annotations

import ast
import asyncio
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.websocket_api.client.support import PROMPT, connected, governor, run, until
from thunderagent.stores.sqlite.engine import MEMORY, SqliteEngine
from thunderagent.streams.connection.endpoint import Attempt
from thunderagent.websocket_api.client import Client, Connected, Disconnected, Ended
from thunderagent.websocket_api.gateway.events import Limits
from thunderagent.websocket_api.gateway.gateway import Gateway
from thunderagent.websocket_api.gateway.issuer import Issuer
from thunderagent.websocket_api.push import Pusher

pytestmark = pytest.mark.slow


@contextmanager
def engines(*names: str) -> Iterator[list[SqliteEngine]]:
    """Tables in memory."""
    opened = [SqliteEngine(MEMORY) for _ in names]
    try:
        yield opened
    finally:
        for engine in opened:
            engine.close()


@asynccontextmanager
async def regions(
    issuer: Issuer, *, states: list[SqliteEngine] | None = None, limits: Limits | None = None
) -> AsyncIterator[list[Gateway]]:
    """Two regions, over one table of states if no other are given."""
    with engines("states", "here", "there") as (shared, here, there):
        tables = states or [shared, shared]
        pairs = zip(("eu-central-1", "eu-west-1"), tables, (here, there), strict=True)
        gateways = [
            Gateway(table, connections, region=region, authorizer=issuer.authorizer(), limits=limits)
            for region, table, connections in pairs
        ]
        async with gateways[0], gateways[1]:
            yield gateways


def test_a_client_and_its_changes_survive_the_loss_of_a_region() -> None:
    async def main() -> None:
        issuer = Issuer()
        async with regions(issuer) as (first, second):
            urls = [first.url, second.url]
            async with connected(urls, token=lambda attempt: issuer.token("ada")) as client:
                assert await client.set({"cart": {"apples": 1}}) == 1
                first.cut()
                answer = client.submit({"cart": {"pears": 2}})
                assert await asyncio.wait_for(answer, 10.0) == 2
                assert client.state == {"cart": {"apples": 1, "pears": 2}} == await client.get()
                assert client.region == "eu-west-1"
                first.mend()
                second.cut()
                assert await client.set({"cart": {"apples": None}}, timeout_s=10.0) == 3
                assert (client.region, client.state) == ("eu-central-1", {"cart": {"pears": 2}})

    run(main())


def test_changes_that_were_not_replicated_are_sent_again_to_the_region_that_takes_over() -> None:
    async def main() -> None:
        issuer = Issuer()
        with engines("here", "there") as (here, there):
            async with regions(issuer, states=[here, there]) as (first, second):
                urls = [first.url]
                token = lambda attempt: issuer.token("ada")  # noqa: E731
                async with connected(lambda attempt: urls[0], token=token) as client:
                    await client.set({"a": 1})
                    there.put(list(here.get(["user:ada"]).values()))  # replicated up to here
                    await client.set({"b": 2})
                    async with connected(second, token=token) as other:  # somebody writes there already
                        await other.set({"theirs": 3})
                    urls[0] = second.url
                    first.cut()
                    await until(lambda: client.state == {"a": 1, "b": 2, "theirs": 3} and not client.unacknowledged)
                    assert await client.get() == {"a": 1, "b": 2, "theirs": 3}

    run(main())


def test_an_expired_token_is_refused_and_a_fresh_one_is_fetched() -> None:
    async def main() -> None:
        issuer = Issuer()
        attempts: list[Attempt] = []

        def token(attempt: Attempt) -> str:
            attempts.append(attempt)
            return issuer.token("ada", expires_s=3600.0 if attempt.auth_failed or attempt.number == 1 else -60.0)

        async with regions(issuer) as (first, _):
            async with connected(first, token=token) as client:
                await client.set({"a": 1})
                first.cut()
                await until(lambda: not client.is_connected)
                first.mend()
                assert await client.set({"b": 2}, timeout_s=10.0) == 2
            refused = [one for one in attempts if one.auth_failed]
            assert len(refused) == 1
            assert refused[0].last_end is not None
            assert refused[0].last_end.status in (401, 403)

    run(main())


def test_changes_of_one_user_never_go_to_another() -> None:
    async def main() -> None:
        issuer, users = Issuer(), ["ada", "bob"]
        async with regions(issuer) as (first, second):
            token = lambda attempt: issuer.token(users.pop(0))  # noqa: E731
            async with connected([first.url, second.url], token=token) as client:
                await client.set({"secret": "of ada"})
                first.cut()
                waiting = client.submit({"more": "of ada"})
                reason = await client.wait_closed()
                assert (reason.ended, reason.unacknowledged) == (Ended.CONFIGURATION, 1)
                assert "another user" in reason.detail
                assert waiting.exception() is not None
            async with connected(second, token=issuer.token("bob")) as other:
                assert other.state == {}

    run(main())


def test_pushes_survive_rotation_without_loss_and_without_duplicates() -> None:
    async def main() -> None:
        issuer = Issuer()
        told: list[Any] = []
        limits = Limits(rotate_after_s=3.0)
        async with regions(issuer, limits=limits) as (first, _):
            pusher = Pusher(first.post, lambda: first._connections)
            options = replace(PROMPT, rotate_after_s=0.6, stable_after_s=0.3)
            async with connected(
                first, token=lambda attempt: issuer.token("ada"), options=options, on_push=told.append
            ) as client:
                rotations: list[Any] = []
                sent = 0
                while len(rotations) < 4:
                    assert await asyncio.to_thread(pusher.push, "ada", sent) >= 1
                    sent += 1
                    await client.set({"sent": sent})
                    rotations = [one for one in client.story if isinstance(one, Connected) and one.is_rotated]
                    assert client.is_connected
                await until(lambda: len(told) >= sent)
                assert told == list(range(sent))
                assert client.version == sent
                assert not [one for one in client.story if isinstance(one, Disconnected)]
                pusher.close()

    run(main())


def test_two_clients_of_one_user_change_the_state_at_once_and_neither_loses_anything() -> None:
    async def main() -> None:
        issuer = Issuer()
        token = lambda attempt: issuer.token("ada")  # noqa: E731
        async with (
            regions(issuer) as (first, second),
            connected(first, token=token) as one,
            connected(second, token=token) as other,
        ):
            changes = [
                client.submit({f"{name}{number}": number})
                for number in range(10)
                for name, client in (("a", one), ("b", other))
            ]
            versions = await asyncio.wait_for(asyncio.gather(*changes), 20.0)
            assert sorted(versions) == list(range(1, 21))
            wanted = {f"{name}{number}": number for name in "ab" for number in range(10)}
            assert await one.get() == await other.get() == wanted

    run(main())


def test_the_page_on_computed_values_does_what_it_says() -> None:
    page = (Path(__file__).parents[3] / "docs" / "guides" / "shared-state.md").read_text(encoding="utf-8")
    printed = "\n".join(re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL))
    code = compile(printed, "shared-state.md", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)

    async def main() -> None:
        issuer = Issuer()
        token = lambda attempt: issuer.token("ada")  # noqa: E731
        async with (
            regions(issuer) as (first, _),
            connected(first, token=token) as client,
            connected(first, token=token) as other,
        ):
            running = eval(code, {"client": client})  # noqa: S307 - our own page
            await asyncio.gather(running, *(other.update(lambda state: {"others": True}) for _ in range(2)))
            wanted = {"count": 1, "todo": [], "items": {}, "seats": ["ada", "ada"], "others": True}
            assert await client.get() in (wanted, wanted | {"address": "Elm Street 5"})
            await until(lambda: other.version == client.version)  # it has heard of all that, and never asked
            assert other.state == client.state

    run(main())


def test_a_long_state_goes_in_chunks_both_ways() -> None:
    async def main() -> None:
        issuer = Issuer()
        async with regions(issuer) as (first, _):
            token = lambda attempt: issuer.token("ada")  # noqa: E731
            text = "ü" * 50_000
            async with connected(first, token=token) as client:
                await client.set({"text": text}, timeout_s=10.0)
            async with Client(first.url, token, options=PROMPT, governor=governor()) as again:
                await again.ready(10.0)
                assert again.state == {"text": text}

    run(main())
