"""The port for probes: `GET` and `HEAD` of `/health` and `/metrics`.

Few threads and short waits: a slow or frequent client takes nothing from the tasks.
"""

from __future__ import annotations

import errno
import json
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final
from urllib.parse import urlsplit

from thunderagent.agent.health.judgement import Health
from thunderagent.agent.threads import JOIN_S
from thunderagent.model.errors import ConfigurationError
from thunderagent.model.version import __version__

PROBE_S: Final = 5.0
"""Longest wait for more of a request; the whole request may take twice as long."""

PORTS: Final = 32
"""Ports that are tried in turn: each agent of a machine has its own."""

AT_ONCE: Final = 8
"""Requests that are answered at once; more are refused."""

ALLOWED: Final = "GET, HEAD"
TEXT: Final = "text/plain; charset=utf-8"
PROMETHEUS: Final = "text/plain; version=0.0.4; charset=utf-8"
_BUSY: Final = b"HTTP/1.0 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n"

Metrics = Callable[[], bytes]


class Probes:
    """The thread `http`.

    Args:
        host: address to listen at.
        port: first port that is tried.
        metrics: in the text format of Prometheus; None: there are none.

    Raises:
        ConfigurationError: no port is free.
    """

    name = "http"

    def __init__(
        self, host: str, port: int, *, agent: str, health: Callable[[], Health], metrics: Metrics | None = None
    ) -> None:
        self._host = host
        self._answers = _Answers(agent, health, metrics)
        self._server = _listen(host, range(port, min(port + PORTS, 65536)), self._answers)
        self._thread: threading.Thread | None = None

    @property
    def url(self) -> str:
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self._server.server_address[1]}"

    @property
    def is_alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def start(self) -> None:
        """Answer; after a death at the same port again."""
        if self._thread is not None:
            port = int(self._server.server_address[1])
            self._server.server_close()
            self._server = _listen(self._host, range(port, port + 1), self._answers)
        self._thread = threading.Thread(target=self._serve, name=self.name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        if self.is_alive and self._thread is not None:
            threading.Thread(target=self._server.shutdown, daemon=True).start()  # it waits without a bound
            self._thread.join(JOIN_S)
        self._server.server_close()

    def _serve(self) -> None:
        self._server.serve_forever(poll_interval=0.2)


NO_METRICS: Final = b"This agent shows no metrics: pip install 'thunderagent[prometheus]' and start it again.\n"


class _Answers:
    """The answers by path."""

    def __init__(self, agent: str, health: Callable[[], Health], metrics: Metrics | None) -> None:
        self._agent = agent
        self._health = health
        self._metrics = metrics

    def to(self, path: str) -> tuple[HTTPStatus, str, bytes]:
        path = path.rstrip("/")
        if path == "/health":
            health = self._health()
            status = HTTPStatus.OK if health.healthy else HTTPStatus.SERVICE_UNAVAILABLE
            body = json.dumps({"agent": self._agent, **health.entry()}, indent=2) + "\n"
            return status, "application/json", body.encode()
        if path == "/metrics" and self._metrics is not None:
            return HTTPStatus.OK, PROMETHEUS, self._metrics()
        if path == "/metrics":
            return HTTPStatus.NOT_FOUND, TEXT, NO_METRICS
        return HTTPStatus.NOT_FOUND, TEXT, b"Here are /health and /metrics, and nothing else.\n"


class _Handler(BaseHTTPRequestHandler):
    timeout = PROBE_S
    server_version = f"thunderagent/{__version__}"
    sys_version = ""
    server: _Server

    def do_GET(self) -> None:
        self._answer(*self._found())

    def do_HEAD(self) -> None:
        self._answer(*self._found(), with_body=False)

    def _refuse(self) -> None:
        body = f"Ask with {ALLOWED}.\n".encode()
        self._answer(HTTPStatus.METHOD_NOT_ALLOWED, TEXT, body, Allow=ALLOWED)

    do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = do_TRACE = do_CONNECT = _refuse

    def _found(self) -> tuple[HTTPStatus, str, bytes]:
        try:
            return self.server.answers.to(urlsplit(self.path).path)
        except Exception as error:  # of the metrics: the next request is answered
            return HTTPStatus.INTERNAL_SERVER_ERROR, TEXT, f"{error!r}\n".encode()

    def _answer(self, status: HTTPStatus, kind: str, body: bytes, *, with_body: bool = True, **headers: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Probes come all the time: no line for each."""


class _Server(ThreadingHTTPServer):
    """At most `AT_ONCE` threads, each for a bounded time."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 16

    def __init__(self, address: tuple[str, int], answers: _Answers) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self.answers = answers
        self._open: dict[socket.socket, float] = {}
        self._guard = threading.Lock()
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        """Bind without the library's look-up of the host's name, which may take long."""
        if self.address_family is socket.AF_INET6:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._guard:
            has_room = len(self._open) < AT_ONCE
            if has_room:
                self._open[request] = time.monotonic()
        if has_room:
            super().process_request(request, client_address)
            return
        with suppress(OSError):
            request.send(_BUSY, socket.MSG_DONTWAIT)
        self.shutdown_request(request)

    def shutdown_request(self, request: Any) -> None:
        with self._guard:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Between requests: break off those that take too long."""
        now = time.monotonic()
        with self._guard:
            late = [one for one, since in self._open.items() if now - since > PROBE_S * 2]
        for one in late:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """The client is gone."""


def _listen(host: str, ports: range, answers: _Answers) -> _Server:
    for port in ports:
        try:
            return _Server((host, port), answers)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise ConfigurationError(
                    f"THUNDERAGENT_HTTP_HOST and THUNDERAGENT_HTTP_PORT are {host} and {port}, where nothing can "
                    f"listen: {error}"
                ) from error
    raise ConfigurationError(
        f"the ports {ports[0]} to {ports[-1]} of {host} are all taken: choose another THUNDERAGENT_HTTP_PORT"
    )
