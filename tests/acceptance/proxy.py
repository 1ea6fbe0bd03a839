"""A network that can fail: a TCP proxy on the loopback address, in front of a local DynamoDB."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Final
from urllib.parse import urlsplit

_EXPIRED: Final = json.dumps(
    {
        "__type": "com.amazon.coral.service#ExpiredTokenException",
        "message": "The security token included in the request is expired",
    }
).encode()


class Proxy:
    """Passes bytes on, refuses connections, says nothing, or answers as AWS does when credentials are over."""

    def __init__(self, endpoint: str) -> None:
        parts = urlsplit(endpoint)
        assert parts.hostname and parts.port
        self._target = (parts.hostname, parts.port)
        self._guard = threading.Lock()
        self._open: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._listener: socket.socket | None = None
        self._handle: Callable[[socket.socket], None] = self._serve
        self.refused = 0
        """Requests answered with expired credentials so far."""
        self.port = 0

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def on(self) -> None:
        """Pass everything on, at the same port as before."""
        self.off()
        self._listen(self._serve)

    def off(self) -> None:
        """Break all connections and refuse new ones."""
        with self._guard:
            sockets, self._open = self._open, set()
            listener, self._listener = self._listener, None
        for one in (*sockets, *([listener] if listener else [])):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits for it, which closes it
        for thread in self._threads:
            thread.join(10)
        self._threads.clear()

    def expire(self) -> None:
        """Answer every request with ExpiredTokenException."""
        self.off()
        self._listen(self._refuse)

    def hang(self) -> None:
        """Take connections and never answer, as a network that loses packets does."""
        self.off()
        self._listen(_swallow)

    def _listen(self, handle: Callable[[socket.socket], None]) -> None:
        self._handle = handle
        self._listener = listener = socket.create_server(("127.0.0.1", self.port), backlog=64)
        self.port = listener.getsockname()[1]
        self._start(self._accept, listener)

    def _start(self, work: Callable[[socket.socket], None], argument: socket.socket) -> None:
        thread = threading.Thread(target=work, args=(argument,), daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self, listener: socket.socket) -> None:
        with listener:
            while True:
                try:
                    client, _ = listener.accept()
                except OSError:
                    return
                with self._guard:
                    if self._listener is not listener:
                        client.close()
                        return
                    self._open.add(client)
                self._start(self._handle, client)

    def _serve(self, client: socket.socket) -> None:
        with client, socket.create_connection(self._target) as server:
            with self._guard:
                if client not in self._open:
                    return
                self._open.add(server)
            back = threading.Thread(target=_pump, args=(server, client), daemon=True)
            back.start()
            _pump(client, server)
            back.join(10)
            with self._guard:
                self._open -= {client, server}

    def _refuse(self, client: socket.socket) -> None:
        with client, suppress(OSError, ValueError), client.makefile("rb") as requests:
            while requests.readline():
                length = 0
                while (line := requests.readline().strip()) != b"":
                    name, _, value = line.partition(b":")
                    if name.lower() == b"content-length":
                        length = int(value)
                requests.read(length)
                self.refused += 1
                head = (
                    "HTTP/1.1 400 Bad Request\r\nContent-Type: application/x-amz-json-1.0\r\n"
                    f"Content-Length: {len(_EXPIRED)}\r\n\r\n"
                )
                client.sendall(head.encode() + _EXPIRED)
        with self._guard:
            self._open.discard(client)


def _swallow(client: socket.socket) -> None:
    with client, suppress(OSError):
        while client.recv(65536):
            pass


def _pump(source: socket.socket, sink: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(65536):
            sink.sendall(data)
    for one in (source, sink):
        with suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)


@contextmanager
def proxy(endpoint: str) -> Iterator[Proxy]:
    """A proxy that passes everything on, gone afterwards."""
    running = Proxy(endpoint)
    running.on()
    try:
        yield running
    finally:
        running.off()
