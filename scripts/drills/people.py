"""The clients of a drill, and the feed that its streams follow: a process of its own, as neither is in a region.

It reads one JSON object from its standard input, tells where the feed is, and then each tenth of a second how many
clients are live in which region. `rest` on a line of the input lets nobody change anything more, `report` makes it tell
everything and end; so does the end of the input, without a word.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections import Counter
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from typing import Any, Final

from drills.pace import LEAST_S, Pace, hasten
from thunderagent.model.errors import ThunderAgentError
from thunderagent.streams.connection.endpoint import Attempt
from thunderagent.streams.connection.governor import Governor
from thunderagent.testing.chaos import ChaosServer
from thunderagent.websocket_api.client import Client, ClientOptions, Connected, Disconnected, Resubmitted

MESSAGES_A_SECOND: Final = 5.0
"""Of the feed, real ones."""
CHANGE_S: Final = 60.0
"""Mean time between two changes of one client, in seconds of the story."""
FLUSH_S: Final = 20.0
TOLD_S: Final = 0.1


class Person:
    """A client, what it was told, and what it has changed."""

    def __init__(self, user: str, device: int, governor: Governor, about: dict[str, Any]) -> None:
        self.user, self.device = user, device
        self._token = about["tokens"][user]
        self._port = about["names_port"]
        self._kept: tuple[str, float] = "", -1.0
        self.sent = 0
        self.acknowledged: list[tuple[int, float, str | None]] = []
        self.events: list[list[Any]] = []
        self.client = Client(self._resolve, lambda attempt: self._token, options=_options(about), governor=governor)

    async def _resolve(self, attempt: Attempt) -> str:
        """Look the name up, for each attempt; the answer of the last one counts while it lives."""
        url, until = self._kept
        if time.monotonic() >= until:
            reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
            try:
                answer = json.loads(await reader.readline())
            finally:
                writer.close()
            # A resolver on the way asked some time ago: what is left of the time to live is anything.
            first = not self._kept[0]
            url, ttl_s = answer["url"], answer["ttl"] * (random.random() if first else 1.0)
            self._kept = url, time.monotonic() + ttl_s
        return url

    async def listen(self) -> None:
        """Keep the events that matter."""
        async for event in self.client.events():
            match event:
                case Connected(at=at, region=region, version=version):
                    self.events.append(["live", at, region, version])
                case Disconnected(at=at):
                    self.events.append(["away", at, None, 0])
                case Resubmitted(at=at, region=region, changes=changes, is_certain=is_certain):
                    self.events.append(["again" if is_certain else "check", at, region, changes])

    async def live(self, mean_s: float, rest: asyncio.Event) -> None:
        """Change the state now and then."""
        await self.client.ready()
        while not rest.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(rest.wait(), random.uniform(0.2, 1.8) * mean_s)
                return
            if len(self.client.unacknowledged) < 20:
                self.sent += 1
                number = self.sent
                self.client.submit({"done": {f"{self.device}.{number}": 1}}).add_done_callback(
                    lambda answer, number=number: self._done(number, answer)  # type: ignore[misc]
                )

    def _done(self, number: int, answer: asyncio.Future[int]) -> None:
        if not answer.cancelled() and answer.exception() is None:
            self.acknowledged.append((number, time.time(), self.client.region))

    def report(self) -> dict[str, Any]:
        """Everything."""
        return {
            "user": self.user,
            "device": self.device,
            "sent": self.sent,
            "acknowledged": self.acknowledged,
            "unacknowledged": len(self.client.unacknowledged),
            "version": self.client.version,
            "region": self.client.region,
            "events": self.events,
        }


def _options(about: dict[str, Any]) -> ClientOptions:
    pace = Pace(about["scale"])
    options = ClientOptions(
        heartbeat_s=pace.s(30.0, LEAST_S),
        request_timeout_s=pace.s(10.0, 3 * LEAST_S),
        open_timeout_s=pace.s(10.0, 3 * LEAST_S),
        close_timeout_s=pace.s(2.0, LEAST_S),
        backoff_base_s=pace.s(0.5),
        backoff_cap_s=pace.s(60.0),
        stable_after_s=pace.s(30.0),
        rotate_after_s=pace.s(6300.0),
        recheck_s=pace.s(60.0),
        fleet=len(about["people"]),
        proxy=False,
    )
    return options if about["resubmit"] else replace(options, keep_acknowledged=0, recheck_s=0.0)


async def _tell(people: list[Person]) -> None:
    while True:
        live = Counter(one.client.region for one in people if one.client.is_connected and one.client.region)
        changes = sum(len(one.acknowledged) for one in people)
        print(json.dumps({"live": live, "acknowledged": changes}), flush=True)
        await asyncio.sleep(TOLD_S)


async def _publish(feed: ChaosServer) -> None:
    while True:
        feed.publish_many(1)
        await asyncio.sleep(1.0 / MESSAGES_A_SECOND)


async def main() -> None:
    """Live until told to report."""
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    about = json.loads(await reader.readline())
    pace = Pace(about["scale"])
    hasten(pace)
    governor = Governor(rate=500.0, spread_s=pace.s(1 / 500.0), fleet=lambda: len(about["people"]), rng=random.Random())
    async with AsyncExitStack() as ends:
        feed = await ends.enter_async_context(ChaosServer())
        print(json.dumps({"feed": feed.url}), flush=True)
        people = [Person(user, device, governor, about) for user, device in about["people"]]
        rest = asyncio.Event()
        jobs = [asyncio.create_task(_publish(feed)), asyncio.create_task(_tell(people))]
        for one in people:
            jobs += [
                asyncio.create_task(one.listen()),
                asyncio.create_task(one.live(pace.s(CHANGE_S), rest)),
            ]
            one.client.start()
        ends.push_async_callback(_end, people, jobs)
        while (line := await reader.readline()) and line.strip() != b"report":
            rest.set()
        if line:
            await asyncio.gather(*(_flushed(one) for one in people))
            jobs[1].cancel()
            report = {"people": [one.report() for one in people], "messages": feed.last_seq}
            print(json.dumps({"report": report}), flush=True)


async def _flushed(person: Person) -> None:
    with suppress(TimeoutError, ThunderAgentError):
        await person.client.flush(FLUSH_S)


async def _end(people: list[Person], jobs: list[asyncio.Task[None]]) -> None:
    await asyncio.gather(*(one.client.close() for one in people))
    for one in jobs:
        one.cancel()
    await asyncio.wait(jobs, timeout=5.0)


if __name__ == "__main__":
    asyncio.run(main())
