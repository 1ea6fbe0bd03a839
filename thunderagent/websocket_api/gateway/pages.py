"""Pages of the local gateway for browsers: the client, the demo page, and the requests of that page.

* `GET /`, `/demo.html`, `/client.js`: the files of `browser/`;
* `GET /demo.json`: `{"regions": [{"region": …, "url": "ws://…", "http": "http://…", "is_cut": false}, …]}`;
* `GET /token?user=NAME&expires_s=60`: `{"token": …}`, signed with the key of this demo;
* `POST /cut?region=NAME`, `/mend`, `/rotate`: a region is lost, is back, closes its connections as after two hours.

The last three need an issuer, and a page of this machine.
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
    """A gateway, as a page sees it."""

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
    status: HTTPStatus
    body: str
    kind: str = "application/json"
    origin: str | None = None


class Pages:
    """Answers requests that are no WebSocket.

    Args:
        regions: the gateways of a demo.
        issuer: makes tokens for every client; None: there are no tokens here, and no region can be cut.
    """

    def __init__(self, regions: Sequence[Region] = (), issuer: Issuer | None = None) -> None:
        self.regions = list(regions)
        self.issuer = issuer

    def answer(self, method: str, path: str, headers: Mapping[str, str]) -> Page:
        low = {name.lower(): value for name, value in headers.items()}
        if not _is_here(f"//{low.get('host', '')}"):  # an outside name that leads here is an attack on the page
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
        regions = [
            {"region": one.region, "url": one.url, "http": one.http_url, "is_cut": one.is_cut} for one in self.regions
        ]
        return Page(HTTPStatus.OK, json.dumps({"regions": regions}))

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
