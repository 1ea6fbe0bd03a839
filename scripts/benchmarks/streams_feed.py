"""A WebSocket feed for many thousands of connections, on 127.0.0.1 in a process of its own.

    python -m benchmarks.streams_feed '{"tls": false}'

Says its port (and, with TLS, the certificate of its authority), then answers requests. Every path is a feed; one that
begins with `/flap` is closed as soon as it is open, and with `greet` in it a message comes at once.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import sys
import time
from bisect import bisect_right
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any, Final, cast

from benchmarks.streams_children import raise_open_files, say, serve
from thunderagent.testing.chaos.certificates import contexts
from thunderagent.testing.chaos.frames import (
    Frame,
    FrameParser,
    Opcode,
    accepting,
    close_frame,
    parse_request,
    text_frame,
)

HOST: Final = "127.0.0.1"
TURN_S: Final = 0.01
GOING_AWAY: Final = 1001


class Feed:
    """What the server knows and does."""

    def __init__(self) -> None:
        self.peers: dict[Peer, None] = {}
        self.attempts: list[float] = []
        """Monotonic seconds at which TCP connections came, since the last mark."""
        self.by_path: dict[str, list[float]] = {}
        """Monotonic seconds of the handshakes of each stream, since the last mark."""
        self.seq = 0

    def state(self) -> dict[str, Any]:
        """Numbers since the last mark."""
        return {
            "open": len(self.peers),
            "attempts": len(self.attempts),
            "peak_rate": most_in_a_second(self.attempts),
            "paths": len(self.by_path),
        }

    def flaps(self, seconds: float) -> dict[str, Any]:
        """How many handshakes each stream made in so many seconds, from its first one on."""
        return {"numbers": [bisect_right(moments, moments[0] + seconds) for moments in self.by_path.values()]}

    def mark(self) -> dict[str, Any]:
        """Count afresh."""
        self.attempts.clear()
        self.by_path.clear()
        return {}

    def drop(self) -> dict[str, Any]:
        """Reset all connections."""
        self.mark()
        dropped = list(self.peers)
        at = time.monotonic()
        for peer in dropped:
            peer.transport.abort()
        return {"dropped": len(dropped), "at": at}

    def message(self, size: int) -> bytes:
        """The next message, padded to a size, as a frame."""
        self.seq += 1
        text = json.dumps({"seq": self.seq, "data": ""}, separators=(",", ":"))
        return text_frame(f'{text[:-2]}{"x" * (size - len(text))}"}}')

    async def push(self, seconds: float, rate: float, batch: int, size: int) -> dict[str, Any]:
        """Send so many messages a second, some at once to one connection after the other.

        A connection that takes nothing is passed over. What is late is made up for, but not beyond `seconds`.
        """
        began = time.monotonic()
        sent = held_back = 0
        peers: list[Peer] = []
        while (now := time.monotonic()) - began < seconds:
            block = b"".join(self.message(size) for _ in range(batch))
            while sent + held_back < rate * (now - began):
                if not peers:
                    peers = [peer for peer in self.peers if peer.is_open]
                    if not peers:
                        break
                peer = peers.pop()
                if peer.is_open and not peer.is_full:
                    peer.transport.write(block)
                    sent += batch
                else:
                    held_back += batch
            await asyncio.sleep(TURN_S)
        return {"sent": sent, "held_back": held_back}


class Peer(asyncio.Protocol):
    """One connection, with as little state as can be."""

    def __init__(self, feed: Feed) -> None:
        feed.attempts.append(time.monotonic())  # as TCP accepts, before TLS
        self._feed = feed
        self._head: bytes | None = b""
        self._parser: FrameParser | None = None
        self.transport: asyncio.WriteTransport
        self.is_open = False
        self.is_full = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.WriteTransport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        self._feed.peers.pop(self, None)

    def pause_writing(self) -> None:
        self.is_full = True

    def resume_writing(self) -> None:
        self.is_full = False

    def data_received(self, data: bytes) -> None:
        if self._head is not None:
            head, found, data = (self._head + data).partition(b"\r\n\r\n")
            if not found:
                self._head = head
                return
            self._head = None
            if not self._open(head + found):
                return
        if data:
            self._hear(data)

    def _open(self, head: bytes) -> bool:
        request = parse_request(head)
        if request is None:
            self.transport.abort()
            return False
        feed = self._feed
        feed.by_path.setdefault(request.path, []).append(time.monotonic())
        self.transport.write(accepting(request))
        if request.path.startswith("/flap"):
            self.transport.write(close_frame(GOING_AWAY))
            return True
        if "greet" in request.path:
            self.transport.write(feed.message(60))
        self.is_open = True
        feed.peers[self] = None
        return True

    def _hear(self, data: bytes) -> None:
        parser = self._parser or FrameParser()
        self._parser = parser
        for frame in parser.feed(data):
            if frame.opcode == Opcode.PING:
                self.transport.write(Frame(opcode=Opcode.PONG, payload=frame.payload).encode())
            elif frame.opcode == Opcode.CLOSE:
                if self.is_open:
                    self.is_open = False
                    self.transport.write(Frame(opcode=Opcode.CLOSE, payload=frame.payload[:2]).encode())
                self.transport.close()
                return


def most_in_a_second(moments: list[float]) -> int:
    """The largest number of moments within one second; they are in order."""
    return max((bisect_right(moments, at + 1.0) - index for index, at in enumerate(moments)), default=0)


async def main(tls: bool) -> None:
    """Serve until standard input ends."""
    raise_open_files()
    loop = asyncio.get_running_loop()
    feed = Feed()
    context = contexts().good if tls else None
    server = await loop.create_server(
        lambda: Peer(feed), HOST, 0, ssl=context, backlog=4096, ssl_handshake_timeout=120.0 if tls else None
    )
    port = server.sockets[0].getsockname()[1]
    hello: dict[str, Any] = {"url": f"{'wss' if tls else 'ws'}://{HOST}:{port}"}
    if tls:
        known = contexts().client.get_ca_certs(binary_form=True)
        hello["authority"] = "".join(map(ssl.DER_cert_to_PEM_cert, known))
    loop.set_exception_handler(lambda _, __: None)  # handshakes that a client gave up are what is measured

    async def answer(do: str, **arguments: Any) -> Mapping[str, Any]:
        match do:
            case "push":
                return await feed.push(**arguments)
            case "state" | "mark" | "drop" | "flaps":
                return cast(dict[str, Any], getattr(feed, do)(**arguments))
        raise ValueError(f"the feed cannot {do}")

    say(hello)
    serve(lambda **request: asyncio.run_coroutine_threadsafe(answer(**request), loop).result())
    await asyncio.Event().wait()


if __name__ == "__main__":
    wanted: dict[str, Any] = json.loads(sys.argv[1])
    if find_spec("uvloop"):  # so that the feed is not what is measured
        import uvloop

        uvloop.run(main(**wanted))
    else:
        asyncio.run(main(**wanted))
