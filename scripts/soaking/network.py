"""A network on the loopback address that loses, delays and resets requests to a local DynamoDB."""

from __future__ import annotations

import random
import socket
import struct
import threading
from collections import Counter
from contextlib import suppress
from typing import BinaryIO, Final
from urllib.parse import urlsplit

HOST: Final = "127.0.0.1"
LATE_S: Final = (0.2, 8.0)
"""How late a delayed request arrives: up to longer than its sender waits."""
SILENCE_S: Final = 10.0
"""How long a connection stays open whose request or reply was lost."""

FATES: Final = ("request lost", "reply lost", "late", "reset")


class Network:
    """Passes requests of HTTP on, one connection to the target for each connection.

    Args:
        endpoint: URL of the target.
        share: of the requests that something happens to.
        seed: of the dice.
    """

    def __init__(self, endpoint: str, share: float, seed: int) -> None:
        parts = urlsplit(endpoint)
        self._target = (parts.hostname or HOST, parts.port or 80)
        self._share = share
        self._dice = random.Random(seed)
        self._guard = threading.Lock()
        self._closed = threading.Event()
        self._listener = socket.create_server((HOST, 0), backlog=128)
        self.endpoint = f"http://{HOST}:{self._listener.getsockname()[1]}"
        self.requests = Counter[str]()
        """Requests by what happened to them."""
        threading.Thread(target=self._accept, name="network", daemon=True).start()

    def close(self) -> None:
        """Take no more connections; those that are open end by themselves."""
        self._closed.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                peer, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(peer,), daemon=True).start()

    def _serve(self, peer: socket.socket) -> None:
        with suppress(OSError), peer, socket.create_connection(self._target, timeout=60) as server:
            asked, answered = peer.makefile("rb"), server.makefile("rb")
            with asked, answered:
                while request := _message(asked):
                    fate = self._fate()
                    if fate == "reset":
                        peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                        return
                    if fate == "request lost":
                        self._closed.wait(SILENCE_S)
                        return
                    if fate == "late":
                        self._closed.wait(self._dice.uniform(*LATE_S))
                    server.sendall(request)  # whether its sender still waits or not
                    reply = _message(answered)
                    if fate == "reply lost":
                        self._closed.wait(SILENCE_S)
                        return
                    peer.sendall(reply)

    def _fate(self) -> str:
        with self._guard:
            fate = self._dice.choice(FATES) if self._dice.random() < self._share else "passed"
            self.requests[fate] += 1
        return fate


def _message(stream: BinaryIO) -> bytes:
    """One request or reply with its body; empty at the end of the connection."""
    head = b""
    length, chunked = 0, False
    while (line := stream.readline()) not in (b"\r\n", b""):
        head += line
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            length = int(value)
        chunked = chunked or (name.lower() == b"transfer-encoding" and b"chunked" in value.lower())
    if not head:
        return b""
    body = _chunks(stream) if chunked else stream.read(length)
    return head + b"\r\n" + body


def _chunks(stream: BinaryIO) -> bytes:
    body = b""
    while True:
        line = stream.readline()
        body += line + stream.read(int(line, 16) + 2)
        if int(line, 16) == 0:
            return body
