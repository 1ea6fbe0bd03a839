"""A small metadata service of EC2 on the loopback address, which a test steers."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

SPOT = "/latest/meta-data/spot/instance-action"
STATE = "/latest/meta-data/autoscaling/target-lifecycle-state"
REBALANCE = "/latest/meta-data/events/recommendations/rebalance"
TAKEN_AWAY = '{"action": "terminate", "time": "2026-11-29T08:22:00Z"}'


class MetadataService:
    """What the instance tells. `answers` has the text of each path; `refusals` the status of each, 0: no answer."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.answers: dict[str, str] = {}
        self.refusals: dict[str, int] = {}
        self.tokens: list[str] = []
        self.asked: Counter[str] = Counter()
        self.unauthorised = 0

    def forget_tokens(self) -> None:
        """As after a stop and a start of the instance."""
        self.tokens.clear()


class _Handler(BaseHTTPRequestHandler):
    service: MetadataService

    def do_PUT(self) -> None:
        self.service.asked[self.path] += 1
        if self._refused():
            return
        if self.path != "/latest/api/token" or int(self.headers["X-aws-ec2-metadata-token-ttl-seconds"]) < 1:
            self._answer(400, "")
            return
        self.service.tokens.append(f"token-{self.service.asked[self.path]}")
        self._answer(200, self.service.tokens[-1])

    def do_GET(self) -> None:
        self.service.asked[self.path] += 1
        if self._refused():
            return
        if self.headers.get("X-aws-ec2-metadata-token") not in self.service.tokens:
            self.service.unauthorised += 1
            self._answer(401, "")
            return
        text = self.service.answers.get(self.path)
        self._answer(404 if text is None else 200, text or "")

    def _refused(self) -> bool:
        status = self.service.refusals.get(self.path)
        if status == 0:
            self.close_connection = True
        elif status:
            self._answer(status, "")
        return status is not None

    def _answer(self, status: int, text: str) -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


@contextmanager
def metadata_service() -> Iterator[MetadataService]:
    """A service on a free port, until the end of the block."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {}))
    service = server.RequestHandlerClass.service = MetadataService(  # type: ignore[attr-defined]
        f"http://127.0.0.1:{server.server_port}"
    )
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield service
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)
