"""The public keys of an issuer of tokens (JWKS), read from a text or a URL and kept for a bounded time.

A token with an unknown key makes the keys be read again, so that a new key of the issuer works at once. That happens
once in `REFETCH_S`: forged tokens must not make the API flood the issuer.
"""

from __future__ import annotations

import json
import threading
import urllib.request
from collections.abc import Callable, Mapping
from typing import Any, Final
from urllib.parse import urlsplit

from thunderagent.model.clock import since_boot
from thunderagent.model.errors import ConfigurationError, StoreUnavailable

MAX_AGE_S: Final = 600.0
"""Age at which keys are read again."""
STALE_S: Final = 3600.0
"""Age at which keys expire while the issuer does not answer; then no client can connect."""
REFETCH_S: Final = 30.0
"""Shortest time between two reads for unknown keys, and between attempts while the issuer is away."""
RETRY_S: Final = 1.0
"""The same while there are no keys, and no client can connect."""
FETCH_S: Final = 4.0
"""Longest time of a read."""
MOST_BYTES: Final = 512 * 1024

Jwk = Mapping[str, Any]


class KeysUnavailable(StoreUnavailable):
    """The keys of the issuer cannot be read now."""


class Keys:
    """The keys of an issuer by their `kid`, of a JWKS that `fetch` reads as text. Safe in threads."""

    def __init__(self, fetch: Callable[[], str], *, monotonic: Callable[[], float] = since_boot) -> None:
        self._fetch = fetch
        self._monotonic = monotonic
        self._guard = threading.Lock()
        self._problem = ""
        self._keys: list[Jwk] | None = None
        self._read_at = self._tried_at = float("-inf")

    def find(self, kid: str | None) -> Jwk | None:
        """The key of this `kid`, or without one the only key. None: there is no such key.

        Raises:
            KeysUnavailable: the keys cannot be read.
        """
        with self._guard:
            age = self._monotonic() - self._read_at
            if age > MAX_AGE_S and not self._try_to_read() and age > STALE_S:
                self._keys = None
            if self._keys is None:
                raise KeysUnavailable(f"the keys of the issuer of tokens cannot be read: {self._problem}")
            found = self._known(kid)
            if found is None and kid is not None and self._try_to_read():
                found = self._known(kid)
            return found

    def _known(self, kid: str | None) -> Jwk | None:
        keys = self._keys or []
        if kid is None:
            return keys[0] if len(keys) == 1 else None
        return next((key for key in keys if key.get("kid") == kid), None)

    def _try_to_read(self) -> bool:
        """Read the keys unless that was tried just now."""
        now = self._monotonic()
        if now - self._tried_at < (REFETCH_S if self._keys is not None else RETRY_S):
            return False
        self._tried_at = now
        try:
            self._keys = read_jwks(self._fetch())
        except (OSError, ValueError) as error:
            self._problem = str(error) or type(error).__name__
            return False
        self._read_at = now
        return True


def read_jwks(text: str) -> list[Jwk]:
    """The public keys for signatures in a JWKS. Symmetric keys are left out: they can sign too.

    Raises:
        ValueError: it is no JWKS, or has no such key.
    """
    try:
        data = json.loads(text)
    except ValueError as error:
        raise ValueError(f"the JWKS is no JSON ({error})") from None
    keys = data.get("keys") if isinstance(data, dict) else None
    if not isinstance(keys, list):
        raise ValueError("the JWKS has no list `keys`")
    usable: list[Jwk] = [
        key
        for key in keys
        if isinstance(key, dict) and key.get("kty") in ("RSA", "EC", "OKP") and key.get("use", "sig") == "sig"
    ]
    if not usable:
        raise ValueError("the JWKS has no public key for signatures (kty RSA, EC or OKP)")
    return usable


def fetch_url(url: str, *, monotonic: Callable[[], float] = since_boot) -> Callable[[], str]:
    """A function that reads the JWKS at a URL, within a bounded time and size.

    Raises:
        ConfigurationError: the URL is not https, nor http on this machine.
    """
    parts = urlsplit(url)
    is_local = parts.scheme == "http" and parts.hostname in ("127.0.0.1", "localhost", "::1")
    if not (parts.scheme == "https" or is_local) or not parts.hostname:
        raise ConfigurationError(f"the JWKS URL {url!r} must begin with https://: changed keys sign any token")

    def fetch() -> str:
        until = monotonic() + FETCH_S
        read = bytearray()
        request = urllib.request.Request(url, headers={"Accept": "application/json"})  # noqa: S310 - checked above
        with _opener.open(request, timeout=FETCH_S / 2) as response:
            while piece := response.read1(65536):
                read += piece
                if len(read) > MOST_BYTES:
                    raise ValueError(f"{url} has over {MOST_BYTES} bytes, which is no JWKS")
                if monotonic() > until:
                    raise TimeoutError(f"{url} did not answer within {FETCH_S:g} s")
        return read.decode()

    return fetch


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect could lead to http, or to other keys."""

    def redirect_request(self, *_: Any) -> None:
        return None


_opener: Final = urllib.request.build_opener(_NoRedirect)
