"""What tests of the client share: prompt options, and clients that are ended."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

from tests.support.connections import run as run  # bounded; nothing may be left, and no error be unseen
from tests.websocket_api.client.server import Api
from thunderagent.streams.connection.endpoint import EndpointSource
from thunderagent.streams.connection.governor import Governor
from thunderagent.websocket_api.client import Client, ClientOptions
from thunderagent.websocket_api.gateway.gateway import Gateway

PROMPT: Final = ClientOptions(proxy=False, close_timeout_s=0.3, backoff_base_s=0.2, backoff_cap_s=1.0)
"""Options of tests that do not look at delays."""


def governor(seed: int = 1, spread_s: float = 0.0) -> Governor:
    """One whose chance is repeatable."""
    return Governor(spread_s=spread_s, rng=random.Random(seed), rate=1000.0)


@asynccontextmanager
async def connected(
    api: Api | Gateway | EndpointSource, *, ready_s: float = 100.0, **arguments: Any
) -> AsyncIterator[Client]:
    """A client that is ready."""
    url = api.url if isinstance(api, (Api, Gateway)) else api
    given = {"token": "good", "options": PROMPT, "governor": governor(), **arguments}
    async with Client(url, **given) as client:
        await client.ready(ready_s)
        yield client


async def until(predicate: Any, timeout_s: float = 10.0) -> None:
    """Wait until it holds, for what tells nobody that it changed."""
    async with asyncio.timeout(timeout_s):
        while not predicate():  # noqa: ASYNC110
            await asyncio.sleep(timeout_s / 500)  # long enough for a clock that jumps to do so
