"""The endpoint and the token of each attempt to connect."""

from __future__ import annotations

import base64
import inspect
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from thunderagent.model.errors import ConfigurationError
from thunderagent.streams.connection.endpoint import Attempt, Endpoint, EndpointSource, resolve_endpoint

TokenSource = str | Callable[[Attempt], str | Awaitable[str]]
"""A token, or better a function that returns one for each attempt. `attempt.auth_failed`: the last was refused."""


class Credentials:
    """Makes the endpoint of each attempt, with the token in a header. It keeps neither.

    Args:
        url: asked for each attempt.
        token: asked for each attempt. Its `sub` must not change, or changes on their way would go to another user.
    """

    __slots__ = ("_token", "_url", "_user")

    def __init__(self, url: EndpointSource, token: TokenSource) -> None:
        self._url = url
        self._token = token
        self._user: object = None

    async def endpoint(self, attempt: Attempt) -> Endpoint:
        """The endpoint of an attempt.

        Raises:
            ConfigurationError: the URL is no WebSocket URL, the token does not fit a header, or its user is another.
        """
        endpoint = await resolve_endpoint(self._url, attempt)
        given: object = self._token(attempt) if callable(self._token) else self._token
        if inspect.isawaitable(given):
            given = await given
        if not isinstance(given, str) or not given or not given.isascii() or not given.isprintable() or " " in given:
            what = (
                "no text" if not isinstance(given, str) else "empty" if not given else "of letters that no header takes"
            )
            raise ConfigurationError(f"the token is {what}: the token function must return the text of a JWT")
        user = _user_of(given)
        if self._user is not None and user != self._user:
            raise ConfigurationError("the token is another user's: close this client, and make one for that user")
        self._user = user
        return replace(endpoint, headers={**endpoint.headers, "Authorization": f"Bearer {given}"})


def _user_of(token: str) -> object:
    """The `sub` that a JWT claims, which only the server can verify. None: it is no JWT."""
    try:
        claims = token.split(".")[1]
        return json.loads(base64.urlsafe_b64decode(claims + "=" * (-len(claims) % 4)))["sub"]
    except (ValueError, LookupError, TypeError):
        return None


def check_source(url: object) -> None:
    """Raise `ConfigurationError` for a URL that is no text, no list of texts and no function."""
    listed = [url] if isinstance(url, (str, Endpoint)) else url
    is_list = isinstance(listed, Sequence) and listed and all(isinstance(one, (str, Endpoint)) for one in listed)
    if isinstance(url, bytes) or not (callable(url) or is_list):
        raise ConfigurationError(f"the url is {type(url).__name__}; it is a text, a list of texts, or a function")
