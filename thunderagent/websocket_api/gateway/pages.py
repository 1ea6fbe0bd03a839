"""What the local gateway serves to browsers beside WebSockets: the client, the demo page, and what that page asks.

* `GET /`, `/demo.html`, `/client.js`: the files of `browser/`;
* `GET /demo.json`: `{"regions": [{"region": …, "url": "ws://…", "http": "http://…", "is_cut": false}, …]}`;
* `GET /token?user=NAME&expires_s=60`: `{"token": …}`, signed with a key that was made for this demo;
* `POST /cut?region=NAME`, `/mend`, `/rotate`: a region is lost, is back, closes its connections as after two hours.

The last three only with an issuer, and only for pages of this machine.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol
from urllib.parse import parse_qs, urlsplit

if TYPE_CHECKING:
    from thunderagent.websocket_api.gateway.issuer import Issuer

BROWSER: Final = Path(__file__).parents[1] / "client" / "browser"
_KINDS: Final = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}
_NAME: Final = re.compile(r"[a-z0-9_-]{1,40}\.(html|js|css|svg)")
_HERE: Final = frozenset({"127.0.0.1", "localhost", "::1"})
LONGEST_S: Final = 86400.0


class Region(Protocol):
    """What a page may know of a gateway and do to it."""

    region: str

    @property
    def url(self) -> str: ...
    @property
    def http_url(self) -> str: ...
    @property
    def is_cut(self) -> bool: ...
    def cut(self) -> None: ...
    def mend(self) -> None: ...
    def rotate(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Page:
    """An answer to a browser."""

    status: HTTPStatus
    body: str
    kind: str = "application/json"
    origin: str | None = None


class Pages:
    """Answers requests that are no WebSocket.

    Args:
        regions: the gateways of a demo.
        issuer: makes tokens for whoever asks; None: nobody gets one here, and nobody cuts anything.
    """

    def __init__(self, regions: Sequence[Region] = (), issuer: Issuer | None = None) -> None:
        self.regions = list(regions)
        self.issuer = issuer

    def answer(self, method: str, path: str, headers: Mapping[str, str]) -> Page:
        """The answer to a request."""
        low = {name.lower(): value for name, value in headers.items()}
        if not _is_here(f"//{low.get('host', '')}"):  # a name of the outside that leads here is an attack on the page
            return _error(HTTPStatus.FORBIDDEN, "only for pages of this machine")
        origin = low.get("origin")
        if origin is not None and not _is_here(origin):
            return _error(HTTPStatus.FORBIDDEN, "only for pages of this machine")
        parts = urlsplit(path)
        query = {name: values[-1] for name, values in parse_qs(parts.query).items()}
        does: dict[tuple[str, str], Callable[[], Page]] = {
            ("GET", "/demo.json"): self._demo,
            ("GET", "/token"): lambda: self._token(query),
        } | {("POST", f"/{verb}"): lambda verb=verb: self._do(verb, query) for verb in ("cut", "mend", "rotate")}
        do = does.get((method, parts.path))
        if do is None:
            page = _file(parts.path) if method == "GET" else _error(HTTPStatus.METHOD_NOT_ALLOWED, "use GET")
        elif self.issuer is None:
            page = _error(HTTPStatus.NOT_FOUND, "only in a demo")
        else:
            page = do()
        return Page(page.status, page.body, page.kind, origin)

    def _demo(self) -> Page:
        told = [
            {"region": one.region, "url": one.url, "http": one.http_url, "is_cut": one.is_cut} for one in self.regions
        ]
        return Page(HTTPStatus.OK, json.dumps({"regions": told}))

    def _token(self, query: Mapping[str, str]) -> Page:
        assert self.issuer is not None
        try:
            expires_s = min(LONGEST_S, float(query.get("expires_s", "3600")))
            token = self.issuer.token(query.get("user", "demo"), expires_s=expires_s)
        except (ValueError, OverflowError) as error:
            return _error(HTTPStatus.BAD_REQUEST, f"expires_s: {error}")
        return Page(HTTPStatus.OK, json.dumps({"token": token, "expires_s": expires_s}))

    def _do(self, verb: str, query: Mapping[str, str]) -> Page:
        for one in self.regions:
            if one.region == query.get("region"):
                if verb == "cut" and all(other.is_cut for other in self.regions if other is not one):
                    return _error(HTTPStatus.CONFLICT, "the last region that is up stays: it serves the page")
                {"cut": one.cut, "mend": one.mend, "rotate": one.rotate}[verb]()
                return self._demo()
        known = ", ".join(one.region for one in self.regions)
        return _error(HTTPStatus.NOT_FOUND, f"there is no such region; there are {known}")


def _file(path: str) -> Page:
    name = "demo.html" if path == "/" else path.removeprefix("/")
    file = BROWSER / name
    if not _NAME.fullmatch(name) or not file.is_file():
        return _error(HTTPStatus.NOT_FOUND, "there is no such page; there are / and /client.js")
    return Page(HTTPStatus.OK, file.read_text(encoding="utf-8"), _KINDS[file.suffix])


def _error(status: HTTPStatus, text: str) -> Page:
    return Page(status, json.dumps({"error": text}))


def _is_here(url: str) -> bool:
    try:
        return urlsplit(url).hostname in _HERE
    except ValueError:
        return False
