"""The jobs of a drill, and the load on them."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from pydantic import BaseModel

from drills.ledger import Ledger
from drills.pace import Pace
from thunderagent.client import Client
from thunderagent.jobs.context import Context
from thunderagent.jobs.job import make_job
from thunderagent.jobs.registry import Registry
from thunderagent.model.errors import StoreError
from thunderagent.model.task import STREAM
from thunderagent.streams.connection.connection import Connection
from thunderagent.streams.connection.options import StreamOptions
from thunderagent.streams.context import StreamContext
from thunderagent.streams.cursor import Cursor

ORDER: Final = "drill.order"
FOLLOW: Final = "drill.follow"
ORDERS_A_SECOND: Final = 3.0
"""In a second of the story: half of what the slots of the agents of one region could do."""
MOST_ORDERS_A_SECOND: Final = 15.0
"""Real ones: so much a machine with two cores can do beside the rest, however fast time runs."""
WORK_S: Final = 4.0
"""How long an order takes, in seconds of the story."""
STREAM_LEASE_S: Final = 20.0
STREAM_BEAT_S: Final = 5.0


class Order(BaseModel):
    """A piece of work."""

    number: int
    work_s: float


class Source(BaseModel):
    """Where a stream comes from."""

    url: str


def make_jobs(region: str, ledger: Ledger, pace: Pace) -> Registry:
    """The jobs as the agents of a region have them."""
    options = StreamOptions(
        open_timeout_s=pace.s(10.0, 1.0),
        subscribe_timeout_s=pace.s(10.0, 1.0),
        backoff_base_s=pace.s(0.5),
        backoff_cap_s=pace.s(60.0),
        stable_after_s=pace.s(30.0),
        ping_interval_s=pace.s(15.0, 0.5),
        proxy=False,
    )

    async def order(ctx: Context, payload: Order) -> int:
        run = ledger.begin(ctx.task_id, region, ctx.lease.task.region_epoch or 0, ctx.fence)
        is_done = False
        try:
            await asyncio.sleep(payload.work_s)
            is_done = True
        finally:
            ledger.end(run, is_done=is_done)
        return payload.number

    async def follow(ctx: StreamContext, payload: Source) -> None:
        run = ledger.begin(ctx.task_id, region, ctx.lease.task.region_epoch or 0, ctx.fence, is_stream=True)
        try:
            async for message in ctx.connect(
                payload.url, decode=_decode, on_open=_subscribe, position=_position, options=options
            ):
                if message is not None:
                    ledger.message(run, message["seq"])
                    ctx.checkpoint(seq=message["seq"], epoch=message["epoch"])
        finally:
            ledger.end(run, is_done=False)

    return Registry(
        make_job(ORDER, order),
        make_job(FOLLOW, follow, kind=STREAM, lease_s=pace.s(STREAM_LEASE_S), heartbeat_s=pace.s(STREAM_BEAT_S)),
    )


class Load(threading.Thread):
    """Applications in both regions, each of which puts orders into the table of its own region, in turn.

    Args:
        clients: of the tables, by region.
        pace: of the drill.
    """

    def __init__(self, clients: Mapping[str, Client], pace: Pace) -> None:
        super().__init__(name="load", daemon=True)
        self._clients = clients
        self._pace = pace
        self._stop_asked = threading.Event()
        self.regions = tuple(clients)
        """Regions whose applications work now."""
        self.put: dict[str, str] = {}
        """The region of each order that was put."""
        self.failure: BaseException | None = None

    def run(self) -> None:
        """Put orders until `stop`."""
        try:
            due = time.monotonic()
            for number in itertools.count():
                due += max(self._pace.s(1.0 / ORDERS_A_SECOND), 1.0 / MOST_ORDERS_A_SECOND)
                if self._stop_asked.wait(max(0.0, due - time.monotonic())):
                    return
                region, task_id = self.regions[number % len(self.regions)], f"order-{number}"
                payload = {"number": number, "work_s": self._pace.s(WORK_S)}
                if self._is_done(lambda: self._clients[region].enqueue(ORDER, payload, task_id=task_id)):  # noqa: B023
                    self.put[task_id] = region
        except BaseException as error:
            self.failure = error

    def stop(self) -> None:
        """Put no more."""
        self._stop_asked.set()
        self.join(5.0)

    def _is_done(self, put: Callable[[], object]) -> bool:
        """Put until the table has acknowledged it; False when `stop` came before that, and nothing is promised."""
        while not self._stop_asked.is_set():
            try:
                put()
            except StoreError:
                self._stop_asked.wait(0.05)
            else:
                return True
        return False


def _decode(message: str | bytes) -> dict[str, Any] | None:
    value: dict[str, Any] = json.loads(message)
    return None if "op" in value else value


async def _subscribe(connection: Connection, since: Cursor | None) -> None:
    place = {"since": since.seq, "epoch": since.epoch} if since else {"since": None, "epoch": None}
    await connection.send_json({"op": "subscribe", **place})
    await connection.expect(op="subscribed")


def _position(message: dict[str, Any] | None) -> Cursor | None:
    return Cursor(message["seq"], message["epoch"]) if message else None
