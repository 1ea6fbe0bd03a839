"""Regions of the WebSocket API on one machine: gateways over one file of states, each with its own connections."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from thunderagent.model.bus import EventBus
from thunderagent.model.errors import ConfigurationError, StoreError
from thunderagent.stores.engine import Engine
from thunderagent.stores.sqlite.engine import SqliteEngine
from thunderagent.websocket_api.gateway.gateway import Gateway
from thunderagent.websocket_api.gateway.issuer import Issuer
from thunderagent.websocket_api.gateway.pages import Pages
from thunderagent.websocket_api.server.authorizer import Authorizer

TIDY_S: Final = 60.0
"""Pace at which expired rows are deleted, which SQLite does not do by itself."""


@dataclass(frozen=True, slots=True)
class LocalRegion:
    """One region and its table of connections."""

    gateway: Gateway
    connections: Engine


@contextmanager
def local_regions(
    names: Sequence[str],
    *,
    folder: Path,
    ports: Sequence[int],
    authorizer: Authorizer | None = None,
    bus: EventBus | None = None,
) -> Iterator[list[LocalRegion]]:
    """Gateways that share their states as in a global table without delay. They are not started.

    Args:
        names: of the regions.
        folder: of the files; made if it does not exist.
        ports: of WebSockets and of pushes for each region, one after the other; 0: free ones.
        authorizer: checks tokens; None: this is a demo, whose pages give tokens to every client of this machine.
        bus: gets the events of a demo.

    Raises:
        ConfigurationError: two regions have one name, or the folder cannot be made.
    """
    if len(set(names)) < len(names):
        raise ConfigurationError(f"two regions have one name: {', '.join(names)}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(f"the folder {str(folder)!r} cannot be made: {error}") from None
    pages = Pages()
    if authorizer is None:
        pages = Pages(issuer=(issuer := Issuer()))
        authorizer = issuer.authorizer(bus)
    with ExitStack() as stack:

        def opened(name: str) -> Engine:
            engine = SqliteEngine(str(folder.resolve() / f"{name}.db"))
            stack.callback(engine.close)
            return engine

        states = opened("states")
        regions = []
        for number, name in enumerate(names):
            connections = opened(f"connections-{name}")
            gateway = Gateway(
                states,
                connections,
                region=name,
                authorizer=authorizer,
                ports=(ports[2 * number], ports[2 * number + 1]),
                pages=pages,
            )
            regions.append(LocalRegion(gateway, connections))
        pages.regions = [one.gateway for one in regions]
        yield regions


async def serve(regions: Sequence[LocalRegion], started: Callable[[], None]) -> None:
    """Serve until SIGINT or SIGTERM, then close within seconds. `started` is called when all regions listen.

    Raises:
        ConfigurationError: a port is taken.
    """
    loop, stopped = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopped.set)
    try:
        for one in regions:
            try:
                await one.gateway.start()
            except OSError as error:
                raise ConfigurationError(
                    f"the region {one.gateway.region} cannot listen: {error}; choose another --port"
                ) from None
        started()
        while not stopped.is_set():
            for one in regions:
                with suppress(StoreError):
                    await asyncio.to_thread(one.connections.expire, one.connections.clock.now())
            with suppress(TimeoutError):
                await asyncio.wait_for(stopped.wait(), TIDY_S)
    finally:
        await asyncio.gather(*(one.gateway.close() for one in regions))
