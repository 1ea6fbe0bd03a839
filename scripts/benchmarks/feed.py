"""A WebSocket feed for thousands of connections, on 127.0.0.1 in a process of its own.

    python -m benchmarks.feed '{"tls": false}'

Every path is a feed. One that begins with `/flap` is closed as soon as it is open, and with `greet` in it a message
comes at once. The hello has the address and, with TLS, the certificate of its authority.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import sys
import time
from bisect import bisect_right
from importlib.util import find_spec
from typing import Any, Final, cast

from websockets.asyncio.server import ServerConnection, serve
from websockets.frames import CloseCode, Frame, Opcode

from benchmarks import measured
from thunderagent.testing.chaos.certificates import contexts

HOST: Final = "127.0.0.1"
TURN_S: Final = 0.01
FULL_BYTES: Final = 64 * 1024
"""A connection that has so much to send gets no more."""


class Feed:
    """What the server knows and does."""

    def __init__(self) -> None:
        self.peers: dict[ServerConnection, None] = {}
        self.attempts: list[float] = []
        """Monotonic seconds at which TCP connections came, since the last mark."""
        self.by_path: dict[str, list[float]] = {}
        """Monotonic seconds of the handshakes of each stream, since the last mark."""
        self.seq = 0

    def accept(self, *arguments: Any, **options: Any) -> ServerConnection:
        """A TCP connection comes; TLS and the handshake follow."""
        self.attempts.append(time.monotonic())
        return ServerConnection(*arguments, **options)

    async def hold(self, peer: ServerConnection) -> None:
        """A connection from its handshake to its end."""
        path = peer.request.path if peer.request else ""
        self.by_path.setdefault(path, []).append(time.monotonic())
        if path.startswith("/flap"):
            await peer.close(CloseCode.GOING_AWAY)
            return
        if "greet" in path:
            peer.transport.write(self.message(60))
        self.peers[peer] = None
        try:
            await peer.wait_closed()
        finally:
            self.peers.pop(peer, None)

    def message(self, size: int) -> bytes:
        """The next message, padded to a size, as a frame."""
        self.seq += 1
        text = json.dumps({"seq": self.seq, "data": ""}, separators=(",", ":"))
        return Frame(Opcode.TEXT, f'{text[:-2]}{"x" * (size - len(text))}"}}'.encode()).serialize(mask=False)

    async def answer(self, do: str, **arguments: Any) -> dict[str, Any]:
        """Answer a request of the harness."""
        match do:
            case "state":
                busiest = (bisect_right(self.attempts, at + 1.0) - index for index, at in enumerate(self.attempts))
                return {
                    "open": len(self.peers),
                    "paths": len(self.by_path),
                    "attempts": len(self.attempts),
                    "attempts_a_second": max(busiest, default=0),
                }
            case "flaps":  # how often each stream came in so many seconds, from its first time on
                seconds = arguments["seconds"]
                return {"numbers": [bisect_right(moments, moments[0] + seconds) for moments in self.by_path.values()]}
            case "mark":
                self.attempts, self.by_path = [], {}
                return {}
            case "drop":
                dropped, at = self.peers, time.monotonic()
                self.peers, self.attempts, self.by_path = {}, [], {}
                for peer in dropped:
                    peer.transport.abort()
                return {"at": at}
            case "push":
                return await self.push(**arguments)
        raise ValueError(f"{do} is not known here")

    async def push(self, seconds: float, rate: float, batch: int, size: int) -> dict[str, Any]:
        """Send so many messages a second, some at once to one connection after the other.

        A connection that takes nothing is passed over. What is late is made up for, but not beyond `seconds`.
        """
        began = time.monotonic()
        sent = held_back = 0
        peers: list[ServerConnection] = []
        while (now := time.monotonic()) - began < seconds:
            block = b"".join(self.message(size) for _ in range(batch))
            while self.peers and sent + held_back < rate * (now - began):
                peers = peers or list(self.peers)
                peer = peers.pop()
                if peer in self.peers and peer.transport.get_write_buffer_size() < FULL_BYTES:
                    peer.transport.write(block)
                    sent += batch
                else:
                    held_back += batch
            await asyncio.sleep(TURN_S)
        return {"sent": sent, "held_back": held_back}


async def main(tls: bool) -> None:
    """Serve until standard input ends."""
    measured.raise_open_files()
    loop, feed = asyncio.get_running_loop(), Feed()
    loop.set_exception_handler(lambda _, __: None)  # handshakes that a client gave up are what is measured
    hello = {}
    if tls:
        known = contexts().client.get_ca_certs(binary_form=True)
        hello["authority"] = "".join(map(ssl.DER_cert_to_PEM_cert, known))
    async with serve(
        feed.hold,
        HOST,
        0,
        create_connection=cast(type[ServerConnection], feed.accept),
        compression=None,
        ping_interval=None,
        open_timeout=120.0,
        ssl=contexts().good if tls else None,
        backlog=4096,
    ) as server:
        port = next(iter(server.sockets)).getsockname()[1]
        hello["url"] = f"{'wss' if tls else 'ws'}://{HOST}:{port}"
        measured.serve(hello, lambda **request: asyncio.run_coroutine_threadsafe(feed.answer(**request), loop).result())
        await asyncio.Event().wait()


if __name__ == "__main__":
    # The fastest loop there is, so that the feed is not what is measured.
    measured.run(main(**json.loads(sys.argv[1])), on_uvloop=find_spec("uvloop") is not None)
