"""A feed in a process of its own: `python -m thunderagent.testing.chaos --rate 10` prints its URL; SIGTERM ends it."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
import time
from collections.abc import Sequence
from typing import Final

from thunderagent.testing.chaos.server import ChaosServer

_KEPT: Final = 100_000


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a feed until SIGTERM or SIGINT; the first line of the output is its URL."""
    parser = argparse.ArgumentParser(prog="python -m thunderagent.testing.chaos", description=__doc__)
    parser.add_argument("--port", type=int, default=0, help="0, the default, takes a free one; always on 127.0.0.1")
    parser.add_argument("--rate", type=float, default=0.0, help="messages published per second")
    parser.add_argument("--history", type=int, default=0, help="messages published before the first connection")
    parser.add_argument("--from-start", action="store_true", help="a new subscriber gets all that was published")
    parser.add_argument("--auto-subscribe", action="store_true", help="feed connections that do not ask for it")
    asyncio.run(_feed(parser.parse_args(arguments)))


async def _feed(options: argparse.Namespace) -> None:
    loop, stopped = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    server = ChaosServer(
        from_start=options.from_start,
        auto_subscribe=options.auto_subscribe,
        keep=_KEPT,
        port=options.port,
        epochs=f"epoch-{int(time.time())}",  # a feed that was started again has lost its history
    )
    async with server:
        server.publish_many(options.history)
        sys.stdout.write(f"{server.url}\n")
        sys.stdout.flush()
        publisher = asyncio.create_task(_publish(server, options.rate))
        await stopped.wait()
        publisher.cancel()


async def _publish(server: ChaosServer, rate: float) -> None:
    """Publish at this rate; what a stopped process missed is published when it goes on."""
    loop, published = asyncio.get_running_loop(), 0
    start = loop.time()
    while rate > 0:
        await asyncio.sleep(1.0 / rate)
        due = int((loop.time() - start) * rate)
        server.publish_many(due - published)
        published = due


if __name__ == "__main__":
    main()
